"""One token's attention to what a layer holds: in Triton kernels on a GPU, in plain products elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels import dispatch
from kernels.attend import step_attention
from kernels.stretches import Stretch
from minikv.axes import Codec, Fixed, Tier

EXACT = Tier(0, Codec(), Codec())


@dataclass(frozen=True)
class Packed:
    """Slots as they are stored: of heads, `[B, H, n, ...]`, or of a pool, `[B, N, ...]`, whose blocks have an owner.

    A `kernels.attend.Stretch`; and, for Triton, `stretch` tells how to read it.
    """

    tier: Tier
    k: dict[str, Tensor]
    v: dict[str, Tensor]
    fixed_k: Fixed
    fixed_v: Fixed
    pos: Tensor
    owner: Tensor | None = None  # [B, blocks]

    def dot(self, q: Tensor) -> Tensor:
        return self.tier.keys.dot(q, self.k, self.fixed_k)

    def mix(self, weights: Tensor) -> Tensor:
        return self.tier.values.mix(weights, self.v, self.fixed_v)

    def stretch(self, q: Tensor) -> Stretch:
        """For queries `[B, H, G, D]`."""
        keys, values = self.tier.keys, self.tier.values
        asked, bias = keys.asked(q, self.fixed_k)
        k, v = keys.side(self.k, self.fixed_k), values.side(self.v, self.fixed_v)
        return Stretch(k, v, self.pos, self.owner, asked, bias, values.turns)


def exact(k: Tensor, v: Tensor, pos: Tensor) -> Packed:
    """Keys and values `[B, H, n, D]` as they are."""
    return Packed(EXACT, {"x": k}, {"x": v}, {}, {}, pos)


def attend(
    q: Tensor, parts: Sequence[Packed], q_pos: Tensor, window: int | None, want_p: bool
) -> tuple[Tensor, list[Tensor]]:
    """q `[B, H, G, D]` at q_pos `[B, 1]` -> y `[B, H, G, D]` and, if wanted, the probabilities of each part."""
    if in_kernels(q, parts):
        return kernel_attention(q, parts, q_pos, window, want_p)
    return step_attention(q, parts, q_pos, window)


def in_kernels(q: Tensor, parts: Sequence[Packed]) -> bool:
    return dispatch.by_triton(q) and all(c.fused for part in parts for c in part.tier[1:])


def kernel_attention(
    q: Tensor, parts: Sequence[Packed], q_pos: Tensor, window: int | None, want_p: bool
) -> tuple[Tensor, list[Tensor]]:
    """As `attend`; a pool's probabilities are `[B, N, G]`."""
    y, turned, p = dispatch.attend(q, [part.stretch(q) for part in parts], q_pos, window, want_p)
    for part in parts:  # at most one tier of a layer turns its values
        if part.tier.values.turns:
            y = y + part.tier.values.turned_back(turned, part.fixed_v)
    return y, p
