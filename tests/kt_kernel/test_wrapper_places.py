"""What `--kt-weight-path` may name, opened through `KTMoEWrapper` as SGLang calls it: outputs against the numbers of
the files, with experts on the GPU and deferred ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kt_kernel import KTMoEWrapper
from tests.support.sglang_files import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    TOP_K,
    Batch,
    Checkpoint,
    distance,
    random_batch,
)
from tests.support.sglang_places import PLACES

CPU = torch.device("cpu")


@pytest.fixture(params=PLACES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Checkpoint, float]:
    place = PLACES[request.param]
    return place.method, place.write(tmp_path_factory.mktemp("place")), place.tolerance


def wrappers(checkpoint: Checkpoint, method: str, gpu_experts: int = 0, deferred: int = 0) -> list[Any]:
    """Stock SGLang's call, by keyword; the last layer defers nothing."""
    made = []
    for layer in range(LAYERS):
        wrapper = KTMoEWrapper(
            layer_idx=layer,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            num_gpu_experts=gpu_experts,
            cpuinfer_threads=2,
            threadpool_count=1,
            weight_path=str(checkpoint.path),
            chunked_prefill_size=64,
            method=method,
            max_deferred_experts_per_token=deferred if layer < LAYERS - 1 else 0,
        )
        wrapper.load_weights(torch.arange(EXPERTS))
        made.append(wrapper)
    return made


def test_outputs_match_the_files(opened: tuple[str, Checkpoint, float]) -> None:
    method, checkpoint, tolerance = opened
    for layer, wrapper in enumerate(wrappers(checkpoint, method, gpu_experts=2)):
        batch = random_batch(9, CPU, seed=layer)
        on_cpu = Batch(batch.hidden, torch.where(batch.ids < 2, -1, batch.ids), batch.weights)
        out = wrapper.forward(batch.hidden, batch.ids, batch.weights, 0)
        assert distance(out, checkpoint.forward(layer, on_cpu)) < tolerance


def test_deferred_experts_are_those_of_the_layer_before(opened: tuple[str, Checkpoint, float]) -> None:
    method, checkpoint, tolerance = opened
    late = torch.zeros(1, HIDDEN, dtype=torch.float64)
    for layer, wrapper in enumerate(wrappers(checkpoint, method, deferred=2)):
        batch = random_batch(1, CPU, seed=20 + layer)
        kept = TOP_K - wrapper.max_deferred_experts_per_token
        ids, later = wrapper.select_deferred_experts(batch.ids, batch.weights, kept)
        out = wrapper.forward(batch.hidden, batch.ids, batch.weights, 0)
        now = checkpoint.forward(layer, Batch(batch.hidden, ids, batch.weights))
        assert distance(out, now + late) < 2 * tolerance
        late = checkpoint.forward(layer, Batch(batch.hidden, later, batch.weights))
