"""`config.json` to `Config`: what all families share. Keys that change the maths are honoured or refused by name."""

import math
from dataclasses import dataclass
from typing import Any

from models.config import Config, RopeScaling

# config.json keys that change the maths of architectures we do not implement. A checkpoint that sets
# one of them to anything but its neutral value would load and talk nonsense.
UNSUPPORTED = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "no_rope_layers": None,
    "num_local_experts": None,
    "num_experts": None,
    "quantization_config": None,
}


@dataclass(frozen=True)
class Fields:
    """A parsed `config.json`, read key by key with errors that name the key."""

    raw: dict[str, Any]

    @property
    def rope(self) -> dict[str, Any]:
        # transformers 5 writes one `rope_parameters` table, earlier versions `rope_scaling` beside `rope_theta`.
        return self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}

    def need(self, key: str) -> Any:
        value = self.raw.get(key)
        if value is None:
            raise ValueError(f"config.json has no {key!r}, which this model family needs")
        return value

    def get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def refuse_unsupported(self) -> None:
        for key, neutral in UNSUPPORTED.items():
            value = self.raw.get(key)
            if value not in (None, neutral, [], {}):
                raise ValueError(f"config.json sets {key}={value!r}, which minikv does not implement")
        activation = self.raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"config.json sets hidden_act={activation!r}; only 'silu' is implemented")


def base_config(fields: Fields, family: str, **switches: Any) -> Config:
    """Everything the families share, from `config.json`; `switches` are what differs between them."""
    fields.refuse_unsupported()
    hidden, n_heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    head_dim = fields.get("head_dim", hidden // n_heads)
    scaling, max_position = rope_scaling(fields, fields.need("max_position_embeddings"))
    partial = fields.rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    eos = fields.get("eos_token_id", [])
    return Config(
        family=family,
        n_layers=fields.need("num_hidden_layers"),
        hidden_size=hidden,
        n_heads=n_heads,
        n_kv_heads=fields.get("num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn_size=fields.need("intermediate_size"),
        vocab_size=fields.need("vocab_size"),
        max_position=max_position,
        rope_theta=float(fields.rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
        rope_scaling=scaling,
        rotary_dim=int(head_dim * partial),
        norm_eps=fields.need("rms_norm_eps"),
        eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        **switches,
    )


def rope_scaling(fields: Fields, max_position: int) -> tuple[RopeScaling | None, int]:
    """The scaling a `config.json` asks for, and the number of positions it makes usable.

    `linear`, `dynamic` and `yarn` stretch the trained length by their factor, so the limit grows with
    it; for `llama3` `max_position_embeddings` already is the stretched length.
    """
    table = fields.rope
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return None, max_position
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ValueError(
            f"rope scaling {kind!r} is not implemented; known are linear, dynamic, llama3 and yarn"
        )
    # The original length may stand in the table or, rarely, beside it.
    original = table.get("original_max_position_embeddings") or fields.get(
        "original_max_position_embeddings", max_position
    )
    factor = table.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position / original
    if factor is None:
        raise ValueError(f"rope scaling {kind!r} needs a 'factor' in config.json")
    if kind == "llama3":
        scaling = RopeScaling(kind, factor, original, table["low_freq_factor"], table["high_freq_factor"])
        return scaling, max_position
    if kind == "yarn":
        scaling = RopeScaling(
            kind,
            factor,
            original,
            beta_fast=table.get("beta_fast") or 32.0,
            beta_slow=table.get("beta_slow") or 1.0,
            truncate=table.get("truncate", True),
            attention_factor=yarn_attention_factor(table, factor),
        )
        return scaling, max(max_position, int(original * factor))
    return RopeScaling(kind, factor, max_position), int(max_position * factor)


def yarn_attention_factor(table: dict[str, Any], factor: float) -> float:
    """What YaRN multiplies cos and sin by (so logits by its square). arXiv:2309.00071, eq. 22."""
    given = table.get("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all = table.get("mscale"), table.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def windows(fields: Fields, n_layers: int, windowed: list[bool]) -> tuple[int | None, ...]:
    """One sliding window per layer: `layer_types` of newer checkpoints, else the family's rule `windowed`."""
    size = fields.raw.get("sliding_window")
    kinds = fields.raw.get("layer_types")
    if kinds is not None:
        if len(kinds) != n_layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"config.json lists {len(kinds)} layer_types of kinds {sorted(set(kinds))} for {n_layers} "
                "layers; known kinds are full_attention and sliding_attention"
            )
        windowed = [kind == "sliding_attention" for kind in kinds]
    if size is None or not any(windowed):
        return ()
    return tuple(size if on else None for on in windowed)
