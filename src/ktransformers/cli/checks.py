"""The checks of `kt doctor`: each is a function from facts to findings, and each finding has a fix.

`doctor.py` collects the facts; these functions read nothing of the machine but small files of /proc and /sys under
`root`, so that tests can provide them. An error means that experts cannot run here, a warning that something installed
is unused or will fail later, a note that a setting could be better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers._core import Machine, VariantInfo
    from ktransformers.ground import model_registry, system

GIB = 2**30
LOW_DISK, LOW_MEMORY = 10 * GIB, 4 * GIB
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
# CUDA's major version -> the oldest driver of Linux that runs it (NVIDIA's release notes).
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
REMOTE_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "fuse.gcsfuse", "fuse.s3fs")
TESTED = {"transformers": "5.22"}  # the newest of constraints.txt, major and minor
FORKS = {"transformers-kt": "transformers", "accelerate-kt": "accelerate", "peft-kt": "peft", "trl-kt": "trl"}
# What each extra is for.
EXTRAS = {
    "train": "kt train",
    "serve": "kt serve",
    "eval": "kt eval",
    "json": "answers in a JSON schema",
    "gguf": "GGUF files",
}
# Beginning of a variable of the original's build scripts -> what has its effect here. docs/install.md has the table.
BUILD_VARIABLES = {
    "CPUINFER_CPU_INSTRUCT": "KT_ISA at run time; a wheel has every variant",
    "CPUINFER_ENABLE_": "KT_ISA at run time; a wheel has every variant",
    "CPUINFER_BUILD_TYPE": "pip install . -C cmake.build-type=Debug",
    "CPUINFER_PARALLEL": "CMAKE_BUILD_PARALLEL_LEVEL",
    "CPUINFER_VERBOSE": "pip install -v . -C build.verbose=true",
    "KTRANSFORMERS_FORCE_BUILD": "pip install . builds always, pip install dist/ktransformers-*.whl never",
}


@dataclass(frozen=True)
class Finding:
    level: str  # error, warning, note
    about: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Cuda:
    """CUDA as torch and the driver report it."""

    driver: str | None = None  # of the kernel module
    built: str | None = None  # torch's CUDA; None: torch is built for the CPU alone
    hip: str | None = None
    capabilities: tuple[tuple[int, int], ...] = ()  # of the devices
    architectures: tuple[str, ...] = ()  # sm_90 and so on that this torch has code for
    hidden: bool = False  # CUDA_VISIBLE_DEVICES hides them all


@dataclass(frozen=True)
class Disk:
    what: str
    path: str
    total: int
    free: int
    kind: str  # of the file system


def read(root: Path, name: str) -> str:
    """The text of a small file of /proc or /sys; empty if it does not exist."""
    try:
        return (root / name).read_text().strip()
    except OSError:
        return ""


def describe_variant(variant: VariantInfo, isa: str | None, environment: Mapping[str, str]) -> str:
    """One line about a CPU variant: in use or not, and the reason."""
    if variant["name"] == isa:
        asked = next((name for name in ("KT_ISA", "KT_KERNEL_CPU_VARIANT") if name in environment), None)
        reason = f"asked for by {asked}" if asked else "the best that this CPU and this system run"
        return f"in use: {reason}" + ("; emulated, for tests" if variant["emulated"] else "")
    if variant["native"]:
        return "runs here"
    if variant["emulated"]:
        return "emulated, for tests" + (f"; needs {variant['missing']}" if variant["missing"] else "")
    return f"needs {variant['missing']}" if variant["missing"] else "not in this build"


def cpu(
    machine: Machine, variants: Sequence[VariantInfo], isa: str | None, environment: Mapping[str, str], root: Path
) -> list[Finding]:
    findings = []
    best = next((variant["name"] for variant in reversed(variants) if variant["native"]), None)
    if isa is not None and best is not None and isa != best:
        findings.append(Finding("note", "cpu", f"{isa} is in use where {best} would run", "unset KT_ISA"))
    elif isa == "generic":
        text = "plain C++ is in use: correct, and many times slower than the kernels for AVX2 or NEON"
        fix = "x86-64 with AVX2 (2013 or later) and ARM with dot products (2018 or later) run the fast kernels"
        findings.append(Finding("warning", "cpu", text, fix))
    for variant in variants:
        disabled = re.findall(r"(\w+) \(OS\)", variant["missing"])
        if disabled and len(disabled) == len(variant["missing"].split(",")):
            text = f"the CPU has {', '.join(disabled)}, and the system does not enable it: no {variant['name']}"
            fix = "Linux 5.16 or later; in a virtual machine, pass the host's CPU through"
            findings.append(Finding("warning", "cpu", text, fix))
            break
        if not variant["missing"] and not variant["native"] and not variant["emulated"]:
            text = f"this CPU runs {variant['name']}, and this build does not have it"
            findings.append(Finding("warning", "cpu", text, "reinstall ktransformers from a wheel with all variants"))
    if 0 < machine["quota"] < machine["cpus"]:
        text = f"the container grants {machine['quota']:g} CPUs' worth of time on {machine['cpus']} CPUs"
        findings.append(Finding("note", "cpu", text, "raise its CPU limit (docker run --cpus, resources.limits.cpu)"))
    governor, driver = (
        read(root, f"sys/devices/system/cpu/cpu0/cpufreq/scaling_{word}") for word in ("governor", "driver")
    )
    if governor == "powersave" and "pstate" not in driver:
        findings.append(
            Finding("note", "cpu", "the CPU governor keeps the clock low", "sudo cpupower frequency-set -g performance")
        )
    if machine["nodes"] > 1 and read(root, "proc/sys/kernel/numa_balancing") == "1":
        text = "the kernel migrates pages between NUMA nodes, although experts are placed on their nodes already"
        findings.append(Finding("note", "numa", text, "sudo sysctl kernel.numa_balancing=0"))
    return findings


def memory(memory: system.Memory, root: Path) -> list[Finding]:
    findings = []
    if memory.available < LOW_MEMORY:
        text = f"{memory.available / GIB:.1f} GiB are free"
        findings.append(
            Finding(
                "warning", "memory", text, "end processes that use memory; `kt plan MODEL` shows what a model needs"
            )
        )
    if memory.huge_pages == "never":
        text = "transparent huge pages are off: reading experts causes many more TLB misses"
        findings.append(Finding("note", "huge pages", text, f"echo madvise | sudo tee {THP}"))
    if read(root, "proc/sys/vm/overcommit_memory") == "2":
        text = "memory overcommit is off: large mappings may be refused"
        findings.append(Finding("warning", "memory", text, "sudo sysctl vm.overcommit_memory=0"))
    return findings


def gpu(cuda: Cuda, gpus: Sequence[system.Gpu]) -> list[Finding]:
    if cuda.hidden:
        return [Finding("note", "gpu", "CUDA_VISIBLE_DEVICES hides every device", "unset CUDA_VISIBLE_DEVICES")]
    if not gpus:
        if cuda.driver is None:
            return [Finding("note", "gpu", "no GPU: everything runs on the CPU")]
        if cuda.built is None and cuda.hip is None:
            text = f"driver {cuda.driver} is here, and this torch is built for the CPU alone"
            fix = "install torch for CUDA: https://pytorch.org/get-started/locally"
            return [Finding("warning", "gpu", text, fix)]
        major, min_driver = int((cuda.built or "0").partition(".")[0]), 0
        min_driver = MIN_DRIVER.get(major, 0)
        if int(cuda.driver.partition(".")[0]) < min_driver:
            text = f"driver {cuda.driver} is too old for this torch's CUDA {cuda.built}"
            return [Finding("warning", "gpu", text, f"a driver of {min_driver} or later, or torch for an older CUDA")]
        text = f"driver {cuda.driver} is here, and torch finds no device"
        fix = "`nvidia-smi` says why; a container needs --gpus all; after an update of the driver, restart"
        return [Finding("warning", "gpu", text, fix)]
    findings = []
    built_for = [
        tuple(map(int, (word[3:-1], word[-1]))) for word in cuda.architectures if re.fullmatch(r"sm_\d{2,3}", word)
    ]
    for device, capability in zip(gpus, cuda.capabilities, strict=False):
        if built_for and capability < min(built_for):
            text = f"{device.name} is of {capability[0]}.{capability[1]}, older than what this torch has code for"
            findings.append(Finding("warning", "gpu", text, "an older torch, or `--device cpu`"))
        elif built_for and capability[0] > max(built_for)[0]:
            text = f"{device.name} is of {capability[0]}.{capability[1]}, newer than what this torch has code for"
            findings.append(Finding("warning", "gpu", text, "a newer torch: https://pytorch.org/get-started/locally"))
        elif capability < (8, 0):  # system.MIN_CAPABILITY
            text = f"{device.name} is of {capability[0]}.{capability[1]}, has no bf16 instructions and is left out"
            findings.append(Finding("warning", "gpu", text, "CUDA_VISIBLE_DEVICES without it, if there are others"))
    return findings


def triton_compiler(gpus: Sequence[system.Gpu], triton: str | None, compiler: str | None) -> list[Finding]:
    from ktransformers.ground.packages import INSTALL_COMPILER

    if not gpus or triton is None or compiler is not None:
        return []
    text = "there is no C compiler, so that Triton's kernels cannot be built; `kt train` and `kt serve` refuse the GPU"
    return [Finding("warning", "gpu", text, f"{INSTALL_COMPILER}; or `--device cpu`")]


def packages(
    own: Sequence[str], requirements_of: Callable[[str], Sequence[str]], version_of: Callable[[str], str | None]
) -> list[Finding]:
    """`own`: the requirements of ktransformers in its metadata."""
    from packaging.requirements import Requirement

    findings, missing = [], {extra: list[str]() for extra in EXTRAS}
    for line in own:
        requirement = Requirement(line)
        extra = next(
            (name for name in EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": name})), None
        )
        if requirement.marker and not extra:
            continue
        installed = version_of(requirement.name)
        plain = f"{requirement.name}{requirement.specifier}"
        if installed is None and extra is not None:
            missing[extra].append(requirement.name)
        elif installed is None:
            findings.append(
                Finding("error", "packages", f"{requirement.name} is not installed", f"pip install '{plain}'")
            )
        elif not requirement.specifier.contains(installed, prereleases=True):
            text = f"{requirement.name} {installed} is installed, and {plain} is needed"
            findings.append(Finding("warning" if extra else "error", "packages", text, f"pip install '{plain}'"))
    findings += [_missing_extra(extra, names) for extra, names in missing.items() if names]
    names = {Requirement(line).name for line in own} | {"torchvision", "torchaudio", "huggingface-hub", "tokenizers"}
    findings += _newer_than_tested(version_of)
    return findings + _forks(version_of) + _version_conflicts(sorted(names), requirements_of, version_of)


def _newer_than_tested(version_of: Callable[[str], str | None]) -> list[Finding]:
    from packaging.version import Version

    findings = []
    for name, tested in TESTED.items():
        installed = version_of(name)
        if installed is not None and Version(installed).release[:2] > Version(tested).release:
            text = f"{name} {installed} is newer than {tested}, the newest that this version was tested with"
            findings.append(Finding("note", "packages", text, f"if a model fails: pip install '{name}=={tested}.*'"))
    return findings


def _missing_extra(extra: str, names: Sequence[str]) -> Finding:
    text = f"{EXTRAS[extra]} needs {', '.join(names)}"
    return Finding("note", "packages", text, f"pip install 'ktransformers[{extra}]'")


def _forks(version_of: Callable[[str], str | None]) -> list[Finding]:
    findings = []
    for fork, stock in FORKS.items():
        if version_of(fork) is not None:
            text = f"{fork} is installed over {stock}; ktransformers works with the stock package"
            fix = f"pip uninstall -y {fork} && pip install --force-reinstall --no-deps {stock}"
            findings.append(Finding("warning", "packages", text, fix))
    if version_of("kt-kernel") is not None:
        text = "kt-kernel is installed, and brings a command `kt` of its own: the later one wins"
        fix = "keep it in an environment of its own, or reinstall ktransformers after it"
        findings.append(Finding("warning", "packages", text, fix))
    return findings


def _version_conflicts(
    names: Sequence[str], requirements_of: Callable[[str], Sequence[str]], version_of: Callable[[str], str | None]
) -> list[Finding]:
    """Installed packages whose requirements on each other are not met."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    watched = {canonicalize_name(name) for name in names}
    findings = []
    for name in names:
        installed = version_of(name)
        for line in requirements_of(name) if installed is not None else ():
            requirement = Requirement(line)
            installed_other = version_of(requirement.name) if canonicalize_name(requirement.name) in watched else None
            if installed_other is None or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            if not requirement.specifier.contains(installed_other, prereleases=True):
                required = f"{requirement.name}{requirement.specifier}"
                text = f"{name} {installed} wants {required}, and {installed_other} is installed"
                findings.append(Finding("warning", "packages", text, f"pip install '{required}'"))
    return findings


