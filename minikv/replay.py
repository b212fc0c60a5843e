"""Reading a prompt a second time before it is compressed, for scorers that ask for it (KVzip)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from kernels.dispatch import largest
from minikv.cache import CompressedKVCache
from minikv.pool import Tokens, joined

REST = -1


class Reading:
    """The first reading: every layer attends as usual, but nothing is compressed yet."""

    def __init__(self, cache: CompressedKVCache):
        self.cache = cache
        self.parts: list[list[Tokens]] = []  # per layer what was held, and last the new tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        rows, here = self.cache.rows, self.cache.layers[layer]
        k, v = k.clone(), v.clone()  # as parts of the projection's output they would keep all of it
        self.parts.append([*here.held(rows), here.arrived(k, v, pos, rows.tokens)])
        return here.attend_chunk(q, self.parts[layer], pos, rows)


class Repetition:
    """A chunk read again: it sees all there is and itself, is not kept, and leaves its largest attention."""

    def __init__(self, first: Reading, begin: int, end: int, sinks: int):
        self.first, self.begin, self.end, self.sinks = first, begin, end, sinks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        here, (*held, new) = self.first.cache.layers[layer], self.first.parts[layer]
        own = replace(here.arrived(k, v, pos, self.first.cache.rows.tokens[:, :0]), state=new.state)
        begin, end = self.begin, self.end
        near = [(new.k[:, :, :begin][:, :, : self.sinks], new.pos[:, :, :begin][:, :, : self.sinks])]
        near += [(new.k[:, :, begin:end], new.pos[:, :, begin:end]), (k, own.pos)]
        keys, places = (torch.cat(side, 2) for side in zip(*near, strict=True))
        grouped = q.unflatten(1, (here.sizes.heads, -1))
        peak = largest(grouped, pos, keys, places, here.window)[:, :, near[0][0].shape[2] :][
            :, :, : end - begin
        ]
        old = new.state["peak"][:, :, begin:end]
        old.copy_(torch.maximum(old, peak))
        bare = [replace(t, state={}) for t in (*held, new, own)]
        past = joined(bare)
        return here.attend_past(q, past, pos)


def hidden_with_replay(
    model: nn.Module, tokens: Tensor, pos: Tensor, cache: CompressedKVCache, at: Tensor | None = None
) -> Tensor:
    """`model.hidden` of a chunk, which is then read again in pieces and compressed by what that showed.

    Holds the whole chunk's keys and values of all layers meanwhile.
    """
    score, rows = cache.policy.score, cache.rows
    first = Reading(cache)
    x = model.hidden(tokens, pos, first, at)
    length = tokens.shape[1]
    last = rows.last(pos)[:, None]  # [B, 1]
    for begin in range(0, length, score.chunk):
        end = min(begin + score.chunk, length)
        start = max(begin - score.lead, 0)
        order = torch.arange(end - start, device=pos.device)
        again = torch.where(pos[:, start:end] >= 0, last + 1 + order, REST)
        nowhere = torch.zeros_like(last[:, 0])  # only what attention leaves is wanted of the repetition
        model.hidden(tokens[:, start:end], again, Repetition(first, begin, end, score.sinks), nowhere)
    for layer, parts in zip(cache.layers, first.parts, strict=True):
        layer.compress(parts, rows, pos)
    return x
