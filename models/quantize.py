"""Weight-only quantization: the matrices of a loaded model as int8 or int4 codes, in the same places.

int8 has one scale per row. int4 has one per 32 channels, and leaves the embedding and the head in int8: next
to the blocks they are few bytes and cost most of the quality. Norms and biases stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.codes import stored
from kernels.matvec import dequantize_rows, matvec, quantize_rows
from models.transformer import Transformer

TILE = 2**20  # weights that are quantized or dequantized at a time: bounds the float32 copy
FEW_ROWS = 8  # rows of x from which unpacking the weights once beats unpacking them for each row


@dataclass(frozen=True)
class Scheme:
    bits: int
    grouped: bool  # a scale for each 32 channels, else for the row


INT8 = Scheme(bits=8, grouped=False)
INT4 = Scheme(bits=4, grouped=True)
SCHEMES = {"int8": (INT8, INT8), "int4": (INT4, INT8)}  # of the blocks; of the embedding and the head


def check_name(name: str | None) -> None:
    """Raises ValueError unless this is a way to store weights; None leaves them as they are."""
    if name is not None and name not in SCHEMES:
        raise ValueError(f"unknown quantization {name!r}; known are {' and '.join(SCHEMES)}")


def quantize_model(model: Transformer, name: str) -> Transformer:
    """Replace every matrix of the model, "int8" or "int4", one after the other; each frees the original.

    A quantized model moves between devices but not between dtypes. Raises ValueError for an unknown name.
    """
    check_name(name)
    blocks, ends = SCHEMES[name]
    for module in list(model.layers.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, child_name, QuantizedLinear(child, blocks))
    if model.head is not None:
        model.head = QuantizedLinear(model.head, ends)
    model.embed = QuantizedEmbedding(model.embed, ends)
    return model


class Quantized(nn.Module):
    """A matrix `[N, K]` as codes, with the dtype of the model it comes from."""

    def __init__(self, weight: Tensor, scheme: Scheme):
        super().__init__()
        self.bits, self.n_columns, self.dtype = scheme.bits, weight.shape[1], weight.dtype
        tiles = [quantize_rows(w, scheme.bits, scheme.grouped) for w in weight.detach().split(self.n_at_once)]
        for name, parts in zip(("words", "scale", "zero"), zip(*tiles, strict=True), strict=True):
            self.register_buffer(name, torch.cat(parts))

    @property
    def n_at_once(self) -> int:
        """Rows of a tile."""
        return max(1, TILE // self.n_columns)

    @property
    def weight(self) -> Tensor:
        """The matrix `[N, K]` in the model's dtype, made anew at each call."""
        return torch.cat(list(self.tiles(self.n_at_once)))

    def tiles(self, n_rows: int) -> Iterator[Tensor]:
        """The matrix in stretches of rows."""
        whole = (self.words, self.scale, self.zero)
        for parts in zip(*(tensor.split(n_rows) for tensor in whole), strict=True):
            yield self.dequantized(*parts)

    def dequantized(self, words: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        # Stored in float32 first: inductor warns of loops that meet both float16 scales and bfloat16.
        w = stored(dequantize_rows(words, scale, zero, self.bits))
        return w[:, : self.n_columns].to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        """x `[..., K]` -> `[..., N]`, in x's dtype."""
        flat = x.flatten(0, -2)
        compiling = torch.compiler.is_compiling()
        if compiling and len(flat) <= FEW_ROWS:
            y = matvec(flat, self.words, self.scale, self.zero, self.bits).to(x.dtype)
        else:
            # A graph holds the loop unrolled, so it takes the matrix in one piece.
            n_rows = len(self.words) if compiling else self.n_at_once
            y = torch.cat([F.linear(flat, w) for w in self.tiles(n_rows)], dim=-1)
        return y.reshape(*x.shape[:-1], -1)


class QuantizedLinear(Quantized):
    def __init__(self, linear: nn.Linear, scheme: Scheme):
        super().__init__(linear.weight, scheme)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


class QuantizedEmbedding(Quantized):
    def __init__(self, embedding: nn.Embedding, scheme: Scheme):
        super().__init__(embedding.weight, scheme)

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens.flatten()
        rows = self.dequantized(self.words[row], self.scale[row], self.zero[row])
        return rows.view(*tokens.shape, -1)

    def logits(self, x: Tensor) -> Tensor:
        """States `[..., C]` -> logits `[..., V]`: the head of a model that ties it to the embedding."""
        return self.product(x)
