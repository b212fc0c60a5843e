"""Every Triton kernel beside its plain twin, on one device: part of scripts/gpu_check.py."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import (
    hashes,
    quantize,
    received,
    stretches,
    triton_attend,
    triton_gather,
    triton_hashes,
    triton_quantize,
    triton_received,
)
from kernels.stretches import Side, Stretch
from minikv.pool import Tokens

BATCH, HEADS, BLOCK = 2, 3, 16


class Check(NamedTuple):
    """A kernel and its twin with arguments for both."""

    name: str
    ours: Callable[..., Any]
    twin: Callable[..., Any]
    arguments: tuple[Any, ...]
    tolerance: float  # largest difference, as a share of the largest number; 0: all bits are equal


class Maker:
    """Random tensors, the same on every device."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)


def all_checks(device: torch.device, dtype: torch.dtype, n: int) -> list[Check]:
    """Of all kernels, over about n tokens; dtype is that of keys and values."""
    make = Maker(device, dtype)
    return [*attend_checks(make, n), *received_checks(make, n), *code_checks(make, n), *other_checks(make, n)]


def run(check: Check) -> dict[str, Any]:
    """Name, difference, tolerance, and whether that is fine; the error of a kernel that does not run."""
    found = dict(kernel=check.name, tolerance=check.tolerance)
    try:
        ours, theirs = (list(tensors(f(*check.arguments))) for f in (check.ours, check.twin))
    except Exception as error:  # of any kind: a broken kernel is a finding, and must not hide the others
        return found | dict(ok=False, error=str(error).strip() or type(error).__name__)
    difference = max(apart(a, b, check.tolerance) for a, b in zip(ours, theirs, strict=True))
    # Not fine if there is no number to compare.
    return found | dict(ok=difference <= check.tolerance, difference=difference)


def line(found: dict[str, Any]) -> str:
    verdict = "ok " if found["ok"] else "WRONG "
    if "error" in found:
        return f"{found['kernel']:42} {verdict} {found['error'].splitlines()[0]}"
    return f"{found['kernel']:42} {verdict} {found['difference']:.1e} apart, {found['tolerance']:.0e} allowed"


def tensors(found: Tensor | Iterable[Any] | None) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif found is not None:
        for part in found:
            yield from tensors(part)


def apart(a: Tensor, b: Tensor, tolerance: float) -> float:
    """Largest difference as a share of the largest number of b, or, without tolerance, the share of unequal bits."""
    b = b.to(a.device)
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if tolerance == 0:
        a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
        return (a != b).float().mean().item()
    largest = b.float().abs().max().clamp(min=1e-6)
    return ((a.float() - b.float()).abs().max() / largest).item()


# Attention of one token.


def stored(make: Maker, kind: str, lead: tuple[int, ...], n: int, d: int) -> Side:
    """n random vectors as a store keeps them: "raw", "int4" (a grid per token) or "span4" (per channel and 32)."""
    x = make.normal(*lead, n, d)
    if kind == "raw":
        return stretches.raw(x)
    bits = int(kind[-1])
    if kind.startswith("int"):
        return stretches.token_grid(*quantize.quantize_tokens(x, bits, 32, False), bits, 32)
    return stretches.channel_grid(*quantize.quantize_channels(x, bits, 32), bits, 32)


def of_heads(make: Maker, k: str, v: str, n: int, d: int) -> Stretch:
    """The same number of slots for every head, every seventh of them empty."""
    pos = torch.arange(n, dtype=torch.int32, device=make.device).repeat(BATCH, HEADS, 1)
    pos[:, :, ::7] = -1
    lead = (BATCH, HEADS)
    return Stretch(stored(make, k, lead, n, d), stored(make, v, lead, n, d), pos)


