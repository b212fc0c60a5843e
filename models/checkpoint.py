"""Checkpoint folders on disk: which weight files they hold, whether those are whole, and writing them.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte
range) and the raw tensors (https://github.com/huggingface/safetensors, "Format"). The header alone
tells how long the file must be, so a cut download is found without reading any tensor.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
AGAIN = "fetch the file again"


@dataclass(frozen=True)
class Entry:
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]
    end: int  # first byte after the tensor, counted from the end of the header


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> `Entry` of a safetensors file whose length is what its header says.

    Raises ValueError for anything else, before a byte of memory depends on what the file claims.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(512)
        refuse_stand_in(path, start)
        if size < 8:
            raise ValueError(f"{path}: file has {size} bytes, which is no safetensors file; {AGAIN}")
        length = int.from_bytes(start[:8], "little")
        if length > size - 8:
            raise ValueError(f"{path}: file has {size} bytes, header says at least {length + 8}; {AGAIN}")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: a header of {length} bytes is no safetensors header; {AGAIN}")
        file.seek(8)
        entries = parse_header(path, file.read(length))
    expected = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if size != expected:
        raise ValueError(f"{path}: file has {size} bytes, header says {expected}; {AGAIN}")
    return entries


def refuse_stand_in(path: Path, start: bytes) -> None:
    """Git LFS pointers and web pages saved under the name of the file they stand for."""
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: this is a Git LFS pointer, not the file; run `git lfs pull`")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path}: this is a web page, not the file; {AGAIN}")


def parse_header(path: Path, text: bytes) -> dict[str, Entry]:
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {
            name: Entry(item["dtype"], tuple(item["shape"]), int(item["data_offsets"][1]))
            for name, item in header.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path}: no safetensors header ({error}); {AGAIN}") from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: the single one, or the shards of the index."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    index = directory / INDEX
    if not index.is_file():
        raise FileNotFoundError(f"{directory}: neither {SINGLE} nor {INDEX} is there")
    text = index.read_bytes()
    refuse_stand_in(index, text[:512])
    try:
        shards = sorted(set(json.loads(text)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: no weight_map of tensors to files ({error}); {AGAIN}") from error
    for shard in shards:
        if not (isinstance(shard, str) and Path(shard).name == shard):
            raise ValueError(f"{index}: {shard!r} is not the name of a file beside the index")
        if not (directory / shard).is_file():
            raise FileNotFoundError(f"{directory}: shard {shard} of {INDEX} is missing")
    return [directory / shard for shard in shards]


def check_complete(directory: Path) -> None:
    """Every weight file is there and as long as its header says; reads headers only."""
    for path in weight_files(directory):
        read_header(path)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    pieces: Callable[[str], Iterable[torch.Tensor]],
) -> None:
    """Write a safetensors file without ever holding it: `pieces(name)` yields a tensor's rows in order.

    `safetensors.torch.save_file` needs all tensors in memory at once; a model being converted is
    larger than that.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start on 8-byte boundaries
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for piece in pieces(name):
                file.write(piece.to(dtype).contiguous().view(torch.uint8).numpy().data)
    read_header(path)


def require_space(directory: Path, needed: int) -> None:
    """Refuse to start writing `needed` bytes that the disk of `directory` cannot take."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"{directory}: {needed:,} bytes needed, {free:,} bytes free on this disk; "
            "free some space or choose another folder"
        )
