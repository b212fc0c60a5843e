"""Models against transformers (random tiny checkpoints), presets against published sizes."""

import json

import pytest
import torch
import transformers
from torch.testing import assert_close

from minikv import CompressedKVCache
from models import MODELS, load_model, random_model
from models.config import Config
from models.load import placement, read_config, skeleton
from models.rope import Rope
from models.transformer import causal_attention
from models.zoo import config_from_json

TINY = dict(
    vocab_size=256,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32)
SWA = dict(sliding_window=5, use_sliding_window=True, max_window_layers=1)

FEATURES = {
    "llama": ("Llama", {}),
    "llama multi-head": ("Llama", dict(num_key_value_heads=4)),
    "llama biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama3 rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "linear rope": ("Llama", dict(rope_parameters=LINEAR)),
    "dynamic rope": ("Llama", dict(rope_parameters=DYNAMIC)),
    "yarn rope": ("Qwen2", dict(rope_parameters=YARN)),
    "yarn given factor": ("Llama", dict(rope_parameters=dict(YARN, attention_factor=1.3, beta_fast=16.0))),
    "yarn untruncated": ("Llama", dict(rope_parameters=dict(YARN, truncate=False))),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral window": ("Mistral", dict(sliding_window=5)),
    "mistral wide heads": ("Mistral", dict(sliding_window=None, head_dim=32)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2 window in its last layers": ("Qwen2", SWA),
    "qwen2 window switched off": ("Qwen2", dict(SWA, use_sliding_window=False)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3 biases and window": ("Qwen3", dict(SWA, attention_bias=True)),
}


def published(family: str, changes: dict, directory, shards: bool = False):
    """A random checkpoint written by transformers, and transformers' own model of it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.25)  # biases too: the initial zeros would hide a dropped one
    model.save_pretrained(directory, max_shard_size="40KB" if shards else "5GB")
    return model


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("feature", FEATURES)
def test_logits_equal_transformers(feature, tmp_path):
    theirs = published(*FEATURES[feature], tmp_path)
    ours = load_model(tmp_path)
    tokens = ids(2, 100 if "dynamic" in feature else 60)
    with torch.no_grad():
        want = theirs(tokens).logits
    assert_close(ours(tokens), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("feature", [f for f in FEATURES if "dynamic" not in f])
def test_token_by_token_equals_one_forward(feature, tmp_path):
    published(*FEATURES[feature], tmp_path)
    model, tokens = load_model(tmp_path), ids(2, 40)
    cache = CompressedKVCache.for_model(model, "full", batch=2, room=8)
    parts = [model(tokens[:, :9], None, cache), *(model(t, None, cache) for t in tokens[:, 9:].split(1, 1))]
    assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-3)


def test_states_of_one_token_per_row_are_those_among_all():
    model = random_model(Config("llama", 2, 32, 4, 2, 8, 48, 64, 64), dtype="float32")
    tokens, at = torch.arange(20).view(2, 10), torch.tensor([9, 3])
    pos = torch.arange(10).expand(2, -1)
    alone = model.hidden(tokens, pos, None, at)
    assert_close(alone, model.hidden(tokens, pos, None)[torch.arange(2), at][:, None])


def test_dynamic_rope_decodes_as_transformers_does(tmp_path):
    """Past the trained length the base grows with each step while earlier keys keep their angle."""
    theirs = published("Llama", dict(rope_parameters=DYNAMIC), tmp_path)
    model, tokens = load_model(tmp_path), ids(1, 80)
    cache = CompressedKVCache.for_model(model, "full")
    past = transformers.DynamicCache()
    for piece in (tokens[:, :60], *tokens[:, 60:].split(1, 1)):
        with torch.no_grad():
            want = theirs(piece, past_key_values=past).logits
        assert_close(model(piece, None, cache), want, rtol=1e-4, atol=1e-3)


def test_one_file_and_shards_load_alike(tmp_path):
    theirs = published("Llama", {}, tmp_path / "shards", shards=True)
    theirs.save_pretrained(tmp_path / "one")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    one, shards = load_model(tmp_path / "one"), load_model(tmp_path / "shards")
    for (name, a), b in zip(one.state_dict().items(), shards.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_partial_rotary_turns_only_the_leading_dimensions(tmp_path):
    """transformers' Llama does not implement the key, so the oracle is the definition itself."""
    published("Llama", {}, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"partial_rotary_factor": 0.5}))
    model, tokens = load_model(tmp_path), ids(1, 12)
    assert model.config.rotary_dim == 8
    block, x = model.layers[0], model.layers[0].attention_norm(model.embed(tokens))
    q, k, v = (p.view(12, -1, 16).transpose(0, 1) for p in block.attention.wqkv(x)[0].split((64, 32, 32), -1))
    for t in (q, k):
        for pos in range(12):
            for i in range(4):
                angle = torch.tensor(pos * 10000.0 ** (-2 * i / 8))
                a, b = t[:, pos, i].clone(), t[:, pos, i + 4].clone()
                t[:, pos, i] = a * angle.cos() - b * angle.sin()
                t[:, pos, i + 4] = b * angle.cos() + a * angle.sin()
    mask = torch.ones(12, 12).tril().log()
    y = torch.stack([(q[h] @ k[h // 2].T / 4 + mask).softmax(-1) @ v[h // 2] for h in range(4)], 1)
    want = block.attention.wo(y.reshape(12, -1))[None]
    pos = torch.arange(12)[None]
    assert_close(block.attention(x, model.rope(pos), causal_attention), want, rtol=1e-4, atol=1e-4)


def test_a_model_in_bfloat16_keeps_exact_frequencies():
    """Rounded to bfloat16, the angle at position 2048 would be off by more than a turn."""
    config = MODELS["llama3.1-8b"].config
    rope = Rope(config)
    exact = rope.inv_freq.double()
    cos, sin = rope.to(torch.bfloat16)(torch.tensor([[2048]]))
    assert rope.inv_freq.dtype == torch.float32
    assert_close(cos.double(), (2048 * exact).cos()[None, None, None], atol=1e-2, rtol=0)
    assert_close(sin.double(), (2048 * exact).sin()[None, None, None], atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(model_type="gemma2"), "gemma2"),
        (dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "longrope"),
        (dict(rope_scaling=dict(rope_type="linear")), "factor"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (dict(num_hidden_layers=None), "num_hidden_layers"),
        (
            dict(model_type="mistral", sliding_window=4, layer_types=["chunked_attention"] * 2),
            "chunked_attention",
        ),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(changes, word):
    raw = dict(TINY, model_type="llama", rms_norm_eps=1e-5)
    config_from_json(raw)
    with pytest.raises(ValueError, match=word):
        config_from_json({**raw, **changes})


PLAIN = dict(TINY, model_type="llama", rms_norm_eps=1e-5)
WINDOWED = dict(model_type="mistral", sliding_window=4)
WRONG = [
    (dict(rope_scaling="linear"), "rope_scaling is 'linear'"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8)), "rope_scaling.low_freq_factor is missing"),
    (dict(rope_parameters=dict(LLAMA3, high_freq_factor=1.0)), "rope_parameters.high_freq_factor is 1.0"),
    (dict(rope_scaling=dict(type="linear", factor=0)), "rope_scaling.factor is 0"),
    (dict(rope_scaling=dict(type="yarn", factor=-4.0)), "rope_scaling.factor is -4.0"),
    (dict(rope_scaling=dict(type="linear", factor="4")), "rope_scaling.factor is '4'"),
    (dict(rope_scaling=dict(rope_type=["yarn"])), "rope_scaling.rope_type is ['yarn']"),
    (dict(rope_theta=0), "rope_theta is 0"),
    (dict(model_type=["llama"]), "model_type is ['llama']"),
    (dict(model_type=None), "model_type is missing"),
    (dict(sliding_window=0, model_type="mistral"), "sliding_window is 0"),
    (dict(sliding_window=-3, model_type="mistral"), "sliding_window is -3"),
    (dict(WINDOWED, layer_types="full_attention"), "layer_types is 'full_attention'"),
    (dict(WINDOWED, layer_types=["full_attention"]), "layer_types lists 1 layers"),
    (dict(partial_rotary_factor=0.0), "partial_rotary_factor is 0.0"),
    (dict(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
    (dict(partial_rotary_factor=0.01), "rotary dimensions must be even and within the head: 1 of 16"),
    (dict(rms_norm_eps=0), "rms_norm_eps is 0"),
    (dict(tie_word_embeddings="false"), "tie_word_embeddings is 'false'"),
    (dict(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    (dict(eos_token_id=[2, "</s>"]), "eos_token_id is [2, '</s>']"),
    (dict(num_key_value_heads=3), "4 query heads cannot be shared evenly by 3 KV heads"),
    *(
        ({size: value}, f"{size} is {value!r}")
        for size, values in {
            "hidden_size": [0, -48, "48", 48.0, [48]],
            "num_hidden_layers": [0, 2.5, True],
            "num_attention_heads": [0, "4"],
            "num_key_value_heads": [0, "2"],
            "head_dim": [0, -16],
            "intermediate_size": [0, "80"],
            "vocab_size": [0, True],
            "max_position_embeddings": [0, -1, "256"],
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=str)
def test_a_wrong_value_is_refused_in_one_line_with_file_key_and_value(changes, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN))
    read_config(tmp_path)
    path.write_text(json.dumps(PLAIN | changes))
    with pytest.raises(ValueError) as error:
        read_config(tmp_path)
    assert str(error.value).startswith(f"{path}: {said}") and "\n" not in str(error.value)


@pytest.mark.parametrize("document", ["[]", "null", '"x"', "{", "\ufeff"])
def test_a_config_that_is_no_json_object_is_named(document, tmp_path):
    (tmp_path / "config.json").write_text(document, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json (holds|is not valid JSON)"):
        read_config(tmp_path)


def test_null_counts_as_absent():
    """transformers writes null for what it left at its default, in the rope table too."""
    empty = dict(rope_theta=None, partial_rotary_factor=None, factor=None)
    for beside in ({}, dict(rope_theta=5e5)):
        want = config_from_json(PLAIN | beside)
        assert config_from_json(PLAIN | beside | dict(rope_parameters=empty, sliding_window=None)) == want
    assert want.rope_theta == 5e5


def test_a_config_made_by_hand_has_sizes_of_at_least_one():
    with pytest.raises(ValueError, match="n_kv_heads is 0"):
        Config("llama", 2, 32, 4, 0, 8, 64, 100, 64)


@pytest.mark.parametrize("device", ["foo", "", "meta", "cuda:x", 1.5])
def test_an_unknown_device_lists_the_known_ones(device):
    with pytest.raises(ValueError, match="unknown device .*known are cpu, cuda, mps") as error:
        placement(device, None)
    assert repr(device) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("device", "gpus"), [("mps", 0), ("cuda", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_there_is_refused(device, gpus, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"device '{device}' was asked for, but this PyTorch sees {gpus} "):
        placement(device, None)


def test_a_device_that_is_there_is_taken(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert placement("mps", None) == (torch.device("mps"), torch.float32)
    assert placement("cuda:1", None) == (torch.device("cuda:1"), torch.bfloat16)
    assert placement(torch.device("cpu"), torch.float16) == (torch.device("cpu"), torch.float16)


@pytest.mark.parametrize("dtype", ["int3", torch.int32, torch.bool, torch.float8_e4m3fn, 32])
def test_a_dtype_that_no_model_runs_in_lists_the_known_ones(dtype):
    with pytest.raises(ValueError, match="unknown dtype .*known are float32, fp32, bfloat16"):
        placement("cpu", dtype)


def test_an_old_style_config_means_the_same():
    """`rope_theta` and `rope_scaling` with `type`, as checkpoints before transformers 5 write them."""
    old = dict(
        TINY,
        model_type="llama",
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=dict(type="linear", factor=4.0),
    )
    new = dict(TINY, model_type="llama", rms_norm_eps=1e-5, rope_parameters=LINEAR)
    assert config_from_json(old) == config_from_json(new)
    assert config_from_json(old).max_position == 256


# Totals that the hub reports for the checkpoints, or that follow from their published sizes.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "r1-llama-8b": 8_030_261_248,
    "r1-llama-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "r1-qwen-1.5b": 1_777_088_000,
    "r1-qwen-7b": 7_615_616_512,
    "r1-qwen-14b": 14_770_033_664,
    "r1-qwen-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def test_presets_have_the_published_number_of_parameters():
    assert {name: preset.config.n_params for name, preset in MODELS.items()} == PARAMETERS


@pytest.mark.parametrize("name", ["llama2-7b", "llama3.2-1b", "mistral-nemo-12b", "qwen2.5-3b", "qwen3-0.6b"])
def test_a_model_of_a_presets_shape_has_as_many_parameters(name):
    model = skeleton(MODELS[name].config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_a_random_model_needs_no_download():
    shape = Config("llama", 2, 32, 4, 2, 8, 64, 100, 64)
    a, b = random_model(shape, dtype="float32"), random_model(shape, dtype="float32")
    tokens = torch.tensor([[1, 2, 3]])
    assert a(tokens).isfinite().all()
    assert torch.equal(a(tokens), b(tokens))
    with pytest.raises(ValueError, match="no preset is called 'lama'"):
        random_model("lama")
