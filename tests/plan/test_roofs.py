"""Roofs of a token and of a prompt, the description of the machine, and what a log says of memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ktransformers.ground import env, system
from ktransformers.plan import Choice, PlanComparison, Serving, open_shape, profile
from ktransformers.plan.meter import read_comparison
from ktransformers.plan.planner import evaluate
from ktransformers.plan.roofs import Roofs, describe_machine
from ktransformers.plan.workload import expert_bytes

ROOFS = Roofs(dram=1e11, tiles=1e13, link=2e10, hbm=1e12, gpu=1e14)
SHAPE, MACHINE = open_shape("qwen3-30b"), profile("desktop-4090")


def plan_of(**choice: Any) -> Any:
    return evaluate(SHAPE, Serving(), Choice("int4", **choice), MACHINE)


def test_a_token_reads_its_experts_dense_weights_and_cache() -> None:
    plan = plan_of()
    experts = 48 * 8 * expert_bytes(SHAPE, plan.choice)
    dense = 2 * (SHAPE.rest - SHAPE.embedding)
    empty, deep = (ROOFS.decode_seconds(SHAPE, plan, MACHINE, depth, 1) for depth in (0, 1000))
    assert empty == pytest.approx((experts + dense) / 1e11, rel=1e-3)
    assert deep - empty == pytest.approx(1000 * SHAPE.cached_numbers * 2 / 1e11)
    eight = ROOFS.decode_seconds(SHAPE, plan, MACHINE, 0, 8)
    assert empty < eight < 8 * empty  # streams share experts and dense weights


def test_residents_and_dense_weights_are_read_by_the_gpu() -> None:
    bare, half = plan_of(gpus=1), plan_of(gpus=1, policy="resident", residents=64)
    slow, fast = (ROOFS.decode_seconds(SHAPE, plan, MACHINE, 0, 1) for plan in (bare, half))
    experts = 48 * 8 * expert_bytes(SHAPE, bare.choice)
    assert slow - fast == pytest.approx(experts / 2 * (1 / 1e11 - 1 / 1e12))


def test_a_prompt_is_products_or_experts_over_the_link() -> None:
    on_cpu = ROOFS.prompt_seconds(SHAPE, plan_of(), 1000, 512)
    assert on_cpu == pytest.approx(2e3 * (48 * 8 * SHAPE.expert_numbers + 48 * SHAPE.rest_per_layer) / 1e13)
    streamed = ROOFS.prompt_seconds(SHAPE, plan_of(gpus=1, policy="stream"), 1000, 512)
    assert streamed == pytest.approx(2 * 48 * 128 * expert_bytes(SHAPE, Choice("int4")) / 2e10)
    fast_link = replace(ROOFS, link=1e18).prompt_seconds(SHAPE, plan_of(gpus=1, policy="stream"), 1000, 512)
    assert fast_link == pytest.approx(on_cpu / 10)


def test_machine_is_described_without_names() -> None:
    machine = describe_machine()
    assert machine["cpus"] >= 1 and machine["isa"] and machine["load"] >= 0 and "node" not in machine


def test_comparison_is_read_from_a_log() -> None:
    lines = (PlanComparison("memory at the end", *values, "GB") for values in ((1.0, 0.5), (2.0, 3.0)))
    text = "\n".join(f"kt: {line}" for line in lines)
    found = read_comparison(text, "memory at the end")
    assert found is not None and (found.predicted, found.measured, found.unit) == (2.0, 3.0, "GB")
    assert read_comparison(text, "memory") is None


def test_gpus_count_as_having_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    shares: list[float] = []
    device = SimpleNamespace(name="H200", total_memory=150 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    assert [gpu.memory for gpu in system.all_gpus()] == [150 * 10**9] and not shares
    monkeypatch.setenv(env.GPU_MEMORY, "24GB")
    assert [gpu.memory for gpu in system.all_gpus()] == [24 * 10**9]
    assert shares == [pytest.approx((24 - 0.6) / 150)]
