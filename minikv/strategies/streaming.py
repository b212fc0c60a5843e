"""StreamingLLM: the first tokens and the most recent ones. arXiv:2309.17453, section 3.

The first few tokens soak up attention whatever they say ("sinks"); keeping them beside a recent window
keeps a model fluent for ever, though it forgets what lies between. Keys keep their true positions here.
"""

from dataclasses import dataclass

from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """The newest tokens win; the policy's `sinks` protect the first ones."""

    def score(self, seen: Seen) -> Tensor:
        return seen.pos.float()
