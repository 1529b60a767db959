"""Chooses how many tokens of an optimizer step go through the model in one pass: `kt_tokens_per_batch`.

Experts are read, or copied to the GPU, once per pass, so few large passes are faster than many small ones as long as
memory suffices; the gradients are the same. `auto` combines the batches of a step, all of them or a half, a quarter,
..., whichever the planner predicts to be fastest. Padding matters: a batch of one row has none, the whole step as one
batch has the most. So a candidate's memory is estimated for full rows, as in every plan, but its time for the passes
into which these rows would actually be split. A resumed run keeps the number stored in its checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.plan import Machine, Plan, Training
from ktransformers.plan.planner import evaluate
from ktransformers.train.arguments import step_shape, uses_packing
from ktransformers.train.data.prepare import DataSplit, pack_rows
from ktransformers.train.data.render import PreferenceRow, TrainRow
from ktransformers.train.forecast import Lengths, Passes, PlanInputs, simulate_epoch, training_workload
from ktransformers.train.settings import TrainSettings

GROUPING_FILE = "kt_batches.json"  # in a checkpoint folder
ESTIMATE_MARGIN = 0.10  # of the estimated sizes, kept free in addition: the observed error of plans (docs/plan.md)
EXACT_SIZES = ("experts", "weights", "residents", "slots")  # tensor sizes, which are exact rather than estimated
MIN_SPEEDUP = 1.10  # over batch by batch; below it batches are not combined
TIE_RATIO = 1.03  # relative to the fastest; the smallest candidate within it is chosen


@dataclass(frozen=True)
class Grouping:
    asked: int | str
    tokens: int | None  # per pass; None: batch by batch
    why: str
    batches: int | None = None  # combined batches, of `of` in a step; set if `auto` compared candidates
    of: int | None = None
    seconds: float | None = None  # per step, predicted
    seconds_apart: float | None = None  # per step, predicted for batch by batch

    @property
    def note(self) -> str | None:
        """A note for the user if `auto` changed the batching, else None."""
        if self.asked != "auto" or self.tokens is None:
            return None
        return f"kt_tokens_per_batch: {self.tokens}, {self.why}; off with kt_tokens_per_batch: off"


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the tokenised rows."""

    sizes: list[tuple[int, int]]  # (tokens, padded within a pair; labelled tokens) of each
    longest: int
    seed: int | None  # of the shuffle; None: in this order

    def passes(self, settings: TrainSettings) -> Passes:
        rows, batches = step_shape(settings)
        budget = settings.experts.tokens_per_pass
        return simulate_epoch(self.sizes, rows * batches if budget else rows, budget, self.seed)

    def lengths(self, settings: TrainSettings) -> Lengths:
        return self.of_passes(self.passes(settings))

    def of_passes(self, passes: Passes) -> Lengths:
        return Lengths(self.longest, passes.max_labelled, passes.labelled / passes.count)


def trainer_sequences(rows: list[Any], settings: TrainSettings) -> list[Any]:
    """The sequences that the trainer gets: rows, or lists of packed rows."""
    return pack_rows(rows, settings.data.cutoff_len) if uses_packing(settings) else list(rows)


def row_lengths(row: TrainRow | PreferenceRow) -> tuple[int, int, int]:
    """(tokens, labelled tokens, length of the longest sequence) of a row."""
    if isinstance(row, PreferenceRow):
        both = len(row.chosen) + len(row.rejected)
        return 2 * len(row.prompt) + both, both, len(row.prompt) + max(len(row.chosen), len(row.rejected))
    return len(row.ids), row.labelled, len(row.ids)


def _sequence_size(rows: list[Any]) -> tuple[int, int]:
    """(tokens, labelled tokens) of one sequence; a pair counts twice its longer half, as it is padded."""
    lengths = [row_lengths(row) for row in rows]
    tokens = sum(
        2 * longest if isinstance(row, PreferenceRow) else longest
        for row, (_, _, longest) in zip(rows, lengths, strict=True)
    )
    return tokens, sum(labelled for _, labelled, _ in lengths)


def measure_rows(split: DataSplit, settings: TrainSettings, seed: int) -> RowLengths:
    sequences = trainer_sequences(split.train, settings)
    sizes = [_sequence_size(sequence if uses_packing(settings) else [sequence]) for sequence in sequences]
    order = settings.trainer.get("train_sampling_strategy", "random")
    if order == "group_by_length":
        sizes.sort()
    shuffled = order == "random" and not settings.data.disable_shuffling
    return RowLengths(sizes, max(row_lengths(row)[2] for row in split.train), seed if shuffled else None)


def with_tokens_per_batch(settings: TrainSettings, tokens: int | None) -> TrainSettings:
    """A copy of the settings with the chosen number."""
    experts = settings.experts.model_copy(update={"kt_tokens_per_batch": tokens or "off"})
    return settings.model_copy(update={"experts": experts})


def find_obstacle(settings: TrainSettings) -> str | None:
    """Why `auto` must not combine the batches of a step: the result would differ. None if it may."""
    trainer = settings.trainer
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "several processes share the rows of a step batch by batch"
    if uses_packing(settings):
        return "packing fills batches already"
    if settings.model.moe_aux_loss_coef:
        return "the router's balance loss is one of each batch"
    if trainer.get("dataloader_drop_last"):
        return "dataloader_drop_last would leave out the rest of a step, not of a batch"
    if trainer.get("neftune_noise_alpha"):
        return "the noise of NEFTune depends on the padding of each batch"
    return None


def read_checkpoint_tokens(checkpoint: Path) -> int | None:
    """The number stored in a checkpoint; older checkpoints without the file ran batch by batch."""
    file = checkpoint / GROUPING_FILE
    try:
        tokens = json.loads(file.read_text())["kt_tokens_per_batch"] if file.is_file() else None
        return None if tokens is None else int(tokens)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(str(file), str(error), "kt_tokens_per_batch of the run", "give the number yourself") from error


