#!/usr/bin/env python3
"""How much each KV head looks back: head scores for the policies headkv and duoattention.

    python scripts/measure_heads.py
    python scripts/measure_heads.py --model llama3.2-1b --text report.txt --tokens 4000 --out llama.json

A head's score is the attention that the last --queries tokens of a text give to tokens which are neither
among the first --sinks nor among the last --recent before the query: mean over these queries and over the
query heads that share the KV head. Without --text, the text states facts and ends with questions and
answers about the first of them, so that whoever answers has to look back. The same text and model give
the same file. Nothing is dropped while measuring.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from minikv.seen import Seen
from models import load_model, load_tokenizer
from models.tokenizer import Tokenizer
from models.transformer import Transformer, causal_attention

COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "golden", "pink", "orange")
ANIMALS = ("fox", "horse", "owl", "cat", "dog", "mouse", "bear", "duck", "frog", "goat", "wolf", "snake")
PLACES = ("barn", "garden", "forest", "kitchen", "harbour", "tower", "school", "market", "cellar", "mill")


class Watch:
    """Stands in for a cache in one forward: plain causal attention, and each layer's head scores noted."""

    def __init__(self, model: Transformer, n_queries: int, sinks: int, recent: int):
        self.config, self.n_queries, self.sinks, self.recent = model.config, n_queries, sinks, recent
        self.scores: list[list[float]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        heads, window = k.shape[1], self.config.window(layer)
        latest = q[:, :, -self.n_queries :].unflatten(1, (heads, -1))  # [1, H, G, w, D]
        q_pos, k_pos = pos[:, -self.n_queries :], pos[:, None].expand(-1, heads, -1)
        p = Seen(latest, q_pos, [k], [v], k_pos, pos[:, -1], window).attention(self.n_queries)
        far = (pos[:, None] >= self.sinks) & (pos[:, None] <= q_pos[..., None] - self.recent)  # [1, w, n]
        self.scores.append((p * far[:, None, None]).sum(-1).mean((2, 3))[0].tolist())
        return causal_attention(q, k, v, window)


def retrieval_text(tok: Tokenizer, n_tokens: int, n_asked: int) -> list[int]:
    """Ids of facts, and of questions about the first of them that fill the last `n_asked` tokens."""
    facts = [
        (f"the {colour} {animal} in the {place}", str(1000 + 7919 * i % 9000))
        for i, (place, animal, colour) in enumerate(product(PLACES, ANIMALS, COLOURS))
    ]
    stated = tok.encode("".join(f"The number of {who} is {number}.\n" for who, number in facts), bos=True)
    asked = tok.encode("".join(f"What is the number of {who}? It is {number}.\n" for who, number in facts))
    if n_tokens - n_asked > len(stated):
        raise ValueError(
            f"the built-in text has {len(stated)} tokens of facts, not {n_tokens - n_asked}; use --text"
        )
    return (stated[: max(n_tokens - n_asked, 0)] + asked[:n_asked])[:n_tokens]


def measure(model: Transformer, ids: list[int], n_queries: int, sinks: int, recent: int) -> list[list[float]]:
    """A score per KV head in each layer. Raises ValueError where a text is too short or too long to tell."""
    if sinks < 0 or recent < 0:
        raise ValueError(f"--sinks {sinks} and --recent {recent} must be at least 0")
    if len(ids) < sinks + recent + n_queries + 1:
        raise ValueError(
            f"a text of {len(ids)} tokens has nothing between {sinks} sinks and {recent} recent tokens of "
            f"{n_queries} queries; give it at least {sinks + recent + n_queries + 1}"
        )
    if len(ids) > model.config.max_position:
        raise ValueError(f"{len(ids)} tokens are more than the model's limit of {model.config.max_position}")
    watch = Watch(model, n_queries, sinks, recent)
    tokens = torch.tensor([ids], device=model.norm.weight.device)
    with torch.inference_mode():
        model.hidden(tokens, torch.arange(len(ids), device=tokens.device)[None], watch)
    return watch.scores


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    summary, details = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        help="preset, folder, .gguf file or downloaded hub id (smollm2-135m)",
    )
    add("--text", type=Path, metavar="FILE", help="measure on this text (default: facts and questions)")
    add("--tokens", type=int, default=1000, help="length of the text; a longer file is cut there (1000)")
    add("--queries", type=int, default=128, help="last tokens that are listened to (128)")
    add("--sinks", type=int, default=4, help="first tokens that do not count (4)")
    add("--recent", type=int, default=32, help="tokens before each query that do not count (32)")
    add("--out", type=Path, default=Path("heads.json"), metavar="FILE", help="where to write (heads.json)")
    add("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, else float32)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.tokens < 1 or args.queries < 1:
            raise ValueError(f"--tokens {args.tokens} and --queries {args.queries} must be at least 1")
        tok = load_tokenizer(args.model)
        if args.text is None:
            source, ids = "facts and questions", retrieval_text(tok, args.tokens, args.queries)
        else:
            source = args.text.name
            ids = tok.encode(args.text.read_text(encoding="utf-8"), bos=True)[: args.tokens]
        model = load_model(args.model, args.device, args.dtype)
        scores = measure(model, ids, args.queries, args.sinks, args.recent)
        how = (
            f"mean attention of the last {args.queries} of {len(ids)} tokens ({source}) to tokens beyond the "
            f"first {args.sinks} and the last {args.recent}"
        )
        shape = {"n_layers": len(scores), "n_kv_heads": len(scores[0])}
        text = json.dumps({"model": args.model, **shape, "how": how, "scores": scores}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"measure_heads.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
