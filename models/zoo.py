"""The table of presets, and the choice of family for a `config.json`."""

import dataclasses
from typing import Any

from models import llama, mistral, qwen
from models.config import Config, Preset
from models.fields import Fields

MODELS: dict[str, Preset] = {preset.name: preset for preset in llama.PRESETS + mistral.PRESETS + qwen.PRESETS}
# Names people type without a version mean the newest of that size.
MODELS["mistral-7b"] = dataclasses.replace(MODELS["mistral-7b-v0.3"], name="mistral-7b")

FAMILIES = {
    llama.MODEL_TYPE: llama.config,
    mistral.MODEL_TYPE: mistral.config,
    **{model_type: qwen.config for model_type in qwen.MODEL_TYPES},
}


def config_from_json(raw: dict[str, Any]) -> Config:
    """A parsed `config.json` as a `Config`; raises ValueError naming the key that cannot be honoured."""
    fields = Fields(raw)
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        raise fields.wrong("model_type", f"one that minikv implements: {', '.join(FAMILIES)}")
    return FAMILIES[model_type](fields)
