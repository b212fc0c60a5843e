"""StreamingLLM: the first tokens and the most recent ones. arXiv:2309.17453, section 3.

The first few tokens soak up attention whatever they say ("sinks"); keeping them beside a recent window
keeps a model fluent for ever, though it forgets what lies between.

Keys keep their true positions. The paper instead numbers what is in the cache anew at each step, so that
distances never exceed the cache's size. As the kept tokens are the sinks and one unbroken run, only the
sinks are then too far away: `shift_sinks=True` turns their keys on until they stand right before the run,
which gives the same attention. Text may then go on past the length the model was trained for.
"""

from dataclasses import dataclass

from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """The newest tokens win; the policy's `sinks` protect the first ones."""

    shift_sinks: bool = False

    @property
    def shifts_sinks(self) -> bool:
        return self.shift_sinks

    def score(self, seen: Seen) -> Tensor:
        return seen.pos.float()
