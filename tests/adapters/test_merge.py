"""`merge` against PEFT's own merge_and_unload, over layouts of the checkpoint; and what happens if it is disturbed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ktransformers.adapters import LoraPair, adapter_from_tensors, convert, facts_from_config, merge, write_adapter
from ktransformers.adapters import merge as merge_function
from ktransformers.ground.errors import InputError
from tests.support.stock_peft_models import TARGETS, logits, save_model_and_adapter


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", list(TARGETS))
def test_merged_model_equals_peft_merge(family: str, tmp_path: Path) -> None:
    expected = save_model_and_adapter(family, tmp_path)
    effect = float((expected - logits(load(tmp_path / "model"))).abs().max())
    done = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "exact", dtype="float32")
    torch.testing.assert_close(logits(load(tmp_path / "exact")), expected, rtol=0, atol=1e-4 * effect)
    assert done.shards > 1 and done.check.rows >= 3 * done.changed - 6 and done.check.kept == pytest.approx(1, abs=1e-5)
    done = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    error = (logits(load(tmp_path / "out")) - expected).abs().mean()
    assert float(error) < 0.1 * float((expected - logits(load(tmp_path / "model"))).abs().mean())  # bf16 weights
    assert done.check.worst <= 1 and done.check.kept == pytest.approx(1, abs=0.05)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *(file.name for file in (tmp_path / "model").iterdir()),
        "kt_manifest.json",
    }


def fuse(directory: Path, transposed: bool) -> None:
    """Rewrites a per-expert checkpoint with fused tensors, `[E, 2I, H]` or transposed."""
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    for layer in range(2):
        root = f"model.layers.{layer}.mlp.experts"

        def stack(word: str, root: str = root) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{root}.{expert}.{word}.weight") for expert in range(6)])

        gate_up, down = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1), stack("down_proj")
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        tensors[f"{root}.gate_up_proj"], tensors[f"{root}.down_proj"] = gate_up.contiguous(), down.contiguous()
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_checkpoints_get_the_same_numbers(transposed: bool, tmp_path: Path) -> None:
    save_model_and_adapter("qwen3_moe", tmp_path)
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "single")
    fuse(tmp_path / "model", transposed)
    done = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "fused")
    fuse(tmp_path / "single", transposed)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "fused"))
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)
    assert done.shards == 1


@pytest.mark.parametrize("adapter_format", ["per-expert", "sglang", "kt", "gguf"])
def test_every_format_gives_the_same_merge(adapter_format: str, tmp_path: Path) -> None:
    save_model_and_adapter("mixtral", tmp_path)
    convert(tmp_path / "adapter", tmp_path / "other", adapter_format, base_model_name_or_path=str(tmp_path / "model"))
    for adapter in ("adapter", "other"):
        merge(tmp_path / "model", tmp_path / adapter, tmp_path / f"out-{adapter}")
    for file in (tmp_path / "out-adapter").glob("*.safetensors"):
        one, two = load_file(file), load_file(tmp_path / "out-other" / file.name)
        for name in one:  # the same product, summed in another order where ranks were padded
            torch.testing.assert_close(one[name], two[name], rtol=2**-7, atol=1e-6)


def test_modules_to_save_replace_the_tensor(tmp_path: Path) -> None:
    expected = save_model_and_adapter("qwen3_moe", tmp_path, modules_to_save=["lm_head"])
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, rtol=0, atol=1e-4)


def test_killed_merge_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module = sys.modules[merge_function.__module__]
    save_model_and_adapter("qwen3_moe", tmp_path)
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "whole")
    write_shard, calls = module._write_shard, []

    def dies(plan: Any, file: Path, partial: Path) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(file.name)
        write_shard(plan, file, partial)

    monkeypatch.setattr(module, "_write_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_write_shard", write_shard)
    done = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert done.resumed == 2
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_merge_with_another_adapter_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module = sys.modules[merge_function.__module__]
    save_model_and_adapter("qwen3_moe", tmp_path)
    verify = module._verify
    monkeypatch.setattr(module, "_verify", lambda plan, partial: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    monkeypatch.setattr(module, "_verify", verify)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 16}))
    assert merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out").resumed == 0


def test_corrupted_output_is_detected_on_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module = sys.modules[merge_function.__module__]
    save_model_and_adapter("qwen3_moe", tmp_path)
    copy_rest = module._copy_other_files

    def spoils(model: Path, partial: Path, *rest: Any) -> None:
        copy_rest(model, partial, *rest)
        for file in partial.glob("*.safetensors"):
            tensors = load_file(file)
            name = next((name for name in tensors if "down_proj" in name), None)
            if name:
                save_file(tensors | {name: tensors[name] + 0.1}, file, metadata={"format": "pt"})

    monkeypatch.setattr(module, "_copy_other_files", spoils)
    with pytest.raises(InputError, match=r"down_proj.*rounding steps"):
        merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_invalid_merge_inputs_are_refused(tmp_path: Path) -> None:
    save_model_and_adapter("qwen3_moe", tmp_path)
    model, adapter, out = tmp_path / "model", tmp_path / "adapter", tmp_path / "out"
    with pytest.raises(InputError, match="--format"):
        merge(model, adapter, out, dtype="int4")
    with pytest.raises(InputError, match="one of which contains the other"):
        merge(model, adapter, model / "merged")
    out.mkdir()
    (out / "file").touch()
    with pytest.raises(InputError, match="--overwrite"):
        merge(model, adapter, out)
    merge(model, adapter, out, overwrite=True)
    assert not (out / "file").exists()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match=r"a quantised model \(fp8\)"):
        merge(model, adapter, tmp_path / "new")
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(InputError, match="no LoRA in layer 2"):
        merge(model, adapter, tmp_path / "new")


def anonymous() -> int:
    """Memory of this process that is no map of a file, in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.slow
def test_merge_memory_is_bounded_by_one_expert(tmp_path: Path) -> None:
    """400 MB of fused experts, of which one expert is 3 MB."""
    experts, hidden, wide, rank = 64, 1024, 512, 8
    config = {"model_type": "qwen3_moe", "hidden_size": hidden, "moe_intermediate_size": wide, "num_hidden_layers": 2}
    config |= {"num_experts": experts, "num_attention_heads": 8}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    roots = [f"model.layers.{layer}.mlp" for layer in range(2)]
    shapes = {"gate_up_proj": (2 * wide, hidden), "down_proj": (hidden, wide)}
    tensors = {
        f"{root}.experts.{name}": torch.randn(experts, *shape).bfloat16()
        for root in roots
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    del tensors

    def pair(outputs: int, inputs: int) -> LoraPair:
        return LoraPair(
            torch.randn(experts, rank, inputs).bfloat16(), torch.randn(experts, outputs, rank).bfloat16(), 0.1
        )

    layer = {"gate": pair(wide, hidden), "up": pair(wide, hidden), "down": pair(hidden, wide)}
    write_adapter(
        adapter_from_tensors(dict.fromkeys(roots, layer), {}, model=facts_from_config(config)),
        tmp_path / "adapter",
        "peft",
    )
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out")
    finally:
        done.set()
        thread.join()
    assert peak - before < 64 * 1024
