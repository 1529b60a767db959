"""Predicted seconds of one layer of experts on one batch: on the CPU, or on CPU and GPU with the placement engine.

The CPU reads the weights of the experts that have tokens (or dequantises them) and multiplies. With the engine, `split`
divides the experts as it does at run time, from the rates of a machine profile instead of measured costs. The link
copies experts while the rest of the layer runs, so a streamed layer costs what its copies take beyond that `lead`, or
what launching and multiplying take, whichever ends later. The CPU's share also decides about host memory (`cpu_share`):
its workspace and the rows that it keeps for backward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ktransformers.plan.formats import TILE_K, format_of, tiles
from ktransformers.plan.machine import BACKWARD_RATE, EFFICIENCY, Machine
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.modes import (
    CPU,
    DECODE,
    HOST_CALLBACK,
    NEARLY_ALL,
    RESIDENT,
    STREAM,
    STREAM_ALL,
    Decision,
    decide,
    pass_kind,
    predict,
)
from ktransformers.plan.split import Costs, split
from ktransformers.plan.workload import Choice, Training, Work, expert_bytes

POWER = Costs.sum
# Share of a GPU's nominal rate that a layer with LoRA reaches in training, moving rows included: fitted to streamed
# steps of 8192 tokens on an H200.
TRAINING_FLOPS_SHARE = 0.25
INFERENCE_FLOPS_SHARE = 0.5  # the same in GEMMs of a few thousand rows without gradients; estimated
# Launching experts on the GPU without LoRA: a streamed int4 token beyond its bytes (bench/place.py).
INFERENCE_CALL = 0.9e-3
HOST_ROUND_TRIP = 800e-6  # copies of hidden states and results and waking a thread, besides their bytes
FORWARD_SHARE = 3 / 7  # of the launch time of a layer's experts, both directions together
BACKWARD_WORK = 5 / 3  # of backward on a GPU in units of forward: gate and up recomputed, and as many GEMMs
ENGINE_LAUNCH_SHARE = 0.7  # of a layer's launch time that remains while the CPU's threads sleep
LAUNCHES_PER_STEP = 4  # of a layer: forward, recompute, and two of backward
GRAPH_LAUNCH_SHARE = 0.3  # the same with attention graphs: norms, routers and residuals remain
GRAPH_CALL_SHARE = 0.5  # of the experts' launch time if their pass is a CUDA graph: fitted to steps in int4
OVERLAP_POWER = 3.0  # by which launching and copies add up in stream_all: fitted likewise

SPLIT_MODE = {HOST_CALLBACK: RESIDENT, STREAM_ALL: STREAM}  # the mode by which `split` divides a layer

CPU_NONE, CPU_SOME, CPU_ALL = "nothing", "some", "all"  # share of a layer's experts that the CPU may compute


def power_sum(first: float, second: float, power: float) -> float:
    resident_all: float = (first**power + second**power) ** (1 / power)
    return resident_all


def expected_experts(model: ModelShape, tokens: float) -> float:
    """Expected number of experts with tokens in a layer, if every token takes k of E at random."""
    missed: float = (1 - model.top_k / model.experts) ** tokens
    return model.experts * (1 - missed)


def experts_of_batch(model: ModelShape, work: Training) -> float:
    """Expected number of experts with tokens in a layer for a training batch, whose sequences route independently."""
    missed: float = (1 - work.touched) ** max(1.0, work.tokens / work.sequence)
    return min(expected_experts(model, work.tokens), model.experts * (1 - missed))


def _even_rows(model: ModelShape, tokens: float, touched: float) -> NDArray[np.int64]:
    """Rows of each expert that has tokens, as even as possible."""
    count = max(1, round(touched))
    each, more = divmod(round(tokens * model.top_k), count)
    counts = np.full(count, each, dtype=np.int64)
    counts[:more] += 1
    return counts


def dense_layer_seconds(
    model: ModelShape, work: Training, machine: Machine, choice: Choice, launches: int, products: int = 1
) -> float:
    """Seconds of one layer besides its experts, in one pass of a step with a GPU; `launches` of LAUNCHES_PER_STEP.
    Launching and computing overlap, but the host waits for the expert ids of every layer."""
    numbers = model.rest_per_layer + model.scores_width * work.sequence / 2
    computing = products * 2 * work.tokens * numbers / (machine.gpus[0].flops * TRAINING_FLOPS_SHARE)
    launching = (
        machine.layer_seconds
        * (ENGINE_LAUNCH_SHARE if choice.uses_engine else 1)
        * (GRAPH_LAUNCH_SHARE if work.uses_attention_graphs(choice) else 1)
    )
    return power_sum(launches / LAUNCHES_PER_STEP * launching, computing, POWER)


def _row_operations(model: ModelShape, rank: int, backward: bool) -> float:
    gate_up_rows = (2 if model.gated else 1) * model.intermediate
    lora = TILE_K * tiles(rank) * (2 * model.hidden + gate_up_rows + model.intermediate)
    return 2 * (model.expert_numbers + (2 if backward else 1) * lora)


def _cpu_rates(
    model: ModelShape, machine: Machine, choice: Choice, rank: int, backward: bool
) -> tuple[float, float, float]:
    """Seconds per expert and per row, and the power by which they add up."""
    shares, cpu = EFFICIENCY[machine.cpu.isa], machine.cpu
    reading = expert_bytes(model, choice) / (cpu.read_bytes * shares.read)
    if format_of(choice.format).bits < 16:
        trained = backward or rank > 0
        operations = shares.open_code if trained else shares.multiply_code
        reading = max(reading, model.expert_numbers * operations / cpu.tile_flops)
    share = cpu.forward_share or shares.tile
    row = _row_operations(model, rank, backward) / (cpu.tile_flops * share)
    if backward:
        measured = cpu.forward_share and cpu.backward_share
        slower = share / cpu.backward_share if measured and cpu.backward_share else 1 / BACKWARD_RATE
        reading, row = reading * slower, row * slower
    return reading, row, shares.sum


def cpu_layer_seconds(
    model: ModelShape,
    tokens: float,
    machine: Machine,
    choice: Choice,
    *,
    rank: int = 0,
    backward: bool = False,
    touched: float | None = None,
) -> float:
    """All experts on the CPU; `touched`: number of experts with tokens, by default that of uniform routing."""
    reading, row, power = _cpu_rates(model, machine, choice, rank, backward)
    count = expected_experts(model, tokens) if touched is None else touched
    return power_sum(count * reading, tokens * model.top_k * row, power) + EFFICIENCY[machine.cpu.isa].call


def predicted_costs(
    model: ModelShape, machine: Machine, choice: Choice, *, training: bool, rank: int = 0, backward: bool = False
) -> Costs:
    """The costs that `split` decides by; `training`: with LoRA and autograd."""
    gpu, size = machine.gpus[0], expert_bytes(model, choice)
    launches = machine.experts_seconds * (1 - FORWARD_SHARE if backward else FORWARD_SHARE)
    share = TRAINING_FLOPS_SHARE if training else INFERENCE_FLOPS_SHARE
    reading, row, power = _cpu_rates(model, machine, choice, rank, backward)
    work = _row_operations(model, rank, False) * (BACKWARD_WORK if backward else 1)
    return Costs(
        cpu_call=EFFICIENCY[machine.cpu.isa].call + HOST_ROUND_TRIP,
        cpu_token=2 * 2 * model.hidden / gpu.link * (2 if backward else 1),
        cpu_expert=reading,
        cpu_row=row,
        link_expert=size / gpu.link,
        memory_expert=size / machine.cpu.read_bytes,
        gpu_call=launches if training else INFERENCE_CALL,
        gpu_expert=(size + 4 * model.expert_numbers) / gpu.bandwidth,  # read, written in bf16, read by the GEMM
        gpu_row=work / (gpu.flops * share),
        sum=power,
    )


def placed_layer_seconds(
    model: ModelShape,
    tokens: float,
    touched: float,
    machine: Machine,
    choice: Choice,
    lead: float,
    *,
    rank: int = 0,
    backward: bool = False,
    resident_all: bool = False,
    training: bool = True,
    captured: bool = False,
) -> float:
    """A layer with the engine, beyond the rest of the layer. `lead`: seconds in which the link copies before the layer
    runs; `resident_all`: all experts are in the cache; `captured`: passes are replayed from CUDA graphs."""
    costs = predicted_costs(model, machine, choice, training=training, rank=rank, backward=backward)
    if captured:
        costs = replace(costs, gpu_call=GRAPH_CALL_SHARE * costs.gpu_call)
    counts = _even_rows(model, tokens, touched)
    count = len(counts)
    residents = count if resident_all else round(count * choice.residents / model.experts)
    mode = planned_decision(model, tokens, touched, machine, choice, rank=rank, training=training, lead=lead).mode
    division = split(
        counts,
        round(tokens),
        costs,
        resident=frozenset(range(residents)),
        backlog=-lead,
        mode=SPLIT_MODE.get(mode, mode),
    )
    on_gpu, on_cpu = division.gpu, division.cpu
    gpu = len(on_gpu) * costs.gpu_expert + float(counts[list(on_gpu)].sum()) * costs.gpu_row
    cpu = costs.cpu(len(on_cpu), float(counts[list(on_cpu)].sum()), tokens, bool(division.streamed))
    link = len(division.streamed) * costs.link_expert - lead
    memory = (len(division.streamed) + len(on_cpu)) * costs.memory_expert - lead
    by_routing = max(gpu + costs.gpu_call if on_gpu else 0.0, cpu, link, memory)
    nearly_all = mode == STREAM and count >= NEARLY_ALL * model.experts
    if not captured or not (mode == STREAM_ALL or nearly_all):
        return by_routing
    # stream_all: the host does not wait for ids, so launching overlaps with the link and the device.
    streamed = 0 if resident_all else model.experts - choice.residents
    device = max(streamed * costs.link_expert, model.experts * costs.gpu_expert + tokens * model.top_k * costs.gpu_row)
    return power_sum(lead + costs.gpu_call, device, OVERLAP_POWER) - lead


def planned_decision(
    model: ModelShape,
    tokens: float,
    touched: float,
    machine: Machine,
    choice: Choice,
    *,
    rank: int = 0,
    training: bool = False,
    lead: float = 0.0,
) -> Decision:
    """The mode of the choice's policy; `auto` decides as the dispatcher does, with this machine's costs."""
    if choice.policy != "auto":
        return Decision(RESIDENT if choice.policy == CPU and choice.residents else choice.policy, {})
    counts = _even_rows(model, tokens, touched)
    costs = {
        direction: predicted_costs(
            model, machine, choice, training=training, rank=rank, backward=direction == "backward"
        )
        for direction in ("forward", "backward")
    }
    residents = round(len(counts) * choice.residents / model.experts)
    kind = pass_kind(round(tokens), training)
    seconds = predict(
        kind, costs, round(tokens), counts, residents, host_callback=kind == DECODE and residents > 0, lead=lead
    )
    return decide(kind, seconds)


def training_decision(model: ModelShape, work: Training, machine: Machine, choice: Choice) -> Decision:
    """The mode of a training batch."""
    lead = 0.0
    if choice.policy == "auto":
        lead = dense_layer_seconds(model, work, machine, choice, 1) * model.layers / model.expert_layers
    rank = work.rank if work.adapts_experts else 0
    return planned_decision(
        model, work.tokens, experts_of_batch(model, work), machine, choice, rank=rank, training=True, lead=lead
    )


def cpu_share(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> str:
    """How many experts of a batch the CPU computes at most. If it may compute all of them, it keeps gate and up of
    every row for backward."""
    if not choice.uses_engine:
        return CPU_ALL
    if not isinstance(work, Training):
        return CPU_NONE if choice.policy in (STREAM, STREAM_ALL) else CPU_SOME  # decode steps at least
    mode = training_decision(model, work, machine, choice).mode
    if mode in (STREAM, STREAM_ALL):
        return CPU_NONE
    return CPU_SOME if choice.residents else CPU_ALL
