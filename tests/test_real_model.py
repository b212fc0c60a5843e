"""The embedded default model, for real: weights, tokenizer, chat, a long document on a budget."""

from pydoc_data.topics import topics

import pytest
import torch
import transformers

from minikv import Chat, CompressedKVCache, generate

pytestmark = pytest.mark.slow

QUESTIONS = ["What is the capital of France?", "Write a short poem about the sea.", "Why is the sky blue?"]
NEEDLE = "The secret code for the blue door is 48213."


def document(tok, n_tokens: int) -> str:
    """Natural English that needs no download: Python's own language reference."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return tok.decode(tok.encode(text[: n_tokens * 8])[:n_tokens])


def test_it_knows_the_capital_of_france(real_model, real_tok):
    model, tok = real_model, real_tok
    ids = tok.chat([{"role": "user", "content": QUESTIONS[0]}])
    out = generate(model, ids, CompressedKVCache.for_model(model), tok, max_new_tokens=32)
    assert "Paris" in out.text
    assert out.reason == "eos"


@pytest.mark.long
def test_greedy_ids_equal_transformers(real_model, real_tok, smollm2_dir):
    model, tok = real_model, real_tok
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    for question in QUESTIONS:
        ids = tok.chat([{"role": "user", "content": question}])
        cache = CompressedKVCache.for_model(model, "full", context=512)
        ours = generate(model, ids, cache, max_new_tokens=64, ignore_eos=True).ids
        # Greedy is what theirs finds likeliest after each of our tokens: one forward tells it for all.
        with torch.no_grad():
            logits = theirs(torch.tensor([ids + ours])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == ours


@pytest.mark.long
def test_a_long_document_fits_a_small_budget_and_answers_two_questions(real_model, real_tok):
    model, tok = real_model, real_tok
    cache = CompressedKVCache.for_model(model, "snapkv", budget=512, room=256)
    full = 2 * 30 * 3 * 64 * 4 * 6000
    chat = Chat(model, tok, cache, max_new_tokens=24)
    text = document(tok, 5900)
    middle = len(text) // 2
    asked = f"{text[:middle]}\n{NEEDLE}\n{text[middle:]}\n\nWhat is the secret code for the blue door?"
    list(chat.send(asked))
    assert 5900 < chat.prompt_tokens < 6200
    for layer in range(30):
        assert all(512 <= len(head) < 512 + 256 for head in cache.kept(layer)[0])
    assert cache.nbytes < 1.08 * full * (512 + 256) / 6000
    before = int(cache.seen[0])
    answer = "".join(chat.send("Thank you. What is the capital of France?"))
    assert chat.prompt_tokens < 40
    assert int(cache.seen[0]) < before + 40 + 24 + 1
    assert answer.strip()
