"""`kt version`: the six lines that kt-kernel's guides show after an installation; `--verbose` adds packages."""

from __future__ import annotations

from typing import Annotated

import typer

import ktransformers
from ktransformers.cli.options import Json, print_result


def version(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also Python, system, CUDA and packages.")] = False,
    as_json: Json = False,
) -> None:
    """Print the versions of ktransformers and what it runs on."""
    fields = details()
    details_lines = [f"{name:<16} {value or '-'}" for name, value in fields.items()]
    print_result(fields, details_lines if verbose else version_lines(fields), as_json)


def version_lines(fields: dict[str, str | None]) -> list[str]:
    """As in the guides; a program that looks for one of these lines finds it."""
    return [
        f"KTransformers CLI v{fields['ktransformers']}",
        f"Python: {fields['python']}",
        f"Platform: {fields['platform']}",
        f"CUDA: {fields['cuda'] or 'none'}",
        f"kt-kernel: {fields['kt-kernel']} ({fields['cpu variant']})",
        f"sglang: {fields['sglang'] or 'not installed'}",
    ]


def details() -> dict[str, str | None]:
    """Version, system and packages, without importing torch."""
    import platform

    from kt_kernel import __version__ as interface
    from ktransformers.ground import system

    fields: dict[str, str | None] = {"ktransformers": ktransformers.__version__, "python": platform.python_version()}
    fields["platform"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        from ktransformers import _core

        fields["cpu variant"] = _core.isa()
    except (ImportError, RuntimeError) as error:
        fields["cpu variant"] = f"none ({error})"
    fields["kt-kernel"] = interface  # the interface that our package kt_kernel has
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
