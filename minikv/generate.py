"""Prefill, then one token at a time: `decode` streams tokens, `generate` makes whole answers of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from minikv.cache import CompressedKVCache
from minikv.replay import hidden_with_replay
from minikv.sampling import check_sampling, sample
from minikv.step import Step, step
from minikv.stop import StopText

REST = -1  # the position of a row that takes no part


@dataclass
class Output:
    """What `generate` made: for one prompt plain values, for a batch lists with an entry per row."""

    ids: list  # new ids without the end id
    text: Any  # None without a tokenizer
    reason: Any  # "eos" | "stop" | "length"


@dataclass(frozen=True)
class Options:
    """How to go on after a prompt: see `generate`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: Sequence[str] = ()
    seed: int | None = None
    ignore_eos: bool = False
    chunk: int | None = None
    step: Step = step

    def __post_init__(self):
        check_sampling(self.temperature, self.top_p, self.top_k)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit into 64 bits, {self.seed} does not")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, not {self.max_new_tokens}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, not {self.chunk}")

    def generator(self, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


@dataclass
class Timing:
    """Seconds that a run took, for those who want to show them."""

    prefill: float = 0.0
    first_token: float = 0.0
    steps: list[float] = field(default_factory=list)


def generate(
    model: nn.Module,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    cache: CompressedKVCache,
    tok: Any = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    seed: int | None = None,
    ignore_eos: bool = False,
    chunk: int | None = None,
    step: Step = step,
) -> Output:
    """Continue from what the cache has seen: feed `ids` (`[T]` or `[B, T]`, rows may differ in length), then sample.

    A row ends with reason "eos" at an end id (the tokenizer's, else the model's; never with `ignore_eos`),
    "stop" at one of the `stop` texts (needs `tok`; the text is cut before the match), "length" after
    max_new_tokens or at the context limit. The last sampled token is not fed.

    chunk: feed the prompt in pieces of that many tokens: bounded memory, but later pieces see a compressed past.
    step: how one token is run: `minikv.step.step`, or a `CompiledStep` made for this cache.
    Raises ValueError for a prompt that does not fit, before anything runs.
    """
    how = Options(max_new_tokens, temperature, top_p, top_k, stop, seed, ignore_eos, chunk, step)
    rows, single = as_rows(ids)
    if how.stop and tok is None:
        raise ValueError("stop texts need a tokenizer: pass tok")
    ends = frozenset() if how.ignore_eos else end_ids(model, tok)
    texts = [StopText(tok.stream(), how.stop) for _ in rows] if tok is not None else None
    new: list[list[int]] = [[] for _ in rows]
    shown: list[list[str]] = [[] for _ in rows]
    reasons = ["length"] * len(rows)
    running = [True] * len(rows)
    for tokens in decode(model, rows, cache, how, running, n_ids=tok.vocab_size if tok else None):
        for row, token in enumerate(tokens):
            if token is None:
                continue
            if token in ends:
                reasons[row], running[row] = "eos", False
                continue
            new[row].append(token)
            if texts:
                shown[row].append(texts[row].feed(token))
                if texts[row].matched:
                    reasons[row], running[row] = "stop", False
    joined = ["".join(s) + t.finish() for s, t in zip(shown, texts, strict=True)] if texts else None
    if single:
        return Output(new[0], joined[0] if joined else None, reasons[0])
    return Output(new, joined, reasons)


@torch.no_grad()
def decode(
    model: nn.Module,
    rows: list[list[int]],
    cache: CompressedKVCache,
    how: Options,
    running: list[bool],
    n_ids: int | None = None,
    timing: Timing | None = None,
) -> Iterator[list[int | None]]:
    """Feed the prompts, then yield each running row's next token (None for the others), step by step.

    A token is fed when the one after it is asked for. The caller ends a row by clearing its entry in
    `running`; `decode` clears it when the row has its max_new_tokens or stands at the context limit.
    Ids from `n_ids` on have no token and are never sampled.
    """
    check_prompts(model, rows, cache)
    timing = timing or Timing()
    started = perf_counter()
    seen = cache.seen.tolist()
    left = [min(how.max_new_tokens, cache.limit - n - len(row)) for n, row in zip(seen, rows, strict=True)]
    logits = prefill(model, rows, cache, how.chunk)
    wait_for(logits)
    timing.prefill = perf_counter() - started
    cache.reserve(max(left))
    generator = how.generator(logits.device)
    token, pos = (torch.zeros(len(rows), 1, dtype=torch.int64, device=logits.device) for _ in range(2))
    for steps in itertools.count():
        for row, n in enumerate(left):
            running[row] = running[row] and n > 0
        if not any(running):
            return
        if steps:
            begun = perf_counter()
            pos.copy_(cache.seen[:, None])
            if not all(running):
                pos[~torch.tensor(running, device=pos.device)] = REST
            logits = how.step(model, cache, token, pos)
            cache.settle()
            wait_for(logits)
            timing.steps.append(perf_counter() - begun)
        if n_ids is not None:
            logits[:, n_ids:] = -torch.inf
        token[:, 0] = sample(logits, how.temperature, how.top_p, how.top_k, generator)
        took = perf_counter() - started
        timing.first_token = timing.first_token or took
        values = token[:, 0].tolist()
        yield [value if on else None for value, on in zip(values, running, strict=True)]
        left = [n - 1 for n in left]


def prefill(
    model: nn.Module, rows: list[list[int]], cache: CompressedKVCache, chunk: int | None = None
) -> Tensor:
    """Feed prompts of any lengths and give the logits after the last token of each, `[B, V]`."""
    device = cache.rows.seen.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    width = int(lengths.max())
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)  # [B, T]
    index = torch.arange(width, device=device)
    pos = torch.where(index < lengths[:, None], cache.seen[:, None] + index, REST)
    last = None
    for start in range(0, width, chunk or width):
        stop = min(start + (chunk or width), width)
        fed = tokens[:, start:stop]
        piece = cache.begin(fed, pos[:, start:stop])
        twice = cache.policy.score.replays and stop - start > 1
        hidden = partial(hidden_with_replay, model) if twice else model.hidden
        at = lengths - 1 - start  # each row's last token within this piece, if it is here
        here = (at >= 0) & (at < stop - start)
        ends = hidden(fed, piece, cache, at.clamp(0, stop - start - 1))[:, 0]  # [B, C]
        cache.end(piece)
        last = ends if last is None else torch.where(here[:, None], ends, last)
    return model.logits(last)


