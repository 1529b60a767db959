"""Programs in a child process: their answers, and how those end that take too much."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ktransformers.ground.sandbox import GIB, SandboxError, run_forked, run_sandboxed


def test_request_and_answer_are_json() -> None:
    program = "def answer(request):\n    return [request, len(request['text'])]"
    request = {"text": "\u4e2d\ud800", "values": [1.5, None, True]}
    assert run_sandboxed(program, request, seconds=2) == [request, 2]


def test_packages_of_this_environment_are_found_where_they_are_asked_for() -> None:
    program = "def answer(request):\n    import jinja2\n    return jinja2.__name__"
    assert run_sandboxed(program, None, seconds=5, packages=True) == "jinja2"
    with pytest.raises(SandboxError, match="does not end"):
        run_sandboxed(program, None, seconds=5)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("while True: pass", "takes longer than 1 s"),
        ("return len('x' * (1 << 29))", "too much memory"),
        ("raise ValueError", "does not end"),
        ("import os; os._exit(3)", "does not end"),
    ],
)
def test_programs_without_an_answer(body: str, reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        run_sandboxed(f"def answer(request):\n    {body}", None, seconds=1, memory=GIB // 4)


def test_a_function_runs_in_a_copy_of_this_process() -> None:
    loaded = {"here": os.getpid()}
    here, there, text = run_forked(lambda: [loaded["here"], os.getpid(), "\u4e2d"], seconds=1, memory=GIB)
    assert here == os.getpid() != there and text == "\u4e2d"


def endless() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (endless, "takes longer than 1 s"),
        (lambda: len("x" * GIB), "too much memory"),
        (lambda: 1 / 0, "fails"),
        (lambda: os.kill(os.getpid(), 11), "fails"),
    ],
)
def test_functions_without_an_answer(function: Callable[[], Any], reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        run_forked(function, seconds=1, memory=GIB // 4)
