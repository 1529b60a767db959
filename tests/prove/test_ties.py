"""`kt prove` where two experts tie in a router: correct programs that choose different ones are proven, wrong adapters
and wrong routers are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ktransformers.adapters import proof_record
from ktransformers.adapters.comparison import LogprobsAndNorms, difference, measure
from ktransformers.adapters.content import open_content
from tests.support.tiny_models import build, rounding_otherwise, save, tie_experts

for package in ("trl", "datasets", "fastapi", "uvicorn"):
    pytest.importorskip(package)

TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "minimind_6400"
EXPERTS = 6
FACTORS = "base_model.model.model.layers.{}.mlp.experts.base_layer.lora_B.weight"  # gate_up, [2 I, r E]

torch.set_num_threads(2)


@dataclass(frozen=True)
class Tied:
    """A trained adapter of a model whose experts 0 and 1 have the same router row but for 1e-7."""

    output: Path
    record: proof_record.ProofRecord
    target: Any
    trainer: Any  # TrainerRun


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Tied:
    from ktransformers.evaluate.prove.run import run_trainer_model
    from ktransformers.serve.target import resolve_target
    from tests.support.training import RunRecorder, recipe
    from tests.support.training_runs import run

    root = tmp_path_factory.mktemp("ties")
    model: Any = build("qwen3_moe", vocab_size=6400, max_position_embeddings=512)
    tie_experts(model)
    save(model, root / "base")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, root / "base" / file.name)
    output = root / "out"
    run(recipe(root / "base", output, val_size=3, learning_rate=2e-2), RunRecorder())
    record, target = proof_record.read_record(output), resolve_target(str(output))
    assert record is not None
    trainer = run_trainer_model(target, open_content(output), record.rows, torch.float32, "cpu", record=record)
    return Tied(output, record, target, trainer)


def check_stock(tied: Tied, adapter: Path | None = None, trainer: Any = None) -> Any:
    """The check against stock PEFT with the adapter of another directory."""
    from ktransformers.evaluate.prove.run import check_stock as check

    target = tied.target if adapter is None else replace(tied.target, adapters=(("out", str(adapter)),))
    return check(target, tied.record.rows, torch.float32, "cpu", trainer or tied.trainer)


def prove(tied: Tied, dtype: str) -> dict[str, Any]:
    """The checks of `kt prove`, by name; the proof must succeed."""
    import typer

    from ktransformers.cli.prove import prove

    app = typer.Typer()
    app.command()(prove)
    done = CliRunner().invoke(app, [str(tied.output), "--json", "--dtype", dtype])
    assert done.exit_code == 0, done.output
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    assert all(check["passed"] for check in checks.values())
    return checks


def test_ties_are_proven(tied: Tied) -> None:
    checks = prove(tied, "auto")
    stock = checks["stock PEFT"]["routers"]
    assert stock["ties"] >= 1 and stock["faults"] == stock["not_judged"] == 0
    for tie in stock["tied_tokens"]:
        assert {*tie["experts"], *tie["instead_of"]} == {0, 1} and tie["gap"] <= tie["limit"]
    assert checks["as trained"]["routers"]["ties"] == 0 and checks["tensors"]["routers"] is None
    first = stock["tied_tokens"][0]
    assert f"token {first['token']} of row {first['row']} in {first['layer']}" in checks["stock PEFT"]["said"]


@pytest.mark.slow
def test_ties_of_a_record_in_another_dtype_are_proven(tied: Tied) -> None:
    """The trainer's graph in bf16 replays the float32 record, and is replayed by the server and by stock PEFT."""
    checks = prove(tied, "bfloat16")
    assert checks["as trained"]["routers"]["ties"] >= 1
    assert checks["as trained"]["routers"]["faults"] == checks["stock PEFT"]["routers"]["faults"] == 0


def test_ties_exceed_the_rest_by_far(tied: Tied) -> None:
    """What the other tests rely on: without replay, ties make most of the difference between two correct programs."""
    base, adapter = (replace(outputs, routers=None) for outputs in (tied.trainer.base, tied.trainer.adapter))
    ignored, replayed = check_stock(tied, trainer=replace(tied.trainer, base=base, adapter=adapter)), check_stock(tied)
    assert ignored.routers is None and replayed.passed and replayed.routers.ties
    assert ignored.difference.max > 20 * replayed.difference.max


def scaled(factors: torch.Tensor) -> torch.Tensor:
    return factors * 1.05


def of_another_expert(factors: torch.Tensor) -> torch.Tensor:
    return factors.reshape(len(factors), -1, EXPERTS).roll(1, 2).reshape(factors.shape)


def missing(factors: torch.Tensor) -> torch.Tensor:
    experts = factors.reshape(len(factors), -1, EXPERTS).clone()
    experts[:, :, 0] = 0
    return experts.reshape(factors.shape)


@pytest.mark.parametrize("edit", [scaled, of_another_expert, missing])
@pytest.mark.parametrize("layer", [0, 1])
def test_wrong_adapter_fails_beside_ties(
    tied: Tied, tmp_path: Path, edit: Callable[[torch.Tensor], torch.Tensor], layer: int
) -> None:
    folder = Path(shutil.copytree(tied.output, tmp_path / "out"))
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[FACTORS.format(layer)] = edit(tensors[FACTORS.format(layer)]).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    check = check_stock(tied, folder)
    assert check.passed is False and check.culprit in (f"model.layers.{layer}.mlp.experts", "the output")
    assert check.routers is not None and check.routers.ties and not check.routers.faults


