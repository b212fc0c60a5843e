"""What a compressed cache does to single heads: attention that is lost, and outputs that move."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attend import chunk_attention
from kernels.dispatch import received
from minikv import CompressedKVCache
from minikv.pool import joined
from models.transformer import Transformer


@dataclass(frozen=True)
class Note:
    """One layer on the continuation with the full cache: what it asked, brought and got."""

    q: Tensor  # [1, G*H, T, D]
    k: Tensor  # [1, H, T, D]
    v: Tensor
    y: Tensor  # [1, G*H, T, D]
    mass: Tensor  # [H, n] attention to each position of the prompt, mean over queries and the group's heads


class Recorder:
    """Stands for a full cache that has read a prompt, and notes what each layer does with the continuation.

    The cache itself stays as it is.
    """

    def __init__(self, full: CompressedKVCache):
        self.full = full
        self.notes: list[Note] = []

    def record(self, model: Transformer, tokens: Tensor) -> None:
        pos = self.full.seen[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        model.hidden(tokens, pos, self)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        here, heads = self.full.layers[layer], k.shape[1]
        past = joined(here.held(self.full.rows))
        keys, values = torch.cat((past.k, k), 2), torch.cat((past.v, v), 2)
        places = torch.cat((past.pos, pos[:, None].expand(-1, heads, -1)), 2)
        y = chunk_attention(q, keys, values, pos, places, here.window)
        mass = received(q.unflatten(1, (heads, -1)), pos, keys, places, here.window)[0] / q.shape[2]
        self.notes.append(Note(q, k, v, y, mass[:, : past.pos.shape[2]]))
        return y


def lost_attention(note: Note, kept: list[list[int]]) -> float:
    """Share of attention that goes to positions of the prompt which a head no longer holds, mean over heads.

    kept: the positions that each KV head holds. The attention is the full run's (teacher-forced, not in-run).
    """
    lost = 0.0
    for mass, held in zip(note.mass, kept, strict=True):
        dropped = torch.ones_like(mass, dtype=torch.bool)
        dropped[held] = False
        lost += float(mass[dropped].sum())
    return lost / len(kept)


def perturbed(
    model: Transformer, cache: CompressedKVCache, tokens: Tensor, notes: list[Note]
) -> list[list[float]]:
    """|o - o'|_1 / |o|_1 of every query head in every layer, summed over the continuation.

    o is the head's part of the layer's output, after its columns of W_O, with the full cache; o' with this one,
    asked the same. The cache has read the prompt, and takes the continuation here.
    """
    pos = cache.begin(tokens)
    found = []
    for layer, (note, block) in enumerate(zip(notes, model.layers, strict=True)):
        y = cache.attend(layer, note.q, note.k, note.v, pos)
        wo = block.attention.wo.weight.float().unflatten(1, y.shape[1:4:2])  # [C, G*H, D]
        before, change = (
            torch.einsum("htd,chd->htc", side[0].float(), wo).abs().sum((1, 2))
            for side in (note.y, y - note.y)
        )
        found.append((change / before).tolist())
    cache.end(pos)
    return found
