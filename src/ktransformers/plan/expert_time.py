"""Seconds of one layer of experts on one batch: on the CPU, and with the placement engine on both sides at once.

The CPU reads the experts that are touched (or decodes them, where they are of a few bits) and multiplies. With the
engine `split` divides them as it does when a model runs, from the costs of a profile in place of measured ones. While
the rest of a layer runs the link already carries its experts, so a streamed layer costs what its bytes take beyond that
(`lead`), or what launching and multiplying take, whichever ends later. What the CPU is asked for decides about host
memory too (`asked_of_cpu`): room to compute in, rows that are kept.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ktransformers.plan.formats import TILE_K, format_of, tiles
from ktransformers.plan.machine import BACKWARD, DECODE, SHARES, Machine
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.modes import (
    CPU,
    HOST_CALLBACK,
    NEARLY_ALL,
    RESIDENT,
    SPLIT,
    STREAM,
    STREAM_ALL,
    decide,
    pass_kind,
    predict,
)
from ktransformers.plan.split import Costs, split
from ktransformers.plan.workload import Choice, Training, Work, expert_bytes

SUM = Costs.sum
# Of a GPU's paper rate that a layer with LoRA reaches in training, moving rows included: fitted to streamed steps of
# 8192 tokens on an H200.
LORA_SHARE = 0.25
GPU_SHARE = 0.5  # and in products of a few thousand rows without gradients; estimated
SERVED_CALL = (
    0.9e-3  # handing experts to the GPU without LoRA: a streamed token in int4 beyond its bytes (bench/place.py)
)
CROSSING = 800e-6  # hidden states down, a thread woken, results up, besides their bytes (place/gpu/layer_costs.py)
FORWARD = 3 / 7  # of what handing experts to the GPU takes in both directions
AGAIN = 5 / 3  # backward on a GPU: gate and up once more, and as many products as forward
QUIET = 0.7  # of Python's time for a layer, where the CPU's threads sleep beside it and nobody waits for them
PASSES = 4  # of Python's time for a layer in a step: forward, again, and backward's two
REPLAYED = 0.3  # and where attention is replayed: norms, routers and residuals are left
RECORDED = 0.5  # of Python's time for a layer's experts where their pass is replayed: fitted to steps in int4
BESIDE = 3.0  # how launching and the link add up where neither waits for the other: fitted likewise

SPLIT_MODE = {HOST_CALLBACK: RESIDENT, STREAM_ALL: STREAM}  # by which `split` divides a layer

NOTHING, SOME, ALL = "nothing", "some", "all"  # of a layer's experts that the CPU is asked for


def together(first: float, second: float, power: float) -> float:
    found: float = (first**power + second**power) ** (1 / power)
    return found


def experts_touched(model: ModelShape, tokens: float) -> float:
    """Of one layer, when every token takes k of E at random."""
    missed: float = (1 - model.top_k / model.experts) ** tokens
    return model.experts * (1 - missed)


def touched_experts(model: ModelShape, work: Training) -> float:
    """Of one layer, by the tokens that pass at once; sequences choose theirs independently of each other."""
    missed: float = (1 - work.touched) ** max(1.0, work.tokens / work.sequence)
    return min(experts_touched(model, work.tokens), model.experts * (1 - missed))


def _spread(model: ModelShape, tokens: float, touched: float) -> NDArray[np.int64]:
    """Rows of each expert that is touched, as even as they can be."""
    count = max(1, round(touched))
    each, more = divmod(round(tokens * model.top_k), count)
    counts = np.full(count, each, dtype=np.int64)
    counts[:more] += 1
    return counts


def rest_of_layer(
    model: ModelShape, work: Training, machine: Machine, choice: Choice, launches: int, products: int = 1
) -> float:
    """Seconds of one layer besides its experts, in one pass of a step with a GPU; `launches` of PASSES. Launching and
    computing hardly wait for each other, but every layer's routes are waited for."""
    numbers = model.rest_per_layer + model.scores_width * work.sequence / 2
    computing = products * 2 * work.tokens * numbers / (machine.gpus[0].flops * LORA_SHARE)
    launching = machine.layer_seconds * (QUIET if choice.uses_engine else 1) * (REPLAYED if work.replays(choice) else 1)
    return together(launches / PASSES * launching, computing, SUM)


def _row_operations(model: ModelShape, rank: int, backward: bool) -> float:
    wide = (2 if model.gated else 1) * model.intermediate
    lora = TILE_K * tiles(rank) * (2 * model.hidden + wide + model.intermediate)
    return 2 * (model.expert_numbers + (2 if backward else 1) * lora)


def _cpu_rates(
    model: ModelShape, machine: Machine, choice: Choice, rank: int, backward: bool
) -> tuple[float, float, float]:
    """Seconds of an expert, of a row, and the power by which they add up."""
    shares, cpu = SHARES[machine.cpu.isa], machine.cpu
    reading = expert_bytes(model, choice) / (cpu.read_bytes * shares.read)
    if format_of(choice.format).bits < 16:
        reading = max(reading, model.expert_numbers * DECODE / cpu.tile_flops)
    share = cpu.forward_share or shares.tile
    row = _row_operations(model, rank, backward) / (cpu.tile_flops * share)
    if backward:
        measured = cpu.forward_share and cpu.backward_share
        slower = share / cpu.backward_share if measured and cpu.backward_share else 1 / BACKWARD
        reading, row = reading * slower, row * slower
    return reading, row, shares.sum


