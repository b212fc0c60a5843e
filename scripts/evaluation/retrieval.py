"""Tasks that ask for something said earlier, made from a seed: the answer is in the context, and nowhere else.

All are conversations in the model's chat format. The assistant is made to begin its answer, so that a small model
is judged by what it finds and not by how it speaks.
"""

import random
from collections.abc import Callable, Iterable, Iterator

from models.tokenizer import Tokenizer
from scripts.evaluation.samples import DEPTHS, Order, Sample, conversation

NAMES = (
    "Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Grace", "Henry", "Irene", "James", "Karen", "Louis",
    "Maria", "Nadia", "Oscar", "Paula", "Ralph", "Sarah", "Thomas", "Ursula", "Victor", "Wendy", "Xavier", "Yusuf",
)  # fmt: skip
PEOPLE = (
    "teacher", "farmer", "sailor", "doctor", "baker", "painter", "driver", "singer", "gardener", "student",
    "builder", "writer",
)  # fmt: skip
VERBS = (
    "watched", "cleaned", "repaired", "described", "bought", "carried", "painted", "found", "moved", "opened",
    "remembered", "sold",
)  # fmt: skip
ADJECTIVES = (
    "old", "green", "quiet", "heavy", "broken", "narrow", "yellow", "famous", "wooden", "empty", "bright", "frozen",
    "hidden", "modern", "gentle", "silver",
)  # fmt: skip
NOUNS = (
    "bridge", "window", "garden", "market", "river", "basket", "engine", "letter", "tower", "kitchen", "mirror",
    "station", "forest", "blanket", "ladder", "harbour",
)  # fmt: skip
TIMES = (
    "in the morning", "after lunch", "before the rain came", "last summer", "late at night", "on Sunday",
    "during the holidays", "a week ago", "at noon", "in early spring",
)  # fmt: skip

Builder = Callable[[Tokenizer, random.Random, int, int], Sample]


def made_by(build: Builder) -> Callable[[Tokenizer, Order], list[Sample]]:
    """A task of samples that `build` makes of a generator, the sample's number and the context's tokens."""

    def make(tok: Tokenizer, order: Order) -> list[Sample]:
        seeds = (f"{build.__name__} {order.seed} {order.tokens} {index}" for index in range(order.n))
        return [build(tok, random.Random(seed), index, order.tokens) for index, seed in enumerate(seeds)]

    return make


# Samples.


def fact(tok: Tokenizer, rng: random.Random, index: int, tokens: int) -> Sample:
    """Four people's codes in a text about nothing; one is asked for."""
    names = rng.sample(NAMES, 4)
    codes = [number(rng) for _ in names]
    asked = index % 4
    depths = [(i + 0.5) / 4 for i in range(4)]
    facts = [f"The secret code for {name} is {code}." for name, code in zip(names, codes, strict=True)]
    return conversation(
        tok,
        haystack(tok, rng, facts, depths, tokens),
        f"What is the secret code for {names[asked]}?",
        f"The secret code for {names[asked]} is",
        f"{codes[asked]}.",
        depths[asked],
    )


def passkey(tok: Tokenizer, rng: random.Random, index: int, tokens: int) -> Sample:
    """One number in a text about nothing, at depths that take turns."""
    key, depth = number(rng), DEPTHS[index % len(DEPTHS)]
    text = haystack(tok, rng, [f"The pass key is {key}. Remember it."], [depth], tokens)
    return conversation(tok, text, "What is the pass key?", "The pass key is", f"{key}.", depth)


def line(tok: Tokenizer, rng: random.Random, index: int, tokens: int) -> Sample:
    """As many lines with a number as fit; one line's number is asked for."""
    pattern = "The value of line {} is"
    text, asked, value, depth = listed(tok, rng, index, tokens, pattern + " {}.")
    question = f"What is the value of line {asked}?"
    return conversation(tok, text, question, pattern.format(asked), f"{value}.", depth)


def table(tok: Tokenizer, rng: random.Random, index: int, tokens: int) -> Sample:
    """A table of keys and values, as in JSON; one key's value is asked for."""
    text, asked, value, depth = listed(tok, rng, index, tokens, '"{}": {},')
    context = f"Here are keys with values.\n\n{text}"
    return conversation(tok, context, f'What is the value of "{asked}"?', f'"{asked}":', f"{value},", depth)


def variable(tok: Tokenizer, rng: random.Random, index: int, tokens: int) -> Sample:
    """Two chains of three variables, each set to the one before it; which ones hold the first chain's value?"""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    names = ["".join(rng.sample(letters, 5)) for _ in range(6)]
    values = [number(rng), number(rng)]
    steps = []
    for i in range(3):
        for value, chain in zip(values, (names[:3], names[3:]), strict=True):
            steps.append(f"VAR {chain[i]} = {value if i == 0 else f'VAR {chain[i - 1]}'}.")
    depths = [(i + 0.5) / len(steps) for i in range(len(steps))]
    return conversation(
        tok,
        haystack(tok, rng, steps, depths, tokens),
        f"Find all variables that have the value {values[0]}.",
        f"The variables with the value {values[0]} are",
        f"{', '.join(names[:3])}.",
    )


# Their parts.


def number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def fill(tok: Tokenizer, pieces: Iterable[str], tokens: int) -> list[str]:
    """The first pieces of text that fit into so many tokens."""
    found: list[str] = []
    for piece in pieces:
        tokens -= len(tok.encode(piece))
        if tokens < 0:
            break
        found.append(piece)
    return found


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences about nothing, without end."""
    while True:
        who, did, which, what, when = map(rng.choice, (PEOPLE, VERBS, ADJECTIVES, NOUNS, TIMES))
        yield f" The {who} {did} the {which} {what} {when}."


def haystack(tok: Tokenizer, rng: random.Random, needles: list[str], depths: list[float], tokens: int) -> str:
    """Sentences about nothing with the needles (given in the order of their depths) between them.

    Raises ValueError if the needles alone are longer than `tokens`.
    """
    left = tokens - sum(len(tok.encode(f" {needle}")) for needle in needles)
    if left < 0:
        raise ValueError(
            f"{tokens} tokens are too few for what is to be found in them; use {tokens - left} or more"
        )
    hay = fill(tok, sentences(rng), left)
    for needle, depth in reversed(list(zip(needles, depths, strict=True))):
        hay.insert(round(depth * len(hay)), f" {needle}")
    return "".join(hay).strip()


def listed(
    tok: Tokenizer, rng: random.Random, index: int, tokens: int, pattern: str
) -> tuple[str, str, str, float]:
    """Lines of keys with numbers; the key that is asked for, its number, and the middle of the fifth it stands in.

    These fifths take turns. Keys are words while there are any, which a small model tells apart best, then pairs.
    Raises ValueError if nothing fits, or if keys run out.
    """
    words = [*NAMES, *PEOPLE, *VERBS, *ADJECTIVES, *NOUNS]
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    keys = rng.sample(words, len(words)) + rng.sample(pairs, len(pairs))
    values = [number(rng) for _ in keys]
    lines = fill(tok, (pattern.format(*pair) + "\n" for pair in zip(keys, values, strict=True)), tokens)
    if not 0 < len(lines) < len(keys):
        raise ValueError(f"{tokens} tokens are too few for one line, or too many for {len(keys)}; use others")
    fifth = index % 5
    asked = int((fifth + rng.random()) / 5 * len(lines))
    return "".join(lines).strip(), keys[asked], values[asked], (2 * fifth + 1) / 10
