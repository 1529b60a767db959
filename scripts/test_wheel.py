"""Tests the wheels in dist/ as `make test-wheel`: for every Python from 3.11 on this machine a bare venv and a PATH
without a compiler, CMake or any other program; the wheel with its extra `sft`; `kt doctor`; and a tiny model trained,
served and proven by `kt loop` (tests/wheel/loop.yaml).

torch is installed first, at the version of constraints.txt; all other packages are what pip resolves from the wheel's
own bounds. With --offline nothing is downloaded: the venv sees the packages of its Python and of PYTHONPATH, through a
.pth file, because programs that drop PYTHONPATH have to find them too.
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
SOURCE = ROOT / "src" / "ktransformers"
KEPT = ("HOME", "LANG", "TMPDIR")  # of the environment, and what pip is configured by


def environment(venv: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in KEPT or key.startswith("PIP_")}
    # On the CPU, because Triton calls a C compiler.
    return kept | {"PATH": str(venv / "bin"), "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Venv:
    path: Path

    def call(self, *words: str | Path, folder: Path = WORK) -> subprocess.CompletedProcess[str]:
        """Runs a program of the venv."""
        program, variables = self.path / "bin" / words[0], environment(self.path)
        return subprocess.run([program, *words[1:]], cwd=folder, env=variables, capture_output=True, text=True)

    def run(self, *words: str | Path, folder: Path = WORK) -> str:
        """What the program printed; ends with it if it fails."""
        done = self.call(*words, folder=folder)
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


def lend_packages(python: Interpreter, venv: Venv) -> None:
    """Lets the venv see what the Python sees, behind the venv's own packages."""
    folders = subprocess.run(
        [python.path, "-c", "import sys; print(*sys.path[1:], sep='\\n')"], check=True, text=True, capture_output=True
    ).stdout.splitlines()
    site = venv.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    lines = [folder for folder in folders if folder.endswith("-packages")]
    Path(site, "lent.pth").write_text("\n".join(lines) + "\n")


def install(python: Interpreter, wheel: Path, venv: Venv, offline: bool) -> None:
    shutil.rmtree(venv.path, ignore_errors=True)
    subprocess.run([python.path, "-m", "venv", venv.path], check=True)
    if offline:
        venv.pip("install", "--no-index", "--no-deps", wheel)
        lend_packages(python, venv)
        return
    (torch,) = re.findall(r"(?m)^torch==\S+", (ROOT / "constraints.txt").read_text())
    venv.pip("install", "--only-binary=:all:", torch)
    venv.pip("install", "--only-binary=:all:", f"{wheel}[sft]")
    # Packages for CUDA that torch brings for some Pythons are tagged for another machine than they are for.
    conflicts = venv.call("python", "-m", "pip", "check").stdout.splitlines()
    if wrong := [line for line in conflicts if re.search(r" requires | has requirement ", line)]:
        raise SystemExit("\n".join(wrong))


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


def missing_examples(package: Path) -> list[str]:
    """Recipes, samples of rules and other YAML files of the checkout that an installed package lacks."""
    names = [str(file.relative_to(SOURCE)) for file in sorted(SOURCE.rglob("*.yaml"))]
    return [name for name in names if not (package / name).is_file()]


def check(python: Interpreter, wheel: Path, offline: bool) -> None:
    venv = Venv(WORK / f"python{python}")
    begin = time.monotonic()
    install(python, wheel, venv, offline)
    installed = time.monotonic()
    module = Path(venv.run("python", "-c", "from ktransformers import _core; print(_core.__file__)").strip())
    if not module.is_relative_to(venv.path):
        raise SystemExit(f"{module} is not of {venv.path}")
    if missing := missing_examples(module.parent):
        raise SystemExit(f"{wheel} lacks {', '.join(missing)}")
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
