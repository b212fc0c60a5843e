"""Natural text, cut into a prompt and its continuation."""

import random
from dataclasses import replace
from pydoc_data.topics import topics

from models.tokenizer import Tokenizer
from scripts.evaluation.samples import DEPTHS, Forced, Order, Sample

CUE, QUOTED = 16, 16  # tokens of `quotation`: they say where it begins, and how much follows


def continuation(tok: Tokenizer, order: Order) -> list[Sample]:
    """`tokens` of text to read, and the `new` that follow in one chunk."""
    return continued(tok, order, one_by_one=False)


def one_prompt(tok: Tokenizer, order: Order) -> list[Sample]:
    """A single sample of `decoding`, however many are asked for: to measure time with."""
    return decoding(tok, replace(order, n=1))


def decoding(tok: Tokenizer, order: Order) -> list[Sample]:
    """The same, but every following token is a decoding step."""
    return continued(tok, order, one_by_one=True)


def continued(tok: Tokenizer, order: Order, one_by_one: bool) -> list[Sample]:
    target = [True] * order.new
    return [
        Sample(ids[: order.tokens], [], Forced(ids[order.tokens :], target, one_by_one))
        for ids in stretches(tok, order)
    ]


def quotation(tok: Tokenizer, order: Order) -> list[Sample]:
    """A text, then a few tokens from within it: what followed there is to follow again.

    Depths take turns. Raises ValueError if `tokens` is less than such a quotation.
    """
    if order.tokens < CUE + QUOTED:
        raise ValueError(f"{order.tokens} tokens are too few to quote from; use {CUE + QUOTED} or more")
    samples = []
    for index, ids in enumerate(stretches(tok, order)):
        depth = DEPTHS[index % len(DEPTHS)]
        at = round(depth * (order.tokens - CUE - QUOTED))
        cue, quoted = ids[at : at + CUE], ids[at + CUE : at + CUE + QUOTED]
        samples.append(Sample(ids, tok.encode("\n\n") + cue, Forced(quoted, [True] * QUOTED), depth))
    return samples


def stretches(tok: Tokenizer, order: Order) -> list[list[int]]:
    """Pieces of the text, of `tokens` and `new` together, that do not overlap, in an order that the seed shuffles.

    The text is `order.text`, or the language reference that comes with Python. Raises ValueError if it is too
    short for so many.
    """
    if order.text is None:
        text, name = "\n\n".join(topics[name] for name in sorted(topics)), "Python's language reference"
    else:
        text, name = order.text.read_text(encoding="utf-8"), str(order.text)
    ids, start = tok.encode(text), tok.encode("", bos=True)
    length = order.tokens + order.new - len(start)
    places = list(range(0, len(ids) - length + 1, length))
    if len(places) < order.n:
        raise ValueError(
            f"{name} has {len(ids)} tokens, enough for {len(places)} stretches of {length}, not for --n {order.n}; "
            "ask for fewer or shorter ones, or give a longer --text"
        )
    random.Random(order.seed).shuffle(places)
    return [start + ids[at : at + length] for at in places[: order.n]]
