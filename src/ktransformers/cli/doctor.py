"""`kt doctor`: what this machine gives to ktransformers, and what stands in the way.

Facts are gathered into one Report, which is printed as text or as JSON (`--json`). The exit status is 1 when experts
cannot run here at all; what only costs speed is a note.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers import env, system

if TYPE_CHECKING:
    from ktransformers._core import Machine, VariantInfo

PACKAGES = ("ktransformers", "torch", "transformers", "peft", "safetensors", "numpy")


@dataclasses.dataclass
class Report:
    packages: dict[str, str | None]
    environment: dict[str, str]
    memory: system.Memory
    gpus: list[system.Gpu]
    python: str = platform.python_version()
    os: str = f"{platform.system()} {platform.release()} {platform.machine()}"
    machine: Machine | None = None
    variants: list[VariantInfo] = dataclasses.field(default_factory=list)
    isa: str | None = None  # the variant in use
    threads: int | None = None
    groups: int | None = None  # of threads, one per NUMA node
    errors: list[str] = dataclasses.field(default_factory=list)  # experts cannot run
    notes: list[str] = dataclasses.field(default_factory=list)  # they run, but something could be better


def ask_core(report: Report) -> None:
    try:
        from ktransformers import _core
    except ImportError as error:
        report.errors.append(f"the native core cannot be imported ({error}); reinstall ktransformers")
        return
    report.machine, report.variants = _core.machine(), _core.variants()
    try:
        report.isa = _core.isa()
        pool = _core.Pool()
    except RuntimeError as error:
        report.errors.append(str(error))
        return
    report.threads, report.groups = pool.threads, pool.groups


def examine() -> Report:
    packages = {name: system.version_of(name) for name in PACKAGES}
    report = Report(packages, env.current(), system.memory(), system.gpus())
    ask_core(report)
    report.errors += [f"{name} is not installed; pip install {name}" for name, at in packages.items() if at is None]
    if not report.gpus:
        report.notes.append("torch sees no CUDA device; everything runs on the CPU")
    if report.memory.huge_pages == "never":
        report.notes.append(
            "transparent huge pages are off; `madvise` in /sys/kernel/mm/transparent_hugepage/enabled is faster"
        )
    if report.isa == "generic":
        report.notes.append("the generic variant is in use; it is correct, and slow")
    return report


def size(count: int) -> str:
    for unit, bytes_in in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= bytes_in:
            return f"{count / bytes_in:.4g} {unit}"
    return f"{count} B"


def rows(report: Report) -> list[tuple[str, str]]:
    found = [("os", report.os), ("python", report.python)]
    found += [(name, version or "not installed") for name, version in report.packages.items()]
    if report.machine is not None:
        machine = report.machine
        guest = ", a guest" if machine["hypervisor"] else ""
        found.append(("cpu", machine["cpu"]))
        found.append(("cores", f"{machine['cores']} (cpus {machine['cpus']}, NUMA nodes {machine['nodes']}{guest})"))
        found.append(("caches", ", ".join(f"{level} {size(machine[level])}" for level in ("l1d", "l2", "l3"))))
    for variant in report.variants:
        if variant["native"]:
            state = "in use" if variant["name"] == report.isa else "runs here"
        elif variant["emulated"]:
            state = "emulated, for tests" + ("; in use" if variant["name"] == report.isa else "")
        else:
            state = f"needs {variant['missing']}" if variant["missing"] else "not in this build"
        found.append((f"variant {variant['name']}", state))
    if report.threads is not None:
        found.append(("threads", f"{report.threads} (groups {report.groups})"))
    memory = report.memory
    found.append(("memory", f"{size(memory.available)} free of {size(memory.total)}, huge pages {memory.huge_pages}"))
    found += [("gpu", f"{gpu.name}, {size(gpu.memory)}") for gpu in report.gpus] or [("gpu", "none")]
    found += [(name, value) for name, value in report.environment.items()]
    found += [("note", note) for note in report.notes]
    found += [("error", error) for error in report.errors]
    return found


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Say what this machine gives to ktransformers, and what is missing."""
    report = examine()
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for name, value in rows(report):
            print(f"{name:<20} {value}")
    if report.errors:
        raise typer.Exit(1)