def expert_threads(asked: int | None, machine: Machine, environment: Mapping[str, str]) -> list[Finding]:
    """`asked`: for how many --kt-cpuinfer (kt_num_threads) would ask; None: KT_THREADS, if that is a number."""
    from ktransformers.ground.system import hyperthreads_asked_for

    variable = environment.get("KT_THREADS", "")
    threads = asked if asked is not None else int(variable) if variable.isdecimal() else 0
    name = "--kt-cpuinfer (kt_num_threads)" if asked is not None else "KT_THREADS"
    cores, cpus = machine["cores"], machine["cpus"]
    if threads > cpus:
        text = f"{name} asks for {threads} threads of experts, and there are {cpus} CPUs"
    elif (shared := hyperthreads_asked_for(threads, cores, cpus)) is not None:
        text = f"{name}: {shared}"
    else:
        return []
    fix = f"leave it out: the pool measures whether hyperthreads help; or ask for {cores}"
    return [Finding("warning", "cpu", text, fix)]


def use_of_nodes(nodes: int, groups: int) -> str:
    """How experts use the NUMA nodes of this process, in one line; `groups` of threads of the pool."""
    if nodes == 1:
        return "one: all experts are in its memory"
    if groups == 1:
        return f"one of {nodes}, because the experts have one group of threads (KT_THREADS=1)"
    return (
        f"{groups}: each computes its range of the rows of every expert, from memory of its own; one copy of the "
        "experts in all, and one of a packed directory for all processes"
    )


