"""A GGUF file (llama.cpp's format) -> a checkpoint folder like those of the Hugging Face hub.

Quantised tensors are dequantised to floats. Everything is streamed, a few million numbers at a time, so
memory stays small whatever the size of the model.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from models.checkpoint import (
    AGAIN,
    INDEX,
    SINGLE,
    refuse_stand_in,
    require_space,
    write_safetensors,
)
from models.fields import Fields
from models.gguf_config import config_json, generation_json
from models.gguf_tokenizer import tokenizer_files
from models.weights import listing, places
from models.zoo import config_from_json

if TYPE_CHECKING:
    from gguf import ReaderTensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHARD_BYTES = 4_000_000_000
PIECE_NUMBERS = 1 << 22  # dequantised at a time: 16 MiB as float32

NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "layers": "blk",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Source:
    """Where the numbers of one checkpoint tensor come from."""

    tensor: ReaderTensor
    shape: tuple[int, ...]
    heads: int  # heads whose rows are interleaved for rope; 0 where the row order is ours


def import_gguf(path: str | Path, directory: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the model of a GGUF file as a new folder: config, weights, tokenizer, chat template.

    `dtype` None keeps the file's own float type; a quantised file becomes bfloat16, whose rounding is
    smaller than that of any quantisation. The folder appears complete or not at all. Raises ValueError,
    naming file and feature, for what cannot be carried over exactly.
    """
    path, directory = Path(path), Path(directory)
    if directory.exists():
        raise ValueError(f"{directory} is there already; delete it or choose another folder")
    meta, tensors = read_gguf(path)
    try:
        config, sources = describe(meta, tensors)
        dtype = dtype or own_dtype(tensors)
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        numbers = sum(source.tensor.n_elements for source in sources.values())
        require_space(directory, numbers * dtype.itemsize)
        with staged(directory) as folder:
            for name, content in tokenizer_files(meta).items():
                (folder / name).write_bytes(content)
            write_json(folder / "config.json", config)
            write_json(folder / "generation_config.json", generation_json(config))
            write_weights(folder, sources, dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_gguf(path: Path) -> tuple[Fields, dict[str, ReaderTensor]]:
    """The metadata of a GGUF file, and its tensors as views into the mapped file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(512)
    refuse_stand_in(path, start)
    if not start.startswith(b"GGUF"):
        raise ValueError(f"{path}: not a GGUF file (it does not start with GGUF); {AGAIN}")
    reader_of = gguf_package(path).GGUFReader
    try:
        reader = reader_of(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path}: damaged, or cut at {size} bytes ({error}); {AGAIN}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path}: written for a machine of the other byte order")
    return Fields(meta), {tensor.name: tensor for tensor in reader.tensors}


def gguf_package(path: Path) -> ModuleType:
    """Imported here and not above: it brings much else, which only a GGUF file has a use for."""
    try:
        return import_module("gguf")
    except ImportError as error:
        raise ValueError(f"{path}: a GGUF file needs the package gguf: pip install gguf") from error


def describe(meta: Fields, tensors: Mapping[str, ReaderTensor]) -> tuple[dict[str, Any], dict[str, Source]]:
    """The `config.json`, and checkpoint tensor -> source; refuses a file that is not exactly that model."""
    parts = meta.integer("split.count", 0, default=1)
    if parts > 1:
        raise ValueError(
            f"part {meta.integer('split.no', 0) + 1} of {parts}; join the parts first "
            "(llama.cpp: llama-gguf-split --merge)"
        )
    # GGUF counts dimensions from the fastest one.
    shapes = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in tensors.items()}
    if "token_embd.weight" not in shapes:
        raise ValueError("no tensor token_embd.weight, so this is not a language model")
    factors = tensors[ROPE_FACTORS].data if ROPE_FACTORS in tensors else None
    raw = config_json(meta, shapes, factors)
    config = config_from_json(raw)
    theirs = places(config, NAMES)
    missing, left = theirs.keys() - shapes.keys(), shapes.keys() - theirs.keys() - {ROPE_FACTORS}
    if missing:
        raise ValueError(f"missing tensors: {listing(missing)}")
    if left:
        raise ValueError(f"tensors this import has no place for: {listing(left)}")
    wrong = [name for name, place in theirs.items() if shapes[name] != place.shape]
    if wrong:
        raise ValueError(f"shapes that contradict the hyperparameters: {listing(wrong)}")
    # llama.cpp interleaves the rows of q and k for its llama architecture only.
    interleaved = meta.text("general.architecture") == "llama"
    sources = {
        ours: Source(tensors[name], place.shape, place.heads if interleaved else 0)
        for ours, (name, place) in zip(places(config), theirs.items(), strict=True)
    }
    return raw, sources


def own_dtype(tensors: Mapping[str, ReaderTensor]) -> torch.dtype:
    """The one float type of the matrices (norms are always float32); bfloat16 if they are quantised."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if not kinds <= FLOATS.keys():
        return torch.bfloat16
    return FLOATS[kinds.pop()] if len(kinds) == 1 else torch.float32


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A folder to write in, renamed to `directory` at the end; after a failure nothing is left."""
    folder = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        yield folder
        try:
            folder.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
            # Another process has finished the same import in the meantime; its folder is as good.
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already if all went well


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: Path, sources: Mapping[str, Source], dtype: torch.dtype) -> None:
    """`model.safetensors`, or several shards with an index if it would be larger than `SHARD_BYTES`."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    total = used = 0
    for name, source in sources.items():
        size = source.tensor.n_elements * dtype.itemsize
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = source.shape
        used, total = used + size, total + size
    weight_map = {}
    for number, shapes in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, shapes, dtype, lambda name: rows(name, sources[name]))
        weight_map |= dict.fromkeys(shapes, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def rows(name: str, source: Source) -> Iterator[torch.Tensor]:
    """The tensor in float32, from the first row to the last, in pieces."""
    data, kind = source.tensor.data, source.tensor.tensor_type
    dequantize = import_module("gguf").dequantize
    try:
        if data.ndim == 1:
            yield to_torch(half_split(dequantize(data, kind), source.heads))
            return
        # Quantisation blocks lie within rows, so rows can change places before they are dequantised.
        data = half_split(data, source.heads)
        step = max(1, PIECE_NUMBERS // source.shape[1])
        for begin in range(0, len(data), step):
            yield to_torch(dequantize(data[begin : begin + step], kind))
    except NotImplementedError as error:
        raise ValueError(f"{name} is stored as {kind.name}, which cannot be dequantised") from error


def to_torch(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.float32))  # a copy: the file is read-only


def half_split(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from interleaved pairs (2i, 2i + 1) to pairs (i, i + half) of each head."""
    if not heads:
        return data
    half = len(data) // heads // 2
    return data.reshape(heads, half, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
