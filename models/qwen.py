"""Qwen2, Qwen2.5, Qwen3 dense and DeepSeek-R1-Distill-Qwen.

What sets the family apart: Qwen2 and 2.5 add biases to q, k and v (their config.json does not say so);
Qwen3 drops them and normalises each head of q and k before rope. A `sliding_window` counts only when
`use_sliding_window` is true, and then from layer `max_window_layers` on.
"""

from models.config import Config, Preset
from models.config_json import base_config, windows
from models.fields import Fields

MODEL_TYPES = ("qwen2", "qwen3")


def config(fields: Fields) -> Config:
    family = fields.text("model_type")
    n_layers = fields.integer("num_hidden_layers")
    layer_windows = ()
    if fields.flag("use_sliding_window", False):
        first = fields.integer("max_window_layers", 0, default=28)
        layer_windows = windows(fields, n_layers, [i >= first for i in range(n_layers)])
    bias = True if family == "qwen2" else fields.flag("attention_bias", False)
    return base_config(
        fields,
        family,
        qkv_bias=bias,
        o_bias=bias and family == "qwen3",
        qk_norm=family == "qwen3",
        tied=fields.flag("tie_word_embeddings", False),
        windows=layer_windows,
    )


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **rest) -> Config:
    values = dict(vocab_size=152064, max_position=32768, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True)
    return _sizes("qwen2", layers, hidden, heads, kv_heads, hidden // heads, ffn, values | rest)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **rest) -> Config:
    values = dict(vocab_size=151936, max_position=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
    return _sizes("qwen3", layers, hidden, heads, 8, 128, ffn, values | rest)


def _sizes(family, layers, hidden, heads, kv_heads, head_dim, ffn, rest) -> Config:
    return Config(
        family=family,
        n_layers=layers,
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        **{"eos_ids": (151645, 151643)} | rest,
    )


SMALL = dict(vocab_size=151936, tied=True)  # the small checkpoints pad their vocabulary less and tie the head
R1 = dict(max_position=131072, eos_ids=(151643,))
R1_MATH = dict(R1, rope_theta=1e4)  # 1.5B and 7B descend from Qwen2.5-Math
R1_BASE = dict(R1, norm_eps=1e-5)

# fmt: off
PRESETS = [
    Preset("qwen2-0.5b", "Qwen/Qwen2-0.5B-Instruct", "qwen2", _qwen2(24, 896, 14, 2, 4864, **SMALL)),
    Preset("qwen2-1.5b", "Qwen/Qwen2-1.5B-Instruct", "qwen2", _qwen2(28, 1536, 12, 2, 8960, **SMALL)),
    Preset("qwen2-7b", "Qwen/Qwen2-7B-Instruct", "qwen2", _qwen2(28, 3584, 28, 4, 18944)),
    Preset("qwen2-72b", "Qwen/Qwen2-72B-Instruct", "qwen2", _qwen2(80, 8192, 64, 8, 29568)),
    Preset("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5", _qwen2(24, 896, 14, 2, 4864, **SMALL)),
    Preset("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5", _qwen2(28, 1536, 12, 2, 8960, **SMALL)),
    Preset("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "qwen2.5", _qwen2(36, 2048, 16, 2, 11008, **SMALL)),
    Preset("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "qwen2.5", _qwen2(28, 3584, 28, 4, 18944)),
    Preset("qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", "qwen2.5", _qwen2(48, 5120, 40, 8, 13824)),
    Preset("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", "qwen2.5", _qwen2(64, 5120, 40, 8, 27648)),
    Preset("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct", "qwen2.5", _qwen2(80, 8192, 64, 8, 29568)),
    Preset("r1-qwen-1.5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "r1",
           _qwen2(28, 1536, 12, 2, 8960, vocab_size=151936, **R1_MATH)),
    Preset("r1-qwen-7b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "r1", _qwen2(28, 3584, 28, 4, 18944, **R1_MATH)),
    Preset("r1-qwen-14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "r1", _qwen2(48, 5120, 40, 8, 13824, **R1_BASE)),
    Preset("r1-qwen-32b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "r1", _qwen2(64, 5120, 40, 8, 27648, **R1_BASE)),
    Preset("qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3", _qwen3(28, 1024, 16, 3072, tied=True)),
    Preset("qwen3-1.7b", "Qwen/Qwen3-1.7B", "qwen3", _qwen3(28, 2048, 16, 6144, tied=True)),
    Preset("qwen3-4b", "Qwen/Qwen3-4B", "qwen3", _qwen3(36, 2560, 32, 9728, tied=True)),
    Preset("qwen3-8b", "Qwen/Qwen3-8B", "qwen3", _qwen3(36, 4096, 32, 12288)),
    Preset("qwen3-14b", "Qwen/Qwen3-14B", "qwen3", _qwen3(40, 5120, 40, 17408)),
    Preset("qwen3-32b", "Qwen/Qwen3-32B", "qwen3", _qwen3(64, 5120, 64, 25600)),
]
# fmt: on
