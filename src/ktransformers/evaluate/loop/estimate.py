"""How long the stages of a loop take: from the plan's forecast, then from the measured pace, then from what has run.

Seconds follow from tokens: of training, of the tasks (`kt eval --dry-run` counts their work), of the proof. Constants
are fitted to two recorded runs of `make demo`, on two Neoverse-N1 cores and on two cores with AMX (docs/loop.md), and
give their stages within a third. Without a forecast and without a measured pace nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ktransformers.evaluate.loop import pace
from ktransformers.evaluate.loop.results import read_json
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.ground.progress import rough

START_SECONDS = 12.0  # for Python and its packages, of a stage that loads a model
LOAD_RATE = 1e9  # bytes of a checkpoint per second
PROOF_TOKENS = 4500  # tokens of training that take as long as a proof
JUDGED_RATE = 1.6  # tokens of a task's work per token of training


def training_seconds(loop: Loop, run: Path) -> tuple[float, pace.Pace] | None:
    """Seconds of all steps, and the pace that they follow from."""
    plan = read_json(run / "plan.json")
    measured = pace.read_pace(run) or (None if plan is None else pace.predict_pace(plan))
    if measured is None:
        return None
    if loop.train.minutes is not None:
        return pace.decide_steps(loop.train, measured).seconds, measured
    return measured.most * measured.tokens_per_step / measured.tokens_per_second, measured


def stage_seconds(
    loop: Loop, run: Path, measured: Mapping[str, float], tasks_in: Path | None = None
) -> dict[str, float]:
    """Stage -> seconds, for stages that can be estimated; `measured`: seconds of stages that this loop has run;
    `tasks_in`: the folder with tasks.json, if it is not the run's."""
    training = training_seconds(loop, run)
    if training is None:
        return {}
    seconds, speed = training
    plan, tasks = read_json(run / "plan.json") or {}, read_json((tasks_in or run) / "tasks.json") or {"tasks": []}
    checkpoint = ((plan.get("forecast") or {}).get("disk") or {}).get("checkpoint", 0)
    start, rate = START_SECONDS + checkpoint / LOAD_RATE, speed.tokens_per_second
    timed = pace.measurement_steps(loop.train, plan) * speed.tokens_per_step / rate
    judged = START_SECONDS + sum(task["work"] for task in tasks["tasks"]) / (JUDGED_RATE * rate)
    estimates = {
        "pace": 2 * start + timed,  # it plans, loads, trains and saves
        "train": 2 * start + seconds,
        "serve": start,
        "prove": start + PROOF_TOKENS / rate,
        "baseline": judged,
        "eval": measured.get("baseline", judged),
        "compare": START_SECONDS,
    }
    return estimates | dict(measured)


def sweep_seconds(runs: Iterable[Loop], shared: Path, measured: Mapping[str, float]) -> dict[str, float]:
    """The same for all runs of a sweep, whose stages are named `train-RUN`; server, base and comparison count once."""
    estimates: dict[str, float] = {}
    judged = {"baseline": measured["baseline"]} if "baseline" in measured else {}
    for run in runs:
        for stage, seconds in stage_seconds(run, Path(run.run), judged, shared).items():
            once = stage in ("serve", "baseline", "compare")
            estimates.setdefault(stage if once else f"{stage}-{run.name}", seconds)
    return estimates | dict(measured)


def total_line(estimates: Mapping[str, float], stages: Iterable[str], words: str) -> str:
    """`about 25 min in all: 13 min of training, 9 min of judging`, with `words` for `in all`; empty without an
    estimate. `stages`: still to run."""
    names = list(stages)
    kinds = {name: name.partition("-")[0] for name in names}  # of a run of a sweep: train-RUN
    if any(kind == "train" and name not in estimates for name, kind in kinds.items()):
        return ""
    total = sum(estimates.get(name, 0.0) for name in names)
    parts = [("training", ("pace", "train")), ("judging", ("baseline", "eval"))]
    shown = []
    for word, members in parts:
        seconds = sum(estimates.get(name, 0.0) for name in names if kinds[name] in members)
        if seconds:
            shown.append(f"{rough(seconds)} of {word}")
    return f"about {rough(total)} {words}" + (f": {', '.join(shown)}" if len(shown) > 1 else "")