def pool(make: Maker, kind: str, n: int, d: int) -> Stretch:
    """A ragged pool: the first head owns half of the blocks, the last one none."""
    blocks = HEADS * n // BLOCK
    owner = (torch.arange(blocks, device=make.device) >= blocks // 2).long().repeat(BATCH, 1)
    pos = torch.arange(blocks * BLOCK, dtype=torch.int32, device=make.device).repeat(BATCH, 1)
    lead = (BATCH,)
    sides = [stored(make, kind, lead, blocks * BLOCK, d) for _ in "kv"]
    return Stretch(*sides, torch.where(pos % 5 == 0, -1, pos % n), owner)


def attend_checks(make: Maker, n: int) -> list[Check]:
    """Stores, head sizes, groups, windows, ragged heads and tiers, each with fresh tokens behind it."""
    n = n // 32 * 32  # whole spans
    cases = [("raw", "raw", d, g) for d, g in ((64, 1), (128, 4), (256, 7))]
    cases += [(f"int{bits}", f"int{bits}", 128, 4) for bits in (2, 3, 4, 8)]
    cases += [(f"span{bits}", f"int{bits}", 128, 4) for bits in (2, 4)]
    found = []
    for k, v, d, g in cases:
        found.append((f"attend {k} {v} D={d} G={g}", d, g, None, [of_heads(make, k, v, n, d)]))
    found.append(("attend window", 128, 4, n // 2, [of_heads(make, "raw", "raw", n, 128)]))
    found += [(f"attend ragged {kind}", 128, 4, None, [pool(make, kind, n, 128)]) for kind in ("raw", "int4")]
    tiers = [of_heads(make, "raw", "raw", 32, 128), of_heads(make, "int2", "int2", n, 128)]
    found.append(("attend two tiers", 128, 4, None, tiers))
    now = torch.full((BATCH, 1), n, device=make.device)
    checks = []
    for name, d, g, window, parts in found:
        arguments = (
            make.normal(BATCH, HEADS, g, d), [*parts, of_heads(make, "raw", "raw", 20, d)], now, window, True
        )  # fmt: skip
        checks.append(Check(name, triton_attend.attend, stretches.attend, arguments, 0.02))
    return checks


# The others.


def received_checks(make: Maker, n: int) -> list[Check]:
    checks = []
    for d, g, window in ((64, 1, None), (128, 4, n // 3), (256, 7, None)):
        length = n * 2 // 3 + 1
        q_pos = torch.arange(n - length, n, device=make.device).repeat(BATCH, 1)
        pos = torch.arange(n, dtype=torch.int32, device=make.device).repeat(BATCH, HEADS, 1)
        pos[:, :, : n - length : 5] = -1
        q, k = make.normal(BATCH, HEADS, g, length, d), make.normal(BATCH, HEADS, n, d)
        for name in ("received", "largest"):
            ours, twin = getattr(triton_received, name), getattr(received, name)
            checks.append(
                Check(f"{name} D={d} G={g} window={window}", ours, twin, (q, q_pos, k, pos, window), 1e-3)
            )
    return checks


def code_checks(make: Maker, n: int) -> list[Check]:
    """Against the twin on the CPU: a GPU divides by a number as a product with its inverse, which rounds twice."""
    x = make.normal(BATCH, HEADS, n // 32 * 32, 128)
    checks = []
    for bits in (2, 3, 4, 8):
        for symmetric in (False, True):
            name = f"codes of tokens, {bits} bits" + ", symmetric" * symmetric
            twin = on_cpu(quantize.quantize_tokens)
            checks.append(Check(name, triton_quantize.quantize_tokens, twin, (x, bits, 32, symmetric), 0))
        twin = on_cpu(quantize.quantize_channels)
        name = f"codes of channels, {bits} bits"
        checks.append(Check(name, triton_quantize.quantize_channels, twin, (x, bits, 32), 0))
    return checks


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        return function(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))

    return called


def other_checks(make: Maker, n: int) -> list[Check]:
    checks = []
    for bits in (16, 64):
        # Small integers: products are exact in any order, so a sign is never a matter of rounding.
        x = make.integers(-8, 9, BATCH, HEADS, n, 128).to(make.dtype)
        directions = make.integers(-8, 9, 128, bits).float()
        codes = hashes.sign_codes(x, directions)
        checks.append(Check(f"{bits} signs", triton_hashes.sign_codes, hashes.sign_codes, (x, directions), 0))
        arguments = (codes, codes[:, :, :4], bits)
        checks.append(
            Check(f"distances of {bits} bits", triton_hashes.distances, hashes.distances, arguments, 0)
        )
    k, v = make.normal(BATCH, n, HEADS, 128).transpose(1, 2), make.normal(BATCH, HEADS, n, 128)
    pos = torch.arange(n, dtype=torch.int32, device=make.device).expand(BATCH, HEADS, n)
    index = make.integers(0, n, BATCH, HEADS, n // 2).sort(-1).values
    checks.append(Check("gather", triton_gather.gather, gathered, (k, v, pos, index), 0))
    return checks


def gathered(k: Tensor, v: Tensor, pos: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = Tokens(k, v, pos).gather(index)
    return found.k, found.v, found.pos
