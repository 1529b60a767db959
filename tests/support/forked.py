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
WARM = ["torch", "ktransformers.nn", "ktransformers.quant.convert", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
WARM += ["ktransformers.train.run", "ktransformers.train.trainers", "trl.trainer.sft_trainer"]
SERVER.set_forkserver_preload(WARM)  # what is not installed is left out


@dataclass(frozen=True)
class Ended:
    returncode: int | None
    stdout: str
    stderr: str


def _run(code: str, words: tuple[str, ...], variables: dict[str, str], folder: str) -> None:
    for name in [name for name in os.environ if name.startswith("KT_")]:
        del os.environ[name]
    os.environ |= variables
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["-c", *words]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class Forked:
    """A piece of code that has been started; `KT_` variables of the tests do not reach it."""

    def __init__(self, code: str, *words: object, **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        arguments = (code, tuple(map(str, words)), variables, self._folder.name)
        self._process = SERVER.Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float = 300) -> Ended:
        """Its end, or after so many seconds that of both."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        said = [Path(self._folder.name, stream).read_text() for stream in ("out", "err")]
        self._folder.cleanup()
        return Ended(self._process.exitcode, *said)


def python(code: str, *words: object, **variables: str) -> Ended:
    return Forked(code, *words, **variables).wait()
