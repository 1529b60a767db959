"""Seconds of one layer of experts on one batch: on the CPU, and with the placement engine on both sides at once.

The CPU reads the experts that are touched (or decodes them, where they are of a few bits) and multiplies. With the
engine `split` divides them as it does when a model runs, from the costs of a profile in place of measured ones. While
the rest of a layer runs the link already carries its experts, so a streamed layer costs what its bytes take beyond that
(`lead`), or what launching and multiplying take, whichever ends later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ktransformers.place.formats import TILE_K, format_of, tiles
from ktransformers.place.machine import BACKWARD, DECODE, SHARES, Machine
from ktransformers.place.memory import expert_bytes
from ktransformers.place.shape import ModelShape
from ktransformers.place.split import Costs, split
from ktransformers.place.work import Choice

SUM = Costs.sum
# Of a GPU's paper rate that a layer with LoRA reaches in training, moving rows included: fitted to streamed steps of
# 8192 tokens on an H200.
LORA_SHARE = 0.25
GPU_SHARE = 0.5  # and in products of a few thousand rows without gradients; estimated
SERVED_CALL = (
    0.9e-3  # handing experts to the GPU without LoRA: a streamed token in int4 beyond its bytes (bench/place.py)
)
CROSSING = 800e-6  # hidden states down, a thread woken, results up, besides their bytes (place/gpu/measure.py)
FORWARD = 3 / 7  # of what handing experts to the GPU takes in both directions
AGAIN = 5 / 3  # backward on a GPU: gate and up once more, and as many products as forward


RECORDED = 0.5  # of Python's time for a layer's experts where their pass is replayed: fitted to steps in int4
BESIDE = 3.0  # how launching and the link add up where neither waits for the other: fitted likewise
NEARLY_ALL = 0.9  # of the experts wanted: `stream` sends for everybody (place/choose.py)


def together(first: float, second: float, power: float) -> float:
    found: float = (first**power + second**power) ** (1 / power)
    return found


def experts_touched(model: ModelShape, tokens: float) -> float:
    """Of one layer, when every token takes k of E at random."""
    missed: float = (1 - model.top_k / model.experts) ** tokens
    return model.experts * (1 - missed)


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
    count = max(1, round(touched))
    each, more = divmod(round(tokens * model.top_k), count)
    counts = np.full(count, each, dtype=np.int64)
    counts[:more] += 1
    residents = count if found else round(count * choice.residents / model.experts)
    policy = "resident" if choice.policy == "cpu" else choice.policy
    here = frozenset(range(residents))
    ways = split(counts, round(tokens), costs, there=here, backlog=-lead, policy=policy)
    near, far = ways.there + ways.streamed, ways.cpu
    gpu = len(near) * costs.gpu_expert + float(counts[list(near)].sum()) * costs.gpu_row
    cpu = costs.cpu(len(far), float(counts[list(far)].sum()), tokens, bool(ways.streamed))
    link = len(ways.streamed) * costs.link_expert - lead
    memory = (len(ways.streamed) + len(far)) * costs.memory_expert - lead
    asked = max(gpu + costs.gpu_call if near else 0.0, cpu, link, memory)
    if not recorded or policy == "resident" or (policy == "stream" and count < NEARLY_ALL * model.experts):
        return asked
    # Everybody unasked: nobody waits, and what Python launches goes on beside the link and the device.
    coming = 0 if found else model.experts - choice.residents
    device = max(coming * costs.link_expert, model.experts * costs.gpu_expert + tokens * model.top_k * costs.gpu_row)
    unasked = together(lead + costs.gpu_call, device, BESIDE) - lead
    return unasked if policy == "stream" else min(asked, unasked)
