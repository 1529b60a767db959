"""What a measurement of speed records of its machine: its description, and rates that no program exceeds.

Rates are bare loops of the same run, because a machine's speed drifts: memory by plain reads, CPU products over panels
in L2, the link by copies of pinned memory, a GPU's memory by a copy within it and its products by one large GEMM. They
are measured in a process that ends, so that no CUDA context stays.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ktransformers import _core
from ktransformers.ground import system
from ktransformers.ground.pool import default_pool
from ktransformers.plan.expert_time import expected_experts
from ktransformers.plan.machine import Machine
from ktransformers.plan.memory import rest_weight_bytes
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.planner import Candidate
from ktransformers.plan.workload import Serving, expert_bytes

COPY_BYTES = 256 << 20
SIDE = 8192  # of the GPU's product


@dataclass(frozen=True)
class Roofs:
    dram: float  # bytes/s read
    tiles: float  # CPU operations/s
    link: float = 0.0  # bytes/s to the GPU; 0: there is none
    hbm: float = 0.0  # bytes/s read or written
    gpu: float = 0.0  # GPU operations/s

    def decode_seconds(self, model: ModelShape, plan: Candidate, machine: Machine, depth: int, streams: int) -> float:
        """A new token of every stream behind `depth` tokens: the bytes that it must read, experts as if every token
        took them at random."""
        work, choice = plan.work, plan.choice
        assert isinstance(work, Serving)
        experts = model.expert_layers * expected_experts(model, streams) * expert_bytes(model, choice)
        dense = (model.rest - model.embedding) * rest_weight_bytes(model, work.rest_bytes, choice, machine)
        cache = streams * (
            model.read_bytes(depth, work.rest_bytes, fp8=work.fp8_cache) + 2 * model.states.bytes(work.rest_bytes)
        )
        if not choice.gpus:
            return (experts + dense + cache) / self.dram
        resident = experts * choice.residents / model.experts
        return (experts - resident) / self.dram + (resident + dense + cache) / self.hbm

    def prompt_seconds(self, model: ModelShape, plan: Candidate, tokens: int, chunk: int) -> float:
        """So many prompt tokens: products, and with a GPU that computes experts their bytes over the link once a
        chunk."""
        choice = plan.choice
        experts = 2.0 * tokens * model.expert_layers * model.top_k * model.expert_numbers
        dense = 2.0 * tokens * model.layers * model.rest_per_layer
        if not choice.gpus:
            return (experts + dense) / self.tiles
        if not choice.uses_engine:
            return experts / self.tiles + dense / self.gpu
        streamed = model.expert_layers * (model.experts - choice.residents) * expert_bytes(model, choice)
        return max((experts + dense) / self.gpu, -(-tokens // chunk) * streamed / self.link)


def measure_roofs() -> Roofs:
    """In a process of its own."""
    program = "import json; from ktransformers.plan import roofs; print(json.dumps(vars(roofs.measure_here())))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return Roofs(**json.loads(done.stdout))


def measure_here() -> Roofs:
    import torch

    pool = default_pool()
    dram, tiles = pool.rate("read", 0.2, bytes=(1 << 30) // pool.threads), pool.rate("panels", 0.2)
    if not system.has_gpu():
        return Roofs(dram, tiles)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    square = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    link = COPY_BYTES / _seconds(lambda: here.copy_(host, non_blocking=True))
    hbm = 2 * COPY_BYTES / _seconds(lambda: here.copy_(there))
    return Roofs(dram, tiles, link, hbm, 2 * SIDE**3 / _seconds(lambda: square @ square))


def _seconds(call: Callable[[], object]) -> float:
    import torch

    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def describe_machine() -> dict[str, Any]:
    """Without names of host and user, so that it can be published."""
    import torch

    import ktransformers

    return {
        **_core.machine(),
        "isa": _core.isa(),
        "arch": platform.machine(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),  # of other programs, mostly
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_loop_seconds": system.python_loop_seconds(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "ktransformers": ktransformers.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