@dataclass(frozen=True)
class GroupingCandidate:
    """A number of batches per pass, with its predicted time."""

    batches: int
    tokens: int | None
    seconds: float
    fits: bool  # with the margin, and on the GPU if there is one


def _reduced_machine(plan: Plan) -> Machine:
    """The plan's machine, less a margin for the error of its estimates."""

    def margin(table: dict[str, int]) -> int:
        return int(ESTIMATE_MARGIN * sum(size for name, size in table.items() if name not in EXACT_SIZES))

    machine, memory = plan.machine, plan.nearest.memory
    gpus = list(machine.gpus)
    for index, table in enumerate(memory.gpus):
        gpus[index] = replace(gpus[index], memory=gpus[index].memory - margin(table))
    return replace(machine, memory=machine.memory - margin(memory.host), gpus=tuple(gpus))


def _mean_pass(work: Training, settings: TrainSettings, passes: Passes, count: int) -> Training:
    """The average pass of an epoch of `count` rows, instead of a full one."""
    steps = -(-count // math.prod(step_shape(settings)))
    width = passes.tokens / count / (2 if settings.data.stage == "dpo" else 1)
    return replace(
        work,
        tokens=max(1, round(passes.tokens / passes.count)),
        tokens_per_step=max(1, round(passes.tokens / steps)),
        sequence=max(1, round(width)),
        labelled=1.0 if work.labelled == 1 else min(1.0, max(1, passes.labelled) / passes.tokens),
        labelled_mean=None,
    )


def _evaluate_candidate(
    settings: TrainSettings, batches: int, tokens: int | None, inputs: PlanInputs, rows: RowLengths | None
) -> GroupingCandidate:
    trial = with_tokens_per_batch(settings, tokens)
    passes = None if rows is None else rows.passes(trial)
    plan = inputs.forecast(trial, None if rows is None or passes is None else rows.of_passes(passes))
    candidate = plan.nearest
    assert isinstance(candidate.work, Training)
    work = candidate.work
    if rows is not None and passes is not None:
        work = _mean_pass(work, trial, passes, len(rows.sizes))
    no_residents = replace(candidate.choice, residents=0)  # residents fill the memory that is free when the run starts
    fits = (
        candidate.fits
        and not plan.gpu_unused_reason
        and evaluate(inputs.shape, candidate.work, no_residents, _reduced_machine(plan)).fits
    )
    seconds = evaluate(inputs.shape, work, candidate.choice, inputs.machine).time.seconds
    return GroupingCandidate(batches, tokens, seconds, fits)


def _batch_counts(batches: int) -> Iterator[int]:
    while batches > 1:
        yield batches
        batches = -(-batches // 2)


def pick_candidate(separate: GroupingCandidate, candidates: list[GroupingCandidate]) -> GroupingCandidate:
    """The smallest of the fitting candidates that is about as fast as the fastest; `separate` unless that is enough
    faster."""
    usable = [candidate for candidate in candidates if candidate.fits]
    fastest = min((candidate.seconds for candidate in usable), default=0.0)
    nearly_fastest = (candidate for candidate in usable if candidate.seconds <= TIE_RATIO * fastest)
    best = min(nearly_fastest, key=lambda candidate: candidate.batches, default=separate)
    return best if separate.seconds >= MIN_SPEEDUP * best.seconds else separate


def choose_grouping(settings: TrainSettings, inputs: PlanInputs, rows: RowLengths | None = None) -> Grouping:
    """Compares all batches of a step in one pass, half of them, ..., one. Without `rows` all are assumed full."""
    _, batches_per_step = step_shape(settings)
    batch_tokens = training_workload(
        with_tokens_per_batch(settings, None), inputs.rest_bytes, None if rows is None else Lengths(rows.longest, 1)
    ).tokens
    separate = _evaluate_candidate(settings, 1, None, inputs, rows)
    candidates = [
        _evaluate_candidate(settings, batches, batches * batch_tokens, inputs, rows)
        for batches in _batch_counts(batches_per_step)
    ]
    best = pick_candidate(separate, candidates)
    if best.tokens is not None:
        combined = (
            f"{batches_per_step} batches of a step"
            if best.batches == batches_per_step
            else f"{best.batches} of a step's {batches_per_step} batches"
        )
        why = f"{combined} at once: {best.seconds:.2g} s a step instead of {separate.seconds:.2g}"
    elif any(candidate.fits for candidate in candidates):
        why = f"several batches at once would gain less than {MIN_SPEEDUP - 1:.0%}"
    else:
        why = "two batches at once would not fit with room to spare" if candidates else "a step is one batch"
    return Grouping("auto", best.tokens, why, best.batches, batches_per_step, best.seconds, separate.seconds)


def decide_grouping(
    settings: TrainSettings, checkpoint: Path | None, inputs: PlanInputs | None, rows: RowLengths | None
) -> Grouping:
    """What the settings say; else what the resumed run used; else what the planner chooses, if it can."""
    experts = settings.experts
    if experts.kt_tokens_per_batch != "auto":
        return Grouping(experts.kt_tokens_per_batch, experts.tokens_per_pass, "as asked")
    obstacle = find_obstacle(settings)
    if obstacle is not None:
        return Grouping("auto", None, obstacle)
    if checkpoint is not None:
        return Grouping("auto", read_checkpoint_tokens(checkpoint), f"as stored in {checkpoint}")
    if inputs is None:
        return Grouping("auto", None, "there is no forecast to choose by")
    return choose_grouping(settings, inputs, rows)
