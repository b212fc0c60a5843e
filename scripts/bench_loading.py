#!/usr/bin/env python3
"""How much memory loading a model takes beyond the model itself (Linux).

    python scripts/bench_loading.py
    python scripts/bench_loading.py --model smollm2-135m

Without --model it first writes a random checkpoint of about 1 GB to a temporary folder. Each row is a
process of its own. The figure is the peak rise of RssAnon while the weights are read: the mapped pages of
the checkpoint file, which the kernel may drop at any time, count in RSS but not in RssAnon.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from models.checkpoint import write_safetensors
from models.config import Config
from models.hub import find
from models.load import read_config, skeleton
from models.weights import load_weights, places

# 527 million parameters: 1.05 GB in bfloat16, the largest tensor 131 MB.
SHAPE = Config("llama", 8, 2048, 16, 16, 128, 5632, 32000, 2048)


def write_random(directory: Path) -> None:
    """A random bfloat16 checkpoint of `SHAPE`, written tensor by tensor."""
    shapes = {name: place.shape for name, place in places(SHAPE).items()}
    generator = torch.Generator().manual_seed(0)

    def rows(name: str):
        yield torch.randn(shapes[name], generator=generator)

    write_safetensors(directory / "model.safetensors", shapes, torch.bfloat16, rows)
    config = dict(
        model_type="llama", num_hidden_layers=SHAPE.n_layers, hidden_size=SHAPE.hidden_size,
        num_attention_heads=SHAPE.n_heads, intermediate_size=SHAPE.ffn_size, vocab_size=SHAPE.vocab_size,
        max_position_embeddings=SHAPE.max_position, rms_norm_eps=SHAPE.norm_eps,
    )  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def anonymous() -> int:
    """Bytes of memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def measure(directory: Path, dtype: torch.dtype) -> dict[str, float]:
    """Load in this process; megabytes."""
    model = skeleton(read_config(directory))
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    load_weights(model, directory, "cpu", dtype)
    peak = max(peak, anonymous())
    done.set()
    watcher.join()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters()) * dtype.itemsize
    return dict(model_MB=held / 1e6, peak_rise_MB=(peak - before) / 1e6, largest_tensor_MB=largest / 1e6)


def main(args: argparse.Namespace) -> None:
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), getattr(torch, args.measure[1]))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = find(args.model) if args.model else Path(temporary)
        if not args.model:
            write_random(directory)
        for dtype in ("bfloat16", "float32"):
            command = [sys.executable, __file__, "--measure", str(directory), dtype]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            print(args.model or "random", dtype, result.stdout.strip())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="measure this one instead of a random checkpoint")
    parser.add_argument("--measure", nargs=2, metavar=("DIR", "DTYPE"), help="one row, in this process")
    main(parser.parse_args())
