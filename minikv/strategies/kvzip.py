"""KVzip: what the model needs to repeat the context is what it needs of it. arXiv:2505.23416, section 3.

After a prompt the model reads it once more, in chunks, as if it were repeating it, and a token counts by the
largest attention that any repeating query of any head of its group pays to it:

    score[x] = max over repeating queries i and query heads h of A[h, i, x]

where A is normalised over the sinks, the chunk that is repeated and the repetition itself. The question is
not looked at, so the same cache serves many. `minikv.replay` does the second reading.

Deviations: the paper puts an instruction ("Repeat the previous context") in front, we let the chunk follow
its `lead` last tokens directly; its threshold is global over layers, our layers and heads get their budgets
from the policy. Generated tokens, which are never repeated, count by the largest attention paid to them
since; so do prompts fed by direct calls of a model. Until a prompt has been read twice all its keys are kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import largest
from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class KVzip(Scorer):
    """Largest attention while the context is read again in chunks of `chunk` tokens."""

    chunk: int = 2048
    lead: int = 8
    sinks: int = 4

    replays = True
    watches = True

    def __post_init__(self):
        for name, least in (("chunk", 2), ("lead", 0), ("sinks", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"kvzip needs {name} of {least} or more, not {getattr(self, name)}")

    def state(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"peak": ((), torch.float32)}

    def absorb(self, seen: Seen) -> dict[str, Tensor]:
        peak = largest(seen.new_q, seen.new_pos, seen.k, seen.pos, seen.sliding)
        # Tokens that have been repeated keep what that gave.
        return {"peak": torch.where(seen.state["peak"] > 0, seen.state["peak"], peak)}

    def watch(self, state: dict[str, Tensor], p: Tensor, share: Tensor, now: Tensor) -> None:
        state["peak"].copy_(torch.maximum(state["peak"], p))

    def score(self, seen: Seen) -> Tensor:
        return seen.state["peak"]
