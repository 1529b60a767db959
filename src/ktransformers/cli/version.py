"""`kt version`: the version, on one line; with `--verbose` what it runs on."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import ktransformers


def version(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also Python, system, CUDA and packages.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the version."""
    if not verbose and not as_json:
        print(f"ktransformers {ktransformers.__version__}")
        return
    found = details()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:<16} {value or '-'}")


def details() -> dict[str, str | None]:
    """Nothing heavy is imported."""
    import platform

    from ktransformers import system

    found: dict[str, str | None] = {"ktransformers": ktransformers.__version__, "python": platform.python_version()}
    found["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        from ktransformers import _core

        found["cpu variant"] = _core.isa()
    except (ImportError, RuntimeError) as error:
        found["cpu variant"] = f"none ({error})"
    for name in ("torch", "transformers", "peft", "trl", "sglang"):
        found[name] = system.version_of(name)
    return found | {"cuda": torch_cuda()}


def torch_cuda() -> str | None:
    """The CUDA that torch is built for, read from its file: importing it takes a second."""
    import importlib.util
    import re
    from pathlib import Path

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1] if found else None
