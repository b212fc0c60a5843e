"""KeyDiff: keys unlike the others carry what the others do not. arXiv:2504.15364, section 3.

    anchor = mean over x of k_x / |k_x|        score(x) = -cos(k_x, anchor)

No query and no attention is needed. Keys are taken after rope.

Deviations: the paper guards nothing and compresses after every 128 tokens of the prompt; here the policy's
sinks and recent tokens stay, and a prompt is compressed once unless it is fed in chunks.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """The keys least like their mean direction win."""

    def score(self, seen: Seen) -> Tensor:
        direction = F.normalize(seen.k.float(), dim=-1)  # [B, H, n, D]
        # The mean's length does not matter to a cosine, so the sum will do.
        total = direction.masked_fill(~seen.valid[..., None], 0.0).sum(2, keepdim=True)
        return -(direction * F.normalize(total, dim=-1)).sum(-1)
