"""The machine that a plan is for: rates and sizes, measured on this machine or read from a named profile.

Rates are bytes and operations per second of bare loops (`_core.Pool.rate`); `KernelEfficiency` is the share of them
that layers of experts reach. A profile is a YAML file in `profiles/`, whose `sources` say what was measured and what
was estimated. GPUs are rows of `profiles/gpus.yaml`, so that `--gpu` can name them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ktransformers.ground.errors import InputError
from ktransformers.ground.system import parse_bytes

GB = 10**9
# Python's launch time per layer in a training step with a GPU: of forward, recompute and backward without the experts,
# and of the experts in both directions. Measured for the profile amx16-h200 only.
LAYER_SECONDS, EXPERTS_SECONDS = 14e-3, 5.5e-3
# `system.python_loop_seconds` of that machine, estimated from steps on hosts where it was measured.
PYTHON_SECONDS = 0.042


@dataclass(frozen=True)
class KernelEfficiency:
    """Share of the bare loops' rates that a layer of experts reaches; `sum` is the power by which the two add up (1:
    sequentially)."""

    tile: float
    read: float
    sum: float = 1.6
    call: float = 0.2e-3  # seconds of a call besides
    # What a weight in fewer than 16 bits costs besides reading it, in operations of the tile loop: multiplied as a code
    # in inference, opened into tiles in training.
    multiply_code: float = 110
    open_code: float = 110


# Fitted to 35 cells of bench/moe.py (bench/results/current/moe.json, history/2026-11-15-moe-*.json): the 28 of amx are
# 7 % off on average, 20 % at most (tested). generic and neon were measured on Neoverse-N1 cores.
# avx512_vnni, avx_vnni and neon_bf16 have not been measured; they are taken for avx512, avx2 and avx512_bf16. Codes:
# amx from small int4 batches, 105 to 126 billion weights a second at 12 TFLOPS; neon measured (docs/cpus.md); the
# others counted: a product of bf16 is two of f32, so avx512_bf16 has twice the operations of avx512_vnni in the same
# time.
EFFICIENCY = {
    "amx": KernelEfficiency(tile=0.70, read=0.86),
    "avx512_bf16": KernelEfficiency(tile=0.96, read=0.94, multiply_code=6, open_code=26),
    "avx512_vnni": KernelEfficiency(tile=0.96, read=0.94, multiply_code=3, open_code=13),
    "avx512": KernelEfficiency(tile=0.96, read=0.94, multiply_code=4, open_code=13),
    "avx_vnni": KernelEfficiency(tile=1.0, read=0.70, multiply_code=3, open_code=13),
    "avx2": KernelEfficiency(tile=1.0, read=0.70, multiply_code=4, open_code=13),
    "neon_bf16": KernelEfficiency(tile=0.96, read=0.94, multiply_code=8, open_code=26),
    "neon": KernelEfficiency(tile=0.92, read=0.60, multiply_code=4, open_code=13),
    "generic": KernelEfficiency(tile=1.0, read=0.70, multiply_code=20, open_code=13),
}
# Rate of backward over that of forward, whatever bounds it: 1.49 to 1.55 times as long in four cells of amx
# (bench/results/current/train-step.json).
BACKWARD_RATE = 0.65


@dataclass(frozen=True)
class CpuRates:
    name: str
    isa: str
    threads: int
    nodes: int
    tile_flops: float  # operations per second of the tile loop over panels, all threads
    read_bytes: float  # bytes per second from memory
    dense_flops: float  # of torch's GEMM in bf16
    dense_flops_f32: float  # and in float32
    forward_share: float | None = None  # measured on this machine, instead of EFFICIENCY[isa].tile
    backward_share: float | None = None
    dense_products: str | None = None  # as `system.dense_products` decided on this machine

    @property
    def products(self) -> str:
        """How dense linear layers are computed: bfloat16, widened or float32."""
        return self.dense_products or ("bfloat16" if self.dense_flops >= self.dense_flops_f32 else "widened")

    @property
    def element(self) -> int:
        """Bytes of an activation in a panel: bf16 where the CPU multiplies bf16 (csrc/kernels/table.h)."""
        return 2 if self.isa in ("amx", "avx512_bf16", "neon_bf16") else 4


@dataclass(frozen=True)
class GpuRates:
    name: str
    memory: int  # bytes
    flops: float  # dense bf16 with float32 accumulation
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second over PCIe, pinned memory, one direction


@dataclass(frozen=True)
class Machine:
    name: str
    cpu: CpuRates
    memory: int  # usable bytes of host memory
    gpus: tuple[GpuRates, ...]
    measured: bool
    sources: tuple[str, ...]
    layer_seconds: float = LAYER_SECONDS
    experts_seconds: float = EXPERTS_SECONDS

    def with_python_speed(self, python_seconds: float) -> Machine:
        """With launch times scaled by the speed of a Python loop (`system.python_loop_seconds`)."""
        slowdown = python_seconds / PYTHON_SECONDS
        return replace(self, layer_seconds=slowdown * LAYER_SECONDS, experts_seconds=slowdown * EXPERTS_SECONDS)


class _GpuRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str
    memory: str
    tflops: float
    bandwidth_gbs: float
    link_gbs: float
    source: str


class _Profile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str
    isa: str
    threads: int
    nodes: int = 1
    memory: str
    tile_tflops: float
    read_gbs: float
    dense_tflops: float
    dense_tflops_f32: float
    gpus: list[str] = []
    layer_ms: float = LAYER_SECONDS * 1e3
    experts_ms: float = EXPERTS_SECONDS * 1e3
    sources: list[str]


def _documents() -> dict[str, Any]:
    folder = resources.files("ktransformers.plan") / "profiles"
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {entry.name.removesuffix(".yaml"): yaml.safe_load(entry.read_text()) for entry in entries}


def gpu_rows() -> dict[str, GpuRates]:
    """Short name -> GPU."""
    rows = {name: _GpuRow(**row) for name, row in _documents()["gpus"].items()}
    return {
        name: GpuRates(
            row.title, parse_bytes(name, row.memory), row.tflops * 1e12, row.bandwidth_gbs * GB, row.link_gbs * GB
        )
        for name, row in rows.items()
    }


def profiles() -> dict[str, Machine]:
    """Name -> machine, of every shipped profile."""
    known = gpu_rows()
    match = {}
    for name, document in sorted(_documents().items()):
        if name == "gpus":
            continue
        try:
            profile = _Profile(**document)
        except ValidationError as error:
            raise InputError(f"profile {name}", str(error), "the keys of a profile") from error
        cpu = CpuRates(
            profile.title,
            profile.isa,
            profile.threads,
            profile.nodes,
            profile.tile_tflops * 1e12,
            profile.read_gbs * GB,
            profile.dense_tflops * 1e12,
            profile.dense_tflops_f32 * 1e12,
        )
        gpus = tuple(known[gpu] for gpu in profile.gpus)
        launches = profile.layer_ms / 1e3, profile.experts_ms / 1e3
        memory = parse_bytes(name, profile.memory)
        match[name] = Machine(name, cpu, memory, gpus, False, tuple(profile.sources), *launches)
    return match


def profile(name: str) -> Machine:
    known = profiles()
    if name not in known:
        raise InputError("machine", name, "`this`, or one of " + ", ".join(known))
    return known[name]


def with_gpus(machine: Machine, words: str) -> Machine:
    """`24GB,24GB`, names of GPUs, or `none`. A size alone takes the machine's own GPU, or an RTX 4090's rates."""
    if words.strip().lower() in ("none", "0", ""):
        return replace(machine, gpus=())
    known, own, match = gpu_rows(), list(machine.gpus), []
    for place, text in enumerate(text.strip() for text in words.split(",")):
        if text.lower() in known:
            match.append(known[text.lower()])
            continue
        like = own[min(place, len(own) - 1)] if own else known["rtx-4090"]
        memory = parse_bytes("gpu", text)
        name = like.name if memory == like.memory else f"{text} like {like.name}"
        match.append(replace(like, memory=memory, name=name))
    return replace(machine, gpus=tuple(match))


def with_memory(machine: Machine, text: str) -> Machine:
    return replace(machine, memory=parse_bytes("ram", text))
