"""Conversations that keep their cache."""

from dataclasses import replace

import pytest
import torch

from minikv import METHODS, Chat, CompressedKVCache
from models import load_model, load_tokenizer

TURNS = ["hello", "and then, after a rather longer question about everything?", "why", "the end"]


@pytest.fixture(scope="module")
def parts(toy_dir):
    return load_model(toy_dir), load_tokenizer(toy_dir)


def talk(chat, turns=TURNS, **options):
    return ["".join(chat.send(text, **options)) for text in turns]


def budgeted(model, budget=24, **changes):
    policy = replace(METHODS["streaming"], sinks=4, recent=8, every=None, **changes)
    return CompressedKVCache.for_model(model, policy, budget=budget, room=8)


def test_each_turn_feeds_only_what_is_new_and_each_token_once(parts):
    """The last sampled token of an answer and its end of turn are the classic off-by-one."""
    model, tok = parts
    cache = CompressedKVCache.for_model(model, "full")
    chat = Chat(model, tok, cache, max_new_tokens=6)
    answers = []
    for text in TURNS:
        before = int(cache.seen[0])
        answers.append("".join(chat.send(text, ignore_eos=True)))
        assert int(cache.seen[0]) == before + chat.prompt_tokens + 6 - 1
    assert [m["content"] for m in chat.messages] == [
        x for pair in zip(TURNS, answers, strict=True) for x in pair
    ]


def test_what_went_through_the_model_is_the_conversation_once(parts):
    """All tokens fed over four turns, joined, give the logits of one forward over them."""
    model, tok = parts
    cache = CompressedKVCache.for_model(model, "full")
    chat = Chat(model, tok, cache, max_new_tokens=5)
    fed = []
    hook = model.embed.register_forward_pre_hook(lambda _, inputs: fed.extend(inputs[0][0].tolist()))
    talk(chat, ignore_eos=True)
    probe = torch.tensor([chat.unfed])
    logits = model(probe, None, cache)
    hook.remove()
    assert len(fed) == int(cache.seen[0])
    torch.testing.assert_close(logits[0, -1], model(torch.tensor([fed]))[0, -1], rtol=1e-4, atol=1e-4)
    assert fed.count(tok.codec.names["<|im_start|>"]) == 2 * len(TURNS)


def test_a_conversation_equals_its_template_where_answers_are_canonical(parts):
    """With answers the tokenizer would write the same way, turn by turn feeding equals one rendering."""
    model, tok = parts
    ids = tok.chat([{"role": "user", "content": "a"}])
    answer = tok.encode("b c")
    joined = ids + answer + tok.follow_up("d")
    roles = [("user", "a"), ("assistant", "b c"), ("user", "d")]
    assert joined == tok.chat([{"role": r, "content": c} for r, c in roles])


def test_a_budget_holds_over_many_turns(parts):
    model, tok = parts
    cache = budgeted(model)
    chat = Chat(model, tok, cache, max_new_tokens=12)
    size = cache.nbytes
    for text in TURNS:
        talk(chat, [text], ignore_eos=True)
        assert all(len(head) <= 24 + 8 for layer in range(2) for head in cache.kept(layer)[0])
    assert cache.nbytes == size
    assert int(cache.seen[0]) > 100


def test_after_a_reset_the_conversation_is_as_new(parts):
    model, tok = parts
    chat = Chat(model, tok, budgeted(model), max_new_tokens=8)
    first = talk(chat)
    chat.reset()
    assert chat.messages == []
    assert talk(chat) == first
    chat.start("be brief")
    assert chat.messages == [{"role": "system", "content": "be brief"}]


def test_an_answer_cut_short_can_be_followed_up(parts):
    model, tok = parts
    cache = CompressedKVCache.for_model(model, "full")
    chat = Chat(model, tok, cache, max_new_tokens=50)
    pieces = chat.send("hello", ignore_eos=True)
    kept = [next(pieces) for _ in range(3)]
    pieces.close()
    assert chat.reason == "interrupted"
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(kept)}
    assert len(chat.turn("more")) == 1 + len(tok.follow_up("more"))
    talk(chat, ["more"], max_new_tokens=3)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_turn_that_does_not_fit_is_refused_and_changes_nothing(parts):
    model, tok = parts
    chat = Chat(model, tok, CompressedKVCache.for_model(model, "full", context=64), max_new_tokens=4)
    talk(chat, ["hello"], ignore_eos=True)
    before = (list(chat.messages), chat.cache.seen.tolist())
    with pytest.raises(ValueError, match="context of 64"):
        chat.send("x" * 200)
    assert (chat.messages, chat.cache.seen.tolist()) == before
    assert talk(chat, ["hi"], ignore_eos=True)


def test_the_context_limit_ends_an_answer_and_shows(parts):
    model, tok = parts
    chat = Chat(model, tok, CompressedKVCache.for_model(model, "full", context=40), max_new_tokens=100)
    talk(chat, ["hello"], ignore_eos=True)
    assert chat.reason == "length"
    assert chat.full


def test_stop_texts_end_an_answer(parts):
    model, tok = parts
    chat = Chat(model, tok, CompressedKVCache.for_model(model, "full"), max_new_tokens=30)
    (whole,) = talk(chat, ["hello"], ignore_eos=True)
    cut = whole[5:8]
    chat.reset()
    (short,) = talk(chat, ["hello"], ignore_eos=True, stop=[cut])
    assert short == whole[: whole.index(cut)]
    assert chat.reason == "stop"


def test_a_saved_conversation_goes_on_as_if_it_had_not_stopped(parts, tmp_path):
    model, tok = parts
    chat = Chat(model, tok, budgeted(model), max_new_tokens=9)
    talk(chat, TURNS[:2], ignore_eos=True)
    chat.save_cache(tmp_path / "talk.safetensors")
    later = Chat(model, tok, CompressedKVCache.for_model(model, "full"), max_new_tokens=9)
    later.load_cache(tmp_path / "talk.safetensors")
    assert later.cache.policy == chat.cache.policy
    assert talk(later, TURNS[2:], ignore_eos=True) == talk(chat, TURNS[2:], ignore_eos=True)
    assert later.messages == chat.messages


def test_a_turn_without_an_answer_feeds_nothing_twice(parts):
    """The token left over from the answer before goes in once, also if no new one comes of it."""
    model, tok = parts
    chat = Chat(model, tok, CompressedKVCache.for_model(model, "full"), max_new_tokens=3)
    talk(chat, ["hi"], ignore_eos=True)
    assert len(chat.unfed) == 1
    talk(chat, ["yo"], max_new_tokens=0)
    assert chat.unfed == []


def test_a_new_message_ends_the_answer_at_hand(parts):
    model, tok = parts
    chat = Chat(model, tok, CompressedKVCache.for_model(model, "full"), max_new_tokens=20)
    first = chat.send("hi", ignore_eos=True)
    next(first)
    talk(chat, ["yo"], max_new_tokens=3, ignore_eos=True)
    assert list(first) == []
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_chat_is_one_conversation(parts):
    model, tok = parts
    with pytest.raises(ValueError, match="2 rows"):
        Chat(model, tok, CompressedKVCache.for_model(model, "full", batch=2))
