"""What the scripts' command lines share."""

import argparse
import json
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from minikv import Policy
from minikv.strategies.fastgen import FastGen
from models.tokenizer import Tokenizer


class Parser(argparse.ArgumentParser):
    """Mistakes cost one line and exit code 2, without the usage text."""

    def error(self, message: str) -> None:
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def print_seconds(title: str, times: dict[str, list[float]], settings: dict[str, Any]) -> None:
    """Medians, ranges and what each adds to `full`; settings and all times as JSON in the last line."""
    full = median(times["full"])
    print(
        f"{title}: {settings['tokens']} tokens, budget {settings['budget']}, median of {settings['repeat']} (range)"
    )
    for name, took in times.items():
        extra = 100 * (median(took) / full - 1)
        print(f"{name:20} {median(took):7.2f} s ({min(took):.2f}, {max(took):.2f})  {extra:+6.1f} %")
    print(json.dumps(dict(settings=settings, threads=torch.get_num_threads(), seconds=times)))


def with_token_kinds(policy: Policy, tok: Tokenizer) -> Policy:
    """FastGen told which of the tokenizer's ids are control tokens and punctuation; other policies as they are."""
    if not isinstance(policy.score, FastGen):
        return policy
    marks = [
        ids for mark in ".,;:!?" for ids in (tok.encode(mark), tok.encode(f"a{mark}")[1:]) if len(ids) == 1
    ]
    punctuation = tuple(sorted({ids[0] for ids in marks}))
    told = replace(policy.score, special=tuple(sorted(tok.stop_ids)), punctuation=punctuation)
    return replace(policy, score=told, heads=told)
