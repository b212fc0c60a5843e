"""Weights as codes: what is stored, what it costs in bytes and quality, and the products of a compiled step."""

import io
import sys
import weakref
from copy import deepcopy
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from kernels.matvec import dequantize_rows, matvec, pack_rows, quantize_rows, unpack_rows
from minikv import CompressedKVCache, generate
from models import load_model, quantize
from models.load import random_model
from models.transformer import Transformer
from scripts.chat import main
from tests.conftest import TOY, make_toy

SCHEMES = [(8, False), (8, True), (4, False), (4, True)]
KINDS = ["int8", "int4"]
# Tied with biases as in Qwen2, and a head of its own as in Llama 3.
FAMILIES = {"tied": dict(tied=True, qkv_bias=True), "untied": {}}


def random_weights(n_rows: int, n_columns: int, seed: int = 0) -> Tensor:
    """Rows of different sizes and offsets, one of zeros, one constant, one too small for float16 scales."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n_rows, n_columns, generator=generator) * torch.rand(n_rows, 1, generator=generator)
    w[::3] += 0.5
    w[0], w[1], w[2] = 0.0, 0.375, w[2] * 1e-7
    return w


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def plain_twin(model: Transformer, quantized: Transformer) -> Transformer:
    """The model with the weights that the quantized one stands for, as ordinary parameters."""
    twin = deepcopy(model)
    for name, module in quantized.named_modules():
        if isinstance(module, quantize.Quantized):
            twin.get_submodule(name).weight.copy_(module.weight)
    return twin


# What is stored.


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_lie_where_the_layout_says(bits):
    shifts = 32 // bits
    codes = torch.randint(2**bits, (3, 2 * shifts * 8), dtype=torch.int32)
    words = pack_rows(codes, bits)
    assert words.dtype == torch.float32 and words.shape == (3, 2, 8)
    assert torch.equal(unpack_rows(words, bits), codes)
    raw = words.view(torch.int32).tolist()
    for row, channel in [(0, 0), (1, 7), (2, 8), (0, shifts * 8 - 1), (1, shifts * 8), (2, shifts * 16 - 3)]:
        block, rest = divmod(channel, shifts * 8)
        shift, lane = divmod(rest, 8)
        assert (raw[row][block][lane] >> shift * bits) % 2**bits == codes[row, channel]


@pytest.mark.parametrize("n_columns", [1, 48, 80, 192])
@pytest.mark.parametrize("bits, grouped", SCHEMES)
def test_no_weight_is_further_than_half_a_step(bits, grouped, n_columns):
    w = random_weights(7, n_columns)
    words, scale, zero = quantize_rows(w, bits, grouped)
    error = (F.pad(w, (0, -n_columns % (256 // bits))) - dequantize_rows(words, scale, zero, bits)).abs()
    bound = 0.501 * scale.double()[..., None] + 1e-5
    assert (error.double().view(7, scale.shape[1], -1) <= bound).all()
    span = w.amax(1).clamp(min=0) - w.amin(1).clamp(max=0)  # rows are filled up with zeros
    assert (scale.double() <= 1.001 * span[:, None] / (2**bits - 1) + 1e-6).all()


def test_weights_that_were_four_bit_codes_come_back_exactly():
    """The default model travels as groups of 32 codes with float16 scale and minimum: int4 is that again."""
    codes = torch.randint(16, (5, 4, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    scale, low = (torch.rand(5, 4, 1) / 64 + 1 / 64).half().float(), -torch.rand(5, 4, 1).half().float()
    w = (codes * scale + low).view(5, 128)
    assert_close(dequantize_rows(*quantize_rows(w, 4, True), 4), w, rtol=0, atol=1e-6)


# Products.


@pytest.mark.parametrize("n_columns", [1, 48, 192])
@pytest.mark.parametrize("bits, grouped", SCHEMES)
def test_the_product_is_that_of_the_dequantized_weights(bits, grouped, n_columns):
    stored = quantize_rows(random_weights(9, n_columns), bits, grouped)
    x = torch.randn(3, n_columns) + 1
    want = x.double() @ dequantize_rows(*stored, bits)[:, :n_columns].double().mT
    assert_close(matvec(x, *stored, bits).double(), want, rtol=1e-5, atol=1e-5 + 1e-6 * n_columns)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_is_one_with_the_dequantized_weights(kind, family, monkeypatch):
    monkeypatch.setattr(quantize, "TILE", 1000)  # many tiles, the last one smaller
    model = make_toy(**FAMILIES[family])
    quantized = quantize.quantize_model(deepcopy(model), kind)
    twin = plain_twin(model, quantized)
    tokens = torch.randint(TOY.vocab_size, (2, 7))
    logits = quantized(tokens)
    assert_close(logits, twin(tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, model(tokens), atol=1e-2)
    assert torch.equal(quantized.embed(tokens), twin.embed.weight[tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_quantized_model_is_one_graph(kind):
    model = quantize.quantize_model(make_toy(n_layers=1, tied=True, qkv_bias=True), kind)
    traced = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for batch in (1, 12):  # few rows, and too many for matvec
        tokens = torch.arange(batch)[:, None]
        assert_close(traced(tokens), model(tokens), rtol=1e-4, atol=1e-4)


def test_compiled_and_eager_agree():
    """Both stores through inductor: an embedding in int8, a matrix with bias in int4, the tied head."""
    embed = quantize.QuantizedEmbedding(nn.Embedding(40, 72), quantize.INT8)
    linear = quantize.QuantizedLinear(nn.Linear(72, 72).requires_grad_(False), quantize.INT4)

    def step(token: Tensor) -> Tensor:
        return embed.logits(linear(embed(token)))

    token = torch.tensor([[7]])
    compiled = torch.compile(step, fullgraph=True, dynamic=False)(token)
    assert_close(compiled, step(token), rtol=1e-4, atol=1e-4)


# Memory, names, and the rest of the program.


def test_bytes_are_those_of_the_codes_and_the_originals_are_freed():
    shape = type(TOY)(
        **{**TOY.__dict__, "hidden_size": 256, "ffn_size": 768, "vocab_size": 512, "tied": True}
    )
    full = random_model(shape, "cpu", "bfloat16")
    matrices = [p for p in full.parameters() if p.dim() == 2]
    ends = full.embed.weight.numel()
    blocks = sum(p.numel() for p in matrices) - ends
    rest = nbytes(full) - 2 * (blocks + ends)
    originals = [weakref.ref(p) for p in matrices]
    del matrices
    int8 = quantize.quantize_model(full, "int8")
    assert not any(original() is not None for original in originals)
    n_rows = 2 * (128 + 256 + 2 * 768 + 256) + 512
    assert nbytes(int8) == blocks + ends + 4 * n_rows + rest
    int4 = random_model(shape, "cpu", "bfloat16", quantize="int4")
    # Half a byte, and scale and zero for every 32.
    assert nbytes(int4) == blocks * 5 // 8 + ends + 4 * 512 + rest


def test_an_unknown_name_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="unknown quantization 'int3'; known are int8 and int4"):
        load_model(tmp_path / "nothing", quantize="int3")
    with pytest.raises(ValueError, match="int3"):
        random_model(TOY, quantize="int3")


def test_a_policy_that_weighs_by_the_output_projection_finds_it():
    model = make_toy()
    quantized = quantize.quantize_model(deepcopy(model), "int4")
    answers = [
        generate(
            m, list(range(60)), CompressedKVCache.for_model(m, "criticalkv", budget=48), max_new_tokens=8
        )
        for m in (quantized, plain_twin(model, quantized))
    ]
    assert answers[0].ids == answers[1].ids


def test_chat_takes_quantize(toy_dir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    flags = ["--model", str(toy_dir), "--prompt", "hello", "--max-new-tokens", "3", "--quantize"]
    assert main([*flags, "int4"]) == 0
    assert main([*flags, "3"]) == 2
    assert capsys.readouterr().err == "error: unknown quantization '3'; known are int8 and int4\n"


@pytest.mark.slow
@pytest.mark.long
def test_quality_on_natural_text(real_model, real_tok, smollm2_dir):
    """Mean KL per token: int8 was 0.0035. int4 was 0.0011, as the model travels in 4 bits; bfloat16 alone 0.0011."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = torch.tensor([real_tok.encode(text[20000:24000])[:200]])
    want = real_model(tokens)[0].log_softmax(-1)
    for kind, limit in [("int8", 0.006), ("int4", 0.003)]:
        got = load_model(smollm2_dir, quantize=kind)(tokens)[0].log_softmax(-1)
        assert 1e-6 < F.kl_div(got, want, log_target=True, reduction="batchmean") < limit, kind
