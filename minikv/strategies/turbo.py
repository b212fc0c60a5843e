"""TurboQuant: rotate, then one table of levels for every coordinate. arXiv:2504.19874, algorithms 1 and 2.

A random rotation R makes the coordinates of a unit vector nearly independent normals of variance 1 / D,
whatever the vector was, so one Lloyd-Max table serves all of them:

    n = |k|,  y = R k / n,  code_i = nearest level to sqrt(D) y_i,  stored scale s = n / |c|

with c the vector of levels / sqrt(D). Queries are rotated once and outputs rotated back once; keys never are.
This is EDEN's quantiser (arXiv:2102.08098, ICML 2022); the scale keeps the norm exact (`scale="norm"`), makes
inner products unbiased (`"unbiased"`, s = n / <c, y>), or is the paper's n (`"plain"`), which shrinks them.

`sign=True` is the paper's inner-product form: one bit less for the levels, and one for the signs of S r, where
r is what the levels missed and S a second rotation. At 2 to 4 bits it costs more variance than it removes bias.

Ours: keys have their mean over the first tokens taken off, which softmax does not see and which the large key
biases of Qwen2 need; q . mean is added back to the logits, so exact tokens mix in unshifted.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.codes import decode_tokens, dot_levels, dot_tokens, mix_levels, mix_tokens
from kernels.pack import pack, row_words
from kernels.stretches import Side, level_table
from minikv.axes import Codec, Coded, Fixed
from minikv.strategies.rtn import check_bits, slots_last

# Lloyd-Max levels of a standard normal, the positive half.
LEVELS = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
SCALES = ("norm", "unbiased", "plain")
ROTATIONS = ("haar", "hadamard")


@dataclass(frozen=True)
class RotatedLevels(Codec):
    bits: int
    seed: int
    rotation: str = "haar"
    scale: str = "norm"
    centred: bool = False
    sign: bool = False

    exact = False
    turns = True

    @property
    def fused(self) -> bool:
        return not self.sign  # kernels read one plane of codes

    @property
    def level_bits(self) -> int:
        return self.bits - self.sign

    def buffers(
        self, lead: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        words = slots_last(lead, row_words(head_dim, self.level_bits, head_dim), torch.float32, device)
        parts = {"words": words, "scale": slots_last(lead, 1, torch.float16, device)}
        if self.sign:
            parts["signs"] = slots_last(lead, row_words(head_dim, 1, head_dim), torch.float32, device)
            parts["missed"] = slots_last(lead, 1, torch.float16, device)
        return parts

    def constants(self, head_dim: int, device: torch.device) -> dict[str, Tensor]:
        half = torch.tensor(LEVELS[self.level_bits], dtype=torch.float64)
        levels = (torch.cat((-half.flip(0), half)) / math.sqrt(head_dim)).float()
        found = {"levels": levels, "turn": rotation(self.rotation, head_dim, self.seed)}
        if self.sign:
            found["sketch"] = rotation("haar", head_dim, self.seed + 1000)
        return {name: x.to(device) for name, x in found.items()}

    def fitted(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"mean": (head_dim,)} if self.centred else {}

    def fit(self, x: Tensor, valid: Tensor, q: Tensor | None) -> dict[str, Tensor]:
        weights = valid.float() / valid.sum(-1, keepdim=True).clamp(min=1)
        return {"mean": (weights[..., None] * x.float()).sum(-2)}

    def encode(self, x: Tensor, fixed: Fixed) -> dict[str, Tensor]:
        x = x.float() - (fixed["mean"][..., None, :] if self.centred else 0)
        norm = x.norm(dim=-1, keepdim=True)
        y = torch.where(norm > 0, x / norm, 0) @ fixed["turn"].mT
        levels = fixed["levels"]
        codes = torch.bucketize(y, (levels[1:] + levels[:-1]) / 2)
        c = levels[codes]
        shrink = {"norm": c.norm(dim=-1, keepdim=True), "unbiased": (c * y).sum(-1, keepdim=True)}
        scale = norm / shrink[self.scale] if self.scale in shrink else norm
        parts = {"words": pack(codes, self.level_bits, x.shape[-1]), "scale": half(scale)}
        if self.sign:
            missed = (y - scale / torch.where(norm > 0, norm, 1) * c) @ fixed["sketch"].mT
            parts["signs"] = pack(missed >= 0, 1, x.shape[-1])
            # E[sign(S r)] is r over this length, for an orthogonal S.
            length = math.sqrt(math.pi / (2 * x.shape[-1])) * missed.norm(dim=-1, keepdim=True)
            parts["missed"] = half(norm * length)
        return parts

    def decode(self, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        d = fixed["turn"].shape[0]
        y = self.side(parts, fixed).decode()
        if self.sign:
            y = y + decode_tokens(*self.sign_grid(parts, d)) @ fixed["sketch"]
        x = y @ fixed["turn"]
        return x + fixed["mean"][..., None, :] if self.centred else x

    def dot(self, q: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        turned = q @ fixed["turn"].mT
        logits = dot_levels(turned, parts["words"], parts["scale"], fixed["levels"], self.level_bits)
        if self.sign:
            logits = logits + dot_tokens(turned @ fixed["sketch"].mT, *self.sign_grid(parts, q.shape[-1]))
        return logits + q @ fixed["mean"][..., None] if self.centred else logits

    def mix(self, weights: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        d = fixed["turn"].shape[0]
        y = mix_levels(weights, parts["words"], parts["scale"], fixed["levels"], self.level_bits, d)
        if self.sign:
            y = y + mix_tokens(weights, *self.sign_grid(parts, d)) @ fixed["sketch"]
        x = y @ fixed["turn"]
        return x + weights.sum(-1, keepdim=True) * fixed["mean"][..., None, :] if self.centred else x

    def side(self, parts: dict[str, Tensor], fixed: Fixed) -> Side:
        d = fixed["turn"].shape[0]
        return level_table(parts["words"], parts["scale"], fixed["levels"], self.level_bits, d)

    def asked(self, q: Tensor, fixed: Fixed) -> tuple[Tensor, Tensor | None]:
        q = q.float()
        return q @ fixed["turn"].mT, (q @ fixed["mean"][..., None])[..., 0] if self.centred else None

    def turned_back(self, y: Tensor, fixed: Fixed) -> Tensor:
        return (y.float() @ fixed["turn"]).to(y.dtype)

    def sign_grid(self, parts: dict[str, Tensor], d: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Signs as one-bit codes on the grid -missed, +missed."""
        return parts["signs"], 2 * parts["missed"].float(), -parts["missed"].float(), 1, d


