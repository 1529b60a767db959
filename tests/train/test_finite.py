"""A loss, gradient or weight that is NaN or infinite ends the run with step, rows and last checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ktransformers.train.checkpoints import list_checkpoints
from ktransformers.train.data.render import TrainRow
from ktransformers.train.finite import MAX_SKIPPED_STEPS, FiniteCheck, NotFiniteError, sequences_of
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import adapter, run

MARK = "zebra"


@pytest.fixture(scope="module")
def poisoned(tiny: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with NaN embeddings for the tokens of one word: rows with that word have a NaN loss."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    other = set(tokenizer("Say the word number for me please once more. Yes 0 1 2 3 4 5 6 7 8 9")["input_ids"])
    tokens = [token for token in tokenizer(f" {MARK}")["input_ids"] if token not in other]
    tensors["model.embed_tokens.weight"][tokens[-1]] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rows(stage: str, bad: int) -> list[dict[str, str]]:
    made = []
    for number in range(16):
        row = {"instruction": f"Say the word number {number} for me please"}
        answer = f"Yes {MARK}" if number == bad else f"Yes {number}"
        made.append(row | ({"chosen": answer, "rejected": "once more"} if stage == "dpo" else {"output": answer}))
    return made


def keys_of(model: Path, folder: Path, stage: str, **keys: Any) -> dict[str, Any]:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows(stage, bad=9)))
    steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 8}
    steps |= {"dataset": str(file), "stage": stage, "disable_shuffling": True, "gradient_accumulation_steps": 1}
    if stage == "dpo":
        steps |= {"pref_loss": "orpo"}  # no reference, which would already be NaN
    return recipe(model, folder / "x", **steps) | keys


@pytest.mark.parametrize(
    ("stage", "more"),
    [("sft", {}), ("dpo", {}), ("sft", {"kt_tokens_per_batch": 200, "gradient_accumulation_steps": 2})],
    ids=["sft", "dpo", "tokens at once"],
)
def test_nan_loss_stops_the_run(poisoned: Path, tmp_path: Path, stage: str, more: dict[str, Any]) -> None:
    keys = keys_of(poisoned, tmp_path, stage, **more)
    bad_step = 9 // (keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"]) + 1
    watcher, output = RunRecorder(), tmp_path / "x"
    with pytest.raises(NotFiniteError) as raised:
        run(keys, watcher)
    told = str(raised.value)
    assert told.startswith(f"step {bad_step}: the loss is nan; rows of this step: ") and "\n" not in told
    assert "9 (" in told and "Say the word number 9" in told
    assert f"the last checkpoint is {output / f'checkpoint-{bad_step - 1}'}" in told
    (last,) = list_checkpoints(output)
    assert all(torch.isfinite(tensor).all() for tensor in adapter(last).values())
    assert max(step.step for step in watcher.steps) == bad_step - 1
    assert not (output / "adapter_model.safetensors").exists()


def test_a_tensor_of_the_base_is_named(poisoned: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"; model\.embed_tokens\.weight of the base has NaN or infinite"):
        run(keys_of(poisoned, tmp_path, "sft"))


def test_packed_rows_are_named(poisoned: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"step \d: the loss is nan; .*9 \(.*Say the word number 9"):
        run(keys_of(poisoned, tmp_path, "sft", packing=True))


def test_reference_that_is_not_finite_is_not_cached(poisoned: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="ref_chosen_logps of 1 train rows is not finite, rows 9"):
        run(keys_of(poisoned, tmp_path, "dpo", pref_loss="sigmoid"))
    assert not list((tmp_path / "x").glob("kt_reference*"))


def test_diverging_rate_stops_before_a_bad_save(tiny: Path, tmp_path: Path) -> None:
    """Weights that overflow in an optimizer step are not saved, though loss and gradients of that step were finite."""
    keys = recipe(tiny, tmp_path / "x", save_strategy="steps", save_steps=1, learning_rate=1e38, max_grad_norm=0)
    with pytest.raises(NotFiniteError, match=r"step \d: .*(is not finite|the loss is|the norm of the gradients is)"):
        run(keys | {"optim": "sgd", "lr_scheduler_type": "constant"})
    for folder in list_checkpoints(tmp_path / "x"):
        assert all(torch.isfinite(tensor).all() for tensor in adapter(folder).values())


class Words:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class State:
    global_step = 4


def check_of(tmp_path: Path, has_scaler: bool = False) -> tuple[FiniteCheck, nn.Linear]:
    model = nn.Linear(2, 2)
    check = FiniteCheck(model, tmp_path, [TrainRow([1, 2, 3], [1, 2, 3]), TrainRow([4, 5], [4, 5])], Words(), False)
    check.has_scaler = has_scaler
    return check, model


def test_infinite_gradients_name_all_rows_of_the_step(tmp_path: Path) -> None:
    check, model = check_of(tmp_path)
    for ids, mask in (([[1, 2, 3]], [[1, 1, 1]]), ([[4, 5, 0]], [[1, 1, 0]])):
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        check.record_loss(torch.tensor(2.0), inputs, 5)
    model.weight.grad = torch.tensor([[1.0, float("inf")], [0.0, 0.0]])
    with pytest.raises(NotFiniteError, match=r"step 5: .*gradients is inf; rows of this step: 0 \(1 2 3\), 1 \(4 5\);"):
        check.on_pre_optimizer_step(None, State(), None)
    check.record_norm(torch.tensor(3.0))  # of the Trainer; computed only where it has none
    check.on_pre_optimizer_step(None, State(), None)


def test_scaler_may_skip_some_steps(tmp_path: Path) -> None:
    check, _ = check_of(tmp_path, has_scaler=True)
    for norm in (*[float("inf")] * MAX_SKIPPED_STEPS, 1.0, *[float("inf")] * MAX_SKIPPED_STEPS):
        check.record_norm(norm)
        check.on_pre_optimizer_step(None, State(), None)
    check.record_norm(float("inf"))
    with pytest.raises(NotFiniteError, match="no checkpoint was saved before"):
        check.on_pre_optimizer_step(None, State(), None)


def test_rows_of_a_batch() -> None:
    packed = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    assert sequences_of(packed, pairs=False) == [[1, 2], [3, 4]]
    isolating = {"attention_mask": torch.ones(1, 1, 4, 4)}
    assert sequences_of(packed | isolating, pairs=False) == [[1, 2], [3, 4]]
    pairs = {"input_ids": torch.tensor([[1, 2], [3, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    assert sequences_of(pairs, pairs=True) == [[1, 2]]
