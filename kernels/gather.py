"""Some slots of every head, moved together."""

from torch import Tensor


def gather(k: Tensor, v: Tensor, pos: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k, v `[B, H, n, D]` and pos `[B, H, n]` at index `[B, H, m]` -> `[B, H, m, D]` twice, `[B, H, m]`."""
    return pick(k, index), pick(v, index), pick(pos, index)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, n, ...]` at index `[B, H, m]` -> `[B, H, m, ...]`."""
    tail = x.shape[3:]
    return x.gather(2, index.view(*index.shape, *(1 for _ in tail)).expand(*index.shape, *tail))