def as_rows(ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> tuple[list[list[int]], bool]:
    """Prompts as lists of ids, and whether it was a single one. Anything that counts as an integer will do."""
    listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    try:
        return [[operator.index(i) for i in listed]], True
    except TypeError:
        try:
            return [[operator.index(i) for i in row] for row in listed], False
        except TypeError as error:
            raise ValueError(f"ids must be integers, or a list of them for each row: {error}") from error


def check_prompts(model: nn.Module, rows: list[list[int]], cache: CompressedKVCache) -> None:
    """Raises ValueError for prompts that cannot be fed: wrong number, empty, unknown ids, too long."""
    seen = cache.seen.tolist()
    if len(rows) != len(seen):
        raise ValueError(f"the cache holds {len(seen)} rows, {len(rows)} prompts were given")
    for n, row in zip(seen, rows, strict=True):
        if not row:
            raise ValueError("a prompt has no tokens; there is nothing to continue")
        if min(row) < 0 or max(row) >= model.config.vocab_size:
            bad = next(i for i in row if not 0 <= i < model.config.vocab_size)
            raise ValueError(f"id {bad} is outside the model's vocabulary of {model.config.vocab_size}")
        cache.check_fits(n + len(row))


def end_ids(model: nn.Module, tok: Any) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's if there is one, else the model's."""
    return frozenset(tok.stop_ids if tok is not None else model.config.eos_ids)


def wait_for(x: Tensor) -> None:
    """Let the device finish, so that the clock tells the truth."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