def threads(torch_threads: int, cores: int, environment: Mapping[str, str]) -> list[Finding]:
    if torch_threads >= min(cores, 4) or "OMP_NUM_THREADS" not in environment:
        return []
    text = f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']} leaves attention {torch_threads} of {cores} cores"
    return [Finding("note", "cpu", text, "unset OMP_NUM_THREADS")]


def ignored_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Variables of the original's build scripts (docs/install.md) that are set and have no effect here."""
    findings = []
    for name in sorted(environment):
        if name.startswith(("CPUINFER_", "KTRANSFORMERS_")):
            instead = next((fix for part, fix in BUILD_VARIABLES.items() if name.startswith(part)), "")
            findings.append(
                Finding("note", "environment", f"{name} is set and has no effect", instead or f"unset {name}")
            )
    return findings


def disks(disks: Sequence[Disk]) -> list[Finding]:
    findings = []
    for disk in disks:
        if disk.free < LOW_DISK:
            fix = "`kt config set paths.downloads DIR`" if disk.what == "models" else "free some, or move it (HF_HOME)"
            findings.append(
                Finding("warning", "disk", f"{disk.free / GIB:.1f} GiB free at {disk.path} ({disk.what})", fix)
            )
        if disk.kind in REMOTE_FILE_SYSTEMS and disk.what in ("models", "hub cache"):
            text = f"{disk.path} lies on {disk.kind}: a model is read over the network whenever it is loaded"
            findings.append(
                Finding("note", "disk", text, "keep models on a local disk: `kt config set paths.downloads DIR`")
            )
    return findings


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that holds `path`: that of the longest mount point above it in /proc/mounts."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 3 and path.is_relative_to(words[1]) and len(words[1]) > best:
            best, kind = len(words[1]), words[2]
    return kind


def models(entries: Sequence[model_registry.Entry]) -> list[Finding]:
    missing = [entry.name for entry in entries if not entry.exists]
    if not missing:
        return []
    return [Finding("note", "models", f"registered and gone from the disk: {', '.join(missing)}", "kt model refresh")]
