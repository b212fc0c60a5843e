"""What a decode step must read, and how fast this machine reads: the ceiling, before anything is measured."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from minikv.cache import CompressedKVCache
from minikv.generate import wait_for

# Far beyond any processor cache, yet read in a moment.
MATRIX_BYTES = {"cpu": 2**28, "cuda": 2**31}
COLUMNS = 4096


def weight_bytes(model: nn.Module, batch: int = 1) -> int:
    """Bytes of weights that one step for `batch` rows reads: each once, of a separate embedding a row per token."""

    def held(module: nn.Module) -> int:
        return sum({t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}.values())

    if model.head is None:
        return held(model)
    unread = model.config.vocab_size - batch
    return held(model) - held(model.embed) * unread // model.config.vocab_size


def cache_bytes(cache: CompressedKVCache, prompt: int, generated: int = 0) -> int:
    """Bytes of held tokens (keys, values, positions, statistics) that a step reads, all rows together.

    After a prompt of `prompt` tokens per row and `generated` more. Only slots with a token count, at the average
    of a layer's tiers: what an implementation reads beyond them is its own doing. Call `cache.reserve` first
    where `every=0`.
    """
    batch, room = len(cache.rows.seen), cache.rows.room
    moved, fresh = generated // room * room, generated % room  # compressed since the prompt, and not yet
    total = 0.0
    for layer in cache.layers:
        heads = layer.sizes.heads
        slots = sum(b.numel() for name, b in layer.kept.named_buffers() if name.endswith("pos"))
        kept_slot = sum(b.nbytes for b in layer.kept.buffers()) / slots
        own = [b for name, b in layer.named_buffers(recurse=False) if name.startswith("fresh_")]
        fresh_slot = sum(b.nbytes for b in own) / (batch * heads * room)
        kept = min(prompt + moved, layer.kept.slots)
        total += batch * heads * (kept * kept_slot + fresh * fresh_slot)
    return round(total)


def multiply_and_sum(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix-vector product that a compiler fuses into one pass over the matrix."""
    return (matrix * vector).sum(-1)


@torch.no_grad()
def bandwidth(
    device: torch.device,
    dtype: torch.dtype,
    repeat: int = 10,
    typical: Callable[[Sequence[float]], float] = min,
) -> dict[str, float | None]:
    """Bytes per second of one large matrix-vector product, the fastest of `repeat`: eager and compiled.

    typical: which of the times counts, if not the shortest. Eagerly it is torch's own product. "compiled" is None where there is no working compiler.
    """
    size = MATRIX_BYTES.get(device.type, MATRIX_BYTES["cpu"])
    matrix = torch.ones(size // dtype.itemsize // COLUMNS, COLUMNS, dtype=dtype, device=device)
    vector = torch.ones(COLUMNS, dtype=dtype, device=device)

    def speed(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        times = []
        for _ in range(repeat + 1):  # the first one warms up
            start = perf_counter()
            wait_for(product(matrix, vector))
            times.append(perf_counter() - start)
        return matrix.nbytes / typical(times[1:])

    eager = speed(torch.mv)
    try:
        compiled = speed(torch.compile(multiply_and_sum, dynamic=False))
    except torch._inductor.exc.InductorError:
        compiled = None
    return {"eager": eager, "compiled": compiled}
