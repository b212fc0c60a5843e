"""What all layers of a cache share: how far each batch row has come, and where its next token goes."""

import torch
from torch import Tensor, nn


class Rows(nn.Module):
    """Positions of fresh tokens and remembered queries per row, and the host's own counts.

    The host keeps plain numbers so that it never has to ask the device: `used`, how many kept slots may
    be filled; `room`, fresh slots per row; `free`, those still free in every row; and two facts about
    the tokens so far, `plain` and `gaps`. The rest is buffers.
    """

    def __init__(
        self,
        batch: int,
        room: int,
        n_queries: int,
        ragged: bool,
        device: torch.device,
        aligned: bool = False,
    ):
        super().__init__()
        self.room = self.first_room = room
        self.used, self.free = 0, room
        self.aligned = (
            aligned  # position p goes to fresh slot p % room, so that room is full at its multiples
        )
        self.n_queries = n_queries
        self.plain = True  # the chunk at hand counts up without gaps, padded only on its right
        self.may_gap = batch > 1 or ragged
        self.gaps = self.may_gap  # filled slots may have empty ones between them
        self.static = False  # read whole buffers rather than their filled part, as a compiled step must
        self.register_buffer("seen", torch.zeros(batch, dtype=torch.int64, device=device))
        self.register_buffer("cursor", torch.zeros(batch, dtype=torch.int64, device=device))
        self.register_buffer("fresh_pos", torch.full((batch, room), -1, dtype=torch.int32, device=device))
        # A ring of the last queries' positions; one spare slot takes what is not to be remembered.
        ring = torch.full((batch, n_queries + 1), -1, dtype=torch.int32, device=device)
        self.register_buffer("query_pos", ring)
        self.register_buffer("token", torch.zeros(batch, 1, dtype=torch.int64, device=device))
        self.tokens = self.token  # ids of the tokens at hand, [B, T]

    @property
    def empty(self) -> bool:
        return self.used == 0 and self.free == self.room

    @property
    def n_fresh(self) -> int:
        """Leading fresh slots that may be filled."""
        return self.room - self.free

    def last(self, pos: Tensor | None) -> Tensor:
        """Position of each row's newest token `[B]`, counting the tokens `pos [B, T]` not yet seen."""
        seen = self.seen if pos is None else torch.maximum(self.seen, pos.amax(1) + 1)
        return seen - 1

    # A single token, pos [B, 1]. Tensor code only: part of the compiled step.

    def place(self, token: Tensor, pos: Tensor) -> None:
        """Before the layers: the token goes to each row's cursor; a row at rest writes -1 there."""
        self.token.copy_(token)
        self.fresh_pos.scatter_(1, self.cursor[:, None], pos.to(torch.int32))
        self.remember(pos)

    def advance(self, pos: Tensor, keeps_fresh: bool) -> None:
        """After the layers. `keeps_fresh` is false where each of them has already taken the token to kept."""
        active = pos[:, 0] >= 0
        self.seen.copy_(torch.where(active, pos[:, 0] + 1, self.seen))
        if keeps_fresh:
            self.cursor.add_(active)
        else:
            self.fresh_pos.fill_(-1)

    # Remembered queries.

    def remember(self, pos: Tensor) -> None:
        if self.n_queries == 0:
            return
        self.query_pos.copy_(self.with_latest(pos))

    def with_latest(self, pos: Tensor) -> Tensor:
        """Positions of the remembered queries once those at `pos [B, T]` are among them, `[B, n_queries + 1]`."""
        index, slot = self.tail(pos)
        latest = self.query_pos.scatter(1, slot, pos.gather(1, index).to(torch.int32))
        latest[:, -1] = -1
        return latest

    def tail(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """The last queries of a chunk with positions `[B, T]`: their index in it and their slot in the ring."""
        n = min(self.n_queries, pos.shape[1])
        count = torch.arange(1, pos.shape[1] + 1, device=pos.device)
        end = torch.where(pos >= 0, count, 0).amax(1, keepdim=True)  # [B, 1] one past the last real token
        index = end - n + torch.arange(n, device=pos.device)  # [B, n]
        tail_pos = torch.where(index >= 0, pos.gather(1, index.clamp(min=0)), -1)
        slot = torch.where(tail_pos >= 0, tail_pos % max(self.n_queries, 1), self.n_queries)
        return index.clamp(min=0), slot

    # A chunk of tokens, and the host's book-keeping.

    def absorb(self, pos: Tensor) -> None:
        """Every layer has compressed the chunk `pos [B, T]` with all it held."""
        self.seen.copy_(self.last(pos) + 1)
        self.used += self.n_fresh + pos.shape[1]
        self.clear((pos >= 0).any(1))

    def clear(self, rows: Tensor) -> None:
        """The fresh part of `rows` (bool `[B]`) is now in kept."""
        start = self.seen % self.room if self.aligned else torch.zeros_like(self.seen)
        self.cursor.copy_(torch.where(rows, start, self.cursor))
        self.fresh_pos.masked_fill_(rows[:, None], -1)
        self.count_free()

    def count_free(self) -> None:
        self.free = self.room - int(self.cursor.max())

    def resize(self, room: int) -> None:
        """A longer fresh part, or back to the first length; what is in it stays as far as it fits."""
        self.fresh_pos = resized(self.fresh_pos, 1, room, fill=-1)
        self.free += room - self.room
        self.room = room

    def reset(self) -> None:
        self.used, self.free = 0, self.room
        self.gaps, self.tokens = self.may_gap, self.token
        self.token.zero_()
        self.seen.zero_()
        self.cursor.zero_()
        self.fresh_pos.fill_(-1)
        self.query_pos.fill_(-1)


def resized(old: Tensor, dim: int, size: int, fill: int = 0) -> Tensor:
    """A copy of `old` that is `size` long along `dim`, cut or filled at its end."""
    shape = list(old.shape)
    shape[dim] = size
    new = old.new_full(shape, fill)
    n = min(size, old.shape[dim])
    new.narrow(dim, 0, n).copy_(old.narrow(dim, 0, n))
    return new
