"""Runs the steps of a Dockerfile without a daemon: each stage has a folder in place of the image's root, COPY copies,
and RUN is a shell script in the folder of WORKDIR. Programs that would change the machine are given as other programs
in `programs`, the first folder of PATH."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


def instructions(file: Path) -> list[tuple[str, str]]:
    """Pairs of instruction and its words, comments left out and continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines()]


@dataclass
class Stage:
    root: Path
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class DockerBuild:
    context: Path
    work: Path
    programs: Path
    environment: dict[str, str]
    stages: dict[str, Stage] = field(default_factory=dict)
    last: Stage | None = None

    def run(self, file: Path) -> Stage:
        """The last stage, built."""
        for number, (word, text) in enumerate(instructions(file)):
            if word == "FROM":
                name = text.partition(" AS ")[2] or str(number)
                root = self.work / name
                root.mkdir(parents=True)
                self.last = self.stages[name] = Stage(root, root)
            else:
                assert self.last is not None, "FROM comes first"
                self.step(self.last, word, text)
        assert self.last is not None
        return self.last

    def step(self, stage: Stage, word: str, text: str) -> None:
        if word == "WORKDIR":
            stage.folder = stage.root / text.lstrip("/")
            stage.folder.mkdir(parents=True, exist_ok=True)
        elif word in ("ENV", "ARG"):
            stage.variables |= dict(pair.split("=", 1) for pair in shlex.split(text))
        elif word == "COPY":
            self.copy(stage, text)
        elif word == "RUN":
            path = os.pathsep.join([str(self.programs), self.environment["PATH"]])
            variables = self.environment | stage.variables | {"PATH": path}
            subprocess.run(["sh", "-euc", text], cwd=stage.folder, env=variables, check=True)

    def copy(self, stage: Stage, text: str) -> None:
        words = shlex.split(text)
        source = self.context
        if match := re.fullmatch(r"--from=(\w+)", words[0]):
            source, words = self.stages[match[1]].root, words[1:]
        for name in words[:-1]:
            origin, target = source / name.lstrip("/"), stage.folder / words[-1]
            if origin.is_dir():
                shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__", "results"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, target)