@dataclass(frozen=True)
class Turbo(Coded):
    """Bits of keys and values, the sign bit included; `rotation` haar (any head size) or hadamard (powers of two)."""

    k: int = 4
    v: int = 4
    rotation: str = "haar"
    scale: str = "norm"
    offset: bool = True
    sign: bool = False
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_bits("turbo", (2, 3, 4) if self.sign else (1, 2, 3, 4), k=self.k, v=self.v)
        for name, allowed in (("rotation", ROTATIONS), ("scale", SCALES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"turbo: {name}={getattr(self, name)!r}; possible are {', '.join(allowed)}")

    def codecs(self, head_dim: int) -> tuple[Codec, Codec]:
        how = (self.rotation, self.scale)
        return (
            RotatedLevels(self.k, self.seed, *how, centred=self.offset, sign=self.sign),
            RotatedLevels(self.v, self.seed + 1, *how, sign=self.sign),
        )


def rotation(kind: str, d: int, seed: int) -> Tensor:
    """An orthogonal matrix `[D, D]`, float32, the same for a seed on every machine's CPU: Haar or Hadamard with signs."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "haar":
        q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        return (q * r.diagonal().sign()).float()
    if d & (d - 1):
        raise ValueError(
            f"a Hadamard rotation needs a head size that is a power of two, not {d}; use rotation=haar"
        )
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < d:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = torch.randint(0, 2, (d,), generator=generator) * 2 - 1
    return (h * signs / math.sqrt(d)).float()


def half(x: Tensor) -> Tensor:
    return x.clamp(max=torch.finfo(torch.float16).max).half()
