"""DuoAttention: retrieval heads keep what they can, streaming heads only sinks and recent. arXiv:2410.10819, section 2.

Most heads look at the first tokens and the latest alone, and the others cannot do without the middle. The
`sparsity` share of the model's KV heads with the lowest scores stream.

Deviations: the paper learns a gate per head by distillation; here the scores come from a file, such as
scripts/measure_heads.py writes. Its retrieval heads keep everything and its streaming heads 64 + 256 tokens;
here a layer's budget is fixed, streaming heads get `stream` of it and the others share the rest evenly. With
`stream` equal to the policy's sinks + recent a streaming head holds exactly those.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import HeadSplit
from minikv.strategies.headkv import check_shape, read_scores


@dataclass(frozen=True)
class DuoAttention(HeadSplit):
    """scores: a file, see `read_scores` of HeadKV; stream: tokens of a streaming head."""

    scores: str = "heads.json"
    sparsity: float = 0.5
    stream: int = 36

    uniform = False

    def __post_init__(self):
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"duoattention: sparsity is a share from 0 to 1, not {self.sparsity}")
        if self.stream < 1:
            raise ValueError(f"duoattention: a streaming head holds at least 1 token, not {self.stream}")
        object.__setattr__(self, "table", read_scores(self.scores))

    def streaming(self) -> set[tuple[int, int]]:
        """(layer, KV head) of those that stream; of equal scores the lower layer and head does."""
        heads = [(layer, head) for layer, row in enumerate(self.table) for head in range(len(row))]
        heads.sort(key=lambda at: self.table[at[0]][at[1]])
        return set(heads[: int(self.sparsity * len(heads))])

    def split(self, scores: Tensor, budget: int, layer: int) -> Tensor:
        batch, heads, _ = scores.shape
        check_shape(self.scores, self.table, layer, heads)
        streaming = self.streaming()
        retrieving = [head for head in range(heads) if (layer, head) not in streaming] or list(range(heads))
        budgets = [min(self.stream, budget)] * heads
        rest = heads * budget - (heads - len(retrieving)) * budgets[0]
        for i, head in enumerate(retrieving):
            budgets[head] = rest // len(retrieving) + (i < rest % len(retrieving))
        return torch.tensor(budgets, device=scores.device).expand(batch, heads)
