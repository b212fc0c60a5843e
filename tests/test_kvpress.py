"""The positions a compressed prompt keeps equal kvpress's, with the same weights, prompt and parameters.

Each side runs its own forward of its own model: transformers with kvpress, ours with CompressedKVCache.
Where the two define a method differently on purpose, a test shows the difference.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import kvpress
import pytest
import torch
import transformers

from minikv import CompressedKVCache, Policy
from minikv.strategies.adakv import AdaKV
from minikv.strategies.criticalkv import CriticalKV
from minikv.strategies.expected_attention import ExpectedAttention
from minikv.strategies.h2o import H2O
from minikv.strategies.keydiff import KeyDiff
from minikv.strategies.l2norm import L2Norm
from minikv.strategies.pyramidkv import PyramidKV
from minikv.strategies.snapkv import SnapKV
from minikv.strategies.streaming import StreamingLLM
from minikv.strategies.tova import TOVA
from models import load_model, load_tokenizer
from tests.test_real_model import document

Kept = list[list[list[int]]]  # layers of KV heads of positions


class Several:
    """Caches side by side under one model: all are fed, the first one's attention goes on."""

    def __init__(self, caches: list[CompressedKVCache]):
        self.caches = caches

    def begin(self, *args) -> torch.Tensor:
        return [cache.begin(*args) for cache in self.caches][0]

    def attend(self, layer: int, q, k, v, pos: torch.Tensor) -> torch.Tensor:
        return [cache.attend(layer, q, k, v, pos) for cache in self.caches][0]

    def end(self, pos: torch.Tensor) -> None:
        for cache in self.caches:
            cache.end(pos)


class Pair:
    """One checkpoint in both libraries, and the prompt `[1, T]` both read."""

    def __init__(self, directory, ids: torch.Tensor, budget: int):
        self.theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.ours = load_model(directory, device="cpu", dtype="float32")
        self.ids, self.budget = ids, budget

    def policies_keep(self, policies: dict[str, Policy]) -> dict[str, Kept]:
        caches = {
            name: CompressedKVCache.for_model(self.ours, policy, budget=self.budget, room=1)
            for name, policy in policies.items()
        }
        self.ours(self.ids, None, Several(list(caches.values())))
        layers = range(self.ours.config.n_layers)
        return {name: [cache.kept(layer)[0] for layer in layers] for name, cache in caches.items()}

    def presses_keep(
        self, presses: dict[str, kvpress.BasePress], attention: str = "sdpa"
    ) -> tuple[dict[str, Kept], dict[str, list[torch.Tensor]]]:
        """What each press keeps, and the scores `[H, T]` it ranks by, layer by layer."""
        kept, scores = {name: [] for name in presses}, {name: [] for name in presses}
        for name, press in presses.items():
            scorer = press if hasattr(press, "score") else press.press
            scorer.score = recorded(scorer.score, scores[name])

        def compress(module, args, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            for name, press in presses.items():
                module.masked_key_indices = None
                got = press.compress(
                    module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
                )
                stays = survivors(layer.keys[0], got[0][0], module.masked_key_indices)
                kept[name].append([head.nonzero()[:, 0].tolist() for head in stays])
            module.masked_key_indices = None

        self.theirs.set_attn_implementation(attention)
        layers = self.theirs.model.layers
        for layer in layers:
            layer.self_attn.rotary_emb = self.theirs.model.rotary_emb  # as a press's own context does
        hooks = [layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in layers]
        with torch.no_grad():
            self.theirs.model(self.ids, past_key_values=transformers.DynamicCache())
        for hook in hooks:
            hook.remove()
        return kept, scores


def recorded(score: Callable, into: list[torch.Tensor]) -> Callable:
    def wrapper(*args, **kwargs) -> torch.Tensor:
        got = score(*args, **kwargs)
        into.append(got[0].clone())
        return got

    return wrapper


def survivors(before: torch.Tensor, after: torch.Tensor, dropped: tuple | None) -> torch.Tensor:
    """Bool `[H, T]`. Keys are moved and never changed: equal in two channels, they are the same token."""
    if dropped is not None:
        stays = torch.ones(before.shape[:2], dtype=torch.bool)
        stays[dropped[1], dropped[2]] = False
        return stays
    same = torch.stack([(a[:, None, :2] == b[:, :2]).all(-1) for a, b in zip(after, before, strict=True)])
    assert (same.sum(-1) == 1).all()
    return same.any(1)


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256, rope_theta=10000.0)


