"""Predicted time and memory of a layer of experts by policy, and that the planner's limits are the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.place.apply import as_planned
from ktransformers.plan import Choice, Training, make_plan, open_shape, profile
from ktransformers.plan.expert_time import (
    CPU_ALL,
    CPU_NONE,
    CPU_SOME,
    cpu_layer_seconds,
    cpu_share,
    experts_of_batch,
    placed_layer_seconds,
    predicted_costs,
)
from ktransformers.plan.machine import with_gpus
from ktransformers.plan.memory import cached_experts, captures_expert_passes, predict_memory
from ktransformers.plan.split import split
from ktransformers.plan.step_time import predict_time
from ktransformers.plan.workload import TRAINING_POLICIES

QWEN = open_shape("qwen3-30b-a3b")
MACHINE = profile("amx16-h200")


def layer(policy: str, tokens: int, lead: float = 0.0, **options: float) -> float:
    return placed_layer_seconds(QWEN, tokens, QWEN.experts, MACHINE, Choice("bf16", 1, policy=policy), lead, **options)  # type: ignore[arg-type]


def test_streaming_runs_at_the_speed_of_the_link() -> None:
    """docs/place.md: 23.4 ms for all experts of a layer over 52 GB/s, whatever the batch."""
    for tokens in (512, 2048):
        assert layer("stream", tokens) == pytest.approx(23.4e-3, rel=0.05)
    assert layer("stream", 512, lead=10e-3) == pytest.approx(13.4e-3, rel=0.05)  # what came while the rest ran
    assert layer("stream", 512, resident_all=True) < 6e-3  # all are there: launches, and hardly any work


def test_auto_without_gradients_is_no_slower_than_either_device_alone() -> None:
    for tokens in (64, 512, 2048, 8192):
        alone = min(layer("stream", tokens, training=False), layer("resident", tokens, training=False))
        assert layer("auto", tokens, training=False) <= 1.01 * alone
    costs = predicted_costs(QWEN, MACHINE, Choice("bf16", 1, policy="auto"), training=True)
    resident_all = split([128] * 128, 2048, costs)
    assert resident_all.streamed and resident_all.cpu


def test_residents_are_not_computed_by_the_cpu() -> None:
    half = replace(Choice("bf16", 1, policy="resident"), residents=64)
    whole = placed_layer_seconds(QWEN, 512, 128, MACHINE, half, 0.0)
    assert whole < 0.7 * layer("resident", 512)
    assert layer("resident", 512) == pytest.approx(cpu_layer_seconds(QWEN, 512, MACHINE, Choice()), rel=0.2)


def test_steps_by_policy() -> None:
    """One sequence of a bad router touches half of the experts: streaming costs half, more sequences make up for it."""
    work = Training(2048, 2048, 512, retain=True)
    times = {
        name: predict_time(QWEN, work, Choice("bf16", 1, policy=name), MACHINE).seconds for name in TRAINING_POLICIES
    }
    assert times["auto"] == times["stream"] <= min(times["cpu"], times["resident"])
    assert predict_time(QWEN, work, Choice("int4", 1, policy="stream"), MACHINE).seconds < times["stream"]
    few = replace(work, tokens=512, tokens_per_step=512, touched=0.5)
    assert experts_of_batch(QWEN, few) == pytest.approx(64)
    assert experts_of_batch(QWEN, replace(work, touched=0.5)) == pytest.approx(120)
    streamed = Choice("bf16", 1, policy="stream")
    assert (
        predict_time(QWEN, few, streamed, MACHINE).seconds
        < predict_time(QWEN, replace(few, touched=1), streamed, MACHINE).seconds
    )
    # Recomputing costs launches, but the backward pass finds the experts where they are.
    again = predict_time(QWEN, replace(work, retain=False), streamed, MACHINE).seconds
    assert times["stream"] <= again < 1.3 * times["stream"]


def test_memory_by_policy() -> None:
    work = Training(2048, 2048, 512, retain=True)
    cpu, stream = (predict_memory(QWEN, work, Choice("bf16", 1, policy=name), MACHINE) for name in ("cpu", "stream"))
    assert stream.gpus[0]["slots"] == pytest.approx(153 * QWEN.expert_numbers * 2.03, rel=0.01)
    assert "slots" not in cpu.gpus[0] and "kept rows" in cpu.host and "kept rows" not in stream.host
    assert stream.host_bytes < cpu.host_bytes and stream.gpu_bytes > cpu.gpu_bytes
    bare = make_plan(QWEN, work, replace(MACHINE, gpus=()), policies=PlacementOptions().policies)
    assert (
        as_planned(PlacementOptions(), bare).policy == "cpu"
        and as_planned(PlacementOptions(kt_place="stream"), bare).policy == "stream"
    )
    small = replace(MACHINE, gpus=(replace(MACHINE.gpus[0], memory=8 * 10**9),))
    assert 0 < cached_experts(QWEN, work, Choice("bf16", 1, policy="stream"), small) < 160


@pytest.mark.parametrize(
    ("choice", "tokens", "asked"),
    [
        (Choice("int4", 1), 8192, CPU_ALL),
        (Choice("int4", 1, policy="stream"), 512, CPU_NONE),
        (Choice("int4", 1, policy="resident", residents=16), 512, CPU_SOME),
        (Choice("int4", 1, policy="auto"), 8192, CPU_NONE),  # the link carries all of them sooner
        (Choice("int4", 1, policy="auto"), 2048, CPU_NONE),
        (Choice("int4", 1, policy="auto", residents=128), 2048, CPU_NONE),
        (Choice("bf16", 1, policy="auto"), 8192, CPU_NONE),
        (Choice("bf16", 1, policy="auto"), 512, CPU_NONE),  # the costs cannot tell: streaming
        (Choice("bf16", 1, policy="auto", residents=1), 512, CPU_NONE),
    ],
)
def test_host_memory_follows_the_cpus_share(choice: Choice, tokens: int, asked: str) -> None:
    """As recorded: bench/results/*/*train-e2e*.json have the ways that were tried."""
    work = Training(tokens=tokens, tokens_per_step=tokens, sequence=512, retain=True, touched=0.553)
    assert cpu_share(QWEN, work, choice, MACHINE) == asked
    host = predict_memory(QWEN, work, choice, MACHINE).host
    assert (host["workspace"] > 0) == (asked != CPU_NONE)
    assert ("kept rows" in host) == (asked == CPU_ALL)
    rows = tokens * QWEN.hidden * 2
    assert host["transfers"] == (4 + (0 if choice.uses_engine else QWEN.expert_layers)) * rows


def test_the_plan_takes_the_policies_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_PLACE", raising=False)
    work = Training(8192, 8192, 512, retain=True)
    assert make_plan(QWEN, work, MACHINE).nearest.choice.policy == "cpu"
    best = make_plan(QWEN, work, MACHINE, policies=TRAINING_POLICIES).best
    assert best is not None and best.choice.policy in ("stream", "auto", "resident")
    unasked = make_plan(QWEN, work, MACHINE, policies=PlacementOptions().policies)
    assert as_planned(PlacementOptions(), unasked).policy == "auto" and PlacementOptions(kt_place="cpu").policies == (
        "cpu",
    )
    bare = make_plan(QWEN, work, replace(MACHINE, gpus=()), policies=PlacementOptions().policies)
    assert (
        as_planned(PlacementOptions(), bare).policy == "cpu"
        and as_planned(PlacementOptions(kt_place="stream"), bare).policy == "stream"
    )
    small = replace(MACHINE, gpus=(replace(MACHINE.gpus[0], memory=8 * 10**9),))
    without = make_plan(QWEN, work, small, policies=PlacementOptions().policies)
    assert without.nearest.choice.gpus == 1 and as_planned(PlacementOptions(), without).policy == "cpu"
    for bad in ({"policy": "moon", "gpus": 1}, {"policy": "stream"}):
        with pytest.raises(InputError):
            Choice(**bad)  # type: ignore[arg-type]


def test_captured_passes_are_predicted_faster() -> None:
    """Few bits and some thousand tokens; then the host does not wait for ids."""
    work, few = Training(tokens=2048, tokens_per_step=2048, sequence=512, rank=8), Choice("int4", 1, policy="auto")
    assert captures_expert_passes(QWEN, work, few, MACHINE)
    assert not captures_expert_passes(QWEN, work, replace(few, format="bf16"), MACHINE)
    assert not captures_expert_passes(QWEN, work, replace(few, policy="cpu"), MACHINE)
    assert not captures_expert_passes(QWEN, replace(work, tokens=8192), few, MACHINE)
    assert captures_expert_passes(QWEN, work, few, with_gpus(MACHINE, "rtx-4090"))
    lead = 5e-3
    asked, unasked = (placed_layer_seconds(QWEN, 2048, 128, MACHINE, few, lead, captured=one) for one in (False, True))
    assert unasked < 0.9 * asked
    half = replace(few, residents=64)
    assert placed_layer_seconds(QWEN, 2048, 128, MACHINE, half, lead, captured=True) < unasked
