"""Seconds from shapes and rates: a training step, a pass of serving, each as its parts one after another.

Routed experts are computed by the CPU, or by both sides with the placement engine (`sides.py`), where the link carries
them while the rest of the layer runs. Everything else is counted in operations at a share of the GPU's paper rate, or
at the measured rate of torch's product on a CPU. The surprising part is Python: launching a layer, LoRA and
checkpointing included, takes longer than computing it until a step has thousands of tokens, and without a GPU nothing
is computed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.plan.expert_time import (
    GPU_SHARE,
    LORA_SHARE,
    NOTHING,
    PASSES,
    asked_of_cpu,
    experts_touched,
    layer_seconds,
    placed_seconds,
    rest_of_layer,
    touched_experts,
)
from ktransformers.plan.formats import packed_lora_bytes
from ktransformers.plan.machine import Machine
from ktransformers.plan.memory import (
    attention_lora_numbers,
    expert_lora_numbers,
    layer_bytes,
    recorded,
    slot_count,
)
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.workload import Choice, Serving, Training, Work

LAYER = 0.3e-3  # seconds in which Python launches one layer's operators without gradients, about sixty; estimated
# Of Python's time for a layer in a training step with a GPU, what it takes without one, its experts' calls included:
# 12.8 ms in float32 and 15 ms in bf16 on two AMX cores where that is 18 ms, the difference between steps of 4 and of 12
# layers of next to no size.
ON_CPU = 0.75
# Times that a step without a GPU moves what autograd keeps of a layer, at the read rate: norms, casts, residuals and
# attention, whose backward costs 20 to 45 us a token whatever it sees. Steps of 16 and of 45 short rows at once were
# 0.62 ms a token apart, of which products and experts explain 0.18 (6 layers of 512, bf16, two AMX cores).
MOVED = 150
HOST_CALL = 50e-6  # a layer's experts start after a copy down and end with one up: two callbacks of 23 us, measured
# The same in training, with PEFT and autograd around the kernels: 5 to 6.7 ms in either direction and at every size of
# bench/train_e2e.py.
TRAINED_CALL = 6e-3
LOSS_PASSES = 3  # the head: forward, and in backward once again and its gradient
ADAM_BYTES = 28  # read and written for a trained number: it, its gradient, two moments
ADAM_SHARE = 0.62  # of the read rate that torch's AdamW reaches with eight threads: 16 ms for 53 million numbers
PREFETCHED = 4  # rows of an expert on average: from here on the next layer's experts are fetched ahead


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


def rest_seconds(model: ModelShape, tokens: float, seen: float, machine: Machine, choice: Choice, size: int) -> float:
    """Products of all layers besides their experts, once forward; `seen` tokens stand before a token on average."""
    numbers = model.layers * model.rest_per_layer
    operations = 2 * tokens * (numbers + model.layers * model.scores_width * seen)
    return _products(operations, numbers * size, machine, choice, size)


def head_seconds(
    model: ModelShape, tokens: float, machine: Machine, choice: Choice, size: int, share: float = GPU_SHARE
) -> float:
    return _products(2 * tokens * model.embedding, model.embedding * size, machine, choice, size, share)


def _products(
    operations: float, weights: float, machine: Machine, choice: Choice, size: int, share: float = GPU_SHARE
) -> float:
    if choice.gpus:
        gpu = machine.gpus[0]
        return max(operations / (gpu.flops * share), weights / gpu.bandwidth)
    cpu = machine.cpu
    return max(operations / (cpu.dense_flops_f32 if size == 4 else cpu.dense_flops), weights / cpu.read_bytes)


def crossing_seconds(
    model: ModelShape, tokens: float, machine: Machine, choice: Choice, size: int, call: float = HOST_CALL
) -> float:
    """Hidden states down to the CPU and results up, of all layers."""
    if not choice.gpus:
        return 0.0
    both = 2 * tokens * model.hidden * size / machine.gpus[0].link
    return model.expert_layers * (both + call)


@dataclass(frozen=True)
class _Pass:
    """One way through all layers in a training step."""

    launches: int  # of PASSES
    products: int  # of the rest, as many as forward has
    experts: bool  # computed, not taken from what was kept
    backward: bool = False
    found: bool = False  # the pass before it left the layer's experts in their slots


def _passes(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> list[_Pass]:
    found = [_Pass(1, 1, True)]
    if work.checkpointing:
        found.append(_Pass(1, 1, not work.retain))
    held = choice.uses_engine and slot_count(model, work, choice, machine) >= model.experts
    return [*found, _Pass(2, 1, True, backward=True, found=held and found[-1].experts and work.checkpointing)]


def training_time(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> Time:
    rank, size = work.rank if work.adapts_experts else 0, work.rest_bytes
    touched, sparse = touched_experts(model, work), model.expert_layers / model.layers
    replayed = recorded(model, work, choice, machine)
    parts = dict.fromkeys(("experts", "rest", "loss", "crossing", "optimiser"), 0.0)
    for way in _passes(model, work, choice, machine):
        rest = _training_rest(model, work, machine, choice, way) / model.layers
        parts["rest"] += work.batches * model.layers * rest
        if not way.experts:
            continue
        if choice.uses_engine:
            lead = rest / sparse  # what the link has of a layer besides
            expert = placed_seconds(
                model,
                work.tokens,
                touched,
                machine,
                choice,
                lead,
                rank=rank,
                backward=way.backward,
                found=way.found,
                recorded=replayed,
            )
        else:
            expert = layer_seconds(
                model, work.tokens, machine, choice, rank=rank, backward=way.backward, touched=touched
            )
            crossing = crossing_seconds(model, work.tokens, machine, choice, size, TRAINED_CALL)
            parts["crossing"] += work.batches * crossing
        parts["experts"] += work.batches * model.expert_layers * expert
    parts["loss"] = work.batches * LOSS_PASSES * head_seconds(model, work.scored, machine, choice, size, LORA_SHARE)
    parts["crossing"] += _factor_seconds(model, work, choice, machine)
    parts["optimiser"] = _optimiser_seconds(model, work, choice, machine)
    return Time(parts, max(work.tokens_per_step, work.tokens))


def _training_rest(model: ModelShape, work: Training, machine: Machine, choice: Choice, way: _Pass) -> float:
    """All layers besides their experts; on a CPU also what comes before and after them, about as much as a layer."""
    if not choice.gpus:
        products = rest_seconds(model, work.tokens, work.sequence / 2, machine, choice, work.rest_bytes)
        launching = ON_CPU * machine.layer_seconds * (model.layers + 1)
        moving = MOVED * model.layers * layer_bytes(model, work) / machine.cpu.read_bytes
        return way.products * products + way.launches / PASSES * (launching + moving)
    return model.layers * rest_of_layer(model, work, machine, choice, way.launches, way.products)


def _factor_seconds(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> float:
    """Factors of experts that a GPU computes, there, of every batch; gradients come back while the next layer runs."""
    if not choice.uses_engine or not work.adapts_experts:
        return 0.0
    return work.batches * expert_lora_numbers(model, work.rank) * work.trained_bytes / machine.gpus[0].link


def _optimiser_seconds(model: ModelShape, work: Training, choice: Choice, machine: Machine) -> float:
    experts = expert_lora_numbers(model, work.rank) if work.adapts_experts else 0
    attention = attention_lora_numbers(model, work.rank) if work.adapts_attention else 0
    near = machine.gpus[0].bandwidth if choice.gpus else machine.cpu.read_bytes
    host = machine.cpu.read_bytes * ADAM_SHARE
    seconds = experts * ADAM_BYTES / host + attention * ADAM_BYTES / (near if choice.gpus else host)
    if work.adapts_experts and asked_of_cpu(model, work, choice, machine) != NOTHING:  # factors are packed every step
        packed = packed_lora_bytes(model.hidden, model.intermediate, model.gated, work.rank)
        seconds += model.expert_layers * model.experts * packed / machine.cpu.read_bytes
    return seconds


def pass_parts(model: ModelShape, tokens: float, seen: float, machine: Machine, choice: Choice, size: int) -> Time:
    """One forward pass without gradients; the head sees one token of each sequence."""
    rest = rest_seconds(model, tokens, seen, machine, choice, size) + LAYER * model.layers
    if choice.uses_engine:
        touched = experts_touched(model, tokens)
        lead = rest / model.expert_layers if tokens * model.top_k >= PREFETCHED * model.experts else 0.0
        expert = placed_seconds(model, tokens, touched, machine, choice, lead, learns=False)
        crossing = 0.0
    else:
        expert = layer_seconds(model, tokens, machine, choice)
        crossing = crossing_seconds(model, tokens, machine, choice, size)
    parts = {
        "experts": model.expert_layers * expert,
        "rest": rest,
        "head": head_seconds(model, 1, machine, choice, size),
        "crossing": crossing,
    }
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