@pytest.fixture(scope="module", params=["llama", "qwen3", "llama with yarn"])
def pair(request, tmp_path_factory) -> Pair:
    """Random models of three layers, grouped heads and weights large enough for attention to have peaks."""
    family, _, yarn = request.param.partition(" with ")
    directory = tmp_path_factory.mktemp(family)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        **(dict(rope_parameters=YARN) if yarn else {}),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # with weights of one, normalized keys would all be of one length
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return Pair(directory, torch.randint(3, 300, (1, 160)), budget=64)


W = 16
SNAPKV = SnapKV(W, kernel=5, pool="avg")
EXPECTED = ExpectedAttention(64)
EXPECTED_SHARE = replace(EXPECTED, value_norm=False)


def bare(score, **axes) -> Policy:
    """A policy without our guards, which kvpress does not have."""
    return Policy(score, **{"sinks": 0, "recent": 0, **axes})


def snap(ratio: float, kind=kvpress.SnapKVPress, **more) -> kvpress.SnapKVPress:
    return kind(ratio, window_size=W, kernel_size=5, **more)


def expected(ratio: float, **more) -> kvpress.ExpectedAttentionPress:
    return kvpress.ExpectedAttentionPress(ratio, **{"n_future_positions": 64, **more})


@dataclass
class Case:
    """A policy, and kvpress's press for a ratio and the share of the budget its first stage takes."""

    policy: Policy
    press: Callable[[float, float], kvpress.BasePress]
    guarded: int = 0  # what kvpress counts inside the first stage of CriticalKV, and we outside

    def make(self, n: int, budget: int) -> kvpress.BasePress:
        first = self.guarded + int(0.25 * (budget - self.guarded))
        return self.press(1 - budget / n, (first + 1e-6) / budget)


CASES = {
    "snapkv": Case(bare(SNAPKV), lambda r, _: snap(r)),
    "snapkv_unpooled": Case(bare(SnapKV(W, kernel=1)), lambda r, _: kvpress.SnapKVPress(r, W, 1)),
    "pyramidkv": Case(
        bare(SNAPKV, layers=PyramidKV(beta=4, guarded=0)),
        lambda r, _: snap(r, kvpress.PyramidKVPress, beta=4),
    ),
    "tova": Case(bare(TOVA(), recent=1), lambda r, _: kvpress.TOVAPress(r)),
    "knorm": Case(bare(L2Norm()), lambda r, _: kvpress.KnormPress(r)),
    "streaming": Case(bare(StreamingLLM(), sinks=4), lambda r, _: kvpress.StreamingLLMPress(r)),
    "keydiff": Case(bare(KeyDiff()), lambda r, _: kvpress.KeyDiffPress(r)),
    "expected_attention": Case(bare(EXPECTED), lambda r, _: expected(r)),
    "expected_attention_with_epsilon": Case(
        bare(ExpectedAttention(epsilon=0.02)),
        lambda r, _: expected(r, n_future_positions=512, epsilon=0.02),
    ),
    "expected_attention_by_mean": Case(
        bare(replace(EXPECTED_SHARE, covariance=False)),
        lambda r, _: expected(r, use_covariance=False, use_vnorm=False),
    ),
    "criticalkv": Case(
        bare(SNAPKV, refine=CriticalKV(0.25)),
        lambda r, first: kvpress.CriticalKVPress(snap(r), 1e-4, first),
        W,
    ),
    "critical_expected_attention": Case(
        bare(EXPECTED_SHARE, refine=CriticalKV(0.25)),
        lambda r, first: kvpress.CriticalKVPress(expected(r, use_vnorm=False), 1e-4, first),
        4,
    ),
    "adakv": Case(bare(SNAPKV, heads=AdaKV(0.2)), lambda r, _: kvpress.AdaKVPress(snap(r), 0.2)),
    "adakv_no_reserve": Case(bare(SNAPKV, heads=AdaKV(0)), lambda r, _: kvpress.AdaKVPress(snap(r), 0)),
    "adakv_half": Case(bare(SNAPKV, heads=AdaKV(0.5)), lambda r, _: kvpress.AdaKVPress(snap(r), 0.5)),
    "adakv_expected_attention": Case(
        bare(EXPECTED, heads=AdaKV(0.2)), lambda r, _: kvpress.AdaKVPress(expected(r), 0.2)
    ),
    # Without sinks or window: with them their first stage cannot be told by one share for all heads.
    "critical_adakv": Case(
        bare(replace(EXPECTED_SHARE, sinks=0), refine=CriticalKV(0.25), heads=AdaKV(0)),
        lambda r, first: kvpress.CriticalAdaKVPress(expected(r, n_sink=0, use_vnorm=False), 0, 1e-4, first),
    ),
}


