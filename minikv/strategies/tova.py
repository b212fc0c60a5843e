"""TOVA: the token the last query looks at least goes. arXiv:2401.06104, section 3.

A decoder with a bounded cache is a recurrent network with that many states; in each step the state that
the newest query attends to least is given up. Attention is averaged over all query heads of a layer, so
all its KV heads keep the same tokens: with A the attention of the last query,

    score[x] = mean over the query heads h of A[h, x]

Nothing is protected: not the first tokens, and not the newest one, which may go in its own step.
`recent=1` protects the newest, as kvpress does. The mean is over slots, so it presumes what holds for the
method as published: the heads hold the same tokens in the same order.
"""

from dataclasses import dataclass

from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the last query, mean over all heads of the layer."""

    attention_scores = True
    n_queries = 1

    def score(self, seen: Seen) -> Tensor:
        votes = seen.attention(1).sum(3).mean((1, 2))  # [B, n]
        return votes[:, None].expand(seen.pos.shape)
