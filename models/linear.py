"""Matrix products of the decoder: the library's, and for a few tokens at a time one that reads weights faster."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.codes import stored

# Up to so many rows of x the compiled multiply-and-sum beats F.linear on a CPU. Where a dtype is missing,
# F.linear stays.
FEW_ROWS = {torch.float32: 16, torch.bfloat16: 16}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[..., K]` times weight `[N, K]` transposed, plus bias `[N]`.

    Decoding is bound by how fast weights are read. On the CPU, F.linear reads the small matrices of a step
    at half of what memory can give; multiply-and-sum becomes one parallel loop of compiled vector code that
    comes close. Eagerly it would write every product to memory, so it is for compiled code only.
    """
    n_rows = x.shape[:-1].numel()
    if (
        torch.compiler.is_compiling()
        and weight.device.type == "cpu"
        and n_rows <= FEW_ROWS.get(weight.dtype, 0)
    ):
        flat = stored(x.reshape(n_rows, -1).float())
        wide = weight.float()
        y = torch.stack([(wide * row).sum(-1) for row in flat.unbind()])  # one loop over the weights
        y = y.to(x.dtype).reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Weights are loaded or drawn by who builds the model. Drawing them on the meta device would import the compiler."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As in `Linear`."""

    def logits(self, x: Tensor) -> Tensor:
        """States `[..., C]` -> logits `[..., V]`: the head of a model that ties it to the embedding."""
        return linear(x, self.weight)
