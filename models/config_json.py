"""`config.json` to `Config`: what all families share. Keys that change the maths are honoured or refused by name."""

import math
from typing import Any

from models.config import Config, RopeScaling
from models.fields import Fields

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


def refuse_unsupported(fields: Fields) -> None:
    for key, neutral in UNSUPPORTED.items():
        if fields.raw.get(key) not in (None, neutral, [], {}):
            raise fields.wrong(key, f"{neutral}, because minikv does not implement it")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu, because minikv implements no other")


def rope_table(fields: Fields) -> Fields:
    """Where a `config.json` tells about its rotary positions; may be empty."""
    # transformers 5 writes one `rope_parameters` table, earlier versions `rope_scaling` beside `rope_theta`.
    table = fields.table("rope_parameters")
    return table if table.raw else fields.table("rope_scaling")


def base_config(fields: Fields, family: str, **switches: Any) -> Config:
    """Everything the families share, from `config.json`; `switches` are what differs between them."""
    refuse_unsupported(fields)
    hidden, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=hidden // n_heads)
    rope = rope_table(fields)
    scaling, max_position = rope_scaling(fields, fields.integer("max_position_embeddings"))
    partial = either(rope, fields, "partial_rotary_factor").number(
        "partial_rotary_factor", most=1.0, default=1.0
    )
    return Config(
        family=family,
        n_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=max_position,
        rope_theta=either(rope, fields, "rope_theta").number("rope_theta", above=1.0, default=10000.0),
        rope_scaling=scaling,
        rotary_dim=max(1, int(head_dim * partial)),  # 0 would mean all; 1 is refused
        norm_eps=fields.number("rms_norm_eps"),
        eos_ids=tuple(fields.ids("eos_token_id")),
        **switches,
    )


def either(table: Fields, beside: Fields, key: str) -> Fields:
    """The one of two that has a key."""
    return table if table.has(key) else beside


def rope_scaling(fields: Fields, max_position: int) -> tuple[RopeScaling | None, int]:
    """The scaling a `config.json` asks for, and the number of positions it makes usable.

    `linear`, `dynamic` and `yarn` stretch the trained length by their factor, so the limit grows with
    it; for `llama3` `max_position_embeddings` already is the stretched length.
    """
    rope = rope_table(fields)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None, max_position
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ValueError(
            f"rope scaling {kind!r} is not implemented; known are linear, dynamic, llama3 and yarn"
        )
    # The original length may stand in the table or, rarely, beside it.
    key = "original_max_position_embeddings"
    original = either(rope, fields, key).integer(key, default=max_position)
    factor = rope.number("factor", default=max_position / original if kind == "yarn" else None)
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor", above=low)
        return RopeScaling(kind, factor, original, low, high), max_position
    if kind == "yarn":
        scaling = RopeScaling(
            kind,
            factor,
            original,
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=yarn_attention_factor(rope, factor),
        )
        return scaling, max(max_position, int(original * factor))
    return RopeScaling(kind, factor, max_position), int(max_position * factor)


def yarn_attention_factor(rope: Fields, factor: float) -> float:
    """What YaRN multiplies cos and sin by (so logits by its square). arXiv:2309.00071, eq. 22."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):  # 0 is as good as absent
        return yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(factor, rope.number("mscale_all_dim"))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def windows(fields: Fields, n_layers: int, windowed: list[bool]) -> tuple[int | None, ...]:
    """One sliding window per layer: `layer_types` of newer checkpoints, else the family's rule `windowed`."""
    if fields.has("layer_types"):
        kinds = fields.listed("layer_types", str)
        if len(kinds) != n_layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"layer_types lists {len(kinds)} layers of kinds {sorted(set(kinds))} for {n_layers} "
                "layers; known kinds are full_attention and sliding_attention"
            )
        windowed = [kind == "sliding_attention" for kind in kinds]
    if not (fields.has("sliding_window") and any(windowed)):
        return ()
    size = fields.integer("sliding_window")
    return tuple(size if on else None for on in windowed)
