"""The one decoder behind Llama, Mistral and Qwen: embedding, blocks of attention and MLP, norm, head.

The families differ by data only (`Config`). A block turns states into rotated queries, keys and values and
hands them to a function that attends; the model knows nothing of masks, budgets or layouts.

Letters: B batch, T new tokens, H KV heads, G query heads per KV head, D head size, C model width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Config
from models.linear import Embedding, Linear
from models.rope import Rope, rotate

Attend = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # q [B, G*H, T, D], k and v [B, H, T, D] -> y, shaped as q


class KVCache(Protocol):
    """All a model knows of a cache. One forward is: begin, attend in every layer, end."""

    def begin(self, tokens: Tensor, pos: Tensor | None) -> Tensor:
        """Make room for new tokens (ids `[B, T]`) and give their positions, `[B, T]`; -1 rests."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B, G*H, T, D], k and v [B, H, T, D] after rope, pos [B, T] -> y [B, G*H, T, D]."""

    def end(self, pos: Tensor) -> None:
        """Every layer has attended: count the new tokens as seen."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim, self.n_q, self.n_kv = config.head_dim, config.n_heads, config.n_kv_heads
        size = config.head_dim * (config.n_heads + 2 * config.n_kv_heads)
        self.wqkv = Linear(config.hidden_size, size, bias=config.qkv_bias)
        self.wo = Linear(config.n_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, (G + 2) * H, T, D]
        qk, v = heads.split((self.n_q + self.n_kv, self.n_kv), 1)
        if self.q_norm is not None:
            q, k = qk.split((self.n_q, self.n_kv), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = rotate(qk, *rope).split((self.n_q, self.n_kv), 1)
        y = attend(q, k, v)
        return self.wo(y.transpose(1, 2).flatten(2))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Attention without a cache: every token sees itself and what stands before it, within the window."""
    length = q.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index
    mask = (distance >= 0) & (distance < window)  # [T, T]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate = Linear(config.hidden_size, config.ffn_size, bias=config.mlp_bias)
        self.up = Linear(config.hidden_size, config.ffn_size, bias=config.mlp_bias)
        self.down = Linear(config.ffn_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, at: Tensor | None = None
    ) -> Tensor:
        """States `[B, T, C]`; with at `[B]` only those of one token per row, `[B, 1, C]`."""
        x = x + self.attention(self.attention_norm(x), rope, attend)
        if at is not None:
            x = x.take_along_dim(at[:, None, None], 1)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None
        if not config.tied:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, pos: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """tokens and pos [B, T] -> logits [B, T, V].

        Without a cache the rows are read from position 0 with plain causal attention. With one, `pos`
        defaults to what follows the tokens already seen, and the call is complete: the cache has moved on,
        evicted and compressed by the time it returns.
        """
        if cache is None:
            if pos is None:
                pos = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            return self.logits(self.hidden(tokens, pos, None))
        pos = cache.begin(tokens, pos)
        x = self.hidden(tokens, pos, cache)
        cache.end(pos)
        return self.logits(x)

    def hidden(self, tokens: Tensor, pos: Tensor, cache: KVCache | None, at: Tensor | None = None) -> Tensor:
        """tokens and pos [B, T] -> states before the head, [B, T, C].

        With at [B], only those of the tokens at these places, [B, 1, C]: the last MLP runs for them alone.
        """
        x = self.embed(tokens)
        rope = self.rope(pos)
        for layer, block in enumerate(self.layers):
            wanted = at if layer + 1 == len(self.layers) else None
            x = block(x, rope, self.attend_in(layer, pos, cache), wanted)
        return self.norm(x)

    def attend_in(self, layer: int, pos: Tensor, cache: KVCache | None) -> Attend:
        """How tokens at `pos` attend in a layer: through the cache, or without one to each other."""
        if cache is None:
            return partial(causal_attention, window=self.config.window(layer))
        return partial(cache.attend, layer, pos=pos)

    def logits(self, x: Tensor) -> Tensor:
        """States [B, T, C] -> logits [B, T, V]."""
        return self.embed.logits(x) if self.head is None else self.head(x)
