"""Models in released formats: a tiny model in each, against stock transformers on the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktransformers.checkpoint import Encoded, ExpertShape, decode
from ktransformers.checkpoint.sources import open_source
from ktransformers.ground.errors import InputError
from ktransformers.modeling.prepare import prepare
from ktransformers.modeling.quantizer import KTConfig, check_computable
from ktransformers.nn import load_model
from ktransformers.quantized import weight as quantized_weight
from tests.support.loaded_models import EXACT, SIZES, stores, training_logits
from tests.support.quantised_models import edit, release, stock
from tests.support.releases import KINDS, gptq_desc_act, kt_parts, write_kt_tree
from tests.support.tiny_models import build, logits, save, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_release_matches_its_dequantised_model(kind: str, tmp_path: Path) -> None:
    want = release(tmp_path, kind)
    model = load_model(tmp_path, dtype=torch.float32)
    (store,) = stores(model)
    assert store.formats == dict.fromkeys(("gate", "up", "down"), KINDS[kind][1])
    torch.testing.assert_close(training_logits(model), want, rtol=EXACT, atol=EXACT)
    assert model.name_or_path == str(tmp_path)
    assert model.config.quantization_config.to_dict() == {"quant_method": "kt", "source": KINDS[kind][2]}


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_keep_the_bits_of_the_release(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 0)
    want = release(tmp_path, kind)
    numbers, codes = (load_model(tmp_path, dtype=torch.float32, rest=rest) for rest in ("bf16", "keep"))
    kept = {name: one for name, one in codes.named_parameters() if isinstance(one, quantized_weight.QuantizedWeight)}
    assert any("o_proj" in name for name in kept) and any("kv_b_proj" in name for name in kept)
    assert {one.spec for name, one in kept.items() if "kv_b_proj" not in name} == {KINDS[kind][1]}  # that has one group
    for name, one in kept.items():
        assert torch.equal((one + 0).bfloat16(), (numbers.get_parameter(name) + 0).bfloat16()), name
    assert relative(logits(codes), want) < 1e-2
    with_numbers(numbers, kept)
    assert relative(logits(codes), logits(numbers)) < 6e-3, "more than bf16 in the experts explains"


def with_numbers(model: Any, kept: dict[str, Any]) -> None:
    """Gives linear layers the numbers of these codes, not rounded."""
    for name, one in kept.items():
        model.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(one + 0, requires_grad=False)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_linear_layers_in_order_of_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ with desc_act outside of the experts, whose columns are in their own order."""
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 0)
    words = KINDS["gptq zeros"][2] | {"desc_act": True}
    monkeypatch.setitem(KINDS, "gptq desc_act", (gptq_desc_act, "uint4:32:f16", words))
    want = release(tmp_path, "gptq desc_act", only=r"self_attn|shared_experts|layers\.0\.mlp")
    numbers, codes = (load_model(tmp_path, dtype=torch.float32, rest=rest) for rest in ("bf16", "keep"))
    torch.testing.assert_close(logits(numbers), want, rtol=EXACT, atol=EXACT)
    kept = {name: one for name, one in codes.named_parameters() if isinstance(one, quantized_weight.QuantizedWeight)}
    assert any(one.impl.order is not None for one in kept.values())
    with_numbers(numbers, kept)
    assert relative(logits(codes), logits(numbers)) < 6e-3


