"""`kt prove`, and the check of the saved adapter at the end of training: intact adapters pass, tampered tensors are
named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ktransformers.adapters import proof_record
from ktransformers.adapters.comparison import LogprobsAndNorms, difference
from ktransformers.adapters.content import open_content
from ktransformers.ground.errors import KTError
from tests.support.tiny_models import build, save

TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "minimind_6400"
WEIGHTS = "adapter_model.safetensors"
EXPERTS = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"  # gate_up, [2 I, r E]
ATTENTION = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"

for package in ("trl", "datasets", "fastapi", "uvicorn"):
    pytest.importorskip(package)

torch.set_num_threads(2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A tiny model, trained for a few steps with held-out rows, and the output of the run."""
    from tests.support.training import RunRecorder, recipe
    from tests.support.training_runs import run

    root, watcher = tmp_path_factory.mktemp("prove"), RunRecorder()
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512), root / "base")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, root / "base" / file.name)
    run(recipe(root / "base", root / "out", val_size=3, learning_rate=2e-2), watcher)
    return root / "out", watcher.notes


@pytest.fixture
def output(trained: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(trained[0], tmp_path / "out"))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], *, manifest: bool = True) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if not manifest:
        (folder / "kt_manifest.json").unlink()


def changed_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERTS][3, :] += 0.05


def changed_slightly(tensors: dict[str, torch.Tensor]) -> None:
    """Change values by no more than bf16 rounding."""
    tensors[EXPERTS][3, :] *= 1.01


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    gate, up = tensors[EXPERTS].chunk(2)
    tensors[EXPERTS] = torch.cat([up, gate])


def changed_attention(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ATTENTION][0, 0] += 0.1


