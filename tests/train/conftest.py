"""Tiny random models with a real tokenizer, and runs on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import build, save

TOKENIZER = Path(__file__).resolve().parent.parent / "data" / "minimind_6400"


class Quiet:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.steps: list[Any] = []
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

    def on_step(self, progress: Any) -> None:
        self.steps.append(progress)


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> directory of a tiny float32 model with the 6,400-token tokenizer."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            save(build(family, vocab_size=6400, max_position_embeddings=512), folder)
            for file in TOKENIZER.glob("*.json"):
                shutil.copyfile(file, folder / file.name)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny(model_of: Callable[[str], Path]) -> Path:
    return model_of("qwen3_moe")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


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
