"""Tiny random models with a real tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER


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
