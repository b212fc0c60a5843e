"""How far one set of predictions is from another, and how they are told in tables and pictures."""

from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A figure of a row: its name in tables, and whether less of it is better."""

    label: str
    less_is_better: bool
    decimals: int = 3
    exponential: bool = False  # rows hold its logarithm, which is what is averaged

    def shown(self, value: float) -> float:
        return exp(value) if self.exponential else value


METRICS = {
    "kl": Metric("KL to full, nats/token", True),
    "kl_p95": Metric("95th percentile of KL", True),
    "agreement": Metric("same top token", False),
    "nll": Metric("perplexity", True, 2, exponential=True),
    "accuracy": Metric("answer tokens right", False),
    "exact": Metric("answers right", False),
    "attention_loss": Metric("attention lost", True),
    "perturbation": Metric("relative L1 after W_O", True),
    "better_heads": Metric("heads better than {}", False),
    "run_length": Metric("run length, tokens", False, 1),
    "step": Metric("decode, s/step", True, 4),
    "prefill": Metric("prefill, s", True, 2),
    "steps_of_full": Metric("decode, full = 1", True, 2),
    "prefills_of_full": Metric("prefill, full = 1", True, 2),
    "score": Metric("score", False),
}


def compare(full: Tensor, other: Tensor, gold: Tensor) -> dict[str, float]:
    """Predictions against those of the full cache and the tokens that followed: logits `[n, V]` twice, ids `[n]`.

    kl: KL(full || other) in nats, mean over the tokens, and its 95th percentile. agreement: share of tokens with
    the same argmax. nll: negative log-likelihood of the tokens that followed, mean. accuracy: share of them that
    is the argmax; exact: 1 if all are, which is what greedy decoding would then have said.
    """
    p, q = (logits.float().log_softmax(-1) for logits in (full, other))
    kl = (p.exp() * (p - q)).sum(-1)
    top = other.argmax(-1)
    right = top == gold
    return dict(
        kl=float(kl.mean()),
        kl_p95=float(torch.quantile(kl, 0.95)),
        agreement=float((top == full.argmax(-1)).double().mean()),
        nll=float(-q.gather(-1, gold[:, None]).mean()),
        accuracy=float(right.double().mean()),
        exact=float(right.all()),
    )


def run_length(kept: list[int], end: int) -> float:
    """Mean length of the runs of consecutive positions in a sorted list, of those below `end`; 0 of none."""
    below = [pos for pos in kept if pos < end]
    breaks = sum(b != a + 1 for a, b in zip(below, below[1:], strict=False))
    return len(below) / (breaks + 1) if below else 0.0
