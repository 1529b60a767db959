"""Finds the Pythons of this machine that ktransformers supports, for `make wheel` and `make test-wheel`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

OLDEST = (3, 11)
STABLE_ABI = (3, 12)  # the first with all that nanobind needs of it
WHEEL_311, WHEEL_312 = "cp311-cp311", "cp312-abi3"  # tags
ASK = """
import json, sys, sysconfig
import ensurepip, venv
from pathlib import Path
headers = Path(sysconfig.get_path("include"), "Python.h").exists()
threads = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([sys.version_info[:2], sys.executable, headers, threads]))
"""


@dataclass(frozen=True)
class Interpreter:
    version: tuple[int, int]
    path: Path
    headers: bool

    @property
    def wheel_tag(self) -> str:
        """The tag of the wheel that it installs."""
        return WHEEL_312 if self.version >= STABLE_ABI else WHEEL_311

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def inspect(path: Path) -> Interpreter | None:
    """None if it does not run, has no venv, or has no global lock: the stable ABI is not for those builds."""
    done = subprocess.run([path, "-I", "-c", ASK], capture_output=True, text=True)
    if done.returncode != 0:
        return None
    version, executable, headers, threads = json.loads(done.stdout)
    return None if threads else Interpreter((version[0], version[1]), Path(executable), headers)


def find() -> list[Interpreter]:
    """One of each version from 3.11, ascending; with headers before one without. Looks in PATH, then at pyenv's."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"))
    by_version: dict[tuple[int, int], Interpreter] = {}
    for path in (file for folder in folders for file in sorted(folder.glob("python3.*"))):
        match = re.fullmatch(r"python3\.(\d+)", path.name)
        if match is None or (3, int(match[1])) < OLDEST:
            continue
        python = inspect(path)
        if python is not None and (
            python.version not in by_version or python.headers > by_version[python.version].headers
        ):
            by_version[python.version] = python
    return [by_version[version] for version in sorted(by_version)]
