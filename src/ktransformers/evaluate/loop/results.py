"""What training and the proof came to, read from the files that they leave in the run's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.ground.progress import rough
from ktransformers.ground.training_charts import read_log


@dataclass(frozen=True)
class TrainingSummary:
    steps: int
    seconds: float
    tokens_per_second: float | None
    loss: float | None


def read_json(file: Path) -> Any:
    """The parsed file; None if it does not exist."""
    return json.loads(file.read_text()) if file.is_file() else None


def summarise_training(adapter: Path) -> TrainingSummary:
    """The rate is the mean of the logged steps after the first; for very short runs that of the whole run."""
    results = read_json(adapter / "all_results.json") or {}
    steps = int((read_json(adapter / "trainer_state.json") or {}).get("global_step", 0))
    rates = [line["throughput"] for line in read_log(adapter) if line.get("throughput")]
    seconds, tokens = float(results.get("train_runtime", 0.0)), float(results.get("num_tokens", 0.0))
    rate = sum(rates) / len(rates) if rates else tokens / seconds if tokens and seconds else None
    return TrainingSummary(steps, seconds, rate, results.get("train_loss"))


def training_lines(adapter: Path) -> list[str]:
    """`100 steps in 12 min at 58 tokens/s, loss from 3.25 to 0.41`."""
    training = summarise_training(adapter)
    losses = [float(line["loss"]) for line in read_log(adapter) if "loss" in line]
    rate = f" at {training.tokens_per_second:.0f} tokens/s" if training.tokens_per_second else ""
    loss = f", loss from {losses[0]:.3g} to {losses[-1]:.3g}" if len(losses) > 1 else ""
    return [f"{training.steps} steps in {rough(training.seconds)}{rate}{loss}"]


def describe_proof(file: Path, *, failed: bool = False) -> tuple[bool | None, str]:
    """Whether it was proven, None if there is no result, and the result as a sentence. `failed`: the command has."""
    document = read_json(file)
    if failed and not (document and document["passed"] is False):
        return False, "NOT proven: kt prove did not end well; its log says why"
    if not document:
        return None, "not there"
    if not document["passed"]:
        return False, f"NOT proven: {document.get('culprit') or 'see prove.json'}"
    checks = [check for check in document["checks"] if check["passed"]]
    floor, effect = document["floor"]["max"], document["effect"]["max"]
    return True, (
        f"proven by {len(checks)} checks on {document['tokens']} tokens: what is served is what was trained, and the "
        f"base is the base (log-probabilities move by up to {effect:.2g} with the adapter, by {floor:.2g} with noise)"
    )


def proof_lines(file: Path) -> list[str]:
    """The first half of the sentence."""
    return [describe_proof(file)[1].partition(" (")[0]]
