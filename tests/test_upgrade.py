"""What version 0.1.0 wrote (tests/data/v0.1.0) is opened by today's code and means the same numbers: a packed
directory, an adapter as `kt train` leaves it, and a checkpoint that training goes on from.

Numbers were written on another CPU: variants that round activations to bf16 are off by 0.3 % of the logits and 0.08 %
of the log-probabilities, others by the order of sums alone. A tensor that was read wrongly, or not at all, is off by
more: the adapter changes log-probabilities by 5 %, quantised experts logits by 16 %.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktransformers.adapters import read_adapter
from ktransformers.adapters.proof_record import ProofRecord, read_record
from ktransformers.nn import load_model

OLD = Path(__file__).parent / "data" / "v0.1.0"
CLOSE = 0.01


def apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_packed_directory() -> None:
    stored = load_file(OLD / "packed_logits.safetensors")
    model = load_model(OLD / "packed", dtype=torch.float32, verify=True)
    formats = {
        role: word for one in model.modules() if hasattr(one, "kt") for role, word in one.kt.store.formats.items()
    }
    assert formats == {"gate": "int4:32", "up": "int4:32", "down": "int8"}
    base = load_model(OLD / "base", dtype=torch.float32)
    with torch.no_grad():
        assert apart(model(input_ids=stored["tokens"]).logits, stored["logits"]) < CLOSE
        assert apart(base(input_ids=stored["tokens"]).logits, stored["logits"]) > 3 * CLOSE, "quantised, and it shows"


def log_probabilities(model: Any, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    found = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([row])
            scores = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(1, tokens[0, 1:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def record() -> ProofRecord:
    found = read_record(OLD / "run")
    assert found is not None and len(found.rows) == 4 and found.dtype == "float32" and not found.held_out
    return found


@pytest.mark.parametrize("how", ["stock", "kt"])
def test_adapter(how: str, record: ProofRecord) -> None:
    """Loaded by stock PEFT, on the stock model and on packed experts, it gives what training recorded."""
    base: Any
    if how == "stock":
        base = AutoModelForCausalLM.from_pretrained(OLD / "base", dtype=torch.float32)
    else:
        base = load_model(OLD / "base", dtype=torch.float32)
    before, after = torch.cat(record.base.logprobs), torch.cat(record.adapter.logprobs)
    assert apart(before, after) > 2 * CLOSE, "the adapter does something"
    assert apart(log_probabilities(base.eval(), record.rows), before) < CLOSE / 4
    adapted = PeftModel.from_pretrained(base, str(OLD / "run")).eval()
    assert apart(log_probabilities(adapted, record.rows), after) < CLOSE / 4


def test_adapter_is_read_whole() -> None:
    """Every tensor against the manifest, which is refused if it says another shape, norm or hash."""
    found = read_adapter(OLD / "run", model=str(OLD / "base"))
    assert len(found.experts) == 2 and len(found.modules) == 2 and not found.extras
    manifest = json.loads((OLD / "run" / "kt_manifest.json").read_text())
    assert len(manifest["tensors"]) == 12


def test_training_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps 3 and 4, whose losses and tensors are those of the run that was not interrupted: optimiser, scheduler,
    order of rows and dropout's random state were all found."""
    for package in ("trl", "datasets"):
        pytest.importorskip(package)
    from typer.testing import CliRunner

    from ktransformers.cli.main import app

    for name in ("base", "data", "run/checkpoint-2"):
        shutil.copytree(OLD / name, tmp_path / name)
    shutil.copy(OLD / "recipe.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "recipe.yaml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "checkpoint-2 has no kt_checkpoint.json: its files and its recipe are not verified" in done.output
    before, after = (
        [
            (line["step"], line["loss"], line["learning_rate"])
            for line in json.loads((run / "trainer_state.json").read_text())["log_history"]
            if "loss" in line
        ]
        for run in (OLD / "run", tmp_path / "run")
    )
    assert [step for step, *_ in after] == [1, 2, 3, 4] and after[:2] == before[:2]
    shown = [line.split()[1] for line in done.output.splitlines() if line.startswith("step ")]
    assert shown == ["3/4", "4/4"]
    for (_, loss, rate), (_, old_loss, old_rate) in zip(after, before, strict=True):
        assert loss == pytest.approx(old_loss, rel=CLOSE / 4) and rate == pytest.approx(old_rate)
    for name in ("kt_batches.json", "kt_gradients.json"):
        old_words, words = (
            json.loads((folder / name).read_text())
            for folder in (OLD / "run/checkpoint-2", tmp_path / "run/checkpoint-4")
        )
        assert old_words.keys() == words.keys()
        assert all(one.keys() == words[key].keys() for key, one in old_words.items() if one is not None)
    old, new = (load_file(run / "adapter_model.safetensors") for run in (OLD / "run", tmp_path / "run"))
    assert old.keys() == new.keys()
    assert max(apart(new[name], old[name]) for name in old) < 5 * CLOSE
