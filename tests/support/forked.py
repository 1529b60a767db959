"""Runs Python code in a forked process, because `python -c` would import torch for seconds.

A fork server has imported the packages that most code needs and has computed nothing: no CPU variant is chosen, no
thread runs, no pool exists. Every piece of code runs in a fork of it, with arguments, environment, output and exit code
like those of an interpreter. Not for tests of imports or of interpreter shutdown.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch",
    "ktransformers.nn",
    "ktransformers.quant.convert",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]
PRELOADED += ["ktransformers.train.run", "ktransformers.train.trainers", "trl.trainer.sft_trainer"]
SERVER.set_forkserver_preload(PRELOADED)  # missing packages are skipped


@dataclass(frozen=True)
class Completed:
    returncode: int | None
    stdout: str
    stderr: str


def _run(code: str, arguments: tuple[str, ...], variables: dict[str, str], folder: str) -> None:
    for name in [name for name in os.environ if name.startswith("KT_")]:
        del os.environ[name]
    os.environ |= variables
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class Forked:
    """Running code; `KT_` variables of the test process are removed from its environment."""

    def __init__(self, code: str, *arguments: object, **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        strings = tuple(map(str, arguments))
        self._process = SERVER.Process(target=_run, args=(code, strings, variables, self._folder.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float = 300) -> Completed:
        """Wait for its end; after `seconds` the process is killed."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        outputs = [Path(self._folder.name, stream).read_text() for stream in ("out", "err")]
        self._folder.cleanup()
        return Completed(self._process.exitcode, *outputs)


def python(code: str, *arguments: object, **variables: str) -> Completed:
    return Forked(code, *arguments, **variables).wait()
