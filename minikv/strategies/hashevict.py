"""HashEvict (LSH-E): drop the token whose key points away from the query, before attending. arXiv:2412.16187.

A fixed Gaussian matrix R turns a vector into `bits` signs, code(x) = [x R >= 0]. Two codes differ in a bit
with probability angle / pi (SimHash), so the Hamming distance estimates how small a product is without
computing any:

    score[x] = -Hamming(code(probe), code(k[x]))        lengths of the vectors play no part

The token farthest from the newest one's probe goes first, and then the newest attends to what is left
(algorithm 1). Codes of keys stay with their tokens; nothing accumulates.

probe: "query", as the paper's text has it: the newest token's queries of the group, their distances summed
    (the paper does not speak of groups); "key": its key, as the authors' code has it. They choose differently.
prompt: "token": what exceeds the budget is taken token by token, as published; "batched", not in the paper:
    all at once, scored by the last query or key.
With at most 17 distances ties are the rule; the lower position stays. R is one matrix for all layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import distances, sign_codes
from kernels.hashes import gaussian
from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class HashEvict(Scorer):
    """Nearness of codes of `bits` signs: the keys' to the newest query's or key's."""

    bits: int = 16
    probe: str = "query"
    seed: int = 0
    prompt: str = "token"

    before = True

    def __post_init__(self):
        if not 1 <= self.bits <= 64:
            raise ValueError(f"hashevict codes have 1 to 64 bits, not {self.bits}")
        if self.probe not in ("query", "key"):
            raise ValueError(f'hashevict compares with the "query" or the "key", not {self.probe!r}')
        if self.prompt not in ("token", "batched"):
            raise ValueError(f'hashevict takes a prompt by "token" or "batched", not {self.prompt!r}')

    @property
    def n_queries(self) -> int:
        return 1 if self.probe == "query" else 0

    @property
    def one_by_one(self) -> bool:
        return self.prompt == "token"

    def state(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        dtype = torch.int16 if self.bits <= 16 else torch.int32 if self.bits <= 32 else torch.int64
        return {"code": ((), dtype)}

    def enter(self, k: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        ((_, dtype),) = self.state(k.shape[-1]).values()
        return {"code": self.code(k).to(dtype)}

    def score(self, seen: Seen) -> Tensor:
        codes, last = seen.state["code"], seen.last[:, None]
        if self.probe == "key":
            probe = (codes * (seen.pos == last[..., None])).sum(-1)[:, :, None]  # [B, H, 1]
        else:
            newest = (seen.q_pos == last)[:, None, None, :, None]
            probe = self.code((seen.q * newest).sum(3))  # [B, H, G]
        return -distances(codes, probe, self.bits)

    def code(self, x: Tensor) -> Tensor:
        """Signs of x `[..., D]` along the columns of R, packed: int64 `[...]`."""
        return sign_codes(x, gaussian(x.shape[-1], self.bits, self.seed, x.device))
