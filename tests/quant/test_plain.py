"""`kt quant --format bf16 --plain`: an ordinary checkpoint in bf16, opened by stock transformers with equal bits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ktransformers.checkpoint import rest
from ktransformers.cli import guide_scripts
from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.quant import plain
from ktransformers.quant.plain import plan_plain, write_plain
from tests.support.gguf_models import gguf_fields, gpt_oss_to_gguf, to_gguf
from tests.support.packing import as_fp8, contents, edit, pack, tiny
from tests.support.releases import KINDS, write_gguf
from tests.support.tiny_models import MLA, build, save

EXPERT = re.compile(r".*(_proj|\.w[123])\.weight")


def release(directory: Path, kind: str, family: str = "qwen3_moe", **changes: Any) -> dict[str, Tensor]:
    """Replaces every projection of a tiny model by one in a released format; returns what the tensors stand for."""
    make, _, words = KINDS[kind]
    tiny(directory, family, **{"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, **changes})
    tensors = load_file(directory / "model.safetensors")
    expected: dict[str, Tensor] = {}
    for seed, name in enumerate(sorted(tensors)):
        if EXPERT.fullmatch(name):
            rows, columns = tensors.pop(name).shape
            parts, values = make(rows, columns, seed)
            tensors |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in parts.items()}
            expected[name] = values.bfloat16()
        else:
            expected[name] = tensors[name].bfloat16()
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit(directory, quantization_config=words)
    (directory / "tokenizer.json").write_text("{}")
    return expected


def open_stock(directory: Path) -> dict[str, Tensor]:
    """The state of the model that stock transformers opens; it must use every tensor and lack none."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="eager", output_loading_info=True
    )
    assert model.dtype == torch.bfloat16 and not getattr(model.config, "quantization_config", None)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return dict(model.state_dict())


