"""`kt llamafactory on` and `off`: the `.pth` file by which Python itself installs our hooks for a file that says
`use_kt: true`, or with USE_KT=1.

Python executes lines of `.pth` files in site-packages that begin with `import` at every start; LLaMA-Factory has no
plugins, and its launcher starts further Python processes, which run the line too. Where USE_KT is not set and no word
of the command line names a YAML or JSON file, the line does nothing more.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_text
from ktransformers.train.llamafactory.versions import WINDOWS, check_window, installed_version

PTH_NAME = "ktransformers_llamafactory.pth"
PTH_TEXT = (
    'import os, sys; (os.environ.get("USE_KT", "0").lower() in ("true", "y", "1") or "USE_KT" not in os.environ '
    'and any("use_kt" in word or word.endswith((".yaml", ".yml", ".json")) for word in sys.orig_argv)) '
    'and __import__("ktransformers.train.llamafactory.startup")\n'
)
DISTRIBUTIONS = ("llamafactory", "llamafactory-kt")


@dataclass(frozen=True)
class SwitchState:
    file: Path
    on: bool
    packages: dict[str, str | None]  # name -> version, None: not installed
    problem: str | None  # why `use_kt: true` would be refused


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def turn_on(site: Path | None = None) -> Path:
    """Write the file; the environment must have LLaMA-Factory."""
    folder = site or site_packages()
    if site is None and _llamafactory_version() is None:
        given = f"an environment without LLaMA-Factory ({folder})"
        remedy = "install ktransformers into LLaMA-Factory's environment and run its `kt`"
        raise InputError("kt llamafactory on", given, "one that has it", remedy)
    file = folder / PTH_NAME
    write_text(file, PTH_TEXT)
    return file


def turn_off(site: Path | None = None) -> Path | None:
    """Remove the file; None if there was none."""
    file = (site or site_packages()) / PTH_NAME
    if not file.is_file():
        return None
    os.unlink(file)
    return file


def read_state(site: Path | None = None) -> SwitchState:
    file = (site or site_packages()) / PTH_NAME
    on = file.is_file() and file.read_text() == PTH_TEXT
    packages = {name: installed_version(name) for name in (*DISTRIBUTIONS, *WINDOWS[0].packages)}
    version = _llamafactory_version()
    if version is None:
        return SwitchState(file, on, packages, "LLaMA-Factory is not installed")
    try:
        check_window(version)
    except InputError as error:
        return SwitchState(file, on, packages, str(error))
    return SwitchState(file, on, packages, None)


def _llamafactory_version() -> str | None:
    """Of the code, without importing its package, which takes seconds."""
    spec = importlib.util.find_spec("llamafactory")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("extras") / "env.py"
    for line in source.read_text().splitlines() if source.is_file() else ():
        if line.startswith("VERSION = "):
            return line.partition("=")[2].strip().strip("\"'")
    return None
