"""The protocol between a bench and the implementations that it measures, ours included: JSON requests and answers.

    {"do": "hello"}                                                         ->  {"version": ..., "threads": ...}
    {"do": "load", "shape": "qwen3-30b", "layers": 2, "max_tokens": 8192}   ->  {"ms": [...]}
    {"do": "round", "tokens": 512, "seconds": 0.2}                          ->  {"ms": [...], "foreign": ..., ...}
    {"do": "probe", "tokens": 64, "experts": 8}                             ->  {"out": numbers in base64, ...}

An implementation is a class with `facts`, `load` and `bind`. `Runner` answers requests with one in this process;
`serve` does so over stdin and stdout, one line each, and `Peer` is the other end of that pipe, for implementations that
need another interpreter or whose threads would disturb ours.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shapes import SHAPES, Shape, Weights, Work, make_weights, make_work
from timing import Stopwatch

if TYPE_CHECKING:
    import torch

BENCH = Path(__file__).resolve().parent.parent
TIMEOUT = 180.0  # seconds for one answer; a peer that hangs must not cost the run


class Implementation(Protocol):
    def facts(self) -> dict[str, Any]:
        """Versions and threads, for the record."""

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        """Takes the weights in, once for each layer; the seconds that each took, empty where nothing is prepared."""

    def bind(self, work: Work) -> Callable[[int], Any]:
        """A function that computes step i and returns the output [T, H]; for training see `sweeps.py`."""


class Runner:
    """Answers requests with an implementation in this process; the work of one token count is held at a time. `make`
    gives the layer's weights in bf16."""

    def __init__(self, implementation: Implementation, make: Callable[[Shape], Weights] = make_weights) -> None:
        self._implementation = implementation
        self._make = make
        self._tokens = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "hello":
            return self._implementation.facts()
        if request["do"] == "load":
            return self._load(SHAPES[request["shape"]], request["layers"], request["max_tokens"])
        if request["do"] == "probe":
            work = make_work(self._shape, request["tokens"], self._layers, experts=request["experts"])
            return {name: to_text(tensor) for name, tensor in self._results(work).items()}
        return self._round(request["tokens"], request["seconds"])

    def _load(self, shape: Shape, layers: int, max_tokens: int) -> dict[str, Any]:
        self._shape, self._layers, self._tokens = shape, layers, 0
        seconds = self._implementation.load(shape, self._make(shape), layers, max_tokens)
        return {"ms": [1e3 * taken for taken in seconds]}

    def _results(self, work: Work) -> dict[str, torch.Tensor]:
        """What the first step gives."""
        return {"out": self._implementation.bind(work)(0)}

    def prepare(self, tokens: int) -> Stopwatch:
        """Makes the work of a cell unless it is at hand."""
        if self._tokens != tokens:
            work = make_work(self._shape, tokens, self._layers)
            call = self._implementation.bind(work)
            self._check = {
                "unique_experts": work.unique_experts,
                "routes": work.routes,
                "norm": float(call(0).float().norm()),
            }
            self._stopwatch, self._tokens = Stopwatch(call), tokens
        return self._stopwatch

    def _round(self, tokens: int, seconds: float) -> dict[str, Any]:
        taken = self.prepare(tokens).round(seconds)
        return {"ms": taken.ms, "foreign": taken.foreign, **self._check}


def to_text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.float().contiguous().numpy().tobytes()).decode()


def from_text(text: str) -> torch.Tensor:
    """In one dimension, f32."""
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


def serve(make: Callable[[], Implementation], runner: type[Runner] = Runner) -> None:
    """Answers requests until stdin ends. What the implementation prints goes to stderr, away from the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running = runner(make())
    for line in sys.stdin:
        answers.write(json.dumps(running.ask(json.loads(line))) + "\n")
        answers.flush()


class PeerFailed(RuntimeError):
    """A peer exited or timed out; the message ends with the last lines of its stderr."""


class Peer:
    """An implementation in a process of its own."""

    def __init__(self, name: str, python: str, module: str, options: list[str], env: dict[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        # Found from where the user stands, not from the folder that the peer runs in; a venv's link is kept.
        program = shutil.which(python)
        if program is None:
            raise PeerFailed(f"{name}: {python} is not a program; give --peers {name}=/path/to/python")
        self._process = subprocess.Popen(
            [os.path.abspath(program), "-m", module, *options],
            cwd=BENCH,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self._failure("ended early")) from None
        if not select.select([self._process.stdout], [], [], TIMEOUT)[0]:
            raise PeerFailed(self._failure(f"gave no answer in {TIMEOUT:.0f} s"))
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._failure("ended early"))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> str:
        self._log.seek(0)
        tail = [line.rstrip() for line in self._log.read().splitlines() if line.strip()][-5:]
        return f"{self.name}: {what}" + "".join(f"\n    {line}" for line in tail)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
