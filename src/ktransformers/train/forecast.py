"""What a run will take, said before it starts: settings as the planner's work, and the plan for this machine.

The planner (`ktransformers.plan`) knows shapes and rates and no trainer; here stands what a key means to it. A batch
is taken as full: as many rows of the longest length as the file allows. How many of its tokens have a label, and so
meet the vocabulary, is counted in the rows; without rows all do. Of attention LoRA all of `lora_target: all` is counted
even where only some of its modules are named, which is too much by a few megabytes.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from ktransformers import env
from ktransformers.errors import InputError
from ktransformers.place.options import read_options
from ktransformers.plan import ModelShape, Plan, Training, make_plan, open_shape, with_gpus
from ktransformers.plan.machine import Machine
from ktransformers.train.arguments import device_of, dtype_of, packs, step_rows
from ktransformers.train.batches import budget_parts
from ktransformers.train.settings import TrainSettings
from ktransformers.train.targets import EXPERTS, HALVES

EXPERT_WORDS = {*EXPERTS, *HALVES, "gate_up_proj", "down_proj", "all"}


@dataclass(frozen=True)
class Lengths:
    """What the plan needs to know of tokenised rows."""

    longest: int  # row
    learned: int  # tokens with a label in one batch, at most


@dataclass(frozen=True)
class Passes:
    """Through the model, in one epoch."""

    count: int
    tokens: int  # padding included
    learned: int  # tokens with a label
    fullest: int  # of these in one pass, at most


def cut_epoch(sequences: list[tuple[int, int]], rows: int, budget: int | None, seed: int | None) -> Passes:
    """An epoch in one random order; the trainer draws another, and these numbers hardly depend on it. Without a seed:
    in the order given.

    `sequences`: tokens and labelled tokens of each; `rows` of them are a batch, or with a budget a step that is cut.
    """
    order = list(sequences)
    if seed is not None:
        random.Random(seed).shuffle(order)
    parts: list[list[tuple[int, int]]] = []
    for start in range(0, len(order), rows):
        step = order[start : start + rows]
        cut = budget_parts([tokens for tokens, _ in step], budget) if budget else [list(range(len(step)))]
        parts += [[step[row] for row in part] for part in cut]
    learned = [sum(labelled for _, labelled in part) for part in parts]
    padded = sum(len(part) * max(tokens for tokens, _ in part) for part in parts)
    return Passes(len(parts), padded, sum(learned), max(learned))


def fullest(sequences: list[tuple[int, int]], rows: int, budget: int | None, seed: int | None) -> int:
    """Labelled tokens of the fullest batch in an epoch."""
    return cut_epoch(sequences, rows, budget, seed).fullest


def _labelled(settings: TrainSettings, tokens: int, lengths: Lengths | None) -> float:
    """Share of a batch that the head sees: all where the data is not known, and on a CPU all tokens of a pair."""
    everything = settings.data.stage == "dpo" and device_of(settings).type == "cpu"
    if lengths is None or everything or settings.trainer.get("label_smoothing_factor"):
        return 1.0
    return min(1.0, max(1, lengths.learned) / tokens)


def work_of(settings: TrainSettings, rest_bytes: int, lengths: Lengths | None = None) -> Training:
    """`lengths`: where the data is known."""
    rows, parts = step_rows(settings)
    sequence = settings.data.cutoff_len
    if lengths is not None and not packs(settings):
        sequence = min(sequence, lengths.longest)
    batch = rows * sequence * (2 if settings.data.stage == "dpo" else 1)
    budget = settings.experts.tokens_at_once
    whole = batch * parts
    tokens = min(whole, max(budget, sequence)) if budget else batch
    given = settings.trainer.get("gradient_checkpointing", True)
    checkpointing = bool(given) and not settings.model.disable_gradient_checkpointing
    words = set(settings.lora.lora_target)
    adapts_experts = bool(words & EXPERT_WORDS)
    return Training(
        tokens=tokens,
        tokens_per_step=whole,
        sequence=sequence,
        rank=settings.lora.lora_rank,
        adapts_experts=adapts_experts,
        adapts_attention="all" in words or not words <= EXPERT_WORDS,
        checkpointing=checkpointing,
        retain=checkpointing and settings.experts.kt_cpu_activation == "retain",
        trained_bytes=2 if settings.model.pure_bf16 else 4,
        rest_bytes=rest_bytes,
        saves=int(settings.trainer.get("save_total_limit") or 1),
        labelled=_labelled(settings, tokens, lengths),
        graphs=env.graphs_enabled("attention") and not settings.model.use_reentrant_gc,
    )


@dataclass(frozen=True)
class PlanInputs:
    """What does not depend on how a step is cut."""

    shape: ModelShape
    machine: Machine
    policies: tuple[str, ...]
    rest_bytes: int
    needs_gpu: bool = False  # one that is there may not be left out

    def forecast(self, settings: TrainSettings, lengths: Lengths | None) -> Plan:
        work = work_of(settings, self.rest_bytes, lengths)
        return make_plan(self.shape, work, self.machine, policies=self.policies, needs_gpu=self.needs_gpu)


def this_site(settings: TrainSettings, directory: Path, words: dict[str, object]) -> PlanInputs:
    """The machine that this runs on; `words`: config.json."""
    from ktransformers.plan.calibrate import this_machine

    machine: Machine = this_machine()
    if device_of(settings).type == "cpu":
        machine = with_gpus(machine, "none")
    wish, size = read_options(settings.place.model_dump()), dtype_of(settings, words).itemsize
    return PlanInputs(open_shape(str(directory)), machine, wish.policies, size, needs_gpu(settings))


def needs_gpu(settings: TrainSettings) -> bool:
    """The file asks for one, or several processes have to be of one mind."""
    asked = settings.trainer.get("use_cpu") is False or settings.trainer.get("fp16")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return bool(asked) or several or read_options(settings.place.model_dump()).needs_gpu


def try_site(settings: TrainSettings, directory: Path, words: dict[str, object]) -> tuple[PlanInputs | None, list[str]]:
    """A model whose config the planner cannot read trains all the same; the note says why there is no forecast."""
    try:
        site = this_site(settings, directory, words)
        site.forecast(settings, None)  # which knows what it cannot count
        return site, []
    except InputError as error:
        return None, [f"no forecast of memory and time: {error}"]
