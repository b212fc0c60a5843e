"""Loading checkpoints: what transformers saves arrives in the right rows, and nothing else is accepted."""

import json
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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

from models import weights
from models.checkpoint import check_complete, write_safetensors
from models.transformer import Transformer
from models.zoo import config_from_json

TINY = dict(
    num_hidden_layers=2,
    vocab_size=256,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position_embeddings=64,
)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}


def save_reference(directory: Path, family: str = "llama", **options) -> dict[str, torch.Tensor]:
    """A random transformers model in `directory`; gives its tensors by their names in the file."""
    config, model, changes = FAMILIES[family]
    torch.manual_seed(0)
    reference = model(config(**TINY, **changes))
    for parameter in reference.parameters():  # biases and norms would otherwise be all zero or one
        torch.nn.init.normal_(parameter)
    reference.save_pretrained(directory, **options)
    return reference.state_dict()


def load(directory: Path, dtype: torch.dtype = torch.float32, layout: str = "hf") -> Transformer:
    config = config_from_json(json.loads((directory / "config.json").read_text()))
    with torch.device("meta"):
        model = Transformer(config)
    weights.load_weights(model, directory, "cpu", dtype, layout)
    return model


def edit(directory: Path, change) -> None:
    """Rewrite the tensors of model.safetensors with `change`, which edits the dict in place."""
    # cloned, because load_file maps the very file that is rewritten
    tensors = {k: v.clone() for k, v in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_in_its_rows(family, tmp_path):
    theirs = save_reference(tmp_path, family)
    model = load(tmp_path)
    ours = dict(model.named_parameters())
    used = 0
    for i in range(TINY["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for kind in ("weight", "bias"):
            fused = {
                f"attention.wqkv.{kind}": [f"{attention}.{name}_proj.{kind}" for name in "qkv"],
                f"attention.wo.{kind}": [f"{attention}.o_proj.{kind}"],
                f"attention.q_norm.{kind}": [f"{attention}.q_norm.{kind}"],
                f"attention.k_norm.{kind}": [f"{attention}.k_norm.{kind}"],
                f"mlp.gate.{kind}": [f"{mlp}.gate_proj.{kind}"],
                f"mlp.up.{kind}": [f"{mlp}.up_proj.{kind}"],
                f"mlp.down.{kind}": [f"{mlp}.down_proj.{kind}"],
                f"attention_norm.{kind}": [f"model.layers.{i}.input_layernorm.{kind}"],
                f"mlp_norm.{kind}": [f"model.layers.{i}.post_attention_layernorm.{kind}"],
            }
            for name, sources in fused.items():
                if sources[0] not in theirs:
                    assert f"layers.{i}.{name}" not in ours
                    continue
                expected = torch.cat([theirs[source] for source in sources])
                assert torch.equal(ours[f"layers.{i}.{name}"], expected), name
                used += 1
    assert torch.equal(ours["embed.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(ours["norm.weight"], theirs["model.norm.weight"])
    if not model.config.tied:
        assert torch.equal(ours["head.weight"], theirs["lm_head.weight"])
    assert len(ours) == used + (2 if model.config.tied else 3)


def test_one_file_and_shards_with_an_index_load_the_same(tmp_path):
    save_reference(tmp_path / "one")
    save_reference(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    one, shards = load(tmp_path / "one").state_dict(), load(tmp_path / "shards").state_dict()
    assert one.keys() == shards.keys()
    assert all(torch.equal(one[name], shards[name]) for name in one)


def test_the_dtype_asked_for_is_the_dtype_of_every_parameter(tmp_path):
    theirs = save_reference(tmp_path, "qwen2")
    model = load(tmp_path, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight, theirs["model.norm.weight"].bfloat16())
    assert model.rope.inv_freq.dtype == torch.float32


def test_one_checkpoint_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """A loader that gathers a state dict first needs the model twice."""
    save_reference(tmp_path, max_shard_size="60KB")
    alive, read = weakref.WeakSet(), []
    plain = weights.open_shard

    class Counting:
        def __init__(self, path: Path):
            self.shard = plain(path)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.shard.__exit__(None, None, None)

        def get_tensor(self, name: str) -> torch.Tensor:
            assert not alive, f"{name} is read while another checkpoint tensor is held"
            tensor = self.shard.get_tensor(name)
            alive.add(tensor)
            read.append(name)
            return tensor

    monkeypatch.setattr(weights, "open_shard", Counting)
    model = load(tmp_path)
    assert len(read) == len(set(read)) == len(weights.places(model.config))
    assert not alive


def test_no_weights_names_the_files_looked_for_and_the_folder(tmp_path):
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as error:
        load(tmp_path)
    for word in ("model.safetensors", "model.safetensors.index.json", str(tmp_path)):
        assert word in str(error.value)


def test_a_missing_shard_is_named(tmp_path):
    save_reference(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*-of-*.safetensors"))[1]
    shard.unlink()
    for check in (load, check_complete):
        with pytest.raises(FileNotFoundError, match=shard.name):
            check(tmp_path)


def test_an_index_may_not_point_outside_its_folder(tmp_path):
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "elsewhere.safetensors")
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="elsewhere"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    save_reference(tmp_path, max_shard_size="60KB")
    first, second, *_ = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(ValueError, match=f"{second.name} holds again"):
        load(tmp_path)


def test_a_dropped_bias_is_missed(tmp_path):
    """Qwen2 without its biases still loads elsewhere and answers in mojibake."""
    save_reference(tmp_path, "qwen2")
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.bias"))
    with pytest.raises(ValueError, match=r"missing.*model\.layers\.1\.self_attn\.v_proj\.bias"):
        load(tmp_path)


def test_missing_tensors_are_listed_and_counted(tmp_path):
    save_reference(tmp_path)

    def drop(tensors):
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    edit(tmp_path, drop)
    with pytest.raises(ValueError, match=r"missing.*model\.layers\.1\..* and 5 more"):
        load(tmp_path)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    save_reference(tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ValueError, match=r"not in the model.*q_proj\.bias"):
        load(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    save_reference(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \[47\], the config says \[48\]"):
        load(tmp_path)


def test_an_untied_model_needs_its_head(tmp_path):
    save_reference(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing.*lm_head\.weight"):
        load(tmp_path)


def test_a_tied_head_stored_again_is_accepted_if_it_is_the_embedding(tmp_path):
    """Qwen3-0.6B ties its head and stores it all the same."""
    save_reference(tmp_path, "llama tied")
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(tmp_path).head is None
    assert load(tmp_path, torch.bfloat16).head is None


@pytest.mark.parametrize("change", [lambda w: w + 1, lambda w: w[:-1].clone()])
def test_a_tied_head_that_is_another_matrix_is_refused(change, tmp_path):
    save_reference(tmp_path, "llama tied")
    edit(tmp_path, lambda t: t.update({"lm_head.weight": change(t["model.embed_tokens.weight"])}))
    with pytest.raises(ValueError, match=r"ties.*lm_head\.weight"):
        load(tmp_path)


def test_stored_rotary_frequencies_of_old_checkpoints_are_passed_over(tmp_path):
    save_reference(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    load(tmp_path)


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Row order of Meta's files, written out: pair i of a head is (2i, 2i + 1), not (i, i + half)."""
    result, half = torch.empty_like(rows), len(rows) // heads // 2
    for head in range(heads):
        for i in range(half):
            result[(2 * head) * half + 2 * i] = rows[(2 * head) * half + i]
            result[(2 * head) * half + 2 * i + 1] = rows[(2 * head + 1) * half + i]
    return result


def interleave_qk(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if ".q_proj." in name:
            tensors[name] = interleave(tensors[name], TINY["num_attention_heads"])
        if ".k_proj." in name:
            tensors[name] = interleave(tensors[name], TINY["num_key_value_heads"])


META = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def meta_names(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        new = name
        for theirs, meta in META.items():
            new = new.replace(theirs, meta)
        tensors[new] = tensors.pop(name)
    tensors["rope.freqs"] = torch.ones(8)


@pytest.mark.parametrize("renamed", [False, True])
def test_metas_row_order_is_undone_on_request(renamed, tmp_path):
    save_reference(tmp_path)
    expected = load(tmp_path).state_dict()
    edit(tmp_path, interleave_qk)
    if renamed:
        edit(tmp_path, meta_names)
    found = load(tmp_path, layout="meta").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_metas_names_are_refused_without_the_request(tmp_path):
    save_reference(tmp_path)
    edit(tmp_path, meta_names)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.wq\.weight.*layout=\"meta\""):
        load(tmp_path)


def test_an_unknown_layout_is_refused(tmp_path):
    save_reference(tmp_path)
    with pytest.raises(ValueError, match="'ggml'.*hf and meta"):
        load(tmp_path, layout="ggml")


@pytest.mark.parametrize("ending", ["qweight", "weight_scale_inv", "weight_packed", "weight.SCB"])
def test_quantised_checkpoints_are_refused_by_name(ending, tmp_path):
    save_reference(tmp_path)
    name = f"model.layers.0.mlp.up_proj.{ending}"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(4, dtype=torch.int32)}))
    with pytest.raises(ValueError, match=f"{name} belongs to a quantised checkpoint"):
        load(tmp_path)


def test_fp8_tensors_are_refused_by_name(tmp_path):
    save_reference(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    edit(tmp_path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"{name} is stored as F8_E4M3"):
        load(tmp_path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"
BROKEN = {
    "lfs pointer": (lambda whole: LFS, "Git LFS pointer"),
    "cut": (lambda whole: whole[:-10], "file has {size} bytes, header says {whole}"),
    "longer": (lambda whole: whole + b"\0", "file has {size} bytes, header says {whole}"),
    "cut in the header": (lambda whole: whole[:100], "file has 100 bytes, header says at least"),
    "empty": (lambda whole: b"", "file has 0 bytes"),
    "four bytes": (lambda whole: b"\x01\x02\x03\x04", "file has 4 bytes"),
    "endless header": (lambda whole: b"\xff" * 8 + whole, f"header says at least {2**64 + 7}"),
    "web page": (lambda whole: b"<!DOCTYPE html><html>404</html>", "web page"),
    "not json": (lambda whole: whole[:8] + b"?" + whole[9:], "no safetensors header"),
    "json of another kind": (lambda whole: (4).to_bytes(8, "little") + b"[{}]", "no safetensors"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_files_are_named_at_once(damage, tmp_path):
    save_reference(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    change, message = BROKEN[damage]
    broken = change(whole)
    path.write_bytes(broken)
    message = message.format(size=len(broken), whole=len(whole))
    for check in (load, check_complete):
        start = time.monotonic()
        with pytest.raises(ValueError) as error:
            check(tmp_path)
        assert time.monotonic() - start < 1
        assert str(path) in str(error.value) and message in str(error.value)
        assert "\n" not in str(error.value)


def test_a_broken_index_is_named(tmp_path):
    save_reference(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", LFS.decode()):
        index.write_text(text)
        with pytest.raises(ValueError, match="index.json"):
            check_complete(tmp_path)


def test_offsets_that_contradict_the_shape_are_an_error_in_one_line(tmp_path):
    save_reference(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"dtype":"F32"', b'"dtype":"F16"', 1))
    with pytest.raises(ValueError, match="model.safetensors"):
        load(tmp_path)


def test_what_is_written_in_pieces_is_read_by_safetensors(tmp_path):
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(5)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        path = tmp_path / "model.safetensors"
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        write_safetensors(path, shapes, dtype, lambda name: tensors[name].split(2))
        found = load_file(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name].to(dtype)) for name in tensors)
