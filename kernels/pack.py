"""Codes of 1, 2, 3, 4 or 8 bits, packed into 32-bit words.

Each group of channels of a token has words of its own. With W words, code number `c = j * W + w` of a group is
the j-th of word w, so unpacking is one shift for W neighbours. Three bits are a plane of two and a plane of one.

Words travel in float32 tensors and are never read as numbers: the compiler's CPU backend loads floating
vectors directly but integer ones through the stack, which makes attention over packed keys three times slower.
"""

import torch
from torch import Tensor

WIDTHS = (1, 2, 3, 4, 8)  # bits per code


def planes(bits: int) -> tuple[int, ...]:
    """The widths, powers of two, that a code is split into, low bits first."""
    return (2, 1) if bits == 3 else (bits,)


def words_per_group(group: int, width: int) -> int:
    """Words of one plane of one group; a last one may be partly empty."""
    return -(-group * width // 32)


def row_words(channels: int, bits: int, group: int) -> int:
    """Words of one token."""
    return channels // group * sum(words_per_group(group, width) for width in planes(bits))


def pack(codes: Tensor, bits: int, group: int) -> Tensor:
    """codes `[..., D]`, integers below 2**bits -> words `[..., row_words(D)]`, bits in float32."""
    grouped = codes.to(torch.int64).unflatten(-1, (-1, group))  # [..., D / group, group]
    parts, low = [], 0
    for width in planes(bits):
        n = words_per_group(group, width)
        plane = (grouped >> low) & (2**width - 1)
        plane = torch.nn.functional.pad(plane, (0, n * (32 // width) - group))
        words = (plane.unflatten(-1, (-1, n)) << shifts(width, codes.device)[:, None]).sum(-2)
        words = torch.where(words >= 2**31, words - 2**32, words)
        parts.append(words.to(torch.int32).flatten(-2))
        low += width
    return torch.cat(parts, -1).view(torch.float32)


def unpack(words: Tensor, bits: int, group: int) -> Tensor:
    """The inverse of `pack`: int32 `[..., D]`."""
    codes, low = 0, 0
    for width, plane in split_planes(words, bits, group):
        lanes = (plane[..., None, :] >> shifts(width, words.device)[:, None]) & (2**width - 1)
        codes = codes + (lanes.flatten(-2)[..., :group] << low)
        low += width
    return codes.flatten(-2)


def unit_values(plane: Tensor, width: int) -> Tensor:
    """Codes of one plane as `1 + code / 2**width`, float32, without an integer-to-float conversion.

    plane `[..., W, n]`: words with the tokens last -> `[..., 32 / width, W, n]`. The code becomes the top of a
    mantissa whose exponent says 1: as fast as a shift, where a conversion goes lane by lane.
    """
    places = shifts(width, plane.device)[:, None, None]
    top = 23 - width
    mask = (2**width - 1) << top
    return (((plane[..., None, :, :] >> places) << top) & mask | 0x3F800000).view(torch.float32)


def split_planes(words: Tensor, bits: int, group: int) -> list[tuple[int, Tensor]]:
    """(width, int32 words `[..., D / group, W]`) of each plane."""
    sizes = [words_per_group(group, width) for width in planes(bits)]
    groups = words.shape[-1] // sum(sizes)
    parts = words.view(torch.int32).split([groups * n for n in sizes], -1)
    return [
        (w, part.unflatten(-1, (groups, n))) for w, n, part in zip(planes(bits), sizes, parts, strict=True)
    ]


def shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32, width, dtype=torch.int32, device=device)