@dataclass
class Both:
    ours: dict[str, Kept]
    theirs: dict[str, Kept]
    scores: dict[str, list[torch.Tensor]]


def compare(pair: Pair) -> Both:
    """All cases at once: a forward for us, one for kvpress and one that shows its attention."""
    n = pair.ids.shape[1]
    theirs, scores = pair.presses_keep({name: case.make(n, pair.budget) for name, case in CASES.items()})
    observed = {"observed_attention": kvpress.ObservedAttentionPress(1 - pair.budget / n)}
    for ours, more in zip((theirs, scores), pair.presses_keep(observed, "eager"), strict=True):
        ours.update(more)
    policies = {name: case.policy for name, case in CASES.items()}
    policies["observed_attention"] = bare(H2O(normalise=True))
    return Both(pair.policies_keep(policies), theirs, scores)


@pytest.fixture(scope="module")
def both(pair) -> Both:
    return compare(pair)


@pytest.mark.parametrize("case", [*CASES, "observed_attention"])
def test_the_same_positions_are_kept(both, case):
    assert both.ours[case] == both.theirs[case]
    assert sum(len(head) for layer in both.ours[case] for head in layer) == 3 * 2 * 64


def kept_by(pair: Pair, policy: Policy, press: kvpress.BasePress) -> tuple[Kept, Kept]:
    return pair.policies_keep({"": policy})[""], pair.presses_keep({"": press})[0][""]


def test_differs_kvpress_pools_by_average_and_we_by_maximum(pair):
    ours, theirs = kept_by(pair, bare(SnapKV(W, kernel=5)), snap(0.6))
    assert ours != theirs
    assert kept_by(pair, bare(SNAPKV), snap(0.6))[0] == theirs


def test_differs_our_guards_take_part_of_the_budget(pair):
    """Sinks and recent tokens stay; what is left goes to the best of theirs, in their order."""
    ours, theirs = kept_by(pair, Policy(L2Norm(), recent=10), kvpress.KnormPress(0.6))
    guards = {0, 1, 2, 3, *range(150, 160)}
    assert any(not guards <= set(head) for layer in theirs for head in layer)
    for mine, yours in zip(sum(ours, []), sum(theirs, []), strict=True):
        assert guards <= set(mine) and len(mine) == 64
        assert set(mine) - guards <= set(yours)


