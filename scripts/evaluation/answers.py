"""Scores of a text against references, each from 0 to 1, as LongBench and RULER define them."""

import re
import string
from collections import Counter
from collections.abc import Callable

from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

Judge = Callable[..., float]  # of a text and a reference


def normal_words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (as SQuAD's evaluation has it)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(text: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it occurs."""
    said, wanted = normal_words(text), normal_words(reference)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (letters and digits, lower case, not stemmed)."""
    said, wanted = (re.findall(r"[a-z0-9]+", side.lower()) for side in (text, reference))
    common = LCSseq.similarity(said, wanted)
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def edit_similarity(text: str, reference: str) -> float:
    """1 - insertions and deletions that turn one into the other, over both lengths; of the first line of code."""
    lines = text.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return fuzz.ratio(code, reference) / 100


def share_of_numbers(text: str, reference: str) -> float:
    """Of all numbers in the text, the share that is the reference."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def share_of_paragraph_numbers(text: str, reference: str) -> float:
    """As `share_of_numbers`, for a reference like `Paragraph 12`."""
    return share_of_numbers(text, "".join(re.findall(r"Paragraph (\d+)", reference)))


def classification(text: str, reference: str, classes: list[str]) -> float:
    """One over the number of classes the text names, if the right one is among them.

    A class whose name is only part of the reference's does not count.
    """
    named = [name for name in classes if name in text and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def mentions(text: str, reference: str) -> float:
    return float(reference.lower() in text.lower())
