"""One sample, several caches: what each of them makes of it. The first cache is the full one, the reference."""

from collections.abc import Callable, Iterator
from statistics import mean, median
from time import perf_counter

import torch
from torch import Tensor

from minikv import CompressedKVCache, generate
from minikv.generate import prefill, wait_for
from minikv.step import CompiledStep, Step
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from scripts.evaluation.metrics import compare, run_length
from scripts.evaluation.perturbation import Recorder, lost_attention, perturbed
from scripts.evaluation.samples import Sample

ROUNDS = 3  # a prompt is read so many times to tell how long that takes
STEPS = 8  # of one cache before the next one's turn
BINS = 64  # stretches of a prompt for which a row tells how much of them was kept

Found = dict[str, float | list]
# Of caches that have read a sample's prompt, and the logits [1, V] after it: the figures of each, in order.
Measure = Callable[[Transformer, Tokenizer, Sample, list[CompressedKVCache], list[Tensor]], Iterator[Found]]


class Together:
    """Empty caches that read a first chunk in one forward: attention is the same, each compresses its own way."""

    def __init__(self, caches: list[CompressedKVCache]):
        self.caches = caches

    def begin(self, tokens: Tensor, pos: Tensor | None) -> Tensor:
        return [cache.begin(tokens, pos) for cache in self.caches][0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        if q.shape[2] == 1:  # a step, which does not compress
            return [cache.attend(layer, q, k, v, pos) for cache in self.caches][0]
        first, *others = self.caches
        y = first.attend(layer, q, k, v, pos)
        for cache in others:
            here, rows = cache.layers[layer], cache.rows
            here.take(here.arrived(k, v, pos, rows.tokens), q, pos, rows)
        return y

    def end(self, pos: Tensor) -> None:
        for cache in self.caches:
            cache.end(pos)


def reads_alone(cache: CompressedKVCache) -> bool:
    """It reads a prompt twice, or drops tokens before the prompt's own attention."""
    score = cache.policy.score
    return score.replays or (score.before and cache.policy.every == 1)


@torch.no_grad()
def read_prompt(model: Transformer, caches: list[CompressedKVCache], chunks: list[list[int]]) -> list[Tensor]:
    """Feed the chunks to every cache and give the logits after the last, `[1, V]` each."""
    first = torch.tensor([chunks[0]], device=caches[0].seen.device)
    together = Together([cache for cache in caches if not reads_alone(cache)])
    pos = together.begin(first, None)
    x = model.hidden(first, pos, together)
    together.end(pos)
    shared = model.logits(x[:, -1])
    ends = [prefill(model, chunks[:1], cache) if reads_alone(cache) else shared for cache in caches]
    for chunk in chunks[1:]:
        ends = [prefill(model, [chunk], cache) for cache in caches]
    return ends


@torch.no_grad()
def forced(
    model: Transformer, tok: Tokenizer, sample: Sample, caches: list[CompressedKVCache], ends: list[Tensor]
) -> Iterator[Found]:
    """The continuation, fed whatever the model would have said: predictions against the full cache's."""
    target, device = sample.target, ends[0].device
    scored = torch.tensor(target.scored, device=device)
    gold = torch.tensor(target.ids, device=device)[scored]
    reference = None
    for cache, end in zip(caches, ends, strict=True):
        fed = target.ids[:-1]
        if target.one_by_one:
            logits = torch.cat([end, *(prefill(model, [[id]], cache) for id in fed)])  # [n, V]
        else:
            logits = torch.cat([end, *model(torch.tensor([fed], device=device), cache=cache)])
        logits = logits[scored]
        reference = logits if reference is None else reference
        yield compare(reference, logits, gold)


@torch.no_grad()
def free(
    model: Transformer, tok: Tokenizer, sample: Sample, caches: list[CompressedKVCache], ends: list[Tensor]
) -> Iterator[Found]:
    """The model answers by itself, greedily, and the answer is judged."""
    for cache, end in zip(caches, ends, strict=True):
        first = int(end[0, : tok.vocab_size].argmax())
        said = []
        if first not in tok.stop_ids:
            rest = generate(model, [first], cache, tok, max_new_tokens=sample.target.max_new_tokens - 1)
            said = [first, *rest.ids]
        text = tok.decode(said)
        yield dict(score=sample.target.judge(text), said=text)


@torch.no_grad()
def heads(
    model: Transformer, tok: Tokenizer, sample: Sample, caches: list[CompressedKVCache], _: list[Tensor]
) -> Iterator[Found]:
    """What each head loses on the continuation: the full cache's queries, keys and values, given to every cache.

    So all caches answer the same queries, and errors of one layer do not reach the next. attention_loss and
    perturbation are means over layers and heads; run_length is of what a head holds outside the recent tokens.
    """
    tokens = torch.tensor([sample.target.ids], device=caches[0].seen.device)
    recorder = Recorder(caches[0])
    recorder.record(model, tokens)
    for cache in caches:
        kept = [cache.kept(layer)[0] for layer in range(model.config.n_layers)]
        seen = int(cache.seen[0])
        ends = [seen - cache.policy.recent_tokens(budget) for budget in cache.budgets]
        runs = [run_length(head, end) for held, end in zip(kept, ends, strict=True) for head in held]
        lost = [lost_attention(note, held) for note, held in zip(recorder.notes, kept, strict=True)]
        moved = perturbed(model, cache, tokens, recorder.notes)  # layers of query heads
        yield dict(
            perturbation=mean(x for layer in moved for x in layer),
            attention_loss=mean(lost),
            run_length=mean(runs),
            per_head=[[round(x, 6) for x in layer] for layer in moved],
        )


@torch.no_grad()
def cost(
    model: Transformer, tok: Tokenizer, sample: Sample, caches: list[CompressedKVCache], _: list[Tensor]
) -> Iterator[Found]:
    """Seconds to read the prompt, median of ROUNDS after a first, and of a compiled step; both also over the full cache's.

    Rounds visit the caches in turn, so that what disturbs the machine disturbs all.
    """
    reading: list[list[float]] = [[] for _ in caches]
    stepping: list[list[float]] = [[] for _ in caches]
    for _ in range(ROUNDS):
        for cache, seconds in zip(caches, reading, strict=True):
            cache.reset()
            begun = perf_counter()
            wait_for(prefill(model, [sample.context], cache))
            seconds.append(perf_counter() - begun)
    ids = sample.target.ids
    runs = [CompiledStep(cache, note=lambda text: None) for cache in caches]
    for cache, run in zip(caches, runs, strict=True):
        cache.reserve(len(ids))
        step_seconds(model, ids[:1], cache, run)  # compiles
    for first in range(1, len(ids), STEPS):
        for cache, run, seconds in zip(caches, runs, stepping, strict=True):
            seconds += step_seconds(model, ids[first : first + STEPS], cache, run)
    prompts, steps = ([median(seconds) for seconds in all_of] for all_of in (reading, stepping))
    for prompt, step in zip(prompts, steps, strict=True):
        yield dict(
            prefill=prompt, step=step, prefills_of_full=prompt / prompts[0], steps_of_full=step / steps[0]
        )


def step_seconds(model: Transformer, ids: list[int], cache: CompressedKVCache, run: Step) -> list[float]:
    """Seconds of each step that is fed one of these."""
    seconds = []
    for id in ids:
        token = torch.tensor([[id]], device=cache.seen.device)
        begun = perf_counter()
        wait_for(run(model, cache, token, cache.seen[:, None]))
        seconds.append(perf_counter() - begun)
        cache.settle()
    return seconds


def what_is_kept(cache: CompressedKVCache, n_layers: int) -> tuple[float, list[float]]:
    """Tokens per KV head on average, and for each of BINS stretches of the prompt the share that is held."""
    heads_kept = [head for layer in range(n_layers) for head in cache.kept(layer)[0]]
    n = int(cache.seen[0])
    held = torch.zeros(n)
    for head in heads_kept:
        held[head] += 1 / len(heads_kept)
    edges = [round(i * n / BINS) for i in range(BINS + 1)]
    shares = [round(float(held[a : max(b, a + 1)].mean()), 3) for a, b in zip(edges, edges[1:], strict=False)]
    return mean(map(len, heads_kept)), shares
