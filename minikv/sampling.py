"""From logits to the next token."""

import math

import torch
from torch import Tensor


def check_sampling(temperature: float, top_p: float, top_k: int) -> None:
    """Raises ValueError for settings that mean nothing."""
    if not temperature >= 0 or math.isinf(temperature):
        raise ValueError(f"temperature must be a number of 0 or more, not {temperature}")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie in 0..1 (0 is greedy, 1 is off), not {top_p}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or more, not {top_k}")


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Logits `[B, V]` -> tokens `[B]`. Temperature 0, top_p 0 or top_k 1 take the best, ties to the lowest id.

    top_p keeps the smallest set of tokens whose mass at this temperature reaches p. Raises ValueError if a
    logit is NaN or +inf: whatever would be chosen then is noise.
    """
    check_sampling(temperature, top_p, top_k)
    logits = logits.float()
    if bool((logits.isnan() | (logits == torch.inf)).any()):
        raise ValueError("the model gave NaN or infinite logits; try --dtype float32 or bfloat16")
    # argmax does not promise the lowest index among equals.
    best = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    if temperature == 0 or top_p == 0 or top_k == 1:
        return best
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-10)
    if 0 < top_k < logits.shape[-1]:
        values, order = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, values)
    p = logits.softmax(-1)
    if top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # mass before the token already reaches p
        outside[..., 0] = False
        p = p.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0)
    # The largest of p / Exp(1) is a draw from p, without a sync between host and device.
    race = torch.empty_like(p).exponential_(1, generator=generator)
    return (p / race).argmax(-1)
