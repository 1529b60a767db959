"""A child process for what comes with downloaded files and may take forever or all memory: patterns, templates,
tokenizers.

A program is source text that defines `answer(request)`; request and answer are JSON. Its limit is CPU time, because on
a busy machine a slow start says nothing about the input. A function runs in a copy of this process, for input that
needs what took long to load.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import KTError

WAIT_SECONDS = 60.0  # for a CPU, on a busy machine
GIB = 2**30

MAIN = """
import json, resource, sys
cpu, memory, sys.path[len(sys.path):] = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
print(json.dumps(answer(json.load(sys.stdin))))
"""


class SandboxError(KTError):
    """A program that ended without an answer; says why."""


def run_sandboxed(program: str, request: Any, *, seconds: float, memory: int = GIB, packages: bool = False) -> Any:
    """The answer. `seconds` of CPU time, rounded up; `packages`: the program imports more than the standard library."""
    paths = [path for path in sys.path if path] if packages else []
    limits = json.dumps([math.ceil(seconds), memory, paths])
    command = [sys.executable, "-I", "-S", "-c", program + MAIN, limits]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, encoding="utf-8", timeout=seconds + WAIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(f"takes longer than {seconds:g} s") from None
    if done.returncode == -signal.SIGXCPU:
        raise SandboxError(f"takes longer than {seconds:g} s")
    if done.returncode:
        raise SandboxError("does not end on some texts, or takes too much memory")
    return json.loads(done.stdout)


def run_forked(function: Callable[[], Any], *, seconds: float, memory: int) -> Any:
    """What the function returns, as JSON; the copy may take `memory` bytes more than this process has. To be called
    where no other threads run, whose locks would be copied as they are."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            # A library in Rust aborts where memory runs out; that is no crash to report.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (data + memory, hard))
            cpu = math.ceil(seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
            with os.fdopen(writer, "w") as answer:
                json.dump(function(), answer)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        raise SandboxError(f"takes longer than {seconds:g} s" if timed_out else "fails, or takes too much memory")
    return json.loads(text)
