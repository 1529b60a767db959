"""`kt doctor`: what this machine offers to ktransformers, what is missing, and how to fix it.

Facts are collected into one MachineReport and evaluated by `checks.py`; both are printed as text or as JSON (`--json`).
The exit status is 1 if experts cannot run here at all; what only costs speed is a warning or a note.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.checks import Cuda, Disk, Finding
from ktransformers.cli.options import print_result

if TYPE_CHECKING:
    from ktransformers._core import Machine, VariantInfo
    from ktransformers.ground import system

PACKAGES = ("ktransformers", "torch", "transformers", "peft", "safetensors", "numpy")
OPTIONAL_PACKAGES = (
    *("accelerate", "datasets", "trl", "fastapi", "uvicorn", "huggingface-hub", "gguf", "sacrebleu", "matplotlib"),
    *("llguidance", "modelscope", "triton", "kt-kernel", "sglang", "llamafactory"),
)
ENVIRONMENT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE")
DENSE_TEXTS = {
    "bfloat16": "bf16, by torch",
    "widened": "float32; weights stay in bf16 and are widened",
    "float32": "float32, and so are the weights",
}
ROOT = Path("/")


@dataclasses.dataclass
class MachineReport:
    packages: dict[str, str | None]
    environment: dict[str, str]
    memory: system.Memory
    gpus: list[system.Gpu]
    cuda: Cuda
    disks: list[Disk]
    python: str = platform.python_version()
    os: str = f"{platform.system()} {platform.release()} {platform.machine()}"
    machine: Machine | None = None
    nodes: list[str] = dataclasses.field(default_factory=list)  # CPUs and memory of each NUMA node
    variants: list[VariantInfo] = dataclasses.field(default_factory=list)
    isa: str | None = None  # the variant in use
    threads: int | None = None
    groups: int | None = None  # of threads, one per NUMA node
    torch_threads: int | None = None
    dense_products: str | None = None  # how linear layers that are not experts are computed on the CPU
    models: int = 0  # registered
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]


def add_core_facts(report: MachineReport) -> None:
    try:
        from ktransformers import _core
    except ImportError as error:
        text = f"the native core cannot be imported ({error})"
        report.findings.append(Finding("error", "core", text, "reinstall ktransformers"))
        return
    report.machine, report.variants = _core.machine(), _core.variants()
    try:
        report.isa = _core.isa()
        pool = _core.Pool()
    except RuntimeError as error:
        report.findings.append(Finding("error", "cpu", str(error), "unset the variable, or give it another value"))
        return
    report.threads, report.groups = pool.threads, pool.groups


def read_torch(root: Path) -> tuple[Cuda, int | None]:
    """CUDA as torch and the driver report it, and the number of torch's threads."""
    from ktransformers.cli.checks import read

    driver = read(root, "proc/driver/nvidia/version").partition("\n")[0].split()
    version = next((word for word in driver if word[:1].isdigit() and "." in word), None)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    try:
        import torch
    except ImportError:
        return Cuda(version, hidden=hidden), None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capabilities = tuple(torch.cuda.get_device_capability(index) for index in range(count))
    architectures = tuple(torch.cuda.get_arch_list()) if count else ()
    versions: Any = torch.version
    cuda = Cuda(version, versions.cuda, versions.hip, capabilities, architectures, hidden)
    return cuda, torch.get_num_threads()


def read_numa_nodes(root: Path) -> list[str]:
    """One line per NUMA node: `cpus 0-15: 120 GiB, 80 GiB free`."""
    nodes = []
    for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            words = (node / "meminfo").read_text().split()
            total, free = (int(words[words.index(word) + 1]) * 1024 for word in ("MemTotal:", "MemFree:"))
            nodes.append(
                f"cpus {(node / 'cpulist').read_text().strip()}: {format_size(total)}, {format_size(free)} free"
            )
        except (OSError, ValueError):
            continue
    return nodes


def read_disks(root: Path) -> list[Disk]:
    """The disks of models, caches and outputs, each disk once."""
    from ktransformers.cli.checks import file_system, read
    from ktransformers.ground import settings
    from ktransformers.ground.errors import InputError

    try:
        configured = settings.read().paths.downloads
    except InputError:
        configured = None
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    places = {
        "models": Path(configured) if configured else settings.data_folder() / "models",
        "hub cache": Path(hub),
        "here": Path.cwd(),
        "temporary files": Path(tempfile.gettempdir()),
    }
    disks, devices, mounts = [], set(), read(root, "proc/mounts")
    for purpose, directory in places.items():
        nearest = directory.expanduser().absolute()
        while not nearest.exists():
            nearest = nearest.parent
        if nearest.stat().st_dev not in devices:
            devices.add(nearest.stat().st_dev)
            usage = shutil.disk_usage(nearest)
            disks.append(
                Disk(purpose, str(directory.expanduser()), usage.total, usage.free, file_system(nearest, mounts))
            )
    return disks


def own_requirements(name: str) -> list[str]:
    import importlib.metadata

    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def add_registry_facts(report: MachineReport) -> None:
    from ktransformers.cli import checks
    from ktransformers.ground import model_registry, settings
    from ktransformers.ground.errors import InputError

    try:
        settings.read()
        entries = model_registry.entries()
    except InputError as error:
        report.findings.append(Finding("warning", "settings", str(error), "`kt config reset`, or edit the file"))
        return
    report.models = len(entries)
    report.findings += checks.models(entries)


