"""Local benchmark files: LongBench and RULER, one JSON object a line, with their own metrics.

LongBench: `context`, `input`, `answers`, `dataset`, `all_classes`. The prompt is the context and then the input,
not the template of LongBench's own scripts, so scores compare policies, not models with published tables. Contexts
that are too long lose their middle. RULER: `input`, `outputs`, and `answer_prefix` in its newer files; the last
line of the input is the question.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from models.tokenizer import Tokenizer
from scripts.evaluation import answers
from scripts.evaluation.samples import Free, Order, Sample, message

# English data sets of LongBench: metric, longest answer in tokens (as its own scripts have them).
LONGBENCH: dict[str, tuple[answers.Judge, int]] = {
    "narrativeqa": (answers.f1, 128),
    "qasper": (answers.f1, 128),
    "multifieldqa_en": (answers.f1, 64),
    "hotpotqa": (answers.f1, 32),
    "2wikimqa": (answers.f1, 32),
    "musique": (answers.f1, 32),
    "gov_report": (answers.rouge_l, 512),
    "qmsum": (answers.rouge_l, 512),
    "multi_news": (answers.rouge_l, 512),
    "trec": (answers.classification, 64),
    "triviaqa": (answers.f1, 32),
    "samsum": (answers.rouge_l, 128),
    "passage_count": (answers.share_of_numbers, 32),
    "passage_retrieval_en": (answers.share_of_paragraph_numbers, 32),
    "lcc": (answers.edit_similarity, 64),
    "repobench-p": (answers.edit_similarity, 64),
}
FIRST_LINE_ONLY = ("trec", "triviaqa", "samsum")
SUMMARIES = ("gov_report", "multi_news")
RULER_NEW_TOKENS = 128


def longbench(path: Path) -> Callable[[Tokenizer, Order], list[Sample]]:
    def make(tok: Tokenizer, order: Order) -> list[Sample]:
        fields = ("context", "input", "answers", "dataset")
        return [longbench_sample(tok, raw, order) for raw in read(path, fields, order.n)]

    return make


def ruler(path: Path) -> Callable[[Tokenizer, Order], list[Sample]]:
    def make(tok: Tokenizer, order: Order) -> list[Sample]:
        return [ruler_sample(tok, raw, path) for raw in read(path, ("input", "outputs"), order.n)]

    return make


def read(path: Path, fields: tuple[str, ...], n: int) -> list[dict[str, Any]]:
    """The first n objects of a file. Raises ValueError naming the line that is none or lacks a field."""
    found = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if len(found) == n:
                break
            try:
                raw = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
            missing = [name for name in fields if not isinstance(raw, dict) or name not in raw]
            if missing:
                raise ValueError(
                    f"{path}, line {number} has no {', '.join(missing)}; it must be an object with {fields}"
                )
            found.append(raw)
    if not found:
        raise ValueError(f"{path} is empty")
    return found


def longbench_sample(tok: Tokenizer, raw: dict[str, Any], order: Order) -> Sample:
    """Raises ValueError for a data set that is not among the English ones."""
    name = raw["dataset"].removesuffix("_e")
    if name not in LONGBENCH:
        raise ValueError(
            f"LongBench's {name!r} is not among the data sets known here: {', '.join(LONGBENCH)}"
        )
    judge, new = LONGBENCH[name]
    if name == "trec":
        judge = partial(judge, classes=raw["all_classes"])
    asked = "Write a one-page summary of the text above." if name in SUMMARIES else raw["input"]
    context, question = message(tok, raw["context"], asked)
    context = without_middle(context, order.tokens - len(question) - new)
    return Sample(context, question, Free(best_of(judge, raw["answers"], name in FIRST_LINE_ONLY), new))


def ruler_sample(tok: Tokenizer, raw: dict[str, Any], path: Path) -> Sample:
    """Recall of all references; in question answering one of them suffices (`qa` in the file's path)."""
    context, _, asked = raw["input"].rstrip().rpartition("\n")
    context_ids, question = message(tok, context, asked)
    question += tok.encode(raw.get("answer_prefix", "").strip())
    some = "qa" in path.stem or "qa" in path.parent.name
    judge = best_of(answers.mentions, raw["outputs"], False) if some else recall(raw["outputs"])
    return Sample(context_ids, question, Free(judge, RULER_NEW_TOKENS))


def best_of(judge: answers.Judge, references: list[str], first_line: bool) -> Callable[[str], float]:
    """The best score over the references, of the whole text or its first line."""

    def score(text: str) -> float:
        said = text.lstrip("\n").split("\n")[0] if first_line else text
        return max(judge(said, reference) for reference in references)

    return score


def recall(references: list[str]) -> Callable[[str], float]:
    return lambda text: mean(answers.mentions(text, reference) for reference in references)


def without_middle(ids: list[int], most: int) -> list[int]:
    """Head and tail of what is longer than `most`."""
    if most < 2:
        raise ValueError(f"--tokens leaves {most} tokens for the context; give more")
    if len(ids) <= most:
        return ids
    half = most // 2
    return ids[: most - half] + ids[-half:]
