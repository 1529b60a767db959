"""`kt_expert_parallel`: ranks that divide the experts train what one process trains on the same rows."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.modeling.load import meta_model
from ktransformers.train.expert_parallel import check_ranks, make_partition
from ktransformers.train.resolve import read_settings
from tests.support.forked import Forked
from tests.support.rank_memory import imbalance
from tests.support.ranks import run_ranks
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER, recipe
from tests.support.training_runs import adapter, difference

EXPERTS = 8
EXACT = 1e-5  # relative, by norms, after some steps of Adam in float32
RUN = """
import json, sys
from pathlib import Path
import torch
from ktransformers.train.run import train
from ktransformers.train.resolve import read_settings
from tests.support.training import RunRecorder
torch.set_num_threads(1)
train(read_settings(json.loads(Path(sys.argv[1]).read_text())), RunRecorder())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, num_experts=EXPERTS), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def keys_of(model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(name: str, **changes: Any) -> dict[str, Any]:
        keys = {"use_cpu": True, "precision": "f32", "max_grad_norm": 0.05, "disable_shuffling": True}
        keys |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "kt_place": "cpu"}
        return recipe(model, tmp_path / name, **keys | changes)

    return make


def train_ranks(keys: dict[str, Any], ranks: int) -> Path:
    """The run's directory; `ranks` 0: one process without torchrun's variables."""
    output = Path(keys["output_dir"])
    file = output.with_suffix(".json")
    file.write_text(json.dumps(keys))
    if ranks:
        run_ranks(RUN, ranks, file, seconds=900)
    else:
        done = Forked(RUN, file).wait(900)
        assert done.returncode == 0, done.stderr[-3000:]
    return output


