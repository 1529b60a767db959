"""How many tokens of an optimiser step pass through the model at once, decided before a run: `kt_tokens_per_batch`.

Experts are read, or cross to the GPU, once for every pass, so that few large passes are faster than many small ones
until memory ends; gradients are the same. `auto` takes the batches of a step together, all of them or a half, a
quarter, ..., whichever the plan says is fastest. The surprising part is padding: a batch of one row has none, the whole
step as one batch has all of it. So a candidate's memory is that of full rows, as in every plan, but its time that of
the passes into which these very rows would be cut. What a run was begun with is kept in its checkpoints.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.errors import InputError
from ktransformers.plan import Machine, Plan, Training
from ktransformers.plan.planner import evaluate
from ktransformers.train.arguments import step_shape, uses_packing
from ktransformers.train.forecast import Lengths, Passes, PlanInputs, simulate_epoch, training_workload
from ktransformers.train.settings import TrainSettings

GROUPING_FILE = "kt_batches.json"  # of a checkpoint
ESTIMATE_MARGIN = 0.10  # of what a plan estimates, beside what is free anyway: so far off were plans (docs/plan.md)
EXACT_SIZES = ("experts", "weights", "residents", "slots")  # sizes of tensors: these are no estimates
MIN_SPEEDUP = 1.10  # over batch by batch; below it nothing changes
TIE_RATIO = 1.03  # of the fastest's time; what is smaller and within it wins


@dataclass(frozen=True)
class Grouping:
    asked: int | str
    tokens: int | None  # at once; None: batch by batch
    why: str
    batches: int | None = None  # that many tokens hold, and of how many in a step; known where `auto` looked
    of: int | None = None
    seconds: float | None = None  # of a step, predicted
    seconds_apart: float | None = None  # and batch by batch

    @property
    def note(self) -> str | None:
        """What the user should read: only where something is not as the file says by itself."""
        if self.asked != "auto" or self.tokens is None:
            return None
        return f"kt_tokens_per_batch: {self.tokens}, {self.why}; off with kt_tokens_per_batch: off"


@dataclass(frozen=True)
class RowLengths:
    """Tokenised rows, as far as it matters here."""

    sizes: list[tuple[int, int]]  # tokens, padded within a pair, and labelled tokens of each
    longest: int
    seed: int | None  # of their order; None: as they are here

    def passes(self, settings: TrainSettings) -> Passes:
        rows, parts = step_shape(settings)
        budget = settings.experts.tokens_at_once
        return simulate_epoch(self.sizes, rows * parts if budget else rows, budget, self.seed)

    def lengths(self, settings: TrainSettings) -> Lengths:
        return Lengths(self.longest, self.passes(settings).fullest)


def with_tokens_per_batch(settings: TrainSettings, tokens: int | None) -> TrainSettings:
    """The same with the number that was chosen."""
    experts = settings.experts.model_copy(update={"kt_tokens_per_batch": tokens or "off"})
    return settings.model_copy(update={"experts": experts})


def find_obstacle(settings: TrainSettings) -> str | None:
    """Why the batches of a step may not be taken together without being asked: something would come out different."""
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
    """Checkpoints without the file are of versions that went batch by batch unless a number was given."""
    file = checkpoint / GROUPING_FILE
    try:
        found = json.loads(file.read_text())["kt_tokens_per_batch"] if file.is_file() else None
        return None if found is None else int(found)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(str(file), str(error), "kt_tokens_per_batch of the run", "give the number yourself") from error


@dataclass(frozen=True)
class GroupingCandidate:
    """So many batches of a step at once."""

    batches: int
    tokens: int | None
    seconds: float
    fits: bool  # with room; on the GPU, where there is one


def _reduced_machine(plan: Plan) -> Machine:
    """The plan's machine without what its estimates may be short of."""

    def room(table: dict[str, int]) -> int:
        return int(ESTIMATE_MARGIN * sum(size for name, size in table.items() if name not in EXACT_SIZES))

    machine, memory = plan.machine, plan.nearest.memory
    gpus = list(machine.gpus)
    for place, table in enumerate(memory.gpus):
        gpus[place] = replace(gpus[place], memory=gpus[place].memory - room(table))
    return replace(machine, memory=machine.memory - room(memory.host), gpus=tuple(gpus))


