"""L2 norm of keys: short keys are the ones that get attended to. arXiv:2406.11430.

    score(x) = -|k_x|

No query and no attention is needed, and rope does not change a key's length. In a model that normalizes its
keys (Qwen3) lengths hardly differ, and so the scores say little.

Deviations: the paper's code guards nothing and prunes a share of the tokens; here the policy's sinks and
recent tokens stay and the budget is in tokens. Its `skip_layers`, layers that stay whole, has no counterpart:
a budget holds in every layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class L2Norm(Scorer):
    """The shortest keys win."""

    def score(self, seen: Seen) -> Tensor:
        return torch.cat([-k.float().norm(dim=-1) for k in seen.k_parts], dim=2)
