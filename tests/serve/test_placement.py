"""Placed experts under a server: several adapters in one batch, approximations in the API, routing counts, and GPU
options without a GPU. The expert engine uses torch's CPU device here, and the GPU if there is one.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.place.apply import ModelPlacement, attach_engine, describe, place_residents
from ktransformers.place.residents import load_counts
from ktransformers.serve.flags import parse
from ktransformers.serve.loading import open_service
from ktransformers.serve.placement import fill_gpus, options_of
from ktransformers.serve.target import Target, resolve_target
from tests.support.serving import EngineHarness, RunningServer

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@pytest.mark.parametrize("device", [None, pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("threshold", [None, 16])
def test_adapters_share_a_batch_on_an_expert_engine(
    threshold: int | None, device: str | None, harness: EngineHarness, model_directory: Path, adapters: dict[str, Path]
) -> None:
    """Base, two adapters with experts and one without in one batch; log-probabilities equal those of the CPU's
    experts up to the rounding of gate and up to bf16 on a GPU."""
    other = EngineHarness(model_directory, {}, device=device)
    options = PlacementOptions(kt_num_gpu_experts=2, kt_gpu_prefill_token_threshold=threshold)
    placement = attach_engine(other.model, options, device=device or "cpu")
    assert placement is not None
    description = describe(placement, options, place_residents(placement, options, None, {}))
    assert "policy resident; 2 residents in each of" in description
    assert ("16 tokens" in description) == (threshold is not None)
    other.loaded = {
        name: other.lora_modules.open(path, name, 1, str(model_directory)) for name, path in adapters.items()
    }
    assert set(other.loaded["one"].factors) == set(other.loaded["one"].experts)
    assert not harness.loaded["one"].factors, "the CPU does not use them"
    names = [None, "one", "two", "attention", "one"]
    prompts = [[5 + at, 7, 11, 13 + at, 17, 2 * at + 1] for at in range(len(names))]
    pairs = [other.sequence(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    other.run(other.engine(), *(one for one, _ in pairs))
    assert sum(int(row.sum()) for row in placement.counts())
    streamed = [bool(layer.last_split["forward"].streamed) for layer in placement.layers]
    assert not any(streamed), "answers are computed by residents and the CPU"
    for prompt, name, (_, recorded) in zip(prompts, names, pairs, strict=True):
        alone = harness.alone(prompt, name)
        assert recorded.tokens[0] == alone.tokens[0]
        assert abs(recorded.logprobs[0] - alone.logprobs[0]) < 0.05
    placement.detach()


def test_models_endpoint_reports_approximations(served: RunningServer) -> None:
    def models() -> list[dict[str, object]]:
        with urllib.request.urlopen(f"{served.url}/v1/models") as reply:
            actual: list[dict[str, object]] = json.loads(reply.read())["data"]
        return actual

    assert not any("approximations" in one for one in models())
    served.service.approximations = {"kt_w8a8": True}
    try:
        assert all(one["approximations"] == {"kt_w8a8": True} for one in models())
    finally:
        served.service.approximations = {}


def test_missing_gpu_is_logged_and_routing_is_recorded(model_directory: Path, tmp_path: Path) -> None:
    file, lines = tmp_path / "counts.json", list[str]()
    words = ["--kt-num-gpu-experts", "2", "--kt-max-deferred-experts-per-token", "1", "--kt-record-experts", str(file)]
    launch = parse([str(model_directory), "--device", "cpu", "--max-total-tokens", "256", *words])
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    service = open_service(launch, resolve_target(str(model_directory)), lines.append)
    assert sum("kt_max_deferred_experts_per_token: accepted, not done here" in line for line in lines) == 1
    assert service.approximations == {} and any(
        "all experts are computed on the CPU, exactly" in line for line in lines
    )
    model = service.engine.forward.model
    names = list(expert_modules(model))
    service.placement.save_counts()
    counts = load_counts(file, names)
    assert len(counts) == len(names) and not np.any(counts), "the check came before"


def test_launch_line_overrides_yaml_options(model_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "infer.yaml"
    file.write_text(f"model_name_or_path: {model_directory}\nkt_config:\n  kt_place: stream\n  kt_num_gpu_experts: 3\n")
    target = resolve_target(str(file))
    options = options_of(parse([str(file), "--kt-num-gpu-experts", "1"]), target)
    assert (options.policy, options.kt_num_gpu_experts) == ("stream", 1)
    assert fill_gpus(ModelPlacement(options), 0, 512, None, False, print) == {}
    assert Target(model_directory).keys == {}
