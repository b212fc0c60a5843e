"""GGUF hyperparameters -> `config.json` and `generation_config.json`.

Key names: the GGUF specification (ggml-org/ggml, docs/gguf.md). A key this module does not know could
change what the model computes, so it is refused, not skipped.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.fields import Fields

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say llama
# The keys of an architecture that are read below, and those that change nothing.
READ = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
INERT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
# Keys whose neutral value changes nothing; any other value is refused.
NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
# What every Llama 3.1, 3.2 and 3.3 was trained with; only the factor differs between them.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_json(
    meta: Fields, shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The `config.json` a GGUF file stands for.

    `shapes`: tensor name -> shape, rows first. `rope_factors`: the tensor `rope_freqs.weight`, which
    divides the rotary frequencies one by one, or None.
    """
    arch = meta.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {arch!r}; known are {', '.join(ARCHITECTURES)} (Mistral is llama)"
        )
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in meta.raw.items() if key.startswith(prefix)}
    keys = Fields(own, prefix)
    refuse_unknown(keys)
    heads, width = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", default=width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, default=head_dim) != head_dim:
            raise keys.wrong(key, f"the head size, {head_dim}")
    config = {
        "hidden_size": width,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": decimal(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": decimal(keys.number("rope.freq_base", default=10000.0)),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        **special_ids(meta),
    }
    config["rope_scaling"] = rope_scaling(keys, config, rope_factors)
    return config | family(arch, keys, meta, shapes)


def generation_json(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in config if key.endswith("_token_id")}


def decimal(value: float) -> float:
    """The number that was meant: GGUF stores 1e-5 as the nearest float32, 0.00000999999974."""
    return float(str(np.float32(value)))


def special_ids(meta: Fields) -> dict[str, Any]:
    """bos, pad and every id that ends a generation (end of text, of turn, of message)."""
    ends = [meta.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(sum(ends, [])))}
    for name, key in (("bos", "tokenizer.ggml.bos_token_id"), ("pad", "tokenizer.ggml.padding_token_id")):
        if meta.has(key):
            ids[f"{name}_token_id"] = meta.integer(key, 0)
    return ids


def family(arch: str, keys: Fields, meta: Fields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """model_type and the keys only that family has."""
    if arch != "llama":
        # Qwen's configs carry a window that is switched off; llama.cpp does not window Qwen either.
        name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]
        return {"model_type": arch, "architectures": [name], "use_sliding_window": False}
    window = keys.integer("attention.sliding_window", 0, default=0) or None
    template = meta.text("tokenizer.chat_template", "")
    # Llama 2 writes [INST] too, but only it marks a system prompt with <<SYS>>.
    marks = "[INST]" in template and "<<SYS>>" not in template
    if window or marks or meta.raw.get("tokenizer.ggml.pre") == "tekken":
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }


def rope_scaling(keys: Fields, config: dict[str, Any], factors: np.ndarray | None) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "linear")  # llama.cpp's default
    key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"  # the old name
    stretched = kind != "none" and keys.raw.get(key) not in (None, 0.0, 1.0)
    if factors is not None:
        if stretched:
            raise ValueError(f"rope_freqs.weight together with rope.scaling.type {kind!r}")
        return llama3_scaling(config, factors)
    if not stretched:
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported; known are linear and yarn")
    table = {"rope_type": kind, "factor": decimal(keys.number(key))}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", 0, default=0)
        table["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if keys.has(f"rope.scaling.yarn_{name}"):
                table[name] = decimal(keys.number(f"rope.scaling.yarn_{name}"))
    return table


def llama3_scaling(config: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """The parameters behind `rope_freqs.weight`, or a refusal: they are tried, not guessed.

    The slowest frequency is divided by the full factor; the rest must follow from `LLAMA3_ROPE`.
    """
    factor = decimal(factors.max())
    size = config["head_dim"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / (2 * np.pi)
    turns *= config["rope_theta"] ** -(np.arange(0, size, 2) / size)  # within the original length
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / (keep + (1 - keep) / factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(
            f"rope_freqs.weight is not Llama 3.1's rope scaling (factor {factor}, {LLAMA3_ROPE})"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def refuse_unknown(keys: Fields) -> None:
    for key, value in keys.raw.items():
        if key not in READ + INERT and NEUTRAL.get(key, ...) != value:
            raise ValueError(f"{keys.where}{key} = {value} is a feature this import does not know")
