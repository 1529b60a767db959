"""Adapters that were damaged, each in one way: the error names the tensor, and nothing is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktransformers.adapters import ADAPTER_FORMATS, convert, describe_adapter, read_adapter, write_adapter
from ktransformers.ground.errors import InputError
from tests.support.adapter_samples import Recipe, facts, same_deltas, sample, write_model_config

SAFETENSORS = [adapter_format.name for adapter_format in ADAPTER_FORMATS if adapter_format.name != "gguf"]
Tensors = dict[str, Tensor]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def change(directory: Path, edit: Callable[[Tensors], Tensors], manifest: bool) -> None:
    """Edits every file's tensors; without the manifests, what is left to find the damage are names and shapes."""
    for file in files(directory):
        save_file({name: tensor.clone().contiguous() for name, tensor in edit(load_file(file)).items()}, file)
    (directory / "kt_adapter_manifest.json").unlink(missing_ok=True)
    if not manifest:
        (directory / "kt_manifest.json").unlink()


def names(directory: Path) -> list[str]:
    return [name for file in files(directory) for name in load_file(file)]


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("adapter_format", SAFETENSORS)
def test_adapter_with_missing_tensor_is_refused(adapter_format: str, manifest: bool, tmp_path: Path) -> None:
    model = write_model_config(Recipe(), tmp_path / "model")
    write_adapter(sample(), tmp_path / "whole", adapter_format)
    every = names(tmp_path / "whole")
    for dropped in every if adapter_format in ("peft", "kt") else every[:: max(1, len(every) // 12)]:
        damaged = tmp_path / "damaged"
        write_adapter(sample(), damaged, adapter_format, overwrite=True)
        change(damaged, lambda tensors, dropped=dropped: {k: v for k, v in tensors.items() if k != dropped}, manifest)
        module = re.sub(r"(base_model\.model\.)|(\.?lora_[ABab].*)", "", dropped)
        with pytest.raises(InputError, match=re.escape(module.rpartition(".experts")[0] or module)):
            read_adapter(damaged, model=model)


@pytest.mark.parametrize("adapter_format", SAFETENSORS)
def test_changed_tensor_is_detected_by_manifest(adapter_format: str, tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", adapter_format)
    victim = names(tmp_path / "a")[5]

    def nudge(tensors: Tensors) -> Tensors:
        if victim in tensors:
            tensors[victim].view(-1)[0] += 0.5
        return tensors

    change(tmp_path / "a", nudge, manifest=True)
    with pytest.raises(InputError, match=re.escape(f"{victim}: given other numbers (norm ")):
        read_adapter(tmp_path / "a")


def swap_gate_up(tensors: Tensors) -> Tensors:
    swapped = {}
    for name, tensor in tensors.items():
        other = re.sub(r"gate_(?=proj|lora)|up_(?=proj|lora)", lambda m: "up_" if m[0] == "gate_" else "gate_", name)
        swapped[other] = tensor
        if ".experts.base_layer.lora_B" in name:
            swapped[other] = torch.cat(tensor.chunk(2)[::-1])
    return swapped


@pytest.mark.parametrize("adapter_format", SAFETENSORS)
def test_swapped_gate_and_up_are_detected_by_manifest(adapter_format: str, tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", adapter_format)
    change(tmp_path / "a", swap_gate_up, manifest=True)
    with pytest.raises(InputError, match="other numbers"):
        read_adapter(tmp_path / "a")


def test_changed_gguf_is_detected_by_manifest(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "gguf")
    file = tmp_path / "a" / "adapter.gguf"
    data = bytearray(file.read_bytes())
    data[-40] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(InputError, match="other numbers"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("adapter_format", SAFETENSORS)
def test_nan_and_infinity_are_refused(adapter_format: str, value: float, tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", adapter_format)
    victim = names(tmp_path / "a")[7]

    def spoil(tensors: Tensors) -> Tensors:
        if victim in tensors:
            tensors[victim].view(-1)[1] = value
        return tensors

    change(tmp_path / "a", spoil, manifest=False)
    with pytest.raises(InputError, match=re.escape(f"{victim}: given NaN or infinite")):
        convert(
            tmp_path / "a",
            tmp_path / "b",
            "sglang",
            base_model_name_or_path=write_model_config(Recipe(), tmp_path / "m"),
        )
    assert not (tmp_path / "b").exists()


KEY = "base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    "edit,message",
    [
        (lambda t: t | {KEY.replace("up_proj", "up_porj"): t[KEY]}, "up_porj"),
        (lambda t: {k.replace("experts.2", "experts.3"): v for k, v in t.items()}, r"experts\.2\.\w+\.lora_A"),
        (lambda t: t | {KEY: t[KEY].T}, r"up_proj\.lora_B\.weight: given shape \[2, 6\]"),
        (lambda t: t | {KEY: t[KEY][:, :1]}, r"up_proj\.lora_B\.weight: given shape \[6, 1\]"),
        (lambda t: t | {KEY: torch.cat([t[KEY], t[KEY]])}, r"experts\.2\.up_proj"),
        (lambda t: t | {KEY: t[KEY].float()}, r"experts\.2\.up_proj.*float32"),
        (
            lambda t: t | {"base_model.model.model.norm.weight": torch.ones(8)},
            r"norm\.weight: given a tensor that is no",
        ),
        (
            lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 8)},
            "LoRA on an embedding",
        ),
        (lambda t: t | {f"base_model.model.x.zz_proj.lora_{h}.weight": torch.ones(2, 2) for h in "AB"}, r"zz_proj"),
        (lambda t: {k.replace("layers.1", "layers.7"): v for k, v in t.items()}, "layer 7"),
        (lambda t: t | {KEY.replace(".weight", ".default.weight"): t[KEY]}, "they name the same matrix"),
    ],
)
def test_misnamed_misshapen_and_extra_tensors_are_refused(
    edit: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    write_adapter(sample(), tmp_path / "a", "per-expert")
    change(tmp_path / "a", edit, manifest=False)
    with pytest.raises(InputError, match=message):
        read_adapter(tmp_path / "a", model=write_model_config(Recipe(), tmp_path / "model"))


def test_adapter_of_a_model_with_other_sizes_is_refused(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "kt")
    for change_, message in (
        ({"num_experts": 4}, "3 experts, expected 4"),
        ({"hidden_size": 16}, "hidden size 16"),
        ({"num_hidden_layers": 3}, "no LoRA in layer 2"),
        ({"num_hidden_layers": 1}, "LoRA in layer 1"),
    ):
        model = write_model_config(Recipe(), tmp_path / "model")
        file = Path(model) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change_))
        with pytest.raises(InputError, match=message):
            read_adapter(tmp_path / "a", model=model)


def test_rank_different_from_config_is_refused(tmp_path: Path) -> None:
    for adapter_format in SAFETENSORS:
        write_adapter(sample(), tmp_path / adapter_format, adapter_format)
        file = tmp_path / adapter_format / "adapter_config.json"
        (tmp_path / adapter_format / "kt_adapter_manifest.json").unlink(missing_ok=True)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 5, "rank_pattern": {}}))
        with pytest.raises(InputError, match=r"adapter_config\.json says"):
            read_adapter(tmp_path / adapter_format)


