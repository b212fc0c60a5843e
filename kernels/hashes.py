"""SimHash: the signs of a vector along random directions as one integer, and how far two of them are apart."""

import math

import torch
from torch import Tensor


def gaussian(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """Standard normal numbers `[rows, columns]`, the same for a seed on every device.

    Computed from a counter: a compiled step can neither hold a random generator nor read a tensor of the host.
    """
    x = torch.arange(2 * rows * columns, device=device) + seed * 0x9E3779B9 % 2**32
    for _ in range(3):  # scramble 32 bits
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    u, v = ((x.float() + 1) / 2**32).view(2, rows, columns)  # in (0, 1]
    return (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()  # Box and Muller


def sign_codes(x: Tensor, directions: Tensor) -> Tensor:
    """Bit i is whether x `[..., D]` points along column i of float32 directions `[D, bits]`: int64 `[...]`.

    At most 64 directions; a product of exactly 0 counts as along.
    """
    along = x.float() @ directions >= 0
    return (along.long() << torch.arange(directions.shape[1], device=x.device)).sum(-1)


def distances(codes: Tensor, probes: Tensor, bits: int) -> Tensor:
    """In how many of the low `bits` a code differs from each of the P probes, summed over them.

    codes `[B, H, n]` and probes `[B, H, P]`, integers of any size -> float32 `[B, H, n]`.
    """
    differ = codes[:, :, None] ^ probes[..., None]  # [B, H, P, n]
    return sum((differ >> bit) & 1 for bit in range(bits)).sum(2).float()
