"""`kt train` under FSDP2 on CPUs: losses, gradients, adapters and resumed runs equal one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ktransformers.ground.errors import InputError
from ktransformers.train.resolve import read_settings
from ktransformers.train.sharding import launcher_sharding, read_shard_options, take_launcher_sharding
from tests.support.rank_runs import run_ranks, tiny_model
from tests.support.training import recipe
from tests.support.training_runs import adapter, difference

EXACT: dict[str, Any] = {"precision": "f32", "kt_backend": "AVX2", "use_cpu": True, "max_samples": 32, "seed": 3}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("fsdp"))


def compare(one: Path, several: Path, *, first_step: bool = True, bound: float = 1e-5) -> None:
    """Losses and norms of all steps, gradients of the first, and the adapter."""
    expected, given = (json.loads((folder / "seen-0.json").read_text()) for folder in (one, several))
    assert len(given["steps"]) >= 1
    losses = {step: (loss, norm) for step, loss, norm in expected["steps"]}
    for step, loss, norm in given["steps"]:
        assert (loss, norm) == pytest.approx(losses[step], rel=bound), step
    assert given["eval"] == pytest.approx(expected["eval"][-len(given["eval"]) :] if given["eval"] else [], rel=bound)
    if first_step:
        gradients = [load_file(folder / "gradients-0.safetensors") for folder in (one, several)]
        assert difference(gradients[1], gradients[0]) < bound
    assert difference(adapter(several / "run"), adapter(one / "run")) < 20 * bound


def test_sft_on_two_ranks_equals_one_process_and_resumes_in_one(model: Path, tmp_path: Path) -> None:
    """Packed experts (bf16), accumulation, checkpointing with retained experts, clipping, LoRA+, evaluation."""
    keys = recipe(model, tmp_path / "one" / "run", **EXACT | SAVING, max_steps=4, gradient_accumulation_steps=4)
    keys |= {"max_grad_norm": 0.3, "loraplus_lr_ratio": 4.0, "kt_weight_path": str(model.parent / "packed")}
    keys |= {"precision": "bf16", "kt_cpu_activation": "retain", "val_size": 4, "eval_strategy": "steps"}
    keys |= {"eval_steps": 2, "per_device_eval_batch_size": 2}
    keys.pop("kt_backend")
    two = keys | {"gradient_accumulation_steps": 2, "output_dir": str(tmp_path / "two" / "run"), "fsdp": True}
    (one,) = run_ranks(keys, tmp_path / "one", 1)
    ranks = run_ranks(two, tmp_path / "two", 2)
    compare(tmp_path / "one", tmp_path / "two")
    assert one["sharded"] == 0 and all(rank["sharded"] > 20 for rank in ranks)
    assert all(rank["bytes"] <= 0.55 * one["bytes"] for rank in ranks)
    size = sum(file.stat().st_size for file in (model.parent / "packed").glob("packed-*"))
    for rank in ranks:  # one copy of the experts for both, and a part of the cores for each
        assert 0 < rank["whole"] <= size + 65536 and rank["share"] < 0.6 * rank["whole"]  # whole pages
        assert rank["threads"] <= max(1, len(rank["mask"]))
    saved = sorted(path.name for path in (tmp_path / "two" / "run" / "checkpoint-2").iterdir())
    assert {"adapter_model.safetensors", "optimizer.pt", "kt_checkpoint.json", "rng_state_1.pth"} <= set(saved)
    assert not any("fsdp" in name for name in saved)
    optimizer = [
        torch.load(tmp_path / name / "run" / "checkpoint-2" / "optimizer.pt", weights_only=True)
        for name in ("one", "two")
    ]
    assert [group["params"] for group in optimizer[0]["param_groups"]] == [
        group["params"] for group in optimizer[1]["param_groups"]
    ]
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "two" / "run" / "checkpoint-2", again / "run" / "checkpoint-2")
    run_ranks(keys | {"output_dir": str(again / "run")}, again, 1)
    notes = json.loads((again / "seen-0.json").read_text())["notes"]
    assert any("saved by 2 processes and goes on with 1" in note for note in notes)
    compare(tmp_path / "one", again, first_step=False)


CASES: dict[str, dict[str, Any]] = {
    "dpo": {"stage": "dpo", "dataset": "pairs", "pref_beta": 0.1},
    # 31 sequences: in the fourth step of 8 accelerate would repeat one, so that all ranks have as many batches
    "packed rows": {"packing": True, "cutoff_len": 128, "max_samples": 64, "max_steps": 3},
    "offload without checkpointing": {"disable_gradient_checkpointing": True, "fsdp": "full_shard offload"},
    "balance loss, recompute": {"moe_aux_loss_coef": 0.01, "kt_cpu_activation": "recompute"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_stages_and_modes_equal_one_process(case: str, model: Path, tmp_path: Path) -> None:
    """In float32 throughout, over two and four ranks, and resumed with another number."""
    more = dict(CASES[case])
    sharded = {"fsdp": more.pop("fsdp", "full_shard auto_wrap")}
    if more.get("dataset") == "pairs":
        more["dataset"] = str(write_pairs(tmp_path))
    keys = recipe(model, tmp_path / "1" / "run", **EXACT | SAVING, max_steps=4, gradient_accumulation_steps=4) | more
    run_ranks(keys, tmp_path / "1", 1)
    for count in (2, 4):
        folder = tmp_path / str(count)
        several = {"gradient_accumulation_steps": 4 // count, "output_dir": str(folder / "run")}
        run_ranks(keys | several | sharded, folder, count)
        compare(tmp_path / "1", folder)
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "4" / "run" / "checkpoint-2", resumed / "run" / "checkpoint-2")
    run_ranks(keys | {"gradient_accumulation_steps": 2, "output_dir": str(resumed / "run")} | sharded, resumed, 2)
    compare(tmp_path / "1", resumed, first_step=False)


def write_pairs(folder: Path) -> Path:
    rows = [
        {
            "conversations": [{"from": "human", "value": f"What is {number} plus {number}?"}],
            "chosen": {"from": "gpt", "value": f"It is {2 * number}, of course."},
            "rejected": {"from": "gpt", "value": "I would not know, nor would I say."},
        }
        for number in range(32)
    ]
    (folder / "pairs.json").write_text(json.dumps(rows))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {"pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder / "pairs.json"


# The form of LLaMA-Factory's fsdp2_kt_*.yaml, as `accelerate launch` puts it into the environment.
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}


def options_of(monkeypatch: pytest.MonkeyPatch, world: int = 2, **keys: Any) -> Any:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    return read_shard_options(read_settings(recipe(Path("m"), Path("o")) | keys))


def test_options_of_recipes_and_of_accelerate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = LAUNCHED | {"OTHER": "1"}
    settings = take_launcher_sharding(read_settings(recipe(Path("m"), Path("o"))), environment)
    assert environment == {"OTHER": "1"}  # transformers would leave weights of other ranks empty
    assert settings.trainer["bf16"] is True
    monkeypatch.setenv("WORLD_SIZE", "2")
    options, notes = read_shard_options(settings)
    assert options.cpu_offload and options.reshard_after_forward and options.layer_classes == ()
    assert [note.split(":")[0] for note in notes] == [
        "fsdp_config.state_dict_type",
        "fsdp_config.cpu_ram_efficient_loading",
    ]
    assert launcher_sharding({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"}) == {}
    assert options_of(monkeypatch)[0] is None
    assert options_of(monkeypatch, fsdp="")[0] is None
    assert not options_of(monkeypatch, fsdp="shard_grad_op")[0].reshard_after_forward
    assert options_of(monkeypatch, fsdp=["full_shard", "offload"])[0].cpu_offload
    alone, notes = options_of(monkeypatch, world=1, fsdp=True)
    assert alone is None and "has no effect in one process" in notes[0]
    file = tmp_path / "fsdp2_kt_bf16.yaml"
    file.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: false\n"
        "  fsdp_transformer_layer_cls_to_wrap: Qwen3MoeDecoderLayer\n"
    )
    options, _ = options_of(monkeypatch, fsdp=True, fsdp_config=str(file))
    assert options.layer_classes == ("Qwen3MoeDecoderLayer",) and not options.cpu_offload


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fsdp": "hybrid_shard"}, "fsdp: given hybrid_shard"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp_config.version: given 1, expected 2"),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "TRANSFORMER_BASED_WRAP"),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "gradient checkpointing is on by default"),
        ({"fsdp": True, "fsdp_config": {"zero": 1}}, "fsdp_config.zero"),
        ({"fsdp": True, "fsdp_config": {"offload_params": "often"}}, "true or false"),
        ({"fsdp": True, "fsdp_config": "nowhere.json"}, "fsdp_config: given nowhere.json"),
        ({"fsdp": True, "optim": "adafactor"}, "optim: given adafactor, expected with fsdp one of"),
        ({"fsdp": True, "fp16": True}, "fp16: given True"),
        ({"fsdp": True, "kt_tokens_per_batch": 512}, "kt_tokens_per_batch: given 512, expected off or auto"),
    ],
)
def test_what_cannot_be_sharded_is_refused(keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=message):
        options_of(monkeypatch, **keys)


def test_deepspeed_stays_refused() -> None:
    with pytest.raises(InputError, match=r"deepspeed: .*fsdp: true shards the rest"):
        read_settings(recipe(Path("m"), Path("o")) | {"deepspeed": "zero3.json"})