def test_plain_attention_with_quantised_experts(tmp_path: Path) -> None:
    """The layout of Kimi-K2-Thinking: stock from_pretrained reads the non-expert weights, from links as well."""
    source, out = tmp_path / "model", tmp_path / "kt"
    want = release(source, "compressed int4", only=r"\.experts\.")
    edit(source, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    torch.testing.assert_close(training_logits(load_model(source, dtype=torch.float32)), want, rtol=EXACT, atol=EXACT)
    assert prepare(source, out).links > 0 and (out / "model.safetensors").is_symlink()
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert [store.formats["up"] for store in stores(plain)] == ["int4:32"]
    torch.testing.assert_close(training_logits(plain), want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq"])
def test_prepared_directory_writes_non_expert_weights_in_bf16(kind: str, tmp_path: Path) -> None:
    """Non-expert weights are written in bf16; the experts stay in the source."""
    source, out = tmp_path / "model", tmp_path / "kt"
    want = release(source, kind)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    actual = prepare(source, out)
    assert actual.quantised is not None and actual.quantised.startswith(f"'{KINDS[kind][2]['quant_method']}'")
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    assert written == {"quant_method": "kt", "source": KINDS[kind][2], "experts": str(source)}
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        model = load(out, dtype=torch.float32)
        assert [store.formats["down"] for store in stores(model)] == [KINDS[kind][1]]
        torch.testing.assert_close(training_logits(model), want, rtol=EXACT, atol=EXACT)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    # A program without us stops at the experts instead of making some up.
    words = json.loads((out / "config.json").read_text())
    del words["quantization_config"]
    (out / "config.json").write_text(json.dumps(words))
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(out)


def test_float32_experts_use_unrounded_values(tmp_path: Path) -> None:
    """float32 experts compute with the decoded values, not rounded to bf16."""
    make, _, words = KINDS["fp8 blocks"]
    save(build("qwen3_moe", **SIZES), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    quantised = {name: make(*t.shape, i) for i, (name, t) in enumerate(tensors.items()) if ".experts." in name}
    want = stock(tmp_path, tensors | {name: value for name, (_, value) in quantised.items()})
    for name, (parts, _) in quantised.items():
        del tensors[name]
        tensors |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    edit(tmp_path, quantization_config=words)
    model = load_model(tmp_path, dtype=torch.float32, precision="f32")
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5)


def test_gpt_oss_release_matches_its_dequantised_model(tmp_path: Path) -> None:
    """Blocks and scales of all experts in one tensor, interleaved rows of gate and up, and biases."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save(build("gpt_oss", hidden_size=64, intermediate_size=96), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    released = dict(tensors)
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        experts, columns, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del released[name]
        released |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    want = stock(tmp_path, tensors)
    save_file(released, tmp_path / "model.safetensors")
    edit(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model = load_model(tmp_path, dtype=torch.float32)
    assert [store.formats["gate"] for store in stores(model)] == ["mxfp4", "mxfp4"]
    torch.testing.assert_close(training_logits(model), want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("method", ["INT8", "INT4"])
def test_experts_from_a_kt_kernel_tree(method: str, tmp_path: Path) -> None:
    """Experts from kt-kernel's converter for two NUMA nodes, other weights from the original model."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 3}
    save(build("qwen3_moe", **sizes), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    original = dict(tensors)
    for seed, name in enumerate(tensors):
        if actual := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj", name):
            layer, expert, role = int(actual[1]), int(actual[2]), actual[3]
            parts, value = kt_parts(*tensors[name].shape, role, method, 2, seed)
            write_kt_tree(tmp_path / "tree", layer, expert, role, method, parts)
            tensors[name] = value.bfloat16().float()
    want = stock(tmp_path / "model", tensors)
    save_file(original, tmp_path / "model" / "model.safetensors")
    model = load_model(tmp_path / "model", experts=tmp_path / "tree", dtype=torch.float32)
    torch.testing.assert_close(training_logits(model), want, rtol=EXACT, atol=EXACT)
    with pytest.raises(InputError, match="tree: given experts alone, expected a model"):
        load_model(tmp_path / "tree")


def test_model_from_merged_kt_kernel_files(tmp_path: Path) -> None:
    """Merged files hold the complete model, under the converter's names."""
    save(build("qwen3_moe", hidden_size=128, moe_intermediate_size=128, num_experts=2), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    merged = {}
    for seed, name in enumerate(list(tensors)):
        if actual := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj", name):
            parts, value = kt_parts(*tensors[name].shape, actual[3], "INT8", 1, seed)
            tensors[name] = value.bfloat16().float()
            base = f"blk.{actual[1]}.ffn_{actual[3]}_exps.{actual[2]}.numa.0"
            merged |= {f"{base}.weight": parts[0][0].view(torch.int8), f"{base}.scale": parts[0][1]}
        else:
            merged[re.sub(r"^model\.", "", name.replace("model.layers.", "blk."))] = tensors[name]
    want = stock(tmp_path, tensors)
    save_file(merged, tmp_path / "model.safetensors")
    model = load_model(tmp_path, dtype=torch.float32)
    assert stores(model)[0].formats["down"] == "int8"
    torch.testing.assert_close(training_logits(model), want, rtol=EXACT, atol=EXACT)


def test_unsupported_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    release(tmp_path, "fp8 blocks")
    good = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit(tmp_path, quantization_config={"quant_method": "hqq", "bits": 4})
    for act in (load_model, lambda path: prepare(path, tmp_path / "kt")):
        with pytest.raises(InputError, match=r"config\.json: given a checkpoint quantised with 'hqq' \(bits 4\)"):
            act(tmp_path)
    edit(tmp_path, quantization_config=good)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, message in (
        ("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv", r"experts\.2\.up_proj\.weight: given F8_E4M3"),
        ("model.layers.0.self_attn.o_proj.weight_scale_inv", r"self_attn\.o_proj\.weight: given F8_E4M3"),
        ("model.norm.weight", r"model\.norm\.weight: given 1 tensors missing"),
    ):
        left = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(left, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=message):
            load_model(tmp_path)


def test_formats_without_a_kernel_are_refused() -> None:
    for wrong in ({"gate": "bf16", "up": "bf16", "down": "int5"}, {"up": "int5", "down": "bf16"}):
        with pytest.raises(InputError, match=r"x: given .*int5.*, expected what can be computed .*`kt quant` writes"):
            check_computable("x", wrong, KTConfig())
    check_computable("x", {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, KTConfig())


def test_adapter_on_quantised_experts_gets_the_gradients_of_bf16_experts(tmp_path: Path) -> None:
    """Quantised experts give the loss and LoRA gradients of bf16 experts with the same values."""
    from peft import LoraConfig, get_peft_model

    source, plain = tmp_path / "int4", tmp_path / "plain"
    release(source, "compressed int4")
    release(plain, "compressed int4")
    numbers = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        _, _, ending = name.rpartition(".")
        if not ending.startswith("weight_"):
            numbers[name] = tensor

    opened = open_source(plain, KINDS["compressed int4"][2])
    numbers |= {tensor.name: tensor.read().clone() for tensor in opened.rest()}
    layer = opened.layer("model.layers.1.mlp.experts", ExpertShape(4, 192, 64))
    for piece in layer.chunks():
        for role, part in piece.tensors.items():
            assert isinstance(part, Encoded)
            numbers[f"model.layers.1.mlp.experts.{piece.first_expert}.{role}_proj.weight"] = decode(part)[0].bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, plain / "model.safetensors")
    edit(plain, quantization_config=None)
    grads = []
    for directory in (source, plain):
        model = load_model(directory, dtype=torch.float32)
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_b_proj"], target_parameters=["mlp.experts.down_proj"])
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(len(name))
                parameter.data.normal_(std=0.1)
        adapted(tokens(), labels=tokens()).loss.backward()
        grads.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and any("experts" in name for name in grads[0])
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
