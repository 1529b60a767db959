"""`kt version`: the version on one line; with `--verbose` also Python, the system and packages."""

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
    fields = details()
    if as_json:
        print(json.dumps(fields, indent=2))
    else:
        for name, value in fields.items():
            print(f"{name:<16} {value or '-'}")


def details() -> dict[str, str | None]:
    """Version, system and packages, without importing torch."""
    import platform

    from ktransformers import system

    fields: dict[str, str | None] = {"ktransformers": ktransformers.__version__, "python": platform.python_version()}
    fields["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        from ktransformers import _core

        fields["cpu variant"] = _core.isa()
    except (ImportError, RuntimeError) as error:
        fields["cpu variant"] = f"none ({error})"
    for name in ("torch", "transformers", "peft", "trl", "sglang"):
        fields[name] = system.version_of(name)
    return fields | {"cuda": torch_cuda()}


def torch_cuda() -> str | None:
    """The CUDA version that torch is built for, read from version.py because importing torch takes a second."""
    import importlib.util
    import re
    from pathlib import Path

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", file.read_text(), re.MULTILINE) if file.is_file() else None
    return match[1] if match else None
