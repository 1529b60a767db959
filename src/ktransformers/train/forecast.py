"""What a run will take, said before it starts: settings as the planner's work, and the plan for this machine.

The planner (`ktransformers.place`) knows shapes and rates and no trainer; here stands what a key means to it. A batch
is taken as full: as many rows of the longest length as the file allows. How many of its tokens have a label, and so
meet the vocabulary, is counted in the rows; without rows all do. Of attention LoRA all of `lora_target: all` is counted
even where only some of its modules are named, which is too much by a few megabytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import InputError
from ktransformers.place import Plan, Training, make_plan, open_shape, with_gpus
from ktransformers.place.machine import Machine
from ktransformers.place.wish import read_wish
from ktransformers.train.arguments import device_of, dtype_of, packs, step_rows
from ktransformers.train.batches import budget_parts
from ktransformers.train.settings import Settings
from ktransformers.train.targets import EXPERTS, HALVES

EXPERT_WORDS = {*EXPERTS, *HALVES, "gate_up_proj", "down_proj", "all"}


@dataclass(frozen=True)
class Lengths:
    """What the plan needs to know of tokenised rows."""

    longest: int  # row
    learned: int  # tokens with a label in one batch, at most


def fullest(sequences: list[tuple[int, int]], rows: int, budget: int | None, seed: int) -> int:
    """Labelled tokens of the fullest batch in an epoch, in one random order; the trainer draws another, and the fullest
    of many batches hardly depends on it.

    `sequences`: tokens and labelled tokens of each; `rows` of them are a batch, or with a budget a step that is cut.
    """
    order = list(sequences)
    random.Random(seed).shuffle(order)
    found = 0
    for start in range(0, len(order), rows):
        step = order[start : start + rows]
        cut = budget_parts([tokens for tokens, _ in step], budget) if budget else [list(range(len(step)))]
        found = max(found, *(sum(step[row][1] for row in part) for part in cut))
    return found


def _labelled(settings: Settings, tokens: int, lengths: Lengths | None) -> float:
    """Share of a batch that the head sees: all where the data is not known, and on a CPU all tokens of a pair."""
    everything = settings.data.stage == "dpo" and device_of(settings).type == "cpu"
    if lengths is None or everything or settings.trainer.get("label_smoothing_factor"):
        return 1.0
    return min(1.0, max(1, lengths.learned) / tokens)


def work_of(settings: Settings, rest_bytes: int, lengths: Lengths | None = None) -> Training:
    """`lengths`: where the data is known."""
    rows, parts = step_rows(settings)
    sequence = settings.data.cutoff_len
    if lengths is not None and not packs(settings):
        sequence = min(sequence, lengths.longest)
    batch = rows * sequence * (2 if settings.data.stage == "dpo" else 1)
    budget = settings.experts.kt_tokens_per_batch
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
    )


def forecast(settings: Settings, directory: Path, words: dict[str, object], lengths: Lengths | None) -> Plan:
    """For the machine that this runs on; `words`: config.json."""
    from ktransformers.place.calibrate import this_machine

    machine: Machine = this_machine()
    if device_of(settings).type == "cpu":
        machine = with_gpus(machine, "none")
    work = work_of(settings, dtype_of(settings, words).itemsize, lengths)
    policies = read_wish(settings.place.model_dump()).policies
    return make_plan(open_shape(str(directory)), work, machine, policies=policies)


def try_forecast(
    settings: Settings, directory: Path, words: dict[str, object], lengths: Lengths | None
) -> tuple[Plan | None, list[str]]:
    """A model whose config the planner cannot read trains all the same; the note says why there is no forecast."""
    try:
        return forecast(settings, directory, words, lengths), []
    except InputError as error:
        return None, [f"no forecast of memory and time: {error}"]