def test_configuration_other_than_lora_is_refused(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "peft")
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    for fields, message in (
        ({"peft_type": "IA3"}, "peft_type: given IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"r": 0}, ": r: "),
        ({"lora_alpha": None}, "give --lora-alpha"),
    ):
        file.write_text(json.dumps(config | fields))
        with pytest.raises(InputError, match=message):
            read_adapter(tmp_path / "a")
    file.write_text(json.dumps(config | {"lora_alpha": None}))
    read_adapter(tmp_path / "a", lora_alpha=4)
    for words in ("{", "[1]"):
        file.write_text(words)
        with pytest.raises(InputError, match=r"adapter_config\.json.*a JSON object"):
            read_adapter(tmp_path / "a")
    file.unlink()
    with pytest.raises(InputError, match=r"no adapter_config\.json"):
        read_adapter(tmp_path / "a")


def test_path_without_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_adapter(tmp_path / "none")
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no LoRA tensors"):
        read_adapter(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(InputError, match=r"broken\.gguf: given a file that does not open"):
        read_adapter(tmp_path)
    with pytest.raises(InputError, match="'onnx', expected one of gguf, kt, peft, per-expert, sglang"):
        convert(tmp_path, tmp_path / "out", "onnx")


def test_fused_gate_up_of_unknown_model_is_refused(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "peft")
    (tmp_path / "a" / "kt_manifest.json").unlink()
    with pytest.raises(InputError, match="give --base-model-name-or-path"):
        convert(tmp_path / "a", tmp_path / "b", "sglang")


def test_values_not_representable_in_bf16_are_refused(tmp_path: Path) -> None:
    write_adapter(sample(Recipe(dtype=torch.float32)), tmp_path / "a", "peft")
    with pytest.raises(InputError, match="--dtype bfloat16 rounds them"):
        convert(tmp_path / "a", tmp_path / "b", "kt")
    assert not list(tmp_path.glob("**/*partial*"))
    convert(tmp_path / "a", tmp_path / "b", "kt", dtype="bfloat16")
    same_deltas(sample(Recipe(dtype=torch.float32)), read_adapter(tmp_path / "b"), tolerance=0.02)


def test_mismatch_with_kt_kernel_manifest_is_refused(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "kt")
    (tmp_path / "a" / "kt_manifest.json").unlink()
    manifest = tmp_path / "a" / "kt_adapter_manifest.json"
    whole = json.loads(manifest.read_text())
    fused = tmp_path / "a" / "fused_expert_lora.safetensors"
    data = bytearray(fused.read_bytes())
    data[-3] ^= 1
    fused.write_bytes(data)
    with pytest.raises(InputError, match=r"fused_expert_lora\.safetensors: given other bytes"):
        read_adapter(tmp_path / "a")
    manifest.write_text(json.dumps(whole | {"status": "writing"}))
    with pytest.raises(InputError, match="'ready'"):
        read_adapter(tmp_path / "a")


def test_overlapping_or_existing_outputs_are_refused(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "kt")
    for out, expert in (("a", None), ("a/b", None), (".", None), ("b", "b/c")):
        with pytest.raises(InputError, match="one of which contains the other"):
            convert(tmp_path / "a", tmp_path / out, "sglang", expert_output_dir=expert and tmp_path / expert)
    convert(tmp_path / "a", tmp_path / "b", "sglang")
    with pytest.raises(InputError, match="--overwrite replaces it"):
        convert(tmp_path / "a", tmp_path / "b", "sglang")
    (tmp_path / "b" / "old").touch()
    convert(tmp_path / "a", tmp_path / "b", "sglang", overwrite=True)
    assert not (tmp_path / "b" / "old").exists()


def test_describe_adapter_writes_a_manifest(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "per-expert")
    (tmp_path / "a" / "kt_manifest.json").unlink()
    describe_adapter(tmp_path / "a", model=write_model_config(Recipe(), tmp_path / "model"))
    manifest = json.loads((tmp_path / "a" / "kt_manifest.json").read_text())
    assert manifest["dialect"] == "per-expert" and manifest["tensor_count"] == len(manifest["tensors"])
    one = next(iter(manifest["tensors"].values()))
    assert set(one) == {"file", "shape", "dtype", "norm", "sha256"}
    read_adapter(tmp_path / "a")
    (tmp_path / "a" / "kt_manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"kt_manifest\.json.* version None, expected"):
        read_adapter(tmp_path / "a")


def test_missing_base_model_is_handled(tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "kt")
    with pytest.raises(InputError, match=r"a path without config\.json"):
        convert(tmp_path / "a", tmp_path / "b", "sglang", base_model_name_or_path=str(tmp_path / "typo"))
    assert (
        convert(tmp_path / "a", tmp_path / "b", "sglang", base_model_name_or_path="nobody/nothing").model == "qwen3_moe"
    )
    (tmp_path / "b" / "kt_manifest.json").unlink()
    assert convert(tmp_path / "b", tmp_path / "c", "kt").model is None


def test_dropout_is_read_from_the_manifest(tmp_path: Path) -> None:
    write_adapter(replace(sample(), config={"lora_dropout": 0.1}), tmp_path / "a", "peft")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["lora_dropout"] == 0  # or PEFT refuses it
    convert(tmp_path / "a", tmp_path / "b", "per-expert")
    convert(tmp_path / "b", tmp_path / "c", "kt")
    for place in "abc":
        assert json.loads((tmp_path / place / "kt_manifest.json").read_text())["lora_dropout"] == 0.1
    assert json.loads((tmp_path / "c" / "adapter_config.json").read_text())["lora_dropout"] == 0.1


def test_interleaved_families_are_those_of_transformers() -> None:
    import transformers

    from ktransformers.adapters.model import INTERLEAVED_FAMILIES

    models = Path(transformers.__file__).parent / "models"
    found = {file.parent.name for file in models.glob("*/modeling_*.py") if "is_concatenated=False" in file.read_text()}
    assert found == INTERLEAVED_FAMILIES


def test_sparse_layers_are_read_from_the_index(tmp_path: Path) -> None:
    from ktransformers.adapters import find_facts

    recipe = Recipe(family="ernie4_5_moe")  # has fields of its own for it
    model = write_model_config(recipe, tmp_path)
    found = find_facts(model)
    assert found is not None and found.sparse_layers is None
    names = ["model.layers.1.mlp.experts.0.gate_proj.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    found = find_facts(model)
    assert found is not None and found.sparse_layers == (1,)


def test_block_sparse_moe_in_the_model_is_kept(tmp_path: Path) -> None:
    """granitemoe says block_sparse_moe in the model too: it must not be renamed."""
    from ktransformers.adapters import LoraPair, adapter_from_tensors

    pair = LoraPair(torch.ones(2, 8), torch.ones(3, 2), 1.0)
    name = "model.layers.0.block_sparse_moe.router"
    recipe = Recipe(family="granitemoe")
    adapter = adapter_from_tensors({}, {name: pair}, model=facts(recipe))
    for adapter_format in ("peft", "sglang"):
        write_adapter(adapter, tmp_path / adapter_format, adapter_format)
        assert [module.name for module in read_adapter(tmp_path / adapter_format).modules] == [name]


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".a.999999999.partial"
    running = tmp_path / ".a.1.partial"
    left.mkdir()
    running.mkdir()
    write_adapter(sample(), tmp_path / "a", "kt")
    assert not left.exists() and running.exists()


@pytest.mark.parametrize("key", ["shape", "dtype", "sha256", "file", "norm"])
def test_manifest_without_a_field_is_refused(key: str, tmp_path: Path) -> None:
    write_adapter(sample(), tmp_path / "a", "peft")
    file = tmp_path / "a" / "kt_manifest.json"
    document = json.loads(file.read_text())
    name = min(document["tensors"])
    del document["tensors"][name][key]
    file.write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=rf"kt_manifest\.json: tensors\.{name}\.{key}: given .*, expected Field required"
    ):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize("name", ["x" * 300, "a" * 100_000, "a/" + "x" * 300, "a\0b"])
def test_path_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="given no such file or directory, expected an adapter") as caught:
        read_adapter(name)
    assert len(str(caught.value)) < 1000


def test_base_that_is_no_path_is_ignored(tmp_path: Path) -> None:
    """As that of another machine is: the adapter is read without the facts of its base."""
    write_adapter(sample(), tmp_path / "a", "per-expert")
    (tmp_path / "a" / "kt_manifest.json").unlink()
    file = tmp_path / "a" / "adapter_config.json"
    for base in ("x" * 300, "/" + "x" * 300, "a\0b", "~no-such-user-here/x", 3, ["a"]):
        fields = json.loads(file.read_text())
        if not isinstance(base, str):
            file.write_text(json.dumps(fields | {"base_model_name_or_path": base}))
            with pytest.raises(InputError, match="base_model_name_or_path"):
                read_adapter(tmp_path / "a")
            continue
        file.write_text(json.dumps(fields | {"base_model_name_or_path": base}))
        assert read_adapter(tmp_path / "a").model is None