def _mean_pass(work: Training, settings: TrainSettings, passes: Passes, count: int) -> Training:
    """The mean pass of an epoch of `count` rows, in place of a full one."""
    steps = -(-count // math.prod(step_shape(settings)))
    width = passes.tokens / count / (2 if settings.data.stage == "dpo" else 1)
    return replace(
        work,
        tokens=max(1, round(passes.tokens / passes.count)),
        tokens_per_step=max(1, round(passes.tokens / steps)),
        sequence=max(1, round(width)),
        labelled=1.0 if work.labelled == 1 else min(1.0, max(1, passes.learned) / passes.tokens),
    )


def _evaluate_candidate(
    settings: TrainSettings, batches: int, tokens: int | None, site: PlanInputs, rows: RowLengths | None
) -> GroupingCandidate:
    trial = with_tokens_per_batch(settings, tokens)
    passes = None if rows is None else rows.passes(trial)
    plan = site.forecast(trial, None if rows is None or passes is None else Lengths(rows.longest, passes.fullest))
    found = plan.nearest
    assert isinstance(found.work, Training)
    work = found.work
    if rows is not None and passes is not None:
        work = _mean_pass(work, trial, passes, len(rows.sizes))
    bare = replace(found.choice, residents=0)  # these fill what is free when the run starts
    fits = found.fits and not plan.left_out and evaluate(site.shape, found.work, bare, _reduced_machine(plan)).fits
    seconds = evaluate(site.shape, work, found.choice, site.machine).time.seconds
    return GroupingCandidate(batches, tokens, seconds, fits)


def _batch_counts(parts: int) -> Iterator[int]:
    while parts > 1:
        yield parts
        parts = -(-parts // 2)


def pick_candidate(apart: GroupingCandidate, tried: list[GroupingCandidate]) -> GroupingCandidate:
    """Of those that fit, the smallest that is about as fast as the fastest; `apart`, unless that gains enough."""
    usable = [trial for trial in tried if trial.fits]
    least = min((trial.seconds for trial in usable), default=0.0)
    about = (trial for trial in usable if trial.seconds <= TIE_RATIO * least)
    best = min(about, key=lambda trial: trial.batches, default=apart)
    return best if apart.seconds >= MIN_SPEEDUP * best.seconds else apart


def choose_grouping(settings: TrainSettings, site: PlanInputs, rows: RowLengths | None = None) -> Grouping:
    """Of all batches of a step at once, a half of them, ..., one. Without `rows` all are full."""
    _, parts = step_shape(settings)
    one = training_workload(
        with_tokens_per_batch(settings, None), site.rest_bytes, None if rows is None else Lengths(rows.longest, 1)
    ).tokens
    apart = _evaluate_candidate(settings, 1, None, site, rows)
    tried = [_evaluate_candidate(settings, batches, batches * one, site, rows) for batches in _batch_counts(parts)]
    best = pick_candidate(apart, tried)
    if best.tokens is not None:
        many = f"{parts} batches of a step" if best.batches == parts else f"{best.batches} of a step's {parts} batches"
        why = f"{many} at once: {best.seconds:.2g} s a step instead of {apart.seconds:.2g}"
    elif any(trial.fits for trial in tried):
        why = f"several batches at once would gain less than {MIN_SPEEDUP - 1:.0%}"
    else:
        why = "two batches at once would not fit with room to spare" if tried else "a step is one batch"
    return Grouping("auto", best.tokens, why, best.batches, parts, best.seconds, apart.seconds)


def decide_grouping(
    settings: TrainSettings, checkpoint: Path | None, site: PlanInputs | None, rows: RowLengths | None
) -> Grouping:
    """What was asked for; else what the run was begun with; else what the plan chooses, where there is one."""
    experts = settings.experts
    if experts.kt_tokens_per_batch != "auto":
        return Grouping(experts.kt_tokens_per_batch, experts.tokens_at_once, "as asked")
    against = find_obstacle(settings)
    if against is not None:
        return Grouping("auto", None, against)
    if checkpoint is not None:
        return Grouping("auto", read_checkpoint_tokens(checkpoint), f"as the run of {checkpoint} was begun")
    if site is None:
        return Grouping("auto", None, "there is no forecast to choose by")
    return choose_grouping(settings, site, rows)
