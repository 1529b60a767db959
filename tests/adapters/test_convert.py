"""`kt convert` and the script under its old name, on an adapter with all tensors of Qwen3.5-35B-A3B."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ktransformers.adapters import convert, read_adapter, write_adapter
from ktransformers.cli.main import main
from tests.support.adapter_samples import Recipe, same_deltas, sample, write_model_config
from tests.support.forked import python

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS, RANK = 40, 256, 1
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def kt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command without a new process, which would spend its time on importing torch."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    arguments = mock.patch.object(sys, "argv", ["kt", *map(str, words)])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), arguments:
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(list(map(str, words)), code, out.getvalue(), err.getvalue())


def qwen35(directory: Path, hidden: int, wide: int) -> None:
    """A training output of kt-kernel for Qwen3.5-35B-A3B: every tensor that there would be, of rank 1."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)]
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": hidden,
        "moe_intermediate_size": wide,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "layer_types": kinds,
    }
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    (directory / "kt").mkdir()
    others, experts = {}, {}
    for layer, kind in enumerate(kinds):
        leaves = [f"linear_attn.{leaf}" for leaf in LINEAR]
        if kind == "full_attention":
            leaves = [f"self_attn.{leaf}_proj" for leaf in "qkvo"]
        for leaf in leaves:
            name = f"base_model.model.model.language_model.layers.{layer}.{leaf}.orig_module"
            others |= {
                f"{name}.lora_A.weight": torch.randn(RANK, hidden),
                f"{name}.lora_B.weight": torch.randn(8, RANK),
            }
        for role in ("gate", "up", "down"):
            inputs, outputs = (wide, hidden) if role == "down" else (hidden, wide)
            experts[f"layers.{layer}.experts.{role}_lora_a"] = torch.randn(EXPERTS, RANK, inputs).bfloat16()
            experts[f"layers.{layer}.experts.{role}_lora_b"] = torch.randn(EXPERTS, outputs, RANK).bfloat16()
    save_file(others, directory / "kt" / "adapter_model.safetensors")
    save_file(experts, directory / "kt" / "fused_expert_lora.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *LINEAR]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2, "target_modules": targets, "lora_dropout": 0.1}
    (directory / "kt" / "adapter_config.json").write_text(json.dumps(config))


def pre_serve_check(expert: Path, nonexpert: Path) -> None:
    """What the guide for split serving asks of the two directories before a server is started on them."""
    mlp = {"gate_proj", "up_proj", "down_proj"}
    configs = [json.loads((part / "adapter_config.json").read_text()) for part in (expert, nonexpert)]
    assert mlp <= set(configs[0]["target_modules"])
    assert not mlp & set(configs[1]["target_modules"])
    assert all((part / "adapter_model.safetensors").is_file() for part in (expert, nonexpert))


def keys(directory: Path) -> set[str]:
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        return set(file.keys())


def test_qwen35_conversion_keeps_every_tensor(tmp_path: Path) -> None:
    qwen35(tmp_path, hidden=16, wide=8)
    program = ROOT / "scripts" / "convert_kt_to_sglang_adapter.py"
    flags = ["--base-model-name-or-path", tmp_path / "model", "--overwrite"]
    split = ["--expert-output-dir", tmp_path / "expert", "--nonexpert-output-dir", tmp_path / "rest"]
    code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = python(code, program, tmp_path / "kt", tmp_path / "merged", *flags, *split)
    assert done.returncode == 0, done.stderr
    attention = "q_proj, k_proj, v_proj, o_proj"
    assert done.stdout.splitlines() == [
        f"merged: 61820 tensors, target_modules {attention}, gate_proj, up_proj, down_proj, {', '.join(LINEAR)}",
        "expert-only: 61440 tensors, target_modules gate_proj, up_proj, down_proj",
        f"non-expert-only: 380 tensors, target_modules {attention}, {', '.join(LINEAR)}",
    ]
    pre_serve_check(tmp_path / "expert", tmp_path / "rest")
    merged, expert, rest = (keys(tmp_path / name) for name in ("merged", "expert", "rest"))
    assert expert | rest == merged and not expert & rest
    assert "model.layers.39.mlp.experts.255.down_proj.lora_B.weight" in expert
    assert "model.language_model.layers.3.self_attn.q_proj.lora_A.weight" in rest
    assert all(".orig_module" not in key and not key.startswith("base_model") for key in merged)
    fused = load_file(tmp_path / "kt" / "fused_expert_lora.safetensors")
    with safe_open(tmp_path / "merged" / "adapter_model.safetensors", "pt") as file:
        assert torch.equal(
            file.get_tensor("model.layers.7.mlp.experts.31.up_proj.lora_B.weight"),
            fused["layers.7.experts.up_lora_b"][31],
        )
    config = json.loads((tmp_path / "merged" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (RANK, 2, "none", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    manifest = json.loads((tmp_path / "merged" / "kt_manifest.json").read_text())
    assert manifest["lora_dropout"] == 0.1 and len(manifest["tensors"]) == 61820


@pytest.mark.slow
def test_conversion_memory_is_bounded_by_one_layer(tmp_path: Path) -> None:
    """Qwen3.5-35B-A3B's real sizes: the adapter is 150 MB on disk, converting it grows the process by far less."""
    qwen35(tmp_path, hidden=2048, wide=512)
    read_adapter(tmp_path / "kt", model=str(tmp_path / "model"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = convert(tmp_path / "kt", tmp_path / "out", "sglang", base_model_name_or_path=str(tmp_path / "model"))
    assert done.merged.tensors == 61820
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120 * 1024  # KB; names and sums of 61,820


def test_convert_command_writes_all_outputs(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "peft", "peft")
    model = write_model_config(Recipe(), tmp_path / "model")
    done = kt("convert", tmp_path / "peft", tmp_path / "kt", "--to", "kt", "--base-model-name-or-path", model, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["source"], report["dialect"], report["layers"], report["experts"]) == ("peft", "kt", 2, 3)
    assert report["merged"]["tensors"] == 2 * 6 + 2 * 4 * 2 and report["expert_only"] is None
    same_deltas(sample(), read_adapter(tmp_path / "kt"))
    split = ["--expert-output-dir", tmp_path / "e", "--nonexpert-output-dir", tmp_path / "n"]
    done = kt("convert", tmp_path / "kt", tmp_path / "s", "--to", "sglang", *split)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["read", "merged", "expert-only", "non-expert-only"]
    assert [line.split()[1] for line in lines[1:]] == ["52", "36", "16"]
    pre_serve_check(tmp_path / "e", tmp_path / "n")
    done = kt("convert", tmp_path / "kt", tmp_path / "s", "--to", "sglang")
    assert done.returncode == 1
    assert done.stderr.startswith(f"kt: {tmp_path / 's'}: given a directory that is not empty")


def test_gguf_file_is_read_by_path(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "gguf")
    (tmp_path / "lora.bin").write_bytes((tmp_path / "a" / "adapter.gguf").read_bytes())
    write_adapter(sample(Recipe(seed=5)), tmp_path / "beside", "kt")
    (tmp_path / "kt_manifest.json").write_bytes((tmp_path / "beside" / "kt_manifest.json").read_bytes())
    convert(tmp_path / "lora.bin", tmp_path / "peft", "peft")
    same_deltas(sample(), read_adapter(tmp_path / "peft"))


def test_merge_command_writes_the_model(tmp_path: Path) -> None:
    from tests.support.stock_peft_models import save_model_and_adapter

    save_model_and_adapter("qwen3_moe", tmp_path)
    done = kt("merge", tmp_path / "model", tmp_path / "adapter", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [line[:16].strip() for line in done.stdout.splitlines()] == [
        "written",
        "read back",
        "delta kept",
        "not compared",
    ]
    done = kt("merge", tmp_path / "model", tmp_path / "adapter", "-o", tmp_path / "out", "--dtype", "int8")
    assert done.returncode == 1 and "kt merge --format" in done.stderr


def test_verbose_prints_a_line_for_each_tensor(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "per-expert")
    code = "import sys; from ktransformers.cli.main import main; sys.argv[0] = 'kt'; main()"
    quiet = python(code, "convert", tmp_path / "a", tmp_path / "b", "--to", "kt")
    loud = python(code, "convert", tmp_path / "a", tmp_path / "c", "--to", "kt", "-v")
    assert quiet.returncode == loud.returncode == 0, loud.stderr
    assert "Loaded adapter weight" not in quiet.stderr + quiet.stdout
    theirs = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"
    assert f"kt: Loaded adapter weight: {theirs} -> model.layers.0.mlp.experts.1.up_proj.lora_A\n" in loud.stderr
    assert loud.stderr.count("Loaded adapter weight: ") == len(keys(tmp_path / "a"))
    assert quiet.stdout.splitlines()[0] == loud.stdout.splitlines()[0]
