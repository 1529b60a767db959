"""Chooses the number of training steps for a given time, from a measurement of a few steps of the same run.

The measurement is a separate run (same keys, few steps, output discarded), so that the learning-rate schedule knows the
total from the start. The first step warms up and is not counted. The plan's forecast decides how many steps are timed:
many where they are short, because two steps on a busy machine say little. What other programs take is
measured too: threads that wait for a core are counted by the kernel, and the rate without them is reported with the
rate of now, since that work may end while this run trains. Nothing is timed where the measurement could not change the
number of steps, which is the recipe's least on a machine that is far too slow for more.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.settings import LoopTraining
from ktransformers.ground.errors import KTError
from ktransformers.ground.files import write_json
from ktransformers.ground.progress import rough

PACE_SECONDS = 20.0  # that the timed steps take, by the plan
PACE_STEPS = (3, 20)  # at least and at most, the first step included
SURE_RATIO = 2.5  # forecasts were off by 2.2 at most; nothing is timed if even this pace allows too few steps
BUSY_RATIO = 1.2  # from here on the rate without other programs is worth a word


@dataclass(frozen=True)
class Pace:
    """What was measured, as kept in pace.json."""

    tokens_per_second: float
    tokens_per_step: float
    most: int  # steps of the recipe
    alone: float | None = None  # tokens per second if no other program used the CPUs; None: not known
    timed: bool = True  # False: by the plan's forecast


@dataclass(frozen=True)
class PaceDecision:
    steps: int
    seconds: float
    seconds_alone: float
    bound: str  # what decided: minutes, least_steps, or all steps of the recipe

    def __str__(self) -> str:
        text = f"{self.steps}{BOUND_TEXTS[self.bound]}, in about {rough(self.seconds)}"
        if self.seconds > BUSY_RATIO * self.seconds_alone:
            text += f", or {rough(self.seconds_alone)} once other programs leave the CPUs"
        return text


BOUND_TEXTS = {"minutes": "", "least_steps": ", the fewest that this recipe takes", "all": ", all of the recipe"}


def measurement_steps(train: LoopTraining, plan: dict[str, Any]) -> int:
    """As many steps as take about PACE_SECONDS by the plan's forecast."""
    if train.pace_steps is not None:
        return train.pace_steps
    least, most = PACE_STEPS
    forecast = plan.get("forecast")
    return least if not forecast else max(least, min(most, round(PACE_SECONDS / forecast["seconds"])))


def measurement_keys(steps: int, output: Path) -> dict[str, Any]:
    """Keys that turn a training run into a measurement."""
    keys: dict[str, Any] = {"max_steps": steps, "logging_steps": 1, "save_strategy": "no", "plot_loss": False}
    return keys | {
        "eval_strategy": "no",
        "report_to": "none",
        "output_dir": str(output),
        "overwrite_output_dir": True,
    }


def decide_steps(train: LoopTraining, pace: Pace) -> PaceDecision:
    assert train.minutes is not None
    seconds = pace.tokens_per_step / pace.tokens_per_second
    fitting = int(train.minutes * 60 / seconds)
    steps = max(min(fitting, pace.most), min(train.least_steps, pace.most))
    bound = "least_steps" if steps > fitting else "all" if steps < fitting else "minutes"
    alone = pace.tokens_per_step / (pace.alone or pace.tokens_per_second)
    return PaceDecision(steps, steps * seconds, steps * alone, bound)


def read_pace(run: Path) -> Pace | None:
    """The measurement; None before it."""
    file = run / "pace.json"
    return Pace(**json.loads(file.read_text())) if file.is_file() else None


def predict_pace(plan: dict[str, Any]) -> Pace | None:
    """The pace by the plan's forecast; None without one."""
    forecast, data = plan.get("forecast"), plan.get("data")
    if not forecast or not data:
        return None
    tokens_per_step = data["tokens"] / data["steps_per_epoch"]
    return Pace(float(forecast["tokens_per_second"]), tokens_per_step, int(data["steps"]), timed=False)


def settle_pace(train: LoopTraining, run: Path, preview: bool) -> list[str] | None:
    """The decision by the plan's forecast as a line, and pace.json unless `preview`; None: steps have to be timed."""
    pace = predict_pace(json.loads((run / "plan.json").read_text()))
    if pace is None or train.pace_steps is not None:
        return None
    if decide_steps(train, replace(pace, tokens_per_second=SURE_RATIO * pace.tokens_per_second)).bound != "least_steps":
        return None
    if not preview:
        write_json(run / "pace.json", asdict(pace))
    return [f"{'steps':<8} {decide_steps(train, pace)} by the plan"]


def read_decision(train: LoopTraining, run: Path) -> PaceDecision | None:
    """The decision from the measurement; None before it."""
    pace = read_pace(run)
    return None if pace is None else decide_steps(train, pace)


def measure_pace(lines: list[dict[str, Any]], plan: dict[str, Any]) -> Pace | None:
    """`lines`: of the measurement's trainer_log.jsonl. A GPU's work waits for no core."""
    timed = [(float(line["throughput"]), float(line.get("cpu_wait", 0.0))) for line in lines if line.get("throughput")]
    if not timed:
        return None
    on_cpu = plan.get("device", "cpu") == "cpu"
    alone = [rate / (1 - wait) if on_cpu and wait < 1 else rate for rate, wait in timed]
    data = plan["data"]
    rate = statistics.median(rate for rate, _ in timed)
    tokens_per_step = data["tokens"] / data["steps_per_epoch"]
    return Pace(rate, tokens_per_step, int(data["steps"]), statistics.median(alone))


def write_pace(train: LoopTraining, run: Path) -> list[str]:
    """Reads the rate from the measurement's log and the sizes from the plan, writes pace.json, returns the decision as
    a line."""
    log = run / "pace" / "trainer_log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    pace = measure_pace(lines, json.loads((run / "plan.json").read_text()))
    if pace is None:
        raise KTError(f"{log}: no step with a throughput; a few more pace_steps are needed")
    write_json(run / "pace.json", asdict(pace))
    return [f"{'steps':<8} {decide_steps(train, pace)}"]
