"""An adapter folded into a packed directory: the numbers against stock PEFT's own merge, the limit on the divergence,
and what is left when something goes wrong, which is nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from typer.testing import CliRunner

from ktransformers.adapters import convert as convert_adapter
from ktransformers.adapters import merge_packed as module
from ktransformers.adapters.divergence import calibration_text, measure_divergence
from ktransformers.adapters.merge_packed import merge_packed, wants_packing
from ktransformers.checkpoint.encoded import decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError, MissingArgumentError
from ktransformers.nn import load_model
from ktransformers.quant.convert import convert
from ktransformers.quant.plan import make_plan, parse_formats
from tests.support.gguf_models import gguf_fields, to_gguf
from tests.support.packing import as_fp8
from tests.support.releases import write_gguf
from tests.support.tiny_models import build, save

DATA = Path(__file__).parents[1] / "data" / "minimind_6400"
SIZES: dict[str, Any] = {"moe_intermediate_size": 64, "intermediate_size": 64, "vocab_size": 6400}
SIZES |= {"max_position_embeddings": 1024}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"target_modules": ["q_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj"]},
    "gpt_oss": {
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def made(directory: Path, family: str = "qwen3_moe", **options: Any) -> tuple[Path, Path]:
    """(a model with a tokenizer, an adapter on attention, the router and the experts)."""
    model = build(family, **SIZES)
    base = save(model, directory / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / file, base / file)
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **(TARGETS[family] | options))
    peft = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
    peft.save_pretrained(directory / "adapter")
    return base, directory / "adapter"


def decoded(model: Any) -> dict[str, torch.Tensor]:
    """Every expert matrix as it is multiplied."""
    return {
        f"{name}.{role}.{expert}": store.decode(role, expert).float()
        for name, store in ((name, found.kt.store) for name, found in expert_modules(model).items())
        for role in store.formats
        for expert in range(store.num_experts)
    }


def expected(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The same from PEFT's own merge in float32, experts as transformers keeps them."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(stock, str(adapter)).merge_and_unload()
    found: dict[str, torch.Tensor] = {}
    for name, experts in expert_modules(merged).items():
        gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        if getattr(experts, "is_transposed", False):
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        both = (gate_up[:, 0::2], gate_up[:, 1::2]) if "gpt" in merged.config.model_type else gate_up.chunk(2, dim=1)
        for role, stacked in zip(("gate", "up", "down"), (*both, down), strict=True):
            found |= {f"{name}.{role}.{expert}": matrix for expert, matrix in enumerate(stacked)}
    return found


def unlike(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("family", "word"), [("qwen3_moe", "int8"), ("qwen3_moe", "int4"), ("gpt_oss", "bf16")])
def test_experts_are_encoded_once_from_the_sum(family: str, word: str, tmp_path: Path) -> None:
    base, adapter = made(tmp_path, family)
    done = merge_packed(base, adapter, tmp_path / "out", formats=parse_formats(word), threads=2, max_kl=10, tokens=64)
    found, whole = decoded(load_model(tmp_path / "out")), expected(base, adapter)
    assert set(found) == set(whole)
    spelled = parse_formats(word)["gate"]
    for name, exact in whole.items():
        once = exact.bfloat16() if word == "bf16" else decode(encode(exact, spelled)).reshape(exact.shape).bfloat16()
        # sums of PEFT and ours differ in the last bits of float32, which may move a number to the next step
        assert unlike(found[name], once.float()) < 2e-3, name
    plain = decoded(load_model(base))
    assert min(unlike(whole[name], plain[name]) for name in whole) > 0.05  # the adapter is no small thing here
    assert done.divergence is not None and done.report.summary()["gate"]["format"] == [spelled]


def test_other_tensors_are_merged_and_counts_reported(tmp_path: Path) -> None:
    base, adapter = made(tmp_path)
    done = merge_packed(base, adapter, tmp_path / "out", formats=parse_formats("bf16"), threads=2)
    found = done.divergence
    assert found is not None and found.text == "calibration.txt" and found.tokens > 900
    assert found.kl < 0.01 < 10 * found.kl + 0.01 < found.effect  # bf16 loses little of what the adapter does
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.05)
    record = json.loads((tmp_path / "out" / "kt_merge.json").read_text())
    assert record["divergence"]["kl"] == found.kl and record["max_kl"] == 0.1 and record["adapter"] == "adapter"
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["calibration"]["kl"] == found.kl
    assert done.changed == 2 * (3 + 3)  # q, o and the router, and gate, up, down, of two layers
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged = load_model(tmp_path / "out", dtype=torch.float32)(input_ids=ids).logits
        both = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), str(adapter))(input_ids=ids).logits
        alone = load_model(base, dtype=torch.float32)(input_ids=ids).logits
    assert unlike(merged, both) < 0.05 < 0.3 < unlike(alone, both)
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_divergence_above_limit_is_refused_and_output_removed(tmp_path: Path) -> None:
    base, adapter = made(tmp_path)
    with pytest.raises(InputError, match=r"KL .* nats per token .*at most 1e-06.*nothing was written"):
        merge_packed(base, adapter, tmp_path / "out", formats=parse_formats("int4"), threads=2, max_kl=1e-6, tokens=128)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]


def test_packed_base_keeps_its_format(tmp_path: Path) -> None:
    base, adapter = made(tmp_path)
    packed = tmp_path / "packed"
    convert(make_plan(base, parse_formats("int8", None, "bf16"), 2), packed)
    assert wants_packing(packed) and not wants_packing(base)
    done = merge_packed(packed, adapter, tmp_path / "out", threads=2, tokens=256)
    summary = done.report.summary()
    assert (summary["gate"]["format"], summary["down"]["format"]) == (["int8"], ["bf16"])
    assert done.divergence is not None and done.divergence.kl < 0.02
    before, after = decoded(load_model(packed)), decoded(load_model(tmp_path / "out"))
    delta = {name: matrix - decoded_base for (name, matrix), decoded_base in zip(
        expected(base, adapter).items(), decoded(load_model(base)).values(), strict=True)}  # fmt: skip
    for name in before:
        assert unlike(after[name], before[name] + delta[name]) < 0.02, name


def test_quantised_release_keeps_its_format(tmp_path: Path) -> None:
    base, adapter = made(tmp_path)
    as_fp8(base)
    assert wants_packing(base)
    done = merge_packed(base, adapter, tmp_path / "out", threads=2, max_kl=1, tokens=128)
    assert done.report.summary()["up"]["format"] == ["fp8:128x128"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "kt" and config["packed"]["source"]["quant_method"] == "fp8"


def test_gguf_base_keeps_its_types(tmp_path: Path) -> None:
    """One that stands alone: configuration from its header, and no tokenizer to compare with."""
    pytest.importorskip("gguf")
    plain, adapter = made(tmp_path)
    model = build("qwen3_moe", **SIZES)
    folder = tmp_path / "gguf"
    folder.mkdir()
    tensors = to_gguf(model, "qwen3moe", {"gate": "Q8_0", "up": "Q5_1", "down": "Q4_0"})
    write_gguf(folder / "model.gguf", "qwen3moe", gguf_fields(model.config, "qwen3moe"), tensors)
    for base in (folder / "model.gguf", folder):
        assert wants_packing(base)
        if base == folder:
            shutil.copy(plain / "config.json", folder)
        with pytest.raises(InputError, match="could not be compared"):
            merge_packed(base, adapter, tmp_path / "refused", threads=2)
        done = merge_packed(base, adapter, tmp_path / "out", threads=2, unchecked=True, overwrite=True)
        assert [row["format"] for row in done.report.summary().values()] == [["q8_0"], ["q5_1"], ["q4_0"]]
        found, before = decoded(load_model(tmp_path / "out")), decoded(load_model(base))
        assert min(unlike(found[name], before[name]) for name in before) > 0.05


def test_matrices_without_a_delta_keep_their_bytes(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, target_modules=["q_proj"])
    as_fp8(base)
    done = merge_packed(base, adapter, tmp_path / "out", threads=2, max_kl=1, tokens=64)
    assert all(row["kept"] == row["layers"] for row in done.report.summary().values())
    one, two = decoded(load_model(base)), decoded(load_model(tmp_path / "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_biases_survive_a_packed_base(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, "gpt_oss")
    packed = tmp_path / "packed"
    convert(make_plan(base, parse_formats("bf16"), 2), packed)
    merge_packed(packed, adapter, tmp_path / "one", threads=2, unchecked=True)
    merge_packed(base, adapter, tmp_path / "two", formats=parse_formats("bf16"), threads=2, unchecked=True)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        one, two = (load_model(tmp_path / name, dtype=torch.float32)(input_ids=ids).logits for name in ("one", "two"))
    assert torch.equal(one, two)


def test_killed_merge_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = made(tmp_path)
    judge = module._check_quality

    def dies(*_: Any) -> Any:
        raise KeyboardInterrupt

    layers = []

    def dies_at_the_second(done: int, total: int, word: str) -> None:
        layers.append(word)
        if word.startswith("model.layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_packed(
            base, adapter, tmp_path / "out", formats=parse_formats("int8"), threads=2, progress=dies_at_the_second
        )
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_check_quality", dies)
    with pytest.raises(KeyboardInterrupt):
        merge_packed(base, adapter, tmp_path / "out", formats=parse_formats("int8"), threads=2)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_check_quality", judge)
    merge_packed(base, adapter, tmp_path / "out", formats=parse_formats("int8"), threads=2, max_kl=1, tokens=64)
    merge_packed(base, adapter, tmp_path / "new", formats=parse_formats("int8"), threads=2, unchecked=True)
    one, two = (decoded(load_model(tmp_path / name)) for name in ("out", "new"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base", "new", "out"]


@pytest.mark.slow
def test_other_formats_and_custom_calibration_text(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    convert_adapter(adapter, tmp_path / "other", "per-expert", base_model_name_or_path=str(base))
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "Rain fell on the roofs all night, and in the morning the street was a river."}\n')
    found = [
        merge_packed(
            base, tmp_path / name, tmp_path / f"out-{name}", formats=parse_formats("int8"), calib=text, threads=2
        )
        for name in ("adapter", "other")
    ]
    assert found[0].divergence is not None and found[0].divergence.text == "text.jsonl"
    assert found[0].divergence.tokens < 100
    assert found[1].divergence is not None
    assert found[1].divergence.kl == pytest.approx(found[0].divergence.kl, rel=0.5, abs=1e-4)


def test_divergence_of_a_model_from_itself_is_zero(tmp_path: Path) -> None:
    """The measure against what it has to say where the answer is known."""
    base, adapter = made(tmp_path)
    with calibration_text(None) as text:
        found = measure_divergence(base, adapter, base, text, tokens=128)
    assert found.kl == pytest.approx(found.effect, rel=1e-6) and found.effect > 0.1  # "merged" is the base alone
    assert found.perplexity == pytest.approx(found.base_perplexity, rel=1e-6)


def test_invalid_packed_merge_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = made(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(InputError, match="more than 0"):
        merge_packed(base, adapter, out, max_kl=0)
    with pytest.raises(InputError, match="does not exist"):
        merge_packed(base, adapter, out, calib=tmp_path / "none.txt")
    with pytest.raises(InputError, match="one of which contains the other"):
        merge_packed(base, adapter, base / "merged")
    monkeypatch.setattr(module, "check_format", lambda name, word: (_ for _ in ()).throw(InputError(name, word, "-")))
    with pytest.raises(InputError, match=r"gate in bf16, which an adapter changes.*--format int8"):
        merge_packed(base, adapter, out)
    monkeypatch.undo()
    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"could not be compared.*--unchecked"):
        merge_packed(base, adapter, out, formats=parse_formats("bf16"), threads=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]
    merge_packed(base, adapter, out, formats=parse_formats("bf16"), threads=2, unchecked=True)
    with pytest.raises(InputError, match="--overwrite"):
        merge_packed(base, adapter, out, formats=parse_formats("bf16"), threads=2, unchecked=True)


def test_packed_merge_command_reports_divergence(tmp_path: Path) -> None:
    from ktransformers.cli.main import app

    base, adapter = made(tmp_path)
    out = tmp_path / "out"
    words = ["merge", str(base), str(adapter), "-o", str(out)]
    run = CliRunner().invoke(app, [*words, "--format", "int8", "--calib-tokens", "200", "--threads", "2"])
    assert run.exit_code == 0, run.output
    assert "KL " in run.output and "nats a token from base + adapter, at most 0.1" in run.output
    assert "the adapter " in run.output and "int8" in run.output
    refused = CliRunner().invoke(app, [*words, "--format", "int4", "--max-kl", "1e-9", "--overwrite"])
    assert isinstance(refused.exception, InputError) and "KL" in str(refused.exception)  # main() ends with 1
    assert (out / "kt_merge.json").is_file()  # what was there before stays
    told = CliRunner().invoke(app, [*words, "--overwrite", "--group", "32"])
    assert isinstance(told.exception, InputError) and "--format" in str(told.exception)


def test_merge_takes_the_base_that_the_adapter_names(tmp_path: Path) -> None:
    from ktransformers.cli.main import app

    base, adapter = made(tmp_path)
    file, out = adapter / "adapter_config.json", tmp_path / "out"
    words = ["merge", str(adapter), "-o", str(out), "--unchecked"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, InputError) and "names no base" in str(refused.exception)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0 and (out / "config.json").is_file(), run.output
    alone = CliRunner().invoke(app, ["merge", str(base), "-o", str(out)])
    assert isinstance(alone.exception, MissingArgumentError)


def test_plain_merge_measures_divergence(tmp_path: Path) -> None:
    from ktransformers.cli.main import app

    base, adapter = made(tmp_path)
    words = ["merge", str(base), str(adapter), "-o", str(tmp_path / "out"), "--calib-tokens", "200"]
    refused = CliRunner().invoke(app, [*words, "--max-kl", "1e-12"])
    assert isinstance(refused.exception, InputError) and "nothing was written" in str(refused.exception)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]
    run = CliRunner().invoke(app, [*words, "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output[run.output.index("{") :])
    assert 0 <= found["divergence"]["kl"] < 0.01 < found["divergence"]["effect"] and found["skipped"] is None
