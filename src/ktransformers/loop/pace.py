"""How many steps fit into the time that was given: measured on a few steps of the very run, then decided.

The measurement is a run of its own (the same keys, a handful of steps, nothing kept), so that the schedule of the
learning rate knows its end from the beginning. The first step warms caches and is not counted. Without room for the
least number of steps that makes sense, that number is taken and the longer time is said.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from ktransformers.errors import KTError
from ktransformers.files import write_json
from ktransformers.loop.settings import TrainSettings


def measurement_overrides(steps: int, output: Path) -> tuple[str, ...]:
    """Keys that turn a training run into a measurement."""
    given = {"max_steps": steps, "logging_steps": 1, "save_strategy": '"no"', "plot_loss": "false"}
    given |= {"eval_strategy": '"no"', "output_dir": output, "overwrite_output_dir": "true"}
    return tuple(f"{key}={value}" for key, value in given.items())


def decide_steps(train: TrainSettings, tokens_per_second: float, tokens_per_step: float, most: int) -> tuple[int, str]:
    """(steps, the sentence that says why)."""
    assert train.minutes is not None
    seconds = tokens_per_step / tokens_per_second
    fitting = int(train.minutes * 60 / seconds)
    steps = max(min(fitting, most), min(train.least_steps, most))
    said = (
        f"{tokens_per_second:.0f} tokens/s, {seconds:.2g} s a step: {steps} steps, about {steps * seconds / 60:.2g} min"
    )
    if steps > fitting:
        said += f" (more than the {train.minutes:g} min asked for: fewer steps teach nothing)"
    elif steps < fitting:
        said += f" (all that the recipe asks for, in less than the {train.minutes:g} min given)"
    return steps, said


def read_decision(train: TrainSettings, run: Path) -> tuple[int, str] | None:
    """The decision on what was measured; None where nothing was yet."""
    file = run / "pace.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text())
    return decide_steps(train, found["tokens_per_second"], found["tokens_per_step"], found["most"])


def write_pace(train: TrainSettings, run: Path) -> str:
    """Read the rate off the measurement's log, the sizes off the plan, write pace.json, and say what follows."""
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
