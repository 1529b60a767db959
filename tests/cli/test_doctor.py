"""Findings of `kt doctor` on synthetic machines; tests/test_cli.py runs it on the real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli import checks
from ktransformers.cli.checks import GIB, Cuda, Disk, Finding
from ktransformers.cli.doctor import read_numa_nodes
from ktransformers.ground import system
from ktransformers.ground.model_registry import Entry
from ktransformers.ground.system import Gpu, Memory
from tests.support.cli import RunKt

MACHINE: Any = {"cpus": 16, "cores": 16, "nodes": 1, "quota": 0.0}
OWN = [
    "torch>=2.9",
    "numpy>=1.26",
    'trl>=1; extra == "train"',
    'fastapi>=0.115; extra == "serve"',
    'ruff; extra == "dev"',
]


def variant(name: str, native: bool = True, missing: str = "", emulated: bool = False) -> Any:
    return {"name": name, "native": native, "emulated": emulated, "missing": missing, "precisions": ["bf16"]}


def said(found: Sequence[Finding]) -> str:
    return " | ".join(f"{one.level} {one.about}: {one.text} -> {one.fix}" for one in found)


def cpu(variants: list[Any], isa: str, root: Path, **machine: Any) -> str:
    return said(checks.cpu({**MACHINE, **machine}, variants, isa, {}, root))


def test_cpu_variants_are_explained(tmp_path: Path) -> None:
    good = [variant("generic"), variant("avx2"), variant("amx")]
    assert cpu(good, "amx", tmp_path) == ""
    assert "avx2 is in use where amx would run -> unset KT_ISA" in cpu(good, "avx2", tmp_path)
    kept = [variant("generic"), variant("avx2"), variant("amx", False, "amx_tile (OS), amx_bf16 (OS)")]
    assert "the CPU has amx_tile, amx_bf16, and the system does not enable it" in cpu(kept, "avx2", tmp_path)
    lacks = [variant("generic"), variant("avx2"), variant("amx", False, "amx_tile, amx_bf16")]
    assert cpu(lacks, "avx2", tmp_path) == ""
    unbuilt = [variant("generic"), variant("avx2"), variant("amx", False)]
    assert "this build does not have it" in cpu(unbuilt, "avx2", tmp_path)
    slow = [variant("generic"), variant("avx2", False, "avx2")]
    assert "warning cpu: plain C++" in cpu(slow, "generic", tmp_path)
    assert checks.describe_variant(kept[2], "avx2", {}) == "needs amx_tile (OS), amx_bf16 (OS)"
    assert checks.describe_variant(good[2], "amx", {}) == "in use: the best that this CPU and this system run"
    assert checks.describe_variant(good[1], "avx2", {"KT_ISA": "avx2"}) == "in use: asked for by KT_ISA"
    assert (
        checks.describe_variant(variant("amx", False, "x86-64", True), "generic", {})
        == "emulated, for tests; needs x86-64"
    )


def test_cpu_limits_governor_and_numa_are_reported(tmp_path: Path) -> None:
    best = [variant("generic"), variant("avx2")]
    assert "grants 4 CPUs' worth of time on 16" in cpu(best, "avx2", tmp_path, quota=4.0)
    for name, text in {
        "proc/sys/kernel/numa_balancing": "1\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 4194304 kB\nNode 0 MemFree: 1048576 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    actual = cpu(best, "avx2", tmp_path, nodes=2)
    assert "kernel.numa_balancing=0" in actual and "cpupower" in actual
    (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver").write_text("intel_pstate\n")
    assert "cpupower" not in cpu(best, "avx2", tmp_path)
    assert read_numa_nodes(tmp_path) == ["cpus 0-7: 4 GiB, 1 GiB free"]
    few = checks.threads(1, 16, {"OMP_NUM_THREADS": "1"})
    assert "leaves attention 1 of 16 cores -> unset OMP_NUM_THREADS" in said(few)
    assert checks.threads(8, 16, {"OMP_NUM_THREADS": "8"}) == [] == checks.threads(1, 16, {})


def test_threads_on_hyperthreads_are_a_warning() -> None:
    machine: Any = {**MACHINE, "cpus": 32}
    for asked in (None, 1, 16):
        assert checks.expert_threads(asked, machine, {}) == []
    actual = said(checks.expert_threads(24, machine, {"KT_THREADS": "8"}))
    assert (
        "warning cpu: --kt-cpuinfer (kt_num_threads): 24 threads of experts on 16 cores: 8 of them are second" in actual
    )
    assert "or ask for 16" in actual
    assert "asks for 33 threads of experts, and there are 32 CPUs" in said(checks.expert_threads(33, machine, {}))
    assert "KT_THREADS: 32 threads" in said(checks.expert_threads(None, machine, {"KT_THREADS": "32"}))
    assert checks.expert_threads(None, machine, {"KT_THREADS": "many"}) == []
    assert checks.expert_threads(16, MACHINE, {}) == []


def test_use_of_numa_nodes_is_said() -> None:
    assert checks.use_of_nodes(1, 1).startswith("one:")
    assert "2: each computes its range of the rows of every expert" in checks.use_of_nodes(2, 2)
    assert "one copy of the experts in all" in checks.use_of_nodes(2, 2)
    assert "one of 2, because" in checks.use_of_nodes(2, 1)


def test_doctor_checks_a_number_of_threads(kt: RunKt) -> None:
    actual = kt("doctor", "--kt-cpuinfer", "4096")
    assert "--kt-cpuinfer (kt_num_threads) asks for 4096 threads of experts" in actual.out
    assert kt("doctor", "--kt-cpuinfer", "0").code == 2


def test_low_memory_and_huge_pages_are_reported(tmp_path: Path) -> None:
    assert checks.memory(Memory(64 * GIB, 32 * GIB, "madvise"), tmp_path) == []
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text("2\n")
    actual = said(checks.memory(Memory(64 * GIB, 1 * GIB, "never"), tmp_path))
    assert "1.0 GiB are free" in actual and "echo madvise | sudo tee" in actual and "vm.overcommit_memory=0" in actual


def test_gpu_driver_problems_are_reported() -> None:
    card = [Gpu("RTX 4090", 24 * GIB)]
    assert "note gpu: no GPU" in said(checks.gpu(Cuda(), []))
    assert "built for the CPU alone" in said(checks.gpu(Cuda(driver="550.54.15"), []))
    assert "too old for this torch's CUDA 12.8 -> a driver of 525" in said(checks.gpu(Cuda("515.1", "12.8"), []))
    assert "torch finds no device -> `nvidia-smi`" in said(checks.gpu(Cuda("580.1", "12.8"), []))
    assert "unset CUDA_VISIBLE_DEVICES" in said(checks.gpu(Cuda("580.1", "12.8", hidden=True), []))
    assert checks.gpu(Cuda("580.1", "12.8", None, ((8, 9),), ("sm_80", "sm_90", "sm_120")), card) == []
    assert "no bf16" in said(checks.gpu(Cuda("580.1", "12.8", None, ((7, 5),), ("sm_75",)), card))
    assert "newer than what" in said(checks.gpu(Cuda("580.1", "12.4", None, ((12, 0),), ("sm_80", "sm_90")), card))
    assert "older than what" in said(checks.gpu(Cuda("580.1", "12.8", None, ((6, 1),), ("sm_75", "sm_90a")), card))


def test_a_gpu_without_a_compiler_for_triton_is_reported() -> None:
    card = [Gpu("RTX 4090", 24 * GIB)]
    assert "warning gpu: there is no C compiler" in said(checks.triton_compiler(card, "3.6.0", None))
    assert checks.triton_compiler(card, "3.6.0", "/usr/bin/gcc") == [] == checks.triton_compiler(card, None, None)
    assert checks.triton_compiler([], "3.6.0", None) == []


def packages(versions: dict[str, str], **wants: list[str]) -> str:
    return said(checks.packages(OWN, lambda name: wants.get(name, []), versions.get))


def test_package_conflicts_are_reported() -> None:
    good = {"torch": "2.13.0+cpu", "numpy": "2.0", "trl": "1.16.0", "fastapi": "0.162"}
    assert packages(good) == ""
    assert "error packages: numpy is not installed -> pip install 'numpy>=1.26'" in packages({**good, "numpy": None})  # type: ignore[dict-item]
    assert "error packages: torch 2.5 is installed, and torch>=2.9 is needed" in packages({**good, "torch": "2.5"})
    lean = {"torch": "2.13", "numpy": "2.0"}
    assert "note packages: kt train needs trl -> pip install 'ktransformers[train]'" in packages(lean)
    assert "warning packages: trl 0.9 is installed" in packages({**good, "trl": "0.9"})
    vision = packages({**good, "torchvision": "0.20"}, torchvision=["torch==2.5.0", "pillow"])
    assert "torchvision 0.20 wants torch==2.5.0, and 2.13.0+cpu is installed -> pip install 'torch==2.5.0'" in vision
    assert packages(good, trl=['torch<2; extra == "old"', "torch>2; python_version > '3'"]) == ""
    forked = packages({**good, "transformers-kt": "5.6", "kt-kernel": "0.7.2"})
    assert "pip uninstall -y transformers-kt" in forked and "a command `kt` of its own" in forked


def test_a_transformers_newer_than_tested_is_noted() -> None:
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text().split("transformers==")[1].split()[0]
    assert pinned.startswith(f"{checks.TESTED['transformers']}.")
    good = {"torch": "2.13.0", "numpy": "2.0", "trl": "1.16.0", "fastapi": "0.162"}
    assert packages({**good, "transformers": pinned}) == ""
    assert "note packages: transformers 5.99.1 is newer than" in packages({**good, "transformers": "5.99.1"})


def test_disks_and_missing_models_are_reported(tmp_path: Path) -> None:
    disks = [Disk("models", "/m", 100 * GIB, 2 * GIB, "nfs4"), Disk("here", "/h", 100 * GIB, 50 * GIB, "nfs4")]
    actual = said(checks.disks(disks))
    assert "2.0 GiB free at /m (models) -> `kt config set paths.downloads DIR`" in actual
    assert actual.count("lies on nfs4") == 1
    mounts = "root / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/sdb /data/local xfs rw 0 0\n"
    kinds = [checks.file_system(Path(path), mounts) for path in ("/home", "/data/m", "/data/local/m", "/database")]
    assert kinds == ["ext4", "nfs4", "xfs", "ext4"]
    placed_harness, gone = Entry("here", tmp_path), Entry("old", tmp_path / "gone")
    assert checks.models([placed_harness]) == []
    assert "gone from the disk: old -> kt model refresh" in said(checks.models([placed_harness, gone]))


def test_variables_of_the_guides_without_effect_are_named(kt: RunKt, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "CPUINFER_ENABLE_AMX": "OFF",
        "KTRANSFORMERS_FORCE_BUILD": "TRUE",
        "CPUINFER_NEW": "1",
        "KT_ISA": "generic",
    }
    actual = said(checks.ignored_variables(given))
    assert "note environment: CPUINFER_ENABLE_AMX is set and has no effect -> KT_ISA at run time" in actual
    assert "KTRANSFORMERS_FORCE_BUILD is set and has no effect -> pip install ." in actual
    assert "CPUINFER_NEW is set and has no effect -> unset CPUINFER_NEW" in actual and "KT_ISA is set" not in actual
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    for name in checks.BUILD_VARIABLES:
        assert name in page
    monkeypatch.setenv("CPUINFER_PARALLEL", "8")
    shown = kt("doctor").out
    assert "CPUINFER_PARALLEL is set and has no effect" in shown and "fix: CMAKE_BUILD_PARALLEL_LEVEL" in shown


def test_invalid_settings_do_not_stop_doctor(kt: RunKt) -> None:
    from ktransformers.ground import settings

    settings.config_file().parent.mkdir(parents=True)
    settings.config_file().write_text("server: [")
    done = kt("doctor", "--json")
    assert done.code == 0
    (finding,) = [one for one in done.json["findings"] if one["about"] == "settings"]
    assert finding["level"] == "warning" and "kt config reset" in finding["fix"]


def test_arithmetic_of_linear_layers_is_reported(kt: RunKt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "widened")
    assert kt("doctor", "--json").json["dense_products"] == "widened"
    assert "weights stay in bf16 and are widened" in kt("doctor").out
