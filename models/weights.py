"""Weights into a model: every tensor of a checkpoint used exactly once, one tensor in memory at a time."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from models.checkpoint import Entry, read_header, weight_files
from models.config import Config

# What our modules are called in checkpoints. Hugging Face's names are the format; Meta's original
# releases use others for the same tensors.
HF_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "layers": "model.layers",
}
META_NAMES = {
    "embed": "tok_embeddings",
    "norm": "norm",
    "head": "output",
    "attention_norm": "attention_norm",
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "o": "attention.wo",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "layers": "layers",
}
LAYOUTS = ("hf", "meta")
FLOATS = ("F64", "F32", "F16", "BF16")
# Endings of tensors that only quantised checkpoints have, and who writes them.
QUANTISED = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
INSTEAD = "use the bf16 or fp16 checkpoint"
ROTARY = ("rotary_emb.inv_freq", "rope.freqs")


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor belongs: `shape[0]` rows of a parameter, from `row` on."""

    parameter: str
    row: int
    shape: tuple[int, ...]
    heads: int = 0  # q and k: rows come in this many heads that rope will rotate


def places(config: Config, names: dict[str, str] = HF_NAMES) -> dict[str, Place]:
    """Checkpoint tensor name -> `Place`, for exactly the tensors a model of this config has."""
    width, vocab = config.hidden_size, config.vocab_size
    table = {
        f"{names['embed']}.weight": Place("embed.weight", 0, (vocab, width)),
        f"{names['norm']}.weight": Place("norm.weight", 0, (width,)),
    }
    if not config.tied:
        table[f"{names['head']}.weight"] = Place("head.weight", 0, (vocab, width))
    block = block_places(config, names)
    for layer in range(config.n_layers):
        for name, place in block.items():
            here = replace(place, parameter=f"layers.{layer}.{place.parameter}")
            table[f"{names['layers']}.{layer}.{name}"] = here
    return table


def block_places(config: Config, names: dict[str, str]) -> dict[str, Place]:
    """`places` of one decoder block, without the layer prefixes."""
    width, ffn = config.hidden_size, config.ffn_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    # (their name, our module, first row, rows, columns, bias, rotated heads)
    linears = [
        ("q", "attention.wqkv", 0, q, width, config.qkv_bias, config.n_heads),
        ("k", "attention.wqkv", q, kv, width, config.qkv_bias, config.n_kv_heads),
        ("v", "attention.wqkv", q + kv, kv, width, config.qkv_bias, 0),
        ("o", "attention.wo", 0, width, q, config.o_bias, 0),
        ("gate", "mlp.gate", 0, ffn, width, config.mlp_bias, 0),
        ("up", "mlp.up", 0, ffn, width, config.mlp_bias, 0),
        ("down", "mlp.down", 0, width, ffn, config.mlp_bias, 0),
    ]
    # (their name, our module, size)
    norms = [("attention_norm", "attention_norm", width), ("mlp_norm", "mlp_norm", width)]
    if config.qk_norm:
        norms.append(("q_norm", "attention.q_norm", config.head_dim))
        norms.append(("k_norm", "attention.k_norm", config.head_dim))
    table = {}
    for name, module, row, rows, columns, bias, heads in linears:
        table[f"{names[name]}.weight"] = Place(f"{module}.weight", row, (rows, columns), heads)
        if bias:
            table[f"{names[name]}.bias"] = Place(f"{module}.bias", row, (rows,), heads)
    for name, module, size in norms:
        table[f"{names[name]}.weight"] = Place(f"{module}.weight", 0, (size,))
    return table


