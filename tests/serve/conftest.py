"""A tiny qwen3_moe with a real tokenizer and Qwen3's chat template, and three adapters for it: on attention and
experts, on both with other ranks, on attention only. Weights are float32 with values that bf16 represents.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.serving import (
    DATA,
    EXPERTS,
    VOCABULARY,
    EngineHarness,
    RunningServer,
    make_service,
    run_app,
    write_sample_adapter,
)
from tests.support.tiny_models import FAMILIES, build, save

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "tiny"
    assert FAMILIES["qwen3_moe"]["num_experts"] == EXPERTS
    save(build("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=512, eos_token_id=2), directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, directory / file)
    shutil.copy(DATA / "chat_templates" / "qwen3.jinja", directory / "chat_template.jinja")
    return directory


@pytest.fixture(scope="session")
def adapters(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_sample_adapter(root / "one", model_directory, rank=4, seed=1),
        "two": write_sample_adapter(root / "two", model_directory, rank=7, seed=2),
        "attention": write_sample_adapter(root / "attention", model_directory, rank=3, seed=3, experts=False),
    }


@pytest.fixture(scope="session")
def harness(model_directory: Path, adapters: dict[str, Path]) -> Iterator[EngineHarness]:
    yield EngineHarness(model_directory, adapters)


@pytest.fixture(scope="session")
def tiers_harness(model_directory: Path, adapters: dict[str, Path]) -> Iterator[EngineHarness]:
    """With hashes of its adapters' contents, which name their blocks in lower tiers of the KV cache."""
    yield EngineHarness(model_directory, adapters, hash_adapters=True)


@pytest.fixture(scope="session")
def served(harness: EngineHarness, adapters: dict[str, Path]) -> Iterator[RunningServer]:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from ktransformers.serve.http.api import create_app

    service = make_service(harness, adapters, workers=2)
    with run_app(create_app(service)) as url:
        yield RunningServer(url, service)