def examine(root: Path = ROOT, expert_threads: int | None = None) -> MachineReport:
    from ktransformers.cli import checks
    from ktransformers.ground import env, system
    from ktransformers.ground.packages import c_compiler

    versions = {name: system.version_of(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)}
    packages = {name: version for name, version in versions.items() if version or name in PACKAGES}
    cuda, torch_threads = read_torch(root)
    report = MachineReport(packages, env.current(), system.memory(), system.all_gpus(), cuda, read_disks(root))
    report.environment |= {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ}
    report.torch_threads, report.nodes = torch_threads, read_numa_nodes(root)
    if platform.system() != "Linux":
        report.findings.append(Finding("error", "os", platform.system(), "Linux; on Windows, WSL 2"))
    add_core_facts(report)
    if torch_threads is not None:
        report.dense_products = system.dense_products()
    if report.machine is not None:
        report.findings += checks.cpu(report.machine, report.variants, report.isa, report.environment, root)
        report.findings += checks.expert_threads(expert_threads, report.machine, os.environ)
        report.findings += checks.threads(torch_threads or 0, report.machine["cores"], report.environment)
    report.findings += checks.memory(report.memory, root)
    report.findings += checks.gpu(cuda, report.gpus)
    report.findings += checks.triton_compiler(report.gpus, system.version_of("triton"), c_compiler())
    report.findings += checks.packages(own_requirements("ktransformers"), own_requirements, system.version_of)
    report.findings += checks.disks(report.disks)
    report.findings += checks.ignored_variables(os.environ)
    add_registry_facts(report)
    order = ("error", "warning", "note")
    report.findings.sort(key=lambda finding: order.index(finding.level))
    return report


def format_size(count: int) -> str:
    for unit, bytes_in in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_in:
            return f"{count / bytes_in:.4g} {unit}"
    return f"{count} B"


def report_rows(report: MachineReport) -> list[tuple[str, str]]:
    from ktransformers.cli.checks import describe_variant, use_of_nodes

    rows = [("os", report.os), ("python", report.python)]
    rows += [(name, version or "not installed") for name, version in report.packages.items()]
    if report.machine is not None:
        machine = report.machine
        guest = ", a guest" if machine["hypervisor"] else ""
        quota = f", a limit of {machine['quota']:g}" if machine["quota"] else ""
        rows.append(("cpu", machine["cpu"]))
        cores = f"{machine['cores']} (cpus {machine['cpus']}, NUMA nodes {machine['nodes']}{quota}{guest})"
        rows.append(("cores", cores))
        rows.append(("caches", ", ".join(f"{level} {format_size(machine[level])}" for level in ("l1d", "l2", "l3"))))
    if report.machine is not None and report.groups is not None and report.machine["nodes"] > 1:
        rows.append(("nodes of experts", use_of_nodes(report.machine["nodes"], report.groups)))
    rows += [(f"node {index}", line) for index, line in enumerate(report.nodes) if len(report.nodes) > 1]
    rows += [
        (f"variant {variant['name']}", describe_variant(variant, report.isa, report.environment))
        for variant in report.variants
    ]
    if report.threads is not None:
        experts = f"{report.threads} of experts (groups {report.groups})"
        rows.append(("threads", f"{experts}, {report.torch_threads} of torch"))
    if report.dense_products is not None:
        rows.append(("linear layers", DENSE_TEXTS[report.dense_products]))
    free = f"{format_size(report.memory.available)} free of {format_size(report.memory.total)}"
    rows.append(("memory", f"{free}, huge pages {report.memory.huge_pages}"))
    rows += [("gpu", f"{gpu.name}, {format_size(gpu.memory)}") for gpu in report.gpus] or [("gpu", "none")]
    if report.cuda.driver or report.cuda.built:
        rows.append(("cuda", f"driver {report.cuda.driver or 'none'}, torch for {report.cuda.built or 'the CPU'}"))
    for disk in report.disks:
        free = f"{format_size(disk.free)} free of {format_size(disk.total)}"
        rows.append((f"disk ({disk.what})", f"{free}, {disk.kind}: {disk.path}"))
    rows.append(("models", f"{report.models} registered"))
    rows += [(name, value) for name, value in report.environment.items()]
    return rows


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    expert_threads: Annotated[
        int | None,
        typer.Option("--kt-cpuinfer", min=1, metavar="N", help="Check a number of threads for kt serve or kt train."),
    ] = None,
) -> None:
    """Show what this machine offers and lacks, and how to fix it."""
    report = examine(expert_threads=expert_threads)
    lines = [f"{name:<22} {value}" for name, value in report_rows(report)]
    for finding in report.findings:
        lines.append(f"\n{finding.level}: {finding.about}: {finding.text}")
        lines += [f"  fix: {finding.fix}"] if finding.fix else []
    print_result(dataclasses.asdict(report) | {"ok": not report.errors}, lines, as_json)
    if report.errors:
        raise typer.Exit(1)
