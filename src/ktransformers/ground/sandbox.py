"""A child process for what comes with downloaded files and may take forever or all memory: patterns, templates,
tokenizers.

A program is source text that defines `answer(request)`; request and answer are JSON. Its limit is CPU time, because on
a busy machine a slow start says nothing about the input.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
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
