"""Settings and a watcher for short training runs on tiny random models with a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "minimind_6400"


class RunRecorder:
    """Records what a run reports."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.steps: list[Any] = []
        self.positions: list[Any] = []
        self.notes: list[str] = []
        self.referred = 0

    def on_plan(self, plan: Any) -> None:
        self.plans.append(plan)

    def on_load(self, done: int, layers: int) -> None:
        pass

    def on_reference(self, done: int, rows: int) -> None:
        self.referred = rows

    def on_note(self, line: str) -> None:
        self.notes.append(line)

    def on_position(self, position: Any) -> None:
        self.positions.append(position)

    def on_step(self, progress: Any) -> None:
        self.steps.append(progress)


def recipe(model: Path, output: Path, **keys: Any) -> dict[str, Any]:
    """A short run on the shipped identity data, in float32."""
    return {
        "model_name_or_path": str(model),
        "output_dir": str(output),
        "dataset": "identity",
        "max_samples": 16,
        "cutoff_len": 96,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "lora_rank": 4,
    } | keys