@pytest.mark.parametrize("layer", [0, 1])
def test_wrong_router_fails(tied: Tied, tmp_path: Path, layer: int) -> None:
    """Its choices differ for scores that are far apart, with the same hidden states."""
    from ktransformers.evaluate.prove.run import run_trainer_model

    base = Path(shutil.copytree(tied.target.model, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors[f"model.layers.{layer}.mlp.gate.weight"] *= torch.tensor([1.2, 1.2, 0.9, 1.1, 0.8, 1.1])[:, None]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    content, rows = open_content(tied.output), tied.record.rows
    wrong = run_trainer_model(replace(tied.target, model=base), content, rows, torch.float32, "cpu")
    check = check_stock(tied, trainer=wrong)
    assert check.passed is False and check.culprit == f"model.layers.{layer}.mlp.experts"
    assert check.routers is not None and check.routers.faults
    fault = max(check.routers.faults, key=lambda fault: fault.layer == check.culprit and fault.gap)
    assert fault.distance > 10 * fault.limit
    expected = f"in the base, token {fault.token} of row {fault.row} is routed to experts {fault.experts[0]} instead of"
    assert check.detail.startswith(expected)


def recorded_elsewhere(tied: Tied, tmp_path: Path) -> proof_record.ProofRecord:
    """The record of a trainer that rounds otherwise, read back from its file."""
    model = tied.trainer.reopen()
    with rounding_otherwise(model):
        created = proof_record.record(model, tied.record.rows, held_out=True)
    proof_record.write_record(tmp_path / proof_record.PROOF_FILE, created)
    record = proof_record.read_record(tmp_path)
    assert record is not None
    return record


def test_record_of_another_machine_with_ties(tied: Tied, tmp_path: Path) -> None:
    from ktransformers.evaluate.prove.run import check_record, run_trainer_model

    record = recorded_elsewhere(tied, tmp_path)

    def check(record: proof_record.ProofRecord) -> Any:
        content = open_content(tied.output)
        run = run_trainer_model(tied.target, content, record.rows, torch.float32, "cpu", record=record)
        return check_record(record, run)

    actual = check(record)
    assert actual.passed and actual.routers is not None and actual.routers.ties and not actual.routers.faults

    def without_routers(outputs: LogprobsAndNorms) -> LogprobsAndNorms:
        return replace(outputs, routers=None)

    old = check(replace(record, base=without_routers(record.base), adapter=without_routers(record.adapter)))
    assert old.routers is None


def test_served_ties_are_replayed_in_shared_batches(tied: Tied) -> None:
    """Base and adapter of all rows are requested at once; each row of a batch is assigned to its token."""
    from ktransformers.adapters.router_choices import compare_choices
    from ktransformers.evaluate.prove.server import find_names, score_rows_replayed, start_server
    from ktransformers.ground.client import Client
    from ktransformers.serve.flags import Launch

    rows, launch = tied.record.rows, Launch(str(tied.output), dtype="float32", device="cpu", max_total_tokens=2048)
    with start_server(launch, tied.target, lambda line: None) as (url, service):
        base, adapter, _ = find_names(Client(url, None), tied.target)
        for name, expected in ((adapter, tied.trainer.adapter), (base, tied.trainer.base)):
            served = score_rows_replayed(Client(url, None), service, (adapter, base), rows, name, expected.routers)
            assert served.routers is not None and served.routers.layers.keys() == expected.routers.layers.keys()
            starts = {tuple(row[: token + 1]) for row in rows for token in range(len(row))}
            for layer in served.routers.layers.values():  # a prefix that rows share may be computed once
                assert int((layer.chosen >= 0).all(1).sum()) >= len(starts)
            comparison = compare_choices(served.routers, expected.routers)
            assert comparison is not None and not comparison.faults and not comparison.unjudged
            assert difference(served, expected).within(tied.trainer.floor.replayed)
            assert "run" not in vars(service.engine.forward)


def test_ties_of_a_server_elsewhere_are_explained(tied: Tied) -> None:
    """Its routers are out of reach: the trainer's graph finds the choices that give its numbers."""
    from ktransformers.evaluate.prove.ties import explain_by_ties

    model, rows = tied.trainer.reopen(), tied.record.rows
    expected, floor = tied.trainer.adapter, tied.trainer.floor
    with rounding_otherwise(model):
        other = measure(model, rows)
    assert not difference(other, expected).within(floor.replayed)
    resolved, routers = explain_by_ties(model, rows, other, expected, floor)
    assert difference(other, resolved).within(floor.replayed)
    assert routers.ties and not routers.faults
    for tie in routers.ties:
        assert {*tie.experts, *tie.instead_of} == {0, 1}
    changed = [row for row in range(len(rows)) if not torch.equal(resolved.logprobs[row], expected.logprobs[row])]
    assert {tie.row for tie in routers.ties} == set(changed)


@pytest.mark.parametrize("size", [1e-3, float("nan")])
def test_wrong_numbers_of_a_server_elsewhere_are_not_explained(tied: Tied, size: float) -> None:
    from ktransformers.evaluate.prove.ties import explain_by_ties

    expected, floor, rows = tied.trainer.adapter, tied.trainer.floor, tied.record.rows
    wrong = replace(expected, logprobs=tuple(row + size * torch.ones(len(row)) for row in expected.logprobs))
    resolved, _ = explain_by_ties(tied.trainer.reopen(), rows, wrong, expected, floor)
    assert not difference(wrong, resolved).within(floor.replayed)
