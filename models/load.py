"""A name or a folder in, a model or a tokenizer out."""

from pathlib import Path

import torch
from torch import nn

from models.config import Config
from models.fields import parse_json
from models.hub import find
from models.quantize import check_name, quantize_model
from models.tokenizer import Tokenizer
from models.tokenizer import load_tokenizer as read_tokenizer
from models.transformer import Transformer
from models.weights import load_weights
from models.zoo import MODELS, config_from_json

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
DEVICES = ("cpu", "cuda", "mps")


def load_model(
    name_or_dir: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    layout: str = "hf",
    quantize: str | None = None,
) -> Transformer:
    """A model ready to run, from a preset's name, a folder, a GGUF file or a downloaded hub id.

    device: default the GPU if there is one. dtype: default bfloat16 on a GPU, float32 on the CPU.
    layout: "meta" for weights in Meta's own format, whose q and k rows pair up neighbours for rope.
    quantize: "int8" or "int4" for weights of half or a third of bfloat16's size; see `models.quantize`.
    Raises FileNotFoundError for what is not here yet and ValueError for what cannot be honoured, in one line.
    """
    check_name(quantize)
    directory = find(name_or_dir)
    device, dtype = placement(device, dtype)
    model = skeleton(read_config(directory))
    load_weights(model, directory, device, dtype, layout)
    return ready(model, quantize)


def load_tokenizer(name_or_dir: str | Path, format: str | None = None) -> Tokenizer:
    """The tokenizer of a preset, a folder, a GGUF file or a downloaded hub id, with its chat format.

    A folder needs no weights, only a tokenizer file. `format` names a chat format (see
    `models.chat_format`) instead of finding it.
    """
    directory = Path(name_or_dir).expanduser()
    # A folder may carry a preset's name and hold another model: only its content counts.
    if directory.is_dir():
        return read_tokenizer(directory, format)
    preset = MODELS.get(str(name_or_dir))
    return read_tokenizer(find(name_or_dir), format or (preset.format if preset else None))


def random_model(
    shape: str | Config,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    quantize: str | None = None,
) -> Transformer:
    """A model of a preset's exact shape (or of a `Config`) with random weights: no download, for benchmarks."""
    if isinstance(shape, str) and shape not in MODELS:
        raise ValueError(f"no preset is called {shape!r}; presets are {', '.join(MODELS)}")
    check_name(quantize)
    config = MODELS[shape].config if isinstance(shape, str) else shape
    device, dtype = placement(device, dtype)
    model = skeleton(config).to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return ready(model, quantize)


def ready(model: Transformer, quantize: str | None) -> Transformer:
    """A filled model for inference, its matrices quantized in place if asked for."""
    model.eval().requires_grad_(False)
    return model if quantize is None else quantize_model(model, quantize)


def skeleton(config: Config) -> Transformer:
    """The modules without memory: parameters on the meta device, to be allocated once by whoever fills them."""
    with torch.device("meta"):
        return Transformer(config)


def read_config(directory: Path) -> Config:
    path = directory / "config.json"
    raw = parse_json(path.read_bytes(), str(path))
    try:
        return config_from_json(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def placement(
    device: str | torch.device | None, dtype: str | torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Device and dtype with their defaults filled in; ValueError for what this PyTorch or a model cannot use."""
    device = known_device(device)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in DTYPES.values():
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return device, chosen


def known_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; known are {', '.join(DEVICES)} and cuda:N") from error
    if found.type not in DEVICES:
        raise ValueError(f"unknown device {device!r}; known are {', '.join(DEVICES)} and cuda:N")
    n_devices = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }[found.type]
    if (found.index or 0) >= n_devices:
        raise ValueError(
            f"device {str(found)!r} was asked for, but this PyTorch sees {n_devices} {found.type} devices; "
            "use --device cpu"
        )
    return found
