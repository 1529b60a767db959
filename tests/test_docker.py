"""The Dockerfiles without a daemon: their steps run as scripts, quickly with programs that write down how they were
called, slowly with pip itself; what they copy is all that the build reads; extras, variables and verbs exist."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ktransformers.cli.main import app
from tests.support.dockerfile import DockerBuild, instructions

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "docker" / name for name in ("Dockerfile.cpu", "Dockerfile.cuda")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = "ktransformers-0-cp312-abi3-linux_any.whl"
# Writes its words as a line of JSON; `pip wheel` also leaves a wheel.
RECORDER = f"""#!{sys.executable}
import json, pathlib, sys
words = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
with open({{log!r}}, "a") as log:
    print(json.dumps(words), file=log)
if words[:2] == ["pip", "wheel"]:
    folder = pathlib.Path(words[words.index("--wheel-dir") + 1])
    folder.mkdir()
    (folder / "{WHEEL}").touch()
"""


def record(folder: Path, *names: str) -> Path:
    """Programs of these names in `folder`; returns the file that they write to."""
    folder.mkdir()
    log = folder / "log"
    for name in names:
        (folder / name).write_text(RECORDER.format(log=str(log)))
        (folder / name).chmod(0o755)
    return log


def of(file: Path, word: str) -> list[str]:
    return [text for instruction, text in instructions(file) if instruction == word]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
@pytest.mark.parametrize("index", ["", "an-index"])
def test_steps_run(file: Path, index: str, tmp_path: Path) -> None:
    log = record(tmp_path / "programs", "apt-get", "pip", "useradd", "install", "rm")
    build = DockerBuild(ROOT, tmp_path / "image", tmp_path / "programs", dict(os.environ))
    before = instructions(file)
    assert ("ARG", "TORCH_INDEX=") in before
    changed = tmp_path / "Dockerfile"
    changed.write_text(file.read_text().replace("ARG TORCH_INDEX=\n", f"ARG TORCH_INDEX={index}\n"))
    build.run(changed)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    (torch,) = re.findall(r"(?m)^torch==\S+", (ROOT / "constraints.txt").read_text())
    assert ["pip", "install", "--no-cache-dir", *(["--index-url", index] if index else []), torch] in calls
    (made,) = [call for call in calls if call[:2] == ["pip", "wheel"]]
    assert made[-1] == "."
    (installed,) = [call for call in calls if call[:2] == ["pip", "install"] and "--constraint" in call]
    path, extras = re.fullmatch(r"(.+\.whl)\[([\w,]+)\]", installed[-1]).groups()  # type: ignore[union-attr]
    assert path == f"wheels/{WHEEL}"
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    packages = [call for call in calls if call[:2] == ["apt-get", "install"]]
    assert [call[-1] for call in packages] == (["g++"] if file.suffix == ".cpu" else ["g++", "libc6-dev"])
    assert ["useradd", "--create-home", "kt"] in calls and of(file, "USER") == ["kt"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_copied_files_are_all_that_the_build_reads(file: Path, tmp_path: Path) -> None:
    """CMake finds every source in what the first stage copies, and pyproject.toml every file that it names."""
    record(tmp_path / "programs", "apt-get", "pip", "useradd", "install", "rm")
    build = DockerBuild(ROOT, tmp_path / "image", tmp_path / "programs", dict(os.environ))
    build.run(file)
    source = tmp_path / "image" / "build" / "src"
    assert all((source / name).is_file() for name in (PROJECT["readme"], *PROJECT["license-files"]))
    cmake = Path(sys.executable).with_name("cmake")
    words = [cmake, "-S", source, "-B", tmp_path / "native", "-DSKBUILD=2", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*map(str, words), "-DKT_GLIBC=2.28"], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_the_context_holds_what_is_copied(file: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {name for text in of(file, "COPY") if not text.startswith("--from") for name in shlex.split(text)[:-1]}
    assert copied == kept and "*" in lines
    tracked = subprocess.run(["git", "ls-files", *copied], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.partition("/")[0] for name in tracked.split()} == copied


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_names_exist(file: Path) -> None:
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    verbs |= {group.name for group in app.registered_groups if group.name}
    (entry,) = of(file, "ENTRYPOINT")
    assert json.loads(entry) == ["kt"] and "kt" in PROJECT["scripts"]
    (default,) = of(file, "CMD")
    shown = re.findall(r"(?m)^#   docker run .*?ktransformers:\w+ (\w+)", file.read_text())
    assert {json.loads(default)[0], *shown} == {"doctor", "serve"} <= verbs
    page = (ROOT / "docs" / "environment.md").read_text()
    ours = re.findall(r"\b((?:HF|XDG|KT)_\w+)=", " ".join(of(file, "ENV")))
    assert len(ours) == 4 and all(f"`{name}`" in page for name in ours)
    images = {text.partition(" AS ")[0] for text in of(file, "FROM")}
    (image,) = images
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", image)
    assert version is not None and f"Programming Language :: Python :: {version[1]}" in PROJECT["classifiers"]


def test_both_files_are_built_alike() -> None:
    """The GPU adds a compiler for Triton and variables; nothing else differs."""
    cpu, cuda = (instructions(file) for file in FILES)
    assert [step for step in cpu if step not in cuda] == []
    added = [step for step in cuda if step not in cpu]
    assert [word for word, _ in added] == ["RUN", "ENV"]
    assert "gcc" in added[0][1] and "NVIDIA_DRIVER_CAPABILITIES" in added[1][1]


@pytest.mark.slow
def test_steps_of_the_cpu_file_for_real(tmp_path: Path) -> None:
    """pip builds the wheel and installs it with its extras in a venv; then `kt doctor` runs, as CMD says."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    record(tmp_path / "programs", "apt-get", "useradd", "install", "rm")  # those that need an image
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    clean |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    DockerBuild(ROOT, tmp_path / "image", tmp_path / "programs", clean).run(FILES[0])
    done = subprocess.run([str(python.with_name("kt")), "doctor", "--json"], env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert report["ok"] and report["packages"]["ktransformers"] == importlib.metadata.version("ktransformers")
    assert report["packages"]["transformers"] == pins["transformers"]