def test_differs_kvpress_spends_the_first_stage_on_the_window(pair):
    """A quarter of 64 tokens is its window of 16, so nothing is chosen by attention alone."""
    press = kvpress.CriticalKVPress(snap(0.6), first_stage_ratio=0.25)
    ours, theirs = kept_by(pair, bare(SNAPKV, refine=CriticalKV(0)), press)
    assert ours == theirs


def test_differs_kvpress_never_puts_reserved_tokens_to_the_second_stage(pair):
    """A reserve as large as the budget leaves its CriticalAdaKV nothing to refine; ours still refines."""
    press = kvpress.CriticalAdaKVPress(snap(0.6), alpha_safeguard=1.0, first_stage_ratio=0.25)
    ours, theirs = kept_by(pair, bare(SNAPKV, refine=CriticalKV(0.25), heads=AdaKV(1)), press)
    assert theirs == pair.policies_keep({"": bare(SNAPKV)})[""]
    assert ours == pair.policies_keep({"": bare(SNAPKV, refine=CriticalKV(0.25))})[""] != theirs


def layer_budgets(press: kvpress.PyramidKVPress, n: int, n_layers: int) -> list[int]:
    layers = [
        SimpleNamespace(config=SimpleNamespace(num_hidden_layers=n_layers), layer_idx=i)
        for i in range(n_layers)
    ]
    return [press.get_layer_budget(layer, n) for layer in layers]


@pytest.mark.parametrize("n_layers", [2, 5, 30, 32])
@pytest.mark.parametrize("budget", [250, 400])
@pytest.mark.parametrize("beta", [1, 3, 7, 20])
def test_pyramid_budgets_are_the_same_in_every_layer(n_layers, budget, beta):
    press = kvpress.PyramidKVPress(1 - budget / 2000, window_size=8, kernel_size=5, beta=beta)
    assert PyramidKV(beta, guarded=0).split_layers(budget, n_layers) == layer_budgets(press, 2000, n_layers)


def test_differs_kvpress_may_lose_a_token_in_rounding_and_we_keep_the_total():
    press = kvpress.PyramidKVPress(0.8, window_size=8, kernel_size=5, beta=3.2)
    ours, theirs = PyramidKV(3.2, guarded=0).split_layers(400, 5), layer_budgets(press, 2000, 5)
    assert all(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=True))
    assert sum(ours) == 5 * 400 != sum(theirs)


def test_differs_kvpress_flattens_the_pyramid_for_short_prompts():
    """It knows the prompt: no layer is given more than there is. We size layers before any prompt."""
    press = kvpress.PyramidKVPress(0.4, window_size=8, kernel_size=5, beta=20)
    assert max(layer_budgets(press, 100, 4)) == 100 - 8
    assert PyramidKV(beta=20, guarded=0).split_layers(60, 4)[0] > 100


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> Both:
    tok = load_tokenizer(smollm2_dir)
    ids = torch.tensor([tok.encode(document(tok, 1200))[:1000]])
    return compare(Pair(smollm2_dir, ids, budget=400))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, "observed_attention"])
def test_the_real_model_keeps_the_same_of_a_thousand_tokens(smollm2, case):
    """Near-ties may change places: the libraries' activations agree to about 1e-5 after thirty layers.

    So tokens that one side alone keeps must all lie within 1e-4 of each other in kvpress's own scores.
    """
    ours, theirs, scores = smollm2.ours[case], smollm2.theirs[case], smollm2.scores[case]
    n_swapped = 0
    for mine, yours, score in zip(ours, theirs, scores, strict=True):
        a, b = ({(h, x) for h, head in enumerate(heads) for x in head} for heads in (mine, yours))
        assert len(a) == len(b)
        n_swapped += len(a - b)
        values = torch.tensor([score[h, x] for h, x in a ^ b])
        if len(values):
            assert values.max() - values.min() <= 1e-4 * values.abs().max(), sorted(a ^ b)
    assert n_swapped <= 5
