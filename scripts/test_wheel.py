"""Tests the wheels in dist/ as `make test-wheel`: for every Python from 3.11 on this machine a bare venv and a PATH
without a compiler, CMake or any other program; the wheel with its extra `sft`; `kt doctor`; and a tiny model trained,
served and proven by `kt loop` (tests/wheel/loop.yaml).

torch is installed first, at the version of constraints.txt; all other packages are what pip resolves from the wheel's
own bounds. With --offline nothing is downloaded: the venv sees the packages of its Python and of PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from pythons import Interpreter, find

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "test-wheel"
FIXTURES = ROOT / "tests" / "data" / "v0.1.0"
KEPT = ("HOME", "LANG", "TMPDIR")  # of the environment, and what pip is configured by


def environment(venv: Path, offline: bool) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in KEPT or key.startswith("PIP_")}
    if offline and "PYTHONPATH" in os.environ:
        kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return kept | {"PATH": str(venv / "bin")}


@dataclass(frozen=True)
class Venv:
    path: Path
    offline: bool

    def run(self, *words: str | Path, folder: Path = WORK) -> str:
        """Runs a program of the venv and returns what it printed; ends with it if it fails."""
        program, variables = self.path / "bin" / words[0], environment(self.path, self.offline)
        done = subprocess.run([program, *words[1:]], cwd=folder, env=variables, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def pip(self, *words: str | Path) -> None:
        self.run("python", "-m", "pip", "--quiet", "--disable-pip-version-check", *words)


def wheel_for(python: Interpreter, dist: Path) -> Path:
    files = sorted(dist.glob(f"ktransformers-*-{python.wheel_tag}-*{platform.machine()}.whl"))
    if not files:
        raise SystemExit(f"no wheel for Python {python} in {dist}: run make wheel")
    return max(files, key=lambda file: file.stat().st_mtime)


def install(python: Interpreter, wheel: Path, venv: Venv) -> None:
    shutil.rmtree(venv.path, ignore_errors=True)
    words = ["--system-site-packages"] if venv.offline else []
    subprocess.run([python.path, "-m", "venv", *words, venv.path], check=True)
    if venv.offline:
        venv.pip("install", "--no-index", "--no-deps", "--ignore-installed", wheel)
        return
    (torch,) = re.findall(r"(?m)^torch==\S+", (ROOT / "constraints.txt").read_text())
    venv.pip("install", "--only-binary=:all:", torch)
    venv.pip("install", "--only-binary=:all:", f"{wheel}[sft]")
    venv.pip("check")


def train_serve_prove(venv: Venv, folder: Path) -> str:
    """What the report says of the proof."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("base", "data"):
        shutil.copytree(FIXTURES / name, folder / name)
    shutil.copy(ROOT / "tests" / "wheel" / "loop.yaml", folder)
    venv.run("kt", "loop", "loop.yaml", "--quiet", folder=folder)
    report = json.loads((folder / "run" / "report.json").read_text())
    if report["proven"] is not True:
        raise SystemExit(f"{folder}/run/report.json: {report['proof']}")
    return str(report["proof"])


def check(python: Interpreter, wheel: Path, offline: bool) -> None:
    venv = Venv(WORK / f"python{python}", offline)
    begin = time.monotonic()
    install(python, wheel, venv)
    installed = time.monotonic()
    module = Path(venv.run("python", "-c", "from ktransformers import _core; print(_core.__file__)").strip())
    if not module.is_relative_to(venv.path):
        raise SystemExit(f"{module} is not of {venv.path}")
    doctor = json.loads(venv.run("kt", "doctor", "--json"))
    proof = train_serve_prove(venv, WORK / f"loop{python}")
    print(f"Python {python}: {wheel.name}, {doctor['isa']}, installed in {installed - begin:.0f} s")
    print(f"  trained, served and {proof} ({time.monotonic() - installed:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--offline", action="store_true", help="download nothing, use each Python's own packages")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    pythons = find()
    if not pythons:
        raise SystemExit("no Python of 3.11 or later with venv")
    for python in pythons:
        check(python, wheel_for(python, given.dist.resolve()), given.offline)


if __name__ == "__main__":
    main()
