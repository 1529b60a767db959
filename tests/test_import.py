"""Importing is silent and cheap, and the command line answers before torch would have loaded."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "numpy", "pydantic", "ktransformers._core")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("module", ["ktransformers", "ktransformers.cli.main"])
def test_import_is_silent_and_loads_nothing_heavy(module: str) -> None:
    out = run(f"import {module}, sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))")
    assert json.loads(out) == []


def test_planner_and_its_formats_do_without_torch() -> None:
    code = "import ktransformers.plan, sys\nfrom ktransformers.plan.formats import format_of\n"
    assert run(code + "print(format_of('int4').bits, 'torch' in sys.modules)").split() == ["4", "False"]


def test_import_of_the_native_core_is_silent() -> None:
    assert run("import ktransformers._core") == ""


def test_attributes_are_loaded_lazily() -> None:
    out = run(
        "import ktransformers, sys\n"
        "assert 'ExpertStore' in dir(ktransformers) and 'torch' not in sys.modules\n"
        "print(ktransformers.ExpertStore.__name__, 'torch' in sys.modules)"
    )
    assert out.split() == ["ExpertStore", "True"]


def test_unknown_attribute_raises() -> None:
    import ktransformers

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ktransformers.no_such_name


def seconds_of_cpu(code: str) -> float:
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(code)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def test_help_is_fast() -> None:
    """Measured by the import of the library that parses the command line, in CPU seconds: 1.9 on an idle machine."""
    help_text = "import sys; sys.argv = ['kt', '--help']\nfrom ktransformers.cli.main import main\nmain()"
    parser, whole = zip(*((seconds_of_cpu("import typer"), seconds_of_cpu(help_text)) for _ in range(5)), strict=True)
    assert min(whole) < 4 * min(parser)
