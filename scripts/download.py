"""Fetch checkpoints, list the presets, convert GGUF files.

python scripts/download.py llama3.2-1b qwen2.5-0.5b
python scripts/download.py --gguf model-Q4_K_M.gguf --to checkpoints/mine

A name is a preset (see --list) or a hub id such as Qwen/Qwen3-0.6B. Files go into the cache folder
(MINIKV_HOME, or ~/.cache/minikv) unless --to names another. Run it again after an interruption: files
that are whole are kept.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.download import fetch, plan
from models.gguf_import import import_gguf
from models.hub import find, is_complete, model_folder
from models.zoo import MODELS


def main(args: argparse.Namespace) -> None:
    if args.list:
        print_presets()
    if args.gguf is not None:
        convert(args.gguf, args.to)
    for name in args.names:
        get(name, args.to, args.dry_run)


def print_presets() -> None:
    print(f"{'preset':18} {'parameters':>10} {'bf16':>9}  {'gated':5} {'here':4}  repository")
    for name, preset in MODELS.items():
        count = preset.config.n_params
        gated = "yes" if preset.gated else "no"
        here = "yes" if is_complete(model_folder(name)) else "no"
        size = f"{2 * count / 1e9:.1f} GB"
        print(f"{name:18} {count / 1e9:9.2f}B {size:>9}  {gated:5} {here:4}  {preset.repo}")


def convert(path: Path, to: Path | None) -> None:
    if to is None:
        print(find(path))
    else:
        import_gguf(path, to)
        print(to)


def get(name: str, to: Path | None, dry_run: bool) -> None:
    todo = plan(name, to)
    existing = next(path for path in (todo.folder, *todo.folder.parents) if path.exists())
    print(
        f"{name}: {sum(todo.files.values()):,} bytes in {len(todo.files)} files from {todo.origin}, "
        f"{todo.needed:,} still to fetch into {todo.folder} "
        f"({shutil.disk_usage(existing).free:,} bytes free)"
    )
    if not dry_run:
        print(fetch(todo))


def parse(argv: list[str]) -> argparse.Namespace:
    summary, details = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="presets or hub ids (org/name)")
    parser.add_argument("--list", action="store_true", help="show all presets")
    parser.add_argument("--dry-run", action="store_true", help="only say how much would be fetched")
    parser.add_argument("--to", type=Path, metavar="DIR", help="put the one model named here")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="convert a GGUF file")
    args = parser.parse_args(argv)
    if not (args.names or args.list or args.gguf):
        parser.error("name a preset or a hub id, or use --list or --gguf FILE")
    if args.to and len(args.names) + (args.gguf is not None) != 1:
        parser.error("--to takes exactly one model")
    return args


if __name__ == "__main__":
    try:
        main(parse(sys.argv[1:]))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output (`head`) has seen enough; Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"download.py: {error}", file=sys.stderr)
        sys.exit(2)