def dropped(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[EXPERTS]


def run(folder: Path, *words: str) -> Any:
    import typer

    from ktransformers.cli.prove import prove

    app = typer.Typer()
    app.command()(prove)
    return CliRunner().invoke(app, [str(folder), *words])


def test_saved_adapter_equals_trained_adapter(trained: tuple[Path, list[str]]) -> None:
    lines = [note for note in trained[1] if note.startswith("reloaded:")]
    assert len(lines) == 1 and "24 tensors trained, saved and read back" in lines[0]
    assert "3 held-out rows are the same to the bit" in lines[0]
    record = proof_record.read_record(trained[0])
    assert record is not None and record.held_out and len(record.rows) == 3 and record.dtype == "float32"
    assert difference(record.adapter, record.base).mean > 0.1
    assert "model.layers.1.mlp.experts" in record.adapter.projections and len(record.adapter.projections) == 10


def test_trained_adapter_is_proven(trained: tuple[Path, list[str]]) -> None:
    done = run(trained[0], "--json")
    assert done.exit_code == 0, done.output
    proof = json.loads(done.stdout)
    assert proof["passed"] and proof["culprit"] is None
    assert proof["counts"] == {"saved": 24, "trained": 24, "consumed": 24, "matrices": 14}
    checks = {check["what"]: check for check in proof["checks"]}
    assert all(check["passed"] for check in checks.values())
    assert {"as trained", "server, adapter", "server, base", "stock PEFT"} <= checks.keys()
    assert checks["server, adapter"]["difference"]["max"] <= 4 * proof["floor"]["max"] + 2e-5
    assert proof["effect"]["mean"] > 100 * proof["floor"]["mean"]


@pytest.mark.parametrize("edit", [changed_value, swapped, dropped])
def test_manifest_names_the_changed_tensor(output: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    change(output, edit)
    done = run(output)
    assert done.exit_code == 1 and EXPERTS in done.stderr


def test_dropped_tensor_without_manifest_is_reported(output: Path) -> None:
    change(output, dropped, manifest=False)
    done = run(output, "--json")
    assert done.exit_code == 1 and "layers.1.mlp.experts" in json.loads(done.stdout)["culprit"]


@pytest.mark.parametrize(
    ("edit", "culprit"),
    [
        (changed_value, "model.layers.1.mlp.experts"),
        (swapped, "model.layers.1.mlp.experts"),
        (changed_attention, "model.layers.0.self_attn.v_proj"),
    ],
)
def test_changed_tensor_without_manifest_names_the_layer(
    output: Path, edit: Callable[[dict[str, torch.Tensor]], None], culprit: str
) -> None:
    from ktransformers.evaluate.prove.run import check_record, check_tensors, run_trainer_model
    from ktransformers.serve.target import resolve_target

    change(output, edit, manifest=False)
    record, base = proof_record.read_record(output), json.loads((output / "adapter_config.json").read_text())
    assert record is not None
    folder, content = Path(base["base_model_name_or_path"]), open_content(output)
    assert check_tensors(content, str(folder))[0].passed is None
    graph = run_trainer_model(resolve_target(str(output)), content, record.rows, torch.float32, "cpu")
    actual = check_record(record, graph)
    assert actual.passed is False and actual.culprit == culprit


def test_server_without_expert_lora_fails(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.serve.scheduler.forward.expert_lora", lambda adapter_rows, tokens: {})
    done = run(output)
    assert done.exit_code == 1 and "not proven: model.layers.0.mlp.experts" in done.stderr
    lines = [line for line in done.stdout.splitlines() if "DIFFERENT" in line]
    assert len(lines) == 1 and lines[0].startswith("server, adapter")


def test_running_server_is_proven(trained: tuple[Path, list[str]]) -> None:
    """The server has only the base: the adapter is loaded for the proof and unloaded afterwards."""
    from ktransformers.evaluate.prove.server import start_server
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.target import Target, resolve_target

    target = resolve_target(str(trained[0]))
    launch = Launch(str(target.model), dtype="float32", device="cpu", max_total_tokens=2048)
    with start_server(launch, Target(target.model, name="base"), lambda line: None) as (url, _):
        done = run(trained[0], "--server", url, "--json")
        assert done.exit_code == 0, done.output
        from ktransformers.ground.client import Client

        assert Client(url, None).models() == ["base"]


def test_experts_of_training_are_served(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Trained on int8 experts beside the base: proof and server find them, and stock PEFT is left out."""
    from ktransformers.quant.convert import convert
    from ktransformers.quant.plan import make_plan, parse_formats
    from tests.support.training import RunRecorder, recipe
    from tests.support.training_runs import run as train

    base, packed = trained[0].parent / "base", tmp_path / "int8"
    convert(make_plan(base, parse_formats("int8"), 2), packed)
    train(recipe(base, tmp_path / "out", val_size=3, learning_rate=2e-2, kt_weight_path=str(packed)), RunRecorder())
    done = run(tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    # A server multiplies codes of int8, which training rounds to bf16 (by up to 4e-3 of a weight). Up to how many rows
    # of an expert it does so depends on the CPU, and with it the difference: up to 0.005 with AVX-512.
    for what, most in (("as trained", 2e-5), ("server, adapter", 1e-2), ("server, base", 1e-2)):
        assert checks[what]["passed"] and checks[what]["difference"]["max"] < most, what
    assert checks["stock PEFT"]["passed"] is None and str(packed) in checks["stock PEFT"]["said"]
    packed.rename(tmp_path / "gone")
    assert "pass --kt-weight-path" in str(run(tmp_path / "out").exception)


def test_linear_layers_in_codes_are_proven(
    trained: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, served and proven on the same encoded weights, which the stock model does not have; a server with other
    bits or rules says so."""
    from ktransformers.serve.flags import parse
    from ktransformers.serve.target import as_trained, differences_from_training, resolve_target
    from tests.support.training import recipe
    from tests.support.training_runs import run as train

    monkeypatch.setattr("ktransformers.quantized.weight.MIN_WEIGHTS", 1 << 12)
    train(recipe(trained[0].parent / "base", tmp_path / "out", val_size=3, learning_rate=2e-2, rest="int8"))
    done = run(tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["as trained"]["passed"] and checks["server, adapter"]["passed"] and checks["server, base"]["passed"]
    assert checks["stock PEFT"]["passed"] is None and "trained in int8" in checks["stock PEFT"]["said"]
    target = resolve_target(str(tmp_path / "out"))
    assert target.operators == []
    assert not differences_from_training(as_trained(parse(["M"]), target), target, None)
    (line,) = differences_from_training(parse(["M", "--rest", "bf16"]), target, None)
    assert line.startswith("--rest bf16: the adapter was trained with `rest: int8`")
    (line,) = differences_from_training(as_trained(parse(["M"]), target), target, "Qwen3Moe.yaml")
    assert "other operators" in line


@pytest.mark.slow
def test_float32_experts_are_proven(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Trained in float32: the trainer's model equals the record and stock PEFT; only the server uses bf16."""
    from ktransformers.evaluate.prove.run import check_record, run_trainer_model
    from ktransformers.serve.target import resolve_target
    from tests.support.training import RunRecorder, recipe
    from tests.support.training_runs import run as train

    output = tmp_path / "out"
    train(recipe(trained[0].parent / "base", output, val_size=3, learning_rate=2e-2, precision="f32"), RunRecorder())
    done = run(output, "--json")
    assert done.exit_code == 0, done.output
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"]}
    for what in ("as trained", "server, adapter", "server, base", "stock PEFT"):
        assert checks[what]["passed"] and checks[what]["difference"]["max"] < 2e-5, what
    assert "trained with experts in f32, served in bf16: max 0.00" in checks["server, adapter"]["said"]
    record, target = proof_record.read_record(output), resolve_target(str(output))
    assert record is not None and target.precision == "f32"

    def as_trained(precision: str) -> Any:
        graph = run_trainer_model(target, open_content(output), record.rows, torch.float32, "cpu", precision)
        return check_record(record, graph)

    assert as_trained("bf16").passed is False  # what rounding changes would be taken for a fault
    change(output, changed_slightly, manifest=False)
    actual = as_trained("f32")
    assert actual.passed is False and actual.culprit == "model.layers.1.mlp.experts"


def test_incomplete_adapter_is_refused(trained: tuple[Path, list[str]], output: Path) -> None:
    """The check at the end of training: the file is read back into the trained model."""
    from peft import PeftModel

    from ktransformers.nn import load_model

    base = json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"]
    model: Any = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), str(output), is_trainable=True)
    created = proof_record.record(model, [list(range(5, 60)), list(range(90, 130))], held_out=False)
    assert proof_record.check_reload(model, output, created).difference.is_zero
    change(output, changed_value)
    with pytest.raises(KTError, match=r"^model\.layers\.1\.mlp\.experts: .* is not what was trained"):
        proof_record.check_reload(model, output, created)
    change(output, dropped)
    with pytest.raises(KTError, match=rf"^{EXPERTS}: trained, and not read back"):
        proof_record.check_reload(model, output, created)


def test_noise_floor_allows_single_tokens_only() -> None:
    plain = LogprobsAndNorms((torch.zeros(200),))

    def with_outliers(count: int, noise: float = 0.0) -> LogprobsAndNorms:
        values = torch.full((200,), noise)
        values[:count] = 0.3
        return LogprobsAndNorms((values,))

    rough = difference(with_outliers(0, 0.01), plain)
    assert difference(with_outliers(2, 0.02), plain).within(rough)
    assert not difference(with_outliers(10, 0.02), plain).within(rough)
    fine = difference(with_outliers(0, 1e-6), plain)
    assert not difference(with_outliers(1, 1e-6), plain).within(fine)
    assert not difference(LogprobsAndNorms((torch.full((200,), torch.nan),)), plain).within(rough)