def losses(folder: Path) -> list[tuple[float, float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def assert_same_run(got: Path, want: Path) -> None:
    """Losses, norms of gradients, adapter, optimizer and what is known of gradients, at the last checkpoint."""
    assert difference(adapter(got), adapter(want)) < EXACT
    step = sorted(want.glob("checkpoint-*"))[-1].name
    got, want = got / step, want / step
    assert difference(adapter(got), adapter(want)) < EXACT
    for mine, theirs in zip(losses(got), losses(want), strict=True):
        assert mine == pytest.approx(theirs, rel=EXACT)
    states = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (got, want)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for index, expected in states[1]["state"].items():
        assert difference(states[0]["state"][index], expected) < EXACT
    gradients = [json.loads((folder / "kt_gradients.json").read_text()) for folder in (got, want)]
    assert gradients[0] == gradients[1]


def assert_same_counts(one: Path, several: Path, *, within: float) -> None:
    """Of routed tokens, by layer and expert: the ranks' counts together are those of one process."""
    rows, expected = (json.loads(file.read_text()) for file in (several, one))
    assert list(rows) == list(expected) and len(rows) == 2
    for name in expected:
        different = sum(abs(mine - theirs) for mine, theirs in zip(rows[name], expected[name], strict=True))
        assert sum(expected[name]) > 0 and different <= within * sum(expected[name]), (name, rows, expected)


def test_two_ranks_train_what_one_process_trains(keys_of: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Rows of different lengths are split by tokens, so the ranks have different numbers of passes in a step."""
    budget, counts = {"kt_tokens_per_batch": 100}, [str(tmp_path / f"counts-{ranks}.json") for ranks in (1, 2)]
    options = {"gradient_accumulation_steps": 2, "kt_record_experts": counts[0]}
    one = train_ranks(keys_of("one", **budget, **options), 0)
    options = {"gradient_accumulation_steps": 1, "kt_expert_parallel": 2, "kt_record_experts": counts[1]}
    two = train_ranks(keys_of("two", **budget, **options), 2)
    assert_same_run(two, one)
    assert_same_counts(*map(Path, counts), within=0.05)  # a pass that only takes part has two tokens
    manifest = json.loads((two / "kt_manifest.json").read_text())
    expected = json.loads((one / "kt_manifest.json").read_text())
    shapes = [{name: tensor["shape"] for name, tensor in found["tensors"].items()} for found in (manifest, expected)]
    assert shapes[0] == shapes[1]
    assert manifest["experts_without_gradient"] == expected["experts_without_gradient"]
    assert (two / "kt_proof.safetensors").is_file()

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(keys_of("x")["model_name_or_path"], dtype=torch.float32)
    stock = PeftModel.from_pretrained(base, two)
    loaded = {name: value for name, value in stock.named_parameters() if ".experts." in name and "lora_" in name}
    saved = adapter(two)
    assert len(loaded) == 8
    for name, value in loaded.items():
        assert torch.equal(value, saved[name.replace(".default.", ".")]), name


@pytest.mark.slow
def test_two_groups_of_two_ranks_with_experts_by_frequency(
    keys_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    counts = {f"model.layers.{layer}.mlp.experts": [9, 1, 7, 1, 5, 1, 3, 0] for layer in range(2)}
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    options = {"kt_tokens_per_batch": "off", "kt_cpu_activation": "recompute"}
    record = {"kt_record_experts": str(tmp_path / "one.json")}
    one = train_ranks(keys_of("one", **options, **record, gradient_accumulation_steps=4), 0)
    options |= {"kt_record_experts": str(tmp_path / "four.json")}
    options |= {"kt_expert_partition": "frequency", "init_expert_location": str(tmp_path / "counts.json")}
    four = train_ranks(keys_of("four", **options, gradient_accumulation_steps=1, kt_expert_parallel=2), 4)
    assert_same_run(four, one)
    assert_same_counts(tmp_path / "one.json", tmp_path / "four.json", within=0.0)


@pytest.mark.slow
def test_preference_training_with_experts_by_layers(keys_of: Callable[..., dict[str, Any]]) -> None:
    pairs = {"stage": "dpo", "dataset": "style_neko_en_dpo", "cutoff_len": 80, "max_samples": 8}
    pairs |= {"kt_cpu_activation": "retain", "kt_tokens_per_batch": "off", "per_device_train_batch_size": 1}
    one = train_ranks(keys_of("one", **pairs, gradient_accumulation_steps=2), 0)
    options = {"kt_expert_parallel": 2, "kt_expert_partition": "layers"}
    assert_same_run(train_ranks(keys_of("two", **pairs, **options, gradient_accumulation_steps=1), 2), one)


@pytest.mark.slow
def test_router_loss_and_evaluation(keys_of: Callable[..., dict[str, Any]]) -> None:
    options = {"moe_aux_loss_coef": 0.1, "kt_tokens_per_batch": "off", "val_size": 4, "eval_strategy": "steps"}
    options |= {"eval_steps": 1}
    one = train_ranks(keys_of("one", **options, gradient_accumulation_steps=2), 0)
    two = train_ranks(keys_of("two", **options, gradient_accumulation_steps=1, kt_expert_parallel=2), 2)
    assert_same_run(two, one)
    results = [json.loads((folder / "all_results.json").read_text())["eval_loss"] for folder in (two, one)]
    assert results[0] == pytest.approx(results[1], rel=EXACT)


@pytest.mark.slow
def test_checkpoints_resume_with_other_numbers_of_ranks(keys_of: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    plain = {"kt_tokens_per_batch": "off"}
    one = train_ranks(keys_of("one", **plain, gradient_accumulation_steps=2), 0)
    two = train_ranks(keys_of("two", **plain, gradient_accumulation_steps=1, kt_expert_parallel=2), 2)
    again = plain | {"gradient_accumulation_steps": 2, "resume_from_checkpoint": str(two / "checkpoint-1")}
    assert_same_run(train_ranks(keys_of("alone", **again), 0), one)
    again = plain | {"gradient_accumulation_steps": 1, "resume_from_checkpoint": str(one / "checkpoint-1")}
    again |= {"kt_expert_parallel": 2, "kt_expert_partition": "layers"}
    assert_same_run(train_ranks(keys_of("layers", **again), 2), one)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_fsdp_beside_divided_experts_and_resumed_with_other_numbers(
    stage: str, keys_of: Callable[..., dict[str, Any]]
) -> None:
    """FSDP2 shards the rest over all ranks; 2 ranks, 4 ranks, and two groups of 2 ranks divide the experts."""
    plain: dict[str, Any] = {"kt_tokens_per_batch": "off"}
    if stage == "dpo":
        plain |= {"stage": "dpo", "dataset": "style_neko_en_dpo", "cutoff_len": 80, "max_samples": 16}
        plain |= {"per_device_train_batch_size": 1}
    one = train_ranks(keys_of("one", **plain, gradient_accumulation_steps=4), 0)
    cases = {"two": (2, 2, "experts"), "four": (4, 4, "experts"), "groups": (4, 2, "layers")}
    for name, (ranks, group, partition) in cases.items():
        options = {"kt_expert_parallel": group, "kt_expert_partition": partition, "fsdp": "full_shard"}
        options |= {"gradient_accumulation_steps": 4 // ranks}
        assert_same_run(train_ranks(keys_of(name, **plain, **options), ranks), one)
        plain["kt_cpu_activation"] = "retain"  # of the runs that follow, with the same results
    groups = Path(keys_of("groups")["output_dir"])
    again = plain | {"gradient_accumulation_steps": 4, "resume_from_checkpoint": str(groups / "checkpoint-1")}
    assert_same_run(train_ranks(keys_of("alone", **again), 0), one)
    again |= {"gradient_accumulation_steps": 2, "fsdp": "offload", "kt_expert_parallel": 2}
    assert_same_run(train_ranks(keys_of("other", **again), 2), one)
    again |= {"resume_from_checkpoint": str(one / "checkpoint-1")}
    assert_same_run(train_ranks(keys_of("from-one", **again), 2), one)


@pytest.mark.slow
def test_dropout_of_expert_lora_trains(keys_of: Callable[..., dict[str, Any]]) -> None:
    """Masks are drawn where rows are computed, so they are not those of one process: losses stay near, not equal."""
    options = {"lora_dropout": 0.2, "kt_tokens_per_batch": "off", "gradient_accumulation_steps": 1, "max_steps": 4}
    folder = train_ranks(keys_of("two", **options, kt_expert_parallel=2), 2)
    assert all(math.isfinite(loss) for loss, _ in losses(folder / "checkpoint-4"))


@pytest.mark.parametrize(
    ("keys", "world", "problem"),
    [
        ({"kt_expert_parallel": 2}, 1, "2 with 1 process"),
        ({"kt_expert_parallel": 2}, 3, "2 with 3 processes"),
        ({"kt_expert_parallel": 16}, 16, "16 ranks for 8 experts"),
        ({"kt_expert_parallel": 4, "kt_expert_partition": "layers"}, 4, "4 ranks for 2 layers"),
        ({"kt_expert_parallel": 2, "kt_expert_partition": "frequency"}, 2, "kt_record_experts"),
        ({"kt_expert_parallel": 2, "kt_place": "stream"}, 2, "kt_place"),
        ({"kt_expert_parallel": 2, "optim": "adafactor"}, 2, "optim"),
        ({"kt_expert_parallel": 2, "fp16": True, "bf16": False}, 2, "fp16"),
    ],
)
def test_bad_configurations_are_refused_before_anything_is_loaded(
    keys: dict[str, Any], world: int, problem: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    settings = read_settings(recipe(model, tmp_path / "x", **keys))
    with pytest.raises(InputError, match=problem):
        check_ranks(settings)
        make_partition(settings, meta_model(model))


def test_partitions_of_a_recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    meta = meta_model(model)

    def partition(**keys: Any) -> Any:
        settings = read_settings(recipe(model, tmp_path / "x", **keys))
        check_ranks(settings)
        return make_partition(settings, meta)

    assert partition() is None and partition(kt_expert_parallel=1) is None
    assert partition(kt_expert_parallel=4).owners == ((0, 0, 1, 1, 2, 2, 3, 3),) * 2
    assert partition(kt_expert_parallel=2, kt_expert_partition="layers").owners == ((0,) * 8, (1,) * 8)
    counts = {f"model.layers.{layer}.mlp.experts": [8, 7, 6, 5, 4, 3, 2, 1] for layer in range(2)}
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    measured = partition(
        kt_expert_parallel=2, kt_expert_partition="frequency", init_expert_location=str(tmp_path / "counts.json")
    )
    assert measured.owners == ((0, 1, 1, 0, 0, 1, 1, 0),) * 2 and imbalance(measured, list(counts.values())) == 1.0