@torch.no_grad()
def load_weights(
    model: nn.Module,
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    layout: str = "hf",
) -> None:
    """Give a `Transformer` built on the meta device the weights of a checkpoint folder.

    Parameters are allocated once, in `dtype` on `device`; each checkpoint tensor is then read and
    copied into its rows, so beyond the model at most one checkpoint tensor is in memory.
    `layout="meta"`: the rows of q and k are in the order of Meta's original releases. Raises ValueError
    naming the tensors if the checkpoint is not exactly this model, FileNotFoundError naming missing files.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; known layouts are {' and '.join(LAYOUTS)}")
    headers = {path: read_header(path) for path in weight_files(directory)}
    found = merge(directory, headers)
    names = naming(directory, found, layout)
    table = places(model.config, names)
    check_exact(directory, table, found, names)

    parameters = {
        name: torch.empty(parameter.shape, dtype=dtype, device=device)
        for name, parameter in model.named_parameters()
    }
    for path, header in headers.items():
        with open_shard(path) as shard:
            for name in (name for name in header if name in table):  # in the order of the file
                place = table[name]
                copy_rows(parameters[place.parameter], place, shard.get_tensor(name), layout)
    model.load_state_dict(parameters, assign=True)
    model.to(device)  # the buffers
    check_tied_head(headers, names, model)


def merge(directory: Path, headers: dict[Path, dict[str, Entry]]) -> dict[str, Entry]:
    """The tensors of all shards; one that is stored twice could mean either value, so it is refused."""
    found: dict[str, Entry] = {}
    for path, header in headers.items():
        twice = found.keys() & header.keys()
        if twice:
            raise ValueError(f"{directory}: {path.name} holds again {listing(twice)}")
        found |= header
    return found


def naming(directory: Path, found: dict[str, Entry], layout: str) -> dict[str, str]:
    meta = sorted(name for name in found if name.endswith(".attention.wq.weight"))
    if meta and layout != "meta":
        raise ValueError(
            f"{directory}: {meta[0]} is a name of Meta's original release, which interleaves the rows of "
            'q and k; use the Hugging Face version of the model or pass layout="meta"'
        )
    return META_NAMES if meta else HF_NAMES


def check_exact(
    directory: Path, table: dict[str, Place], found: dict[str, Entry], names: dict[str, str]
) -> None:
    """Every tensor has a place, every place a tensor, of floats, of the right shape."""
    for name, entry in found.items():
        for ending, maker in QUANTISED.items():
            if name.endswith(ending):
                raise ValueError(
                    f"{directory}: {name} belongs to a quantised checkpoint ({maker}); {INSTEAD}"
                )
        if name in table and entry.dtype not in FLOATS:
            raise ValueError(f"{directory}: {name} is stored as {entry.dtype}, not as floats; {INSTEAD}")
    missing = table.keys() - found.keys()
    if missing:
        raise ValueError(f"{directory}: missing from the checkpoint: {listing(missing)}")
    # Old checkpoints store the rotary frequencies, which follow from the config. Qwen3-0.6B stores its
    # tied head a second time; check_tied_head makes sure that it really is the embedding.
    left = {name for name in found.keys() - table.keys() if not name.endswith(ROTARY)}
    left.discard(f"{names['head']}.weight")
    if left:
        raise ValueError(f"{directory}: in the checkpoint but not in the model: {listing(left)}")
    wrong = [
        f"{name} is {list(found[name].shape)}, the config says {list(place.shape)}"
        for name, place in table.items()
        if found[name].shape != place.shape
    ]
    if wrong:
        raise ValueError(f"{directory}: {listing(wrong)}")


def copy_rows(parameter: torch.Tensor, place: Place, tensor: torch.Tensor, layout: str) -> None:
    rows = parameter[place.row : place.row + place.shape[0]]
    if layout == "meta" and place.heads:
        # Meta rotates neighbouring rows (2i, 2i + 1) of a head, we rotate (i, i + half).
        half, columns = place.shape[0] // place.heads // 2, place.shape[1:]
        rows = rows.view(place.heads, 2, half, *columns)
        tensor = tensor.view(place.heads, half, 2, *columns).transpose(1, 2)
    rows.copy_(tensor)


def check_tied_head(headers: dict[Path, dict[str, Entry]], names: dict[str, str], model: nn.Module) -> None:
    """A stored head of a tied model must be the embedding again: same shape, same first, middle, last row."""
    name = f"{names['head']}.weight"
    embedding = model.embed.weight
    for path, header in headers.items():
        if not model.config.tied or name not in header:
            continue
        with open_shard(path) as shard:
            stored = shard.get_slice(name)
            same = header[name].shape == tuple(embedding.shape) and all(
                torch.equal(stored[row : row + 1].to(embedding), embedding[row : row + 1])
                for row in (0, len(embedding) // 2, len(embedding) - 1)
            )
        if not same:
            raise ValueError(
                f"{path}: config.json ties the head to the embedding, but {name} is another matrix"
            )


def open_shard(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}; fetch the file again") from error


def listing(names: Iterable[str], shown: int = 4) -> str:
    names = sorted(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
