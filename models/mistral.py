"""Mistral 7B v0.1 to v0.3, Nemo 12B, Small 24B.

What sets the family apart: a `sliding_window` that is a number is on, in every layer (v0.1); head size
may differ from width / heads (Nemo, Small). No biases, no q/k norm.
"""

from models.config import Config, Preset
from models.config_json import base_config, windows
from models.fields import Fields

MODEL_TYPE = "mistral"


def config(fields: Fields) -> Config:
    n_layers = fields.integer("num_hidden_layers")
    return base_config(
        fields,
        "mistral",
        tied=fields.flag("tie_word_embeddings", False),
        windows=windows(fields, n_layers, [True] * n_layers),
    )


def _sizes(layers: int, hidden: int, ffn: int, vocab: int, max_position: int, theta: float, **rest):
    return Config(
        family="mistral",
        n_layers=layers,
        hidden_size=hidden,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_size=ffn,
        vocab_size=vocab,
        max_position=max_position,
        rope_theta=theta,
        eos_ids=(2,),
        **rest,
    )


# Nemo's config.json allows 1,024,000 positions; it was trained on 131,072, so stay below that in practice.
# fmt: off
PRESETS = [
    Preset("mistral-7b-v0.1", "mistralai/Mistral-7B-Instruct-v0.1", "mistral-v1",
           _sizes(32, 4096, 14336, 32000, 32768, 1e4, windows=(4096,) * 32), gated=True),
    Preset("mistral-7b-v0.2", "mistralai/Mistral-7B-Instruct-v0.2", "mistral-v1",
           _sizes(32, 4096, 14336, 32000, 32768, 1e6), gated=True),
    Preset("mistral-7b-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", "mistral-v3",
           _sizes(32, 4096, 14336, 32768, 32768, 1e6), gated=True),
    Preset("mistral-nemo-12b", "mistralai/Mistral-Nemo-Instruct-2407", "mistral-v3-tekken",
           _sizes(40, 5120, 14336, 131072, 1024000, 1e6), gated=True),
    Preset("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", "mistral-v7-tekken",
           _sizes(40, 5120, 32768, 131072, 32768, 1e8), gated=True),
]
# fmt: on
