#!/usr/bin/env python3
"""See what a policy keeps of a prompt.

    python scripts/inspect_cache.py --prompt-file report.txt --policy snapkv --budget 512 --out kept.png
    python scripts/inspect_cache.py --prompt-file report.txt --policy "snapkv+adakv" --budget 256 --text

The picture has a row for each KV head of each layer and a column for each position. With --text the prompt
itself is printed, each token the brighter the more heads still hold it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib
import numpy as np
import torch
from rich.console import Console
from rich.style import Style
from rich.text import Text

from minikv import CompressedKVCache, Policy
from minikv.generate import prefill
from models import load_model, load_tokenizer
from scripts.command_line import Parser, with_token_kinds

matplotlib.use("Agg")
from matplotlib import pyplot


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="See what a policy keeps of a prompt.")
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as in chat.py (smollm2-135m)")
    add("--prompt-file", type=Path, required=True, help="the text, sent as a user message")
    add("--policy", default="snapkv", help="what stays (snapkv)")
    add("--budget", type=int, default=512, help="tokens per KV head per layer, on average (512)")
    add("--chunk", type=int, help="feed the prompt in pieces of N tokens")
    add("--device", help="default: a GPU if there is one")
    add("--dtype", help="default: bfloat16 on a GPU, else float32")
    add("--out", type=Path, help="write the picture here (PNG, PDF or SVG)")
    add("--text", action="store_true", help="print the prompt with the kept share of each token")
    args = parser.parse_args(argv)
    if args.out is None and not args.text:
        parser.error("say --out FILE for a picture, --text for the text, or both")
    return args


def kept_mask(cache: CompressedKVCache, n_layers: int, n: int) -> np.ndarray:
    """Which positions each head holds, bool `[layers, heads, n]`."""
    heads = len(cache.kept(0)[0])
    mask = np.zeros((n_layers, heads, n), dtype=bool)
    for layer in range(n_layers):
        for head, positions in enumerate(cache.kept(layer)[0]):
            mask[layer, head, positions] = True
    return mask


def draw(mask: np.ndarray, title: str, path: Path) -> None:
    layers, heads, n = mask.shape
    height = min(14.0, 2.0 + 0.12 * layers * heads)
    figure, axes = pyplot.subplots(figsize=(11, height), layout="constrained")
    axes.imshow(mask.reshape(layers * heads, n), aspect="auto", cmap="Blues", interpolation="antialiased")
    step = max(1, layers // 16)
    axes.set_yticks(
        [layer * heads + (heads - 1) / 2 for layer in range(0, layers, step)], range(0, layers, step)
    )
    axes.set_xlabel("position in the prompt (tokens)")
    axes.set_ylabel(f"layer ({heads} KV heads each)")
    axes.set_title(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def show_text(tokens: list[str], share: np.ndarray, console: Console) -> None:
    """The text, each token shaded from dark (nobody holds it) to bright (every head does)."""
    text = Text()
    for token, kept in zip(tokens, share.tolist(), strict=True):
        level = int(70 + 185 * kept)
        text.append(token, Style(color=f"rgb({level},{level},{level})", bold=kept > 0.9))
    console.print(text)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        tok = load_tokenizer(args.model)
        message = {"role": "user", "content": args.prompt_file.read_text(encoding="utf-8")}
        ids = tok.chat([message])
        model = load_model(args.model, args.device, args.dtype)
        policy = with_token_kinds(Policy.parse(args.policy), tok)
        cache = CompressedKVCache.for_model(model, policy, budget=args.budget)
        cache.check_fits(len(ids))
        with torch.no_grad():
            prefill(model, [ids], cache, args.chunk)
        mask = kept_mask(cache, model.config.n_layers, len(ids))
        per_head = mask.sum(-1)
        title = f"{args.policy}, budget {args.budget}: {per_head.mean():.0f} of {len(ids)} tokens per head"
        print(f"{title} (fewest {per_head.min()}, most {per_head.max()}), {cache.nbytes / 2**20:.1f} MiB")
        if args.out is not None:
            draw(mask, title, args.out)
            print(f"written to {args.out}")
        if args.text:
            show_text([tok.decode([i]) for i in ids], mask.mean((0, 1)), Console())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
