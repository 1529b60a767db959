"""Seconds from shapes and rates: what a layer of experts takes on a CPU, what everything else takes beside it.

A layer reads the experts that its tokens touch and multiplies: two times that add up to something between their sum and
the larger one (`Shares.sum`), because memory and arithmetic of one core hardly overlap (docs/log.md). Everything else
is counted in operations at a share of the GPU's paper rate, or at the measured rate of torch's product on a CPU.
Routing is taken as uniform; a step is its parts one after another, as it runs today.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.place.formats import TILE_K, packed_lora_bytes, tiles
from ktransformers.place.machine import BACKWARD, SHARES, Machine
from ktransformers.place.memory import attention_lora_numbers, expert_bytes, expert_lora_numbers
from ktransformers.place.shape import ModelShape
from ktransformers.place.work import Choice, Serving, Training, Work

GPU_SHARE = 0.5  # of the paper rate, in products of a few thousand rows; estimated
LAYER = 0.3e-3  # seconds in which Python launches one layer's operators, about sixty; estimated
HOST_CALL = 50e-6  # a layer's experts start after a copy down and end with one up: two callbacks of 23 us, measured
LOSS_PASSES = 3  # the head: forward, and in backward once again and its gradient
ADAM_BYTES = 28  # read and written for a trained number: it, its gradient, two moments


@dataclass(frozen=True)
class Time:
    """Seconds by part. Of training: one optimiser step. Of serving: one token of every sequence."""

    parts: dict[str, float]
    tokens: float  # that these seconds are for
    first_token: float | None = None  # seconds from the prompt to the first answer

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def experts_touched(model: ModelShape, tokens: float) -> float:
    """Of one layer, when every token takes k of E at random."""
    missed: float = (1 - model.top_k / model.experts) ** tokens
    return model.experts * (1 - missed)


def layer_seconds(
    model: ModelShape, tokens: float, machine: Machine, choice: Choice, *, rank: int = 0, backward: bool = False
) -> float:
    """Routed experts of one layer on the CPU, those that are resident on a GPU left out."""
    shares, cpu = SHARES[machine.cpu.isa], machine.cpu
    here = 1 - choice.residents / model.experts
    rows = tokens * model.top_k * here
    wide = (2 if model.gated else 1) * model.intermediate
    lora = TILE_K * tiles(rank) * (2 * model.hidden + wide + model.intermediate)
    operations = 2 * rows * (model.expert_numbers + (2 if backward else 1) * lora)
    share = cpu.forward_share or shares.tile
    if backward:
        share = cpu.backward_share or share * BACKWARD
    reading = experts_touched(model, tokens) * here * expert_bytes(model, choice) / (cpu.read_bytes * shares.read)
    multiplying = operations / (cpu.tile_flops * share)
    together: float = (reading**shares.sum + multiplying**shares.sum) ** (1 / shares.sum)
    return together + shares.call


def rest_seconds(model: ModelShape, tokens: float, seen: float, machine: Machine, choice: Choice, size: int) -> float:
    """All layers besides their experts, once forward; `seen` tokens stand before a token on average."""
    numbers = model.layers * model.rest_per_layer
    operations = 2 * tokens * (numbers + model.layers * model.scores_width * seen)
    return _products(operations, numbers * size, machine, choice, size) + LAYER * model.layers


def head_seconds(model: ModelShape, tokens: float, machine: Machine, choice: Choice, size: int) -> float:
    return _products(2 * tokens * model.embedding, model.embedding * size, machine, choice, size)


def _products(operations: float, weights: float, machine: Machine, choice: Choice, size: int) -> float:
    if choice.gpus:
        gpu = machine.gpus[0]
        return max(operations / (gpu.flops * GPU_SHARE), weights / gpu.bandwidth)
    cpu = machine.cpu
    return max(operations / (cpu.dense_flops_f32 if size == 4 else cpu.dense_flops), weights / cpu.read_bytes)


def crossing_seconds(model: ModelShape, tokens: float, machine: Machine, choice: Choice, size: int) -> float:
    """Hidden states down to the CPU and results up, of all layers."""
    if not choice.gpus:
        return 0.0
    both = 2 * tokens * model.hidden * size / machine.gpus[0].link
    return model.expert_layers * (both + HOST_CALL)


def training_time(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> Time:
    again = 1 if work.checkpointing else 0  # forward once more
    rank = work.rank if work.adapts_experts else 0
    forward = layer_seconds(model, work.tokens, machine, choice, rank=rank)
    backward = layer_seconds(model, work.tokens, machine, choice, rank=rank, backward=True)
    passes = 1 + (0 if work.retain else again)
    size, seen = work.rest_bytes, work.sequence / 2
    rest = rest_seconds(model, work.tokens, seen, machine, choice, size)
    crossing = crossing_seconds(model, work.tokens, machine, choice, size)
    parts = {
        "experts": work.batches * model.expert_layers * (passes * forward + backward),
        "rest": work.batches * (2 + again) * rest,
        "loss": work.batches * LOSS_PASSES * head_seconds(model, work.tokens, machine, choice, size),
        "crossing": work.batches * (passes + 1) * crossing,
        "optimiser": _optimiser_seconds(model, work, choice, machine),
    }
    return Time(parts, max(work.tokens_per_step, work.tokens))


def _optimiser_seconds(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> float:
    experts = expert_lora_numbers(model, work.rank) if work.adapts_experts else 0
    attention = attention_lora_numbers(model, work.rank) if work.adapts_attention else 0
    near = machine.gpus[0].bandwidth if choice.gpus else machine.cpu.read_bytes
    seconds = experts * ADAM_BYTES / machine.cpu.read_bytes + attention * ADAM_BYTES / near
    if work.adapts_experts:  # factors are packed anew once a step
        packed = packed_lora_bytes(model.hidden, model.intermediate, model.gated, work.rank)
        seconds += model.expert_layers * model.experts * packed / machine.cpu.read_bytes
    return seconds


def pass_parts(model: ModelShape, tokens: float, seen: float, machine: Machine, choice: Choice, size: int) -> Time:
    """One forward pass without gradients; the head sees one token of each sequence."""
    parts = {
        "experts": model.expert_layers * layer_seconds(model, tokens, machine, choice),
        "rest": rest_seconds(model, tokens, seen, machine, choice, size),
        "head": head_seconds(model, 1, machine, choice, size),
        "crossing": crossing_seconds(model, tokens, machine, choice, size),
    }
    if choice.gpus and choice.residents:
        touched = experts_touched(model, tokens) * choice.residents / model.experts
        resident = model.expert_layers * touched * expert_bytes(model, choice) / machine.gpus[0].bandwidth
        parts["experts"] = max(parts["experts"], resident)  # both sides work at the same time
    return Time(parts, tokens)


def serving_time(model: ModelShape, work: Serving, choice: Choice, machine: Machine) -> Time:
    first = pass_parts(model, work.prompt, work.prompt / 2, machine, choice, work.rest_bytes)
    decode = pass_parts(model, work.sequences, (work.prompt + work.context) / 2, machine, choice, work.rest_bytes)
    cache = work.sequences * (work.prompt + work.context) / 2 * model.cache_width * work.rest_bytes
    near = machine.gpus[0].bandwidth if choice.gpus else machine.cpu.read_bytes
    return Time(decode.parts | {"cache": cache / near}, work.sequences, first.seconds)


def time_of(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> Time:
    if isinstance(work, Training):
        return training_time(model, work, choice, machine)
    return serving_time(model, work, choice, machine)
