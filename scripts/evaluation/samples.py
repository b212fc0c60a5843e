"""What a task is made of: a context, perhaps a question, and what a cache is judged by."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.tokenizer import Tokenizer

PROTOCOLS = ("aware", "agnostic")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of answers, by turns


@dataclass(frozen=True)
class Forced:
    """A continuation the model is made to follow, whatever it would have said itself."""

    ids: list[int]
    scored: list[bool]  # which of them are judged
    one_by_one: bool = True  # fed as in decoding; else all at once


@dataclass(frozen=True)
class Free:
    """An answer the model gives by itself; `judge` makes a score from 0 to 1 of its text."""

    judge: Callable[[str], float]
    max_new_tokens: int


@dataclass(frozen=True)
class Sample:
    """Token ids of one example. `depth` is where in the context the answer stands, from 0 to 1."""

    context: list[int]
    question: list[int]
    target: Forced | Free
    depth: float | None = None

    def prompt(self, protocol: str) -> list[list[int]]:
        """What is read, in the chunks after which a cache is compressed.

        `aware`: context and question at once, so the question has a say in what stays. `agnostic`: the context
        is compressed before anybody knows what will be asked.
        """
        if protocol == "agnostic" and self.question:
            return [self.context, self.question]
        return [self.context + self.question]

    @property
    def n_tokens(self) -> int:
        """Most tokens that a cache of this sample ever has to take."""
        new = len(self.target.ids) if isinstance(self.target, Forced) else self.target.max_new_tokens
        return len(self.context) + len(self.question) + new


@dataclass(frozen=True)
class Order:
    """How many samples of which size. The same order gives the same samples, and fewer are the first of more."""

    n: int
    seed: int
    tokens: int  # of a context, about
    new: int  # of a continuation, where it is text
    text: Path | None = None  # natural text to use


def conversation(
    tok: Tokenizer, context: str, question: str, begun: str, answer: str, depth: float | None = None
) -> Sample:
    """A user's message that ends in a question, and an assistant who has said `begun` and goes on with the answer.

    Tokens of the answer that hold a letter or a digit are scored. The last token of `begun` is a decoding step, so
    that all of them are predicted from what was kept. A model without a chat format reads plain text.
    """
    context_ids, question_ids = message(tok, context, question)
    said = tok.encode(f"{begun} {answer}")
    n_begun = len(shared_start(said, tok.encode(begun)))
    scored = [i >= n_begun and any(c.isalnum() for c in tok.decode([id])) for i, id in enumerate(said)]
    last = n_begun - 1
    return Sample(context_ids, question_ids + said[:last], Forced(said[last:], scored[last:]), depth)


def message(tok: Tokenizer, context: str, question: str) -> tuple[list[int], list[int]]:
    """The ids of a message in the model's chat format, divided where the question begins."""

    def ids(text: str) -> list[int]:
        if tok.format is None:
            return tok.encode(text + "\n", bos=True)
        return tok.chat([{"role": "user", "content": text}])

    whole = ids(f"{context}\n\n{question}")
    start = shared_start(whole, ids(context))
    return start, whole[len(start) :]


def shared_start(a: list[int], b: list[int]) -> list[int]:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]
