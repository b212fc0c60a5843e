"""GGUF hyperparameters -> `config.json` and `generation_config.json`.

Key names: the GGUF specification (ggml-org/ggml, docs/gguf.md). A key this module does not know could
change what the model computes, so it is refused, not skipped.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say llama
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
    meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The `config.json` a GGUF file stands for.

    `shapes`: tensor name -> shape, rows first. `rope_factors`: the tensor `rope_freqs.weight`, which
    divides the rotary frequencies one by one, or None.
    """
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {arch!r}; known are {', '.join(ARCHITECTURES)} (Mistral is llama)"
        )
    keys = {key.removeprefix(f"{arch}."): value for key, value in meta.items() if key.startswith(f"{arch}.")}
    heads, width = take(keys, "attention.head_count"), take(keys, "embedding_length")
    head_dim = keys.pop("attention.key_length", width // heads)
    config = {
        "hidden_size": width,
        "intermediate_size": take(keys, "feed_forward_length"),
        "num_hidden_layers": take(keys, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.pop("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": take(keys, "context_length"),
        "rms_norm_eps": decimal(take(keys, "attention.layer_norm_rms_epsilon")),
        "rope_theta": decimal(keys.pop("rope.freq_base", 10000.0)),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        **special_ids(meta),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.pop(key, head_dim) != head_dim:
            raise ValueError(f"{arch}.{key} differs from the head size {head_dim}, which is not supported")
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if not isinstance(config[key], int):
            raise ValueError(f"{key} differs between layers, which is not supported")
    config["rope_scaling"] = rope_scaling(keys, config, rope_factors)
    config |= family(arch, keys, meta, shapes)
    refuse_unknown(arch, keys)
    return config


def generation_json(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in config if key.endswith("_token_id")}


def take(keys: dict[str, Any], key: str) -> Any:
    if key not in keys:
        raise ValueError(f"the file has no {key}")
    return keys.pop(key)


def decimal(value: float) -> float:
    """The number that was meant: GGUF stores 1e-5 as the nearest float32, 0.00000999999974."""
    return float(str(np.float32(value)))


def special_ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad and every id that ends a generation (end of text, of turn, of message)."""
    names = ("eos", "eot", "eom")
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ids = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        if (value := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            ids[f"{name}_token_id"] = value
    return ids


def family(
    arch: str, keys: dict[str, Any], meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """model_type and the keys only that family has."""
    window = keys.pop("attention.sliding_window", None)
    if arch != "llama":
        # Qwen's configs carry a window that is switched off; llama.cpp does not window Qwen either.
        name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]
        return {"model_type": arch, "architectures": [name], "use_sliding_window": False}
    template = meta.get("tokenizer.chat_template", "")
    # Llama 2 writes [INST] too, but only it marks a system prompt with <<SYS>>.
    marks = "[INST]" in template and "<<SYS>>" not in template
    if window or marks or meta.get("tokenizer.ggml.pre") == "tekken":
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


def rope_scaling(
    keys: dict[str, Any], config: dict[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    kind = keys.pop("rope.scaling.type", "linear")  # llama.cpp's default
    factor = keys.pop("rope.scaling.factor", keys.pop("rope.scale_linear", 1.0))  # new and old name
    original = keys.pop("rope.scaling.original_context_length", None)
    stretched = kind != "none" and factor not in (0.0, 1.0)
    if factors is not None:
        if stretched:
            raise ValueError(f"rope_freqs.weight together with rope.scaling.type {kind!r}")
        return llama3_scaling(config, factors)
    if not stretched:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": decimal(factor)}
    if kind != "yarn":
        raise ValueError(f"rope.scaling.type {kind!r} is not supported; known are linear and yarn")
    table = {"rope_type": "yarn", "factor": decimal(factor)}
    table["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    for name in ("beta_fast", "beta_slow"):
        if (value := keys.pop(f"rope.scaling.yarn_{name}", None)) is not None:
            table[name] = decimal(value)
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


def refuse_unknown(arch: str, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        if key not in INERT and NEUTRAL.get(key, ...) != value:
            raise ValueError(f"{arch}.{key} = {value} is a feature this import does not know")
