"""Small GGUF files for the tests: random transformers models, written the way llama.cpp converts them.

Tensor names come from the gguf package, the row order of q and k is written out here, so both are
independent of the import they test.
"""

from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY = dict(
    num_hidden_layers=2,
    vocab_size=288,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=128,
)
# family -> (GGUF architecture, config, model)
FAMILIES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, LlamaConfig, LlamaForCausalLM),
    "mistral": (gguf.MODEL_ARCH.LLAMA, MistralConfig, MistralForCausalLM),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, Qwen3Config, Qwen3ForCausalLM),
}
MISTRAL_TEMPLATE = "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"
KIND = gguf.GGMLQuantizationType


def reference(family: str, **changes):
    _, config, model = FAMILIES[family]
    torch.manual_seed(0)
    model = model(config(**TINY | changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp's llama architecture: pair i of a head is (2i, 2i + 1), not (i, i + half)."""
    result, size = np.empty_like(rows), len(rows) // heads
    for head in range(0, len(rows), size):
        result[head : head + size : 2] = rows[head : head + size // 2]
        result[head + 1 : head + size : 2] = rows[head + size // 2 : head + size]
    return result


def add_field(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_gguf(path: Path, family: str, model, kind=KIND.F32, fields=None, extra=None) -> None:
    """Write a transformers model as llama.cpp does: matrices as `kind`, vectors in float32.

    `fields`: more hyperparameters, after the architecture's prefix; `extra`: more or other raw tensors.
    """
    arch = FAMILIES[family][0]
    config, layers = model.config, model.config.num_hidden_layers
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    hyper = {
        "block_count": layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    for key, value in (hyper | (fields or {})).items():
        add_field(writer, f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    for key, value in byte_vocabulary().items():
        add_field(writer, key, value)
    if family == "mistral":
        writer.add_chat_template(MISTRAL_TEMPLATE)
    tensors = {name: (data, None) for name, data in gguf_tensors(arch, model).items()}
    for name, (data, raw) in (tensors | (extra or {})).items():
        if raw is None and data.ndim > 1 and kind != KIND.F32:
            data, raw = gguf.quantize(data, kind), kind
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(arch, model) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            data = interleave(data, model.config.num_attention_heads)
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            data = interleave(data, model.config.num_key_value_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = data
    return tensors


def byte_vocabulary() -> dict[str, object]:
    """`tokenizer.*` fields of a byte-level BPE: two control tokens, the bytes, a few merges, padding."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ t", "h e", "Ġt he", "i n", "1 2"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|end|>", "<think>", *letters, *merged]
    types = [3, 4] + [1] * (len(tokens) - 2)
    unused = TINY["vocab_size"] - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(unused)],
        "tokenizer.ggml.token_type": types + [5] * unused,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
    }
