"""Predicts memory and time of a run before it starts: translates the settings into the planner's workload.

The planner (`ktransformers.plan`) takes shapes and rates; this module translates YAML keys for it. A batch is assumed
full: as many rows of the longest length as the settings allow. The number of labelled tokens, which the LM head
processes, is counted in the rows; without rows all tokens count. Attention LoRA is counted as with `lora_target: all`
even if only some modules are named, which overestimates by a few megabytes.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.place.backends import encoded_format, rest_by_rules
from ktransformers.plan import ModelShape, Plan, Training, make_plan, open_shape, stored_as, with_gpus
from ktransformers.plan.machine import Machine
from ktransformers.train.arguments import device_of, dtype_of, rest_of, step_shape, uses_packing
from ktransformers.train.batches import split_by_budget
from ktransformers.train.settings import TrainSettings
from ktransformers.train.targets import EXPERT_GROUP_NAMES, GATE_UP_HALVES

EXPERT_TARGETS = {*EXPERT_GROUP_NAMES, *GATE_UP_HALVES, "gate_up_proj", "down_proj", "all"}


@dataclass(frozen=True)
class Lengths:
    """Lengths of tokenised rows that the plan needs."""

    longest: int  # tokens of the longest row
    labelled: int  # maximum of labelled tokens in one batch
    mean_labelled: float | None = None  # mean over the batches; None: not known


@dataclass(frozen=True)
class Passes:
    """Forward passes of one epoch."""

    count: int
    tokens: int  # padding included
    labelled: int  # tokens with a label
    max_labelled: int  # maximum of labelled tokens in one pass


def simulate_epoch(sequences: list[tuple[int, int]], rows: int, budget: int | None, seed: int | None) -> Passes:
    """An epoch in one random order; the trainer draws another, which hardly changes these numbers. Without a seed in
    the given order.

    `sequences`: (tokens, labelled tokens) of each; `rows` of them form a batch, or with a budget a step that is split.
    """
    order = list(sequences)
    if seed is not None:
        random.Random(seed).shuffle(order)
    parts: list[list[tuple[int, int]]] = []
    for start in range(0, len(order), rows):
        step = order[start : start + rows]
        cut = split_by_budget([tokens for tokens, _ in step], budget) if budget else [list(range(len(step)))]
        parts += [[step[row] for row in part] for part in cut]
    labelled = [sum(labelled for _, labelled in part) for part in parts]
    padded = sum(len(part) * max(tokens for tokens, _ in part) for part in parts)
    return Passes(len(parts), padded, sum(labelled), max(labelled))


def _labelled_share(settings: TrainSettings, tokens: int, lengths: Lengths | None) -> float:
    """Share of a batch that the LM head processes: all if the data is unknown, and all tokens of a pair on a CPU."""
    all_tokens = settings.data.stage == "dpo" and device_of(settings).type == "cpu"
    if lengths is None or all_tokens or settings.trainer.get("label_smoothing_factor"):
        return 1.0
    return min(1.0, max(1, lengths.labelled) / tokens)


def _mean_share(largest: float, tokens: int, lengths: Lengths | None) -> float | None:
    """The same of an average batch; None if all tokens are processed or the mean is not known."""
    if lengths is None or lengths.mean_labelled is None or largest == 1:
        return None
    return min(largest, max(1.0, lengths.mean_labelled) / tokens)


def training_workload(settings: TrainSettings, rest_bytes: int, lengths: Lengths | None = None) -> Training:
    """The planner's workload of a run; `lengths` if the data is known."""
    rows, batches = step_shape(settings)
    sequence = settings.data.cutoff_len
    if lengths is not None and not uses_packing(settings):
        sequence = min(sequence, lengths.longest)
    batch = rows * sequence * (2 if settings.data.stage == "dpo" else 1)
    budget = settings.experts.tokens_per_pass
    step_tokens = batch * batches
    tokens = min(step_tokens, max(budget, sequence)) if budget else batch
    requested = settings.trainer.get("gradient_checkpointing", True)
    checkpointing = bool(requested) and not settings.model.disable_gradient_checkpointing
    target_names = set(settings.lora.lora_target)
    adapts_experts = bool(target_names & EXPERT_TARGETS)
    labelled = _labelled_share(settings, tokens, lengths)
    rest = "bf16" if rest_of(settings) == "bf16" else settings.experts.rest
    rest = rest_by_rules(settings.place, rest)
    return Training(
        tokens=tokens,
        tokens_per_step=step_tokens,
        sequence=sequence,
        rank=settings.lora.lora_rank,
        adapts_experts=adapts_experts,
        adapts_attention="all" in target_names or not target_names <= EXPERT_TARGETS,
        checkpointing=checkpointing,
        retain=checkpointing and settings.experts.kt_cpu_activation == "retain",
        trained_bytes=2 if settings.model.pure_bf16 else 4,
        rest_bytes=rest_bytes,
        saves=int(settings.trainer.get("save_total_limit") or 1),
        labelled=labelled,
        labelled_mean=_mean_share(labelled, tokens, lengths),
        graphs=env.graphs_enabled("attention") and not settings.model.use_reentrant_gc,
        linear_format=None if rest == "bf16" else rest,
    )


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of the planner that do not depend on how a step is split."""

    shape: ModelShape
    machine: Machine
    policies: tuple[str, ...]
    rest_bytes: int
    needs_gpu: bool = False  # a visible GPU must be used

    def forecast(self, settings: TrainSettings, lengths: Lengths | None) -> Plan:
        work = training_workload(settings, self.rest_bytes, lengths)
        return make_plan(self.shape, work, self.machine, policies=self.policies, needs_gpu=self.needs_gpu)


def plan_inputs(settings: TrainSettings, directory: Path, config: dict[str, object]) -> PlanInputs:
    """Inputs for this machine; `config` is the parsed config.json."""
    from ktransformers.plan.calibrate import this_machine

    machine: Machine = this_machine()
    if device_of(settings).type == "cpu":
        machine = with_gpus(machine, "none")
    placement, rest_bytes = settings.place, dtype_of(settings, config).itemsize
    released = _own_experts(open_shape(str(directory)), settings.experts.kt_expert_parallel or 1)
    shape = stored_as(released, encoded_format(placement, settings.experts.kt_backend))
    return PlanInputs(shape, machine, placement.policies, rest_bytes, needs_gpu(settings))


def _own_experts(shape: ModelShape, ranks: int) -> ModelShape:
    """The model with the experts of one rank, if a group of `ranks` divides them. A rank computes as many rows as it
    sends away, so the time of the experts is that of its own rows; the network is not counted."""
    return replace(shape, experts=max(shape.top_k, math.ceil(shape.experts / ranks)))


def needs_gpu(settings: TrainSettings) -> bool:
    """Whether the settings request a GPU, or several processes must agree on the device."""
    requested = settings.trainer.get("use_cpu") is False or settings.trainer.get("fp16")
    multiprocess = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return bool(requested) or multiprocess or settings.place.needs_gpu


def try_plan_inputs(
    settings: TrainSettings, directory: Path, config: dict[str, object]
) -> tuple[PlanInputs | None, list[str]]:
    """Plan inputs, or None and a note: a model whose config the planner cannot read trains without a forecast."""
    try:
        inputs = plan_inputs(settings, directory, config)
        inputs.forecast(settings, None)  # raises if the planner cannot count this model
        return inputs, []
    except InputError as error:
        return None, [f"no forecast of memory and time: {error}"]
