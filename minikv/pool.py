"""Where survivors live: `slots` per KV head with their true positions, -1 where a slot is empty."""

import torch
from torch import Tensor, nn

from minikv.axes import Codec


class Pool(nn.Module):
    """Keys, values and positions of one layer's kept tokens, the same number of slots for every head."""

    def __init__(
        self,
        batch: int,
        heads: int,
        slots: int,
        head_dim: int,
        store: Codec,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.slots, self.store = slots, store
        lead = (batch, heads, slots)
        self.parts: list[str] = []
        for name, tensor in store.buffers(lead, head_dim, dtype, device).items():
            self.parts.append(name)
            self.register_buffer(f"k_{name}", tensor)
            self.register_buffer(f"v_{name}", torch.zeros_like(tensor))
        self.register_buffer("pos", torch.full(lead, -1, dtype=torch.int32, device=device))

    def keys(self, n: int) -> Tensor:
        """The first n slots of every head, `[B, H, n, D]`."""
        return self.store.decode({name: self.get_buffer(f"k_{name}")[:, :, :n] for name in self.parts})

    def values(self, n: int) -> Tensor:
        return self.store.decode({name: self.get_buffer(f"v_{name}")[:, :, :n] for name in self.parts})

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, survives: Tensor, rows: Tensor) -> None:
        """Replace what `rows` (bool `[B]`) hold by the candidates that survive, in their order.

        k, v `[B, H, n, D]`, pos and survives `[B, H, n]`, at most `slots` survivors per head.
        """
        index, filled = self.places(survives)
        rows = rows[:, None, None]
        kept_pos = torch.where(filled, pos.gather(2, index), -1)
        self.pos.copy_(torch.where(rows, kept_pos, self.pos))
        wide = index[..., None].expand(-1, -1, -1, k.shape[-1])
        for prefix, x in (("k", k), ("v", v)):
            for name, part in self.store.encode(x.gather(2, wide)).items():
                old = self.get_buffer(f"{prefix}_{name}")
                old.copy_(torch.where(rows[..., None], part, old))

    def places(self, survives: Tensor) -> tuple[Tensor, Tensor]:
        """For each slot the candidate it takes, `[B, H, slots]`, and whether it takes one at all.

        Survivors keep their order. The rejected all write to one slot more than there is.
        """
        batch, heads, n = survives.shape
        slot = torch.where(survives, survives.cumsum(-1) - 1, self.slots)
        index = torch.full((batch, heads, self.slots + 1), n, device=slot.device)
        index.scatter_(2, slot, torch.arange(n, device=slot.device).expand_as(slot))
        index = index[:, :, : self.slots]
        return index.clamp(max=n - 1), index < n

    def replace(self, victim: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Write one token per head over slot `victim [B, H, 1]`; `victim == slots` leaves all as it is.

        k, v `[B, H, 1, D]`, pos `[B, H, 1]`.
        """
        stays = victim == self.slots
        victim = victim.clamp(max=self.slots - 1)
        self.pos.scatter_(2, victim, torch.where(stays, self.pos.gather(2, victim), pos.to(self.pos.dtype)))
        for prefix, x in (("k", k), ("v", v)):
            for name, part in self.store.encode(x).items():
                old = self.get_buffer(f"{prefix}_{name}")
                wide = victim[..., None].expand(-1, -1, -1, part.shape[-1])
                part = torch.where(stays[..., None], old.gather(2, wide), part)
                old.scatter_(2, wide, part)
