"""A cache as one safetensors file: a long document is compressed once and asked many times."""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from minikv.policy import AXES, Policy, from_text, to_text

FORMAT = "minikv cache 1"


def fingerprint(model: nn.Module) -> str:
    """Tells models apart: their sizes and switches, and a sample of their weights, whatever the dtype."""
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode())
    tokens = torch.arange(0, model.config.vocab_size, 997, device=model.norm.weight.device)
    for weight in (model.embed(tokens), model.layers[-1].attention.wo.weight, model.norm.weight):
        sample = weight.flatten()[:: max(1, weight.numel() // 64)].float().bfloat16().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe(policy: Policy) -> dict[str, Any]:
    plain = {f.name: getattr(policy, f.name) for f in fields(policy) if f.name not in AXES}
    return {"strategies": to_text(policy), **plain}


def write(path: str | Path, buffers: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Buffers and a description, under a temporary name first so that a file is whole or not there."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    tensors = {name: buffer.contiguous() for name, buffer in buffers.items()}
    try:
        save_file(tensors, temporary, metadata={"format": FORMAT, "about": json.dumps(about)})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inverse of `write`. Raises ValueError for a file that is no saved cache."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is a safetensors file, but no saved cache of this version")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["about"])
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no saved cache ({error})") from error


def policy_of(about: dict[str, Any]) -> Policy:
    rest = dict(about)
    return from_text(rest.pop("strategies"), **rest)
