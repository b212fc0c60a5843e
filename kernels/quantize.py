"""Vectors to packed codes and their grids in one call: what `kernels.codes` and `kernels.pack` do, put together."""

from torch import Tensor

from kernels.codes import encode_grid, grid
from kernels.pack import pack


def quantize_tokens(
    x: Tensor, bits: int, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A grid per token and `group` channels; the inverse is `kernels.codes.decode_tokens`.

    x `[..., D]` -> words `[..., row_words(D)]`, scale and zero `[..., D / group]`; zero is None if symmetric.
    """
    grouped = x.unflatten(-1, (-1, group))  # [..., D / group, group]
    scale, zero = grid(grouped, bits, symmetric, -1)
    words = pack(encode_grid(grouped, scale, zero, bits).flatten(-2), bits, group)
    return words, scale.squeeze(-1), None if zero is None else zero.squeeze(-1)


def quantize_channels(x: Tensor, bits: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """A grid per channel and `span` tokens; the inverse is `kernels.codes.decode_channels`.

    x `[..., n, D]`, n a multiple of span -> words `[..., n, row_words(D)]`, scale and zero `[..., n / span, D]`.
    """
    stretches = x.unflatten(-2, (-1, span))  # [..., n / span, span, D]
    scale, zero = grid(stretches, bits, False, -2)
    words = pack(encode_grid(stretches, scale, zero, bits).flatten(-3, -2), bits, x.shape[-1])
    return words, scale.squeeze(-2), zero.squeeze(-2)
