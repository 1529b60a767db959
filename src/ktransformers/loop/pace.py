"""Chooses the number of training steps for a given time, from a measurement of a few steps of the same run.

The measurement is a separate run (same keys, few steps, output discarded), so that the learning-rate schedule knows the
total from the start. The first step warms up and is not counted. If fewer than `least_steps` fit, that number is used
and the longer time is reported.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from ktransformers.errors import KTError
from ktransformers.files import write_json
from ktransformers.loop.settings import LoopTraining


def measurement_overrides(steps: int, output: Path) -> tuple[str, ...]:
    """Keys that turn a training run into a measurement."""
    overrides = {"max_steps": steps, "logging_steps": 1, "save_strategy": '"no"', "plot_loss": "false"}
    overrides |= {"eval_strategy": '"no"', "output_dir": output, "overwrite_output_dir": "true"}
    return tuple(f"{key}={value}" for key, value in overrides.items())


def decide_steps(
    train: LoopTraining, tokens_per_second: float, tokens_per_step: float, max_steps: int
) -> tuple[int, str]:
    """(steps, a sentence that explains the number)."""
    assert train.minutes is not None
    seconds = tokens_per_step / tokens_per_second
    fitting = int(train.minutes * 60 / seconds)
    steps = max(min(fitting, max_steps), min(train.least_steps, max_steps))
    reason = (
        f"{tokens_per_second:.0f} tokens/s, {seconds:.2g} s a step: {steps} steps, about {steps * seconds / 60:.2g} min"
    )
    if steps > fitting:
        reason += f" (more than the {train.minutes:g} min asked for: least_steps is the minimum)"
    elif steps < fitting:
        reason += f" (all steps of the recipe, in less than the {train.minutes:g} min given)"
    return steps, reason


def read_decision(train: LoopTraining, run: Path) -> tuple[int, str] | None:
    """The decision from the measurement; None before it."""
    file = run / "pace.json"
    if not file.is_file():
        return None
    pace = json.loads(file.read_text())
    return decide_steps(train, pace["tokens_per_second"], pace["tokens_per_step"], pace["most"])


def write_pace(train: LoopTraining, run: Path) -> str:
    """Reads the rate from the measurement's log and the sizes from the plan, writes pace.json, returns the
    explanation."""
    log = run / "pace" / "trainer_log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rates = [float(line["throughput"]) for line in lines if line.get("throughput")]
    if not rates:
        raise KTError(f"{log}: no step with a throughput; a few more pace_steps are needed")
    data = json.loads((run / "plan.json").read_text())["data"]
    tokens = data["tokens"] / data["steps_per_epoch"]
    rate = statistics.median(rates)
    write_json(run / "pace.json", {"tokens_per_second": rate, "tokens_per_step": tokens, "most": int(data["steps"])})
    return decide_steps(train, rate, tokens, int(data["steps"]))[1]