def kt(*words: object) -> str:
    done = CliRunner().invoke(app, ["quant", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_released_formats_open_in_stock_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several shards, and every tensor has the bits that its release stands for."""
    expected = release(tmp_path / "source", kind)
    monkeypatch.setattr(rest, "SHARD_BYTES", 300_000)
    done = write_plain(plan_plain(tmp_path / "source"), tmp_path / "out")
    actual = contents(tmp_path / "out")
    assert actual.keys() == expected.keys() and done.tensors == len(actual) and done.shards > 3
    assert all(torch.equal(actual[name].bfloat16(), expected[name]) for name in expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys() and (tmp_path / "out" / "tokenizer.json").is_file()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert set(index["weight_map"].values()) == {name for name in files if name.endswith(".safetensors")}
    assert not (tmp_path / "out.partial").exists() and "journal.jsonl" not in files
    state = open_stock(tmp_path / "out")
    for layer in (0, 1):
        experts = f"model.layers.{layer}.mlp.experts"
        for expert in range(6):
            gate, up, down = (expected[f"{experts}.{expert}.{word}_proj.weight"] for word in ("gate", "up", "down"))
            assert torch.equal(state[f"{experts}.gate_up_proj"][expert], torch.cat([gate, up]))
            assert torch.equal(state[f"{experts}.down_proj"][expert], down)
    assert torch.equal(
        state["model.layers.1.self_attn.q_proj.weight"], expected["model.layers.1.self_attn.q_proj.weight"]
    )


def test_dense_and_tied_models(tmp_path: Path) -> None:
    """A model without experts, in FP8."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    config = AutoConfig.for_model(
        "qwen2", **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    )
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    source = as_fp8(save(stock, tmp_path / "source"))
    write_plain(plan_plain(source), tmp_path / "out")
    state, actual = open_stock(tmp_path / "out"), contents(tmp_path / "out")
    assert "lm_head.weight" not in actual
    assert all(torch.equal(state[name], tensor) for name, tensor in actual.items())
    codes = contents(source)
    name = "model.layers.0.mlp.down_proj.weight"
    values = (
        codes[name].float()
        * codes[f"{name}_scale_inv"].repeat_interleave(128, 0)[:64].repeat_interleave(128, 1)[:, :96]
    )
    assert torch.equal(actual[name], values.bfloat16())


@pytest.mark.parametrize(
    ("family", "arch", "changes"),
    [("qwen3_moe", "qwen3moe", {}), ("mixtral", "llama", {}), ("deepseek_v3", "deepseek2", MLA)],
)
def test_gguf_opens_in_stock_transformers(family: str, arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    model = build(family, **sizes, **{key: value for key, value in changes.items() if key not in sizes})
    tensors = to_gguf(model, arch, {"gate": "Q4_0", "up": "Q8_0", "down": "Q5_1"})  # rounds the model's experts too
    write_gguf(tmp_path / "m.gguf", arch, gguf_fields(model.config, arch), tensors)
    shown = kt(tmp_path / "m.gguf", "--format", "bf16", "--plain", "-o", tmp_path / "out")
    assert "stock transformers opens it" in shown
    state, expected = open_stock(tmp_path / "out"), model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    names = contents(tmp_path / "out")
    assert any(".experts.0." in name for name in names)  # as the model is released, for programs that read it so
    assert family != "mixtral" or any(name.endswith("block_sparse_moe.experts.3.w2.weight") for name in names)


def test_gpt_oss_in_gguf(tmp_path: Path) -> None:
    """Transposed parameters with gate and up in turn, and biases; config.json beside the file."""
    pytest.importorskip("gguf")
    model = build("gpt_oss", hidden_size=64, intermediate_size=96)
    save(model, tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    write_gguf(tmp_path / "source" / "m.gguf", "gpt-oss", {}, gpt_oss_to_gguf(model))
    write_plain(plan_plain(tmp_path / "source"), tmp_path / "out")
    state = open_stock(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


def test_fused_experts(tmp_path: Path) -> None:
    """FP8 over all experts in one tensor, with blocks of scales that gate and up share, and MXFP4 of gpt-oss."""
    source = tiny(tmp_path / "fp8", "qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    single = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    experts = "model.layers.{}.mlp.experts.{}_proj"
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, Tensor] = {}
    assert single
    for layer in (0, 1):
        for word, rows in (("gate_up", 128), ("down", 64)):
            name = experts.format(layer, word)
            codes = (torch.randn(6, rows, 64, generator=generator) * 60).to(torch.float8_e4m3fn)
            scale = torch.rand(6, 1, 1, generator=generator)
            tensors |= {name: codes, f"{name}_scale_inv": scale}
            expected[name] = (codes.float() * scale).bfloat16()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    edit(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    write_plain(plan_plain(source), tmp_path / "out")
    state = open_stock(tmp_path / "out")
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())

    source = tiny(tmp_path / "oss", "gpt_oss", intermediate_size=64)
    tensors = load_file(source / "model.safetensors")
    wanted = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape  # transposed
        blocks, values = zip(*(KINDS["mxfp4"][0](rows, columns, seed) for seed in range(count)), strict=True)
        codes = torch.stack([block["weight"].view(torch.uint8) for block in blocks])
        tensors[f"{name}_blocks"] = codes.reshape(count, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = torch.stack([block["scale"].view(torch.uint8) for block in blocks])
        wanted[name] = torch.stack(list(values)).transpose(1, 2).bfloat16()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    edit(source, quantization_config={"quant_method": "mxfp4"})
    write_plain(plan_plain(source), tmp_path / "oss-out")
    state = open_stock(tmp_path / "oss-out")
    assert len(wanted) == 4 and all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_refusals_come_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(tmp_path / "source", "fp8 blocks")
    source, out = tmp_path / "source", tmp_path / "out"
    given = (source, "--format", "bf16", "--plain")
    sizes = json.loads(kt(*given, "--dry-run", "--json"))
    assert 1.5 < sizes["out_bytes"] / sizes["source_bytes"] < 2.1 and not out.exists()
    for words, message in (
        ((*given, "-o", source), "source: given something that exists, expected a new directory"),
        ((*given, "-o", source / "inside"), "given a directory in the source"),
        (given, "out: given nothing"),
        ((source, "--plain", "-o", out), "format: given int4 with --plain, expected bf16"),
        ((*given, "-o", out, "--layers", "0"), "layers: given 0 with --plain"),
    ):
        with pytest.raises(InputError, match=message):
            kt(*words)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        with pytest.raises(InputError, match=r"0\.0 GB free on its disk"):
            kt(*given, "-o", out)
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(InputError, match="a file that does not open"):
        kt(*given, "-o", out)
    (source / "model.safetensors").write_bytes(whole)
    edit(source, quantization_config={"quant_method": "awq"})
    with pytest.raises(InputError, match="quantised with 'awq'"):
        kt(*given, "-o", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    packed = pack(tiny(tmp_path / "other"), tmp_path / "packed", "int8").directory
    with pytest.raises(InputError, match="a packed directory, expected the checkpoint"):
        plan_plain(packed)


def test_interrupted_conversion_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = release(tmp_path / "source", "fp8 blocks")
    monkeypatch.setattr(rest, "SHARD_BYTES", 300_000)
    record, calls = plain.shard_record, []

    def fail_at_the_third(file: Path) -> Any:
        calls.append(file.name)
        if len(calls) == 3:
            raise OSError("the disk is gone")
        return record(file)

    with monkeypatch.context() as patched:
        patched.setattr(plain, "shard_record", fail_at_the_third)
        with pytest.raises(OSError, match="the disk is gone"):
            write_plain(plan_plain(tmp_path / "source"), tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").is_dir()
    done = write_plain(plan_plain(tmp_path / "source"), tmp_path / "out")
    assert done.kept_shards == 2 and not (tmp_path / "out.partial").exists()
    actual = contents(tmp_path / "out")
    assert all(torch.equal(actual[name].bfloat16(), expected[name]) for name in expected)


MEASURE = """
import sys
from pathlib import Path
from ktransformers.checkpoint import rest
from ktransformers.quant.plain import plan_plain, write_plain

rest.SHARD_BYTES = int(sys.argv[3])
plan = plan_plain(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
field = lambda name: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024
before = field("VmRSS")
done = write_plain(plan, sys.argv[2])
print(done.bytes, done.shards, field("VmHWM") - before)
"""


def test_memory_stays_below_two_shards(tmp_path: Path) -> None:
    release(tmp_path / "source", "fp8 blocks", hidden_size=512, moe_intermediate_size=512, num_experts=48)
    shard = 24 << 20
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "source"), str(tmp_path / "out"), str(shard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, shards, peak = map(int, done.stdout.split())
    assert size > 6 * shard and shards > 6
    assert peak < 2 * shard


def test_program_of_the_guides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = release(tmp_path / "source", "fp8 blocks")
    words = ["--input-fp8-hf-path", str(tmp_path / "source"), "--output-bf16-hf-path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["fp8_cast_bf16.py", *words])
    guide_scripts.fp8_cast_bf16()
    assert f"{len(expected)} tensors in 1 file;" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"fp8_cast_bf16: .*out: given something that exists"):
        guide_scripts.fp8_cast_bf16()
