"""A cache that keeps everything and hides what another cache has dropped: the truth to compare with."""

import torch
from torch import Tensor

from minikv import CompressedKVCache


class MaskedDense:
    """Full keys and values of every token; a query sees those that `other` still held before the call."""

    def __init__(self, model, other: CompressedKVCache):
        self.model, self.other = model, other
        config = model.config
        shape = (len(other.seen), config.n_kv_heads, config.max_position, config.head_dim)
        self.k = [torch.zeros(shape) for _ in range(config.n_layers)]
        self.v = [torch.zeros(shape) for _ in range(config.n_layers)]

    def begin(self, tokens: Tensor, pos: Tensor | None) -> Tensor:
        self.held = [self.other.kept(layer) for layer in range(self.model.config.n_layers)]
        return self.other.seen[:, None] + torch.arange(tokens.shape[1]) if pos is None else pos

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        group, limit = q.shape[1] // k.shape[1], self.model.config.max_position
        window = self.model.config.window(layer) or limit
        for row in range(q.shape[0]):
            real = pos[row] >= 0
            new = pos[row, real]
            distance = new[:, None] - torch.arange(limit)
            reachable = (distance >= 0) & (distance < window)  # [t, limit]
            for head in range(k.shape[1]):
                self.k[layer][row, head, new] = k[row, head, real]
                self.v[layer][row, head, new] = v[row, head, real]
                held = torch.zeros(limit, dtype=torch.bool)
                held[self.held[layer][row][head]] = True
                held[new] = True
                for g in range(head * group, (head + 1) * group):
                    logits = q[row, g, real] @ self.k[layer][row, head].T / q.shape[-1] ** 0.5
                    weights = logits.masked_fill(~(reachable & held), -torch.inf).softmax(-1)
                    out[row, g, real] = weights @ self.v[layer][row, head]
        return out

    def end(self, pos: Tensor) -> None:
        """The other cache, fed the same tokens, does the counting."""
