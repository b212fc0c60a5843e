"""What a layer keeps: one pool, or an exact tier before a coded one."""

import torch
from torch import Tensor, nn

from minikv.attention import Packed
from minikv.axes import Codec, Fixed, Store
from minikv.pool import Pool, RaggedPool, Sizes, Statistics, Tokens


class Kept(nn.Module):
    """`slots` per KV head on average, divided into the tiers of a store. The last tier is ragged if heads are."""

    def __init__(
        self,
        sizes: Sizes,
        slots: int,
        store: Store,
        sinks: int,
        ragged: bool,
        statistics: Statistics,
        constants: dict[Codec, Fixed],
    ):
        super().__init__()
        self.slots, self.store, self.sinks, self.ragged = slots, store, sinks, ragged
        self.pools = nn.ModuleList()
        tiers = [tier for tier in store.tiers(slots, sinks, sizes.head_dim) if tier.slots]
        offset = 0
        for tier in tiers:
            kind = RaggedPool if ragged and tier is tiers[-1] else Pool
            self.pools.append(kind(sizes, tier, statistics, constants, offset))
            offset += self.pools[-1].pos.shape[-1]
        # Codecs that decide something once, from the first tokens.
        self.fits = [
            (which, codec) for which, codec in self.pools[-1].codecs.items() if codec.fitted(sizes.head_dim)
        ]

    # Reading.

    def tokens(self, used: int) -> list[Tokens]:
        """Keys and values of each tier, as far as `used` slots of a head may be filled."""
        return [pool.tokens(pool.filled(used)) for pool in self.pools]

    def stretches(self, used: int) -> list[Packed]:
        """Each tier for attention; of ragged heads, all but the last."""
        return [pool.stretch(pool.filled(used)) for pool in self.pools if isinstance(pool, Pool)]

    def count(self) -> Tensor:
        """Tokens each head holds, `[B, H]`."""
        return sum(pool.held() for pool in self.pools)

    def positions(self) -> list[Tensor]:
        """Of each tier `[B, H, n]`, -1 where a slot is empty."""
        return [pool.positions() for pool in self.pools]

    # Writing.

    def keep(self, found: Tokens, survives: Tensor, rows: Tensor, scores: Tensor | None, adds: bool) -> None:
        """Candidates in order of position that survive (bool `[B, H, n]`) become what `rows` (bool `[B]`) hold.

        `adds`: what is in the last tier stays, whether it is among the candidates or not.
        """
        *first, last = self.pools
        settled = torch.zeros_like(survives) if found.home is None else found.home >= last.offset
        if not first:
            if adds and not last.exact:
                last.append(found, survives & ~settled, rows)
            else:
                last.keep(found, survives, rows)
            return
        upper = self.store.first_tier(survives, found.pos, self.sinks, scores, settled)
        first[0].keep(found, upper, rows)
        if adds:
            last.append(found, survives & ~upper & ~settled, rows)
        else:
            last.keep(found, survives & ~upper, rows)

    def fit(self, found: Tokens, valid: Tensor, q: Tensor | None, rows: Tensor) -> None:
        """Let the codecs of the last tier decide what they decide once, in the `rows` where it is empty."""
        last = self.pools[-1]
        for which, codec in self.fits:
            numbers = codec.fit(found.k if which == "k" else found.v, valid, q)
            last.set_fitted(which, numbers, rows & ~(last.pos >= 0).flatten(1).any(1))

    def replace(self, victim: Tensor, new: Tokens) -> None:
        """The newest token comes, the one at `victim [B, H, 1]`, an index into all slots and the new one, goes.

        Where that is in the coded tier, the oldest exact token moves there, and the new one takes its place.
        Tensor code only: part of the compiled step.
        """
        if len(self.pools) == 1:
            self.pools[0].replace(victim, new)
            return
        first, last = self.pools
        in_last = (victim >= first.slots) & (victim < first.slots + last.slots)
        mover, target = new, victim.clamp(max=first.slots)  # at first.slots nothing is written
        if self.store.residual:
            never = torch.iinfo(first.pos.dtype).max
            oldest = torch.where(first.pos >= self.sinks, first.pos, never).argmin(-1, keepdim=True)
            mover = first.tokens(first.slots).gather(oldest)
            target = torch.where(in_last, oldest, target)
        last.replace(torch.where(in_last, victim - first.slots, last.slots), mover)
        first.replace(target, new)

    def reset(self) -> None:
        for pool in self.pools:
            pool.reset()