def layer_seconds(
    model: ModelShape,
    tokens: float,
    machine: Machine,
    choice: Choice,
    *,
    rank: int = 0,
    backward: bool = False,
    touched: float | None = None,
) -> float:
    """All experts on the CPU; `touched`: so many of them, where it is not what uniform routes touch."""
    reading, row, power = _cpu_rates(model, machine, choice, rank, backward)
    count = experts_touched(model, tokens) if touched is None else touched
    return together(count * reading, tokens * model.top_k * row, power) + SHARES[machine.cpu.isa].call


def costs_of(
    model: ModelShape, machine: Machine, choice: Choice, *, learns: bool, rank: int = 0, backward: bool = False
) -> Costs:
    """What `split` decides by; `learns`: in training, with LoRA and autograd around it."""
    gpu, size = machine.gpus[0], expert_bytes(model, choice)
    launches = machine.experts_seconds * (1 - FORWARD if backward else FORWARD)
    share = LORA_SHARE if learns else GPU_SHARE
    reading, row, power = _cpu_rates(model, machine, choice, rank, backward)
    work = _row_operations(model, rank, False) * (AGAIN if backward else 1)
    return Costs(
        cpu_call=SHARES[machine.cpu.isa].call + CROSSING,
        cpu_token=2 * 2 * model.hidden / gpu.link * (2 if backward else 1),
        cpu_expert=reading,
        cpu_row=row,
        link_expert=size / gpu.link,
        memory_expert=size / machine.cpu.read_bytes,
        gpu_call=launches if learns else SERVED_CALL,
        gpu_expert=(size + 4 * model.expert_numbers) / gpu.bandwidth,  # read, written in bf16, read by the product
        gpu_row=work / (gpu.flops * share),
        sum=power,
    )


def placed_seconds(
    model: ModelShape,
    tokens: float,
    touched: float,
    machine: Machine,
    choice: Choice,
    lead: float,
    *,
    rank: int = 0,
    backward: bool = False,
    found: bool = False,
    learns: bool = True,
    recorded: bool = False,
) -> float:
    """With the engine, beyond the rest of the layer. `lead`: seconds of it that the link has besides; `found`: all of
    the experts are on the GPU still; `recorded`: passes are replayed."""
    costs = costs_of(model, machine, choice, learns=learns, rank=rank, backward=backward)
    if recorded:
        costs = replace(costs, gpu_call=RECORDED * costs.gpu_call)
    counts = _spread(model, tokens, touched)
    count = len(counts)
    residents = count if found else round(count * choice.residents / model.experts)
    mode = planned_mode(model, tokens, touched, machine, choice, rank=rank, training=learns, lead=lead)
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
    if not recorded or not (mode == STREAM_ALL or nearly_all):
        return by_routing
    # stream_all: the host does not wait for ids, so launching overlaps with the link and the device.
    streamed = 0 if found else model.experts - choice.residents
    device = max(streamed * costs.link_expert, model.experts * costs.gpu_expert + tokens * model.top_k * costs.gpu_row)
    return together(lead + costs.gpu_call, device, BESIDE) - lead


def planned_mode(
    model: ModelShape,
    tokens: float,
    touched: float,
    machine: Machine,
    choice: Choice,
    *,
    rank: int = 0,
    training: bool = False,
    lead: float = 0.0,
) -> str:
    """The mode of the choice's policy; `auto` decides as the dispatcher does, with this machine's costs."""
    if choice.policy != "auto":
        return RESIDENT if choice.policy == CPU and choice.residents else choice.policy
    counts = _spread(model, tokens, touched)
    costs = {
        direction: costs_of(model, machine, choice, learns=training, rank=rank, backward=direction == "backward")
        for direction in ("forward", "backward")
    }
    residents = round(len(counts) * choice.residents / model.experts)
    kind = pass_kind(round(tokens), training)
    return decide(kind, predict(kind, costs, round(tokens), counts, residents, lead=lead)).mode


def asked_of_cpu(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> str:
    """How much of a batch the CPU computes at most. Where it may have a whole layer it keeps gate and up of every row
    for backward."""
    if not choice.uses_engine:
        return ALL
    if not isinstance(work, Training):
        return NOTHING if choice.policy in (STREAM, STREAM_ALL) else SOME  # a few tokens at least
    lead = rest_of_layer(model, work, machine, choice, 1) * model.layers / model.expert_layers
    rank = work.rank if work.adapts_experts else 0
    mode = planned_mode(
        model, work.tokens, touched_experts(model, work), machine, choice, rank=rank, training=True, lead=lead
    )
    if mode in (STREAM, STREAM_ALL):
        return NOTHING
    return SOME if mode == SPLIT or choice.residents else ALL
