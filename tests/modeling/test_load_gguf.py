"""Models in GGUF files, written like llama.cpp's converter, against the stock model that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ktransformers import _core
from ktransformers.modeling.prepare import prepare
from ktransformers.nn import load_model
from ktransformers.plan import Choice, Serving, open_shape, profile
from ktransformers.plan.formats import bytes_in_format
from ktransformers.plan.memory import predict_memory
from ktransformers.plan.model_shape import ModelShape
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.weight import QuantizedWeight
from tests.support.gguf_models import gguf_fields, gpt_oss_to_gguf, to_gguf
from tests.support.loaded_models import EXACT, MLA, SIZES, stores, training_logits
from tests.support.releases import write_gguf
from tests.support.tiny_models import build, logits, save

GGUF_MODELS = {
    "qwen3_moe": ("qwen3moe", {}),
    "qwen2_moe": ("qwen2moe", {}),
    "mixtral": ("llama", {}),
    "deepseek_v3": ("deepseek2", MLA),
}


def shape_beside(file: Path, config: PretrainedConfig) -> ModelShape:
    """What `kt plan` reads from the folder of a GGUF file that has its own configuration and tokenizer."""
    config.save_pretrained(file.parent)
    (file.parent / "tokenizer.json").write_text("{}")
    return open_shape(str(file.parent))


@pytest.mark.parametrize("family", GGUF_MODELS)
def test_model_from_a_gguf_file_matches_the_stock_model(family: str, tmp_path: Path) -> None:
    """Configuration, tensor names and row order come from the file; experts keep its types."""
    pytest.importorskip("gguf")
    arch, changes = GGUF_MODELS[family]
    model = build(family, **SIZES, **changes)
    kinds = {"gate": "Q4_0", "up": "Q8_0", "down": "Q5_1"}
    tensors = to_gguf(model, arch, kinds)
    file = tmp_path / "model-Q4_M.gguf"
    write_gguf(file, arch, gguf_fields(model.config, arch), tensors)
    actual = load_model(file, dtype=torch.float32)
    assert type(actual) is type(model)
    assert {role: kind.upper() for role, kind in stores(actual)[-1].formats.items()} == kinds
    torch.testing.assert_close(training_logits(actual), logits(model), rtol=EXACT, atol=EXACT)


def test_gguf_file_next_to_config_json(tmp_path: Path) -> None:
    """A directory with config.json and a GGUF file; experts alone from the GGUF file; a prepared directory."""
    pytest.importorskip("gguf")
    model = build("qwen3_moe", **SIZES)
    full = save(model, tmp_path / "full")
    tensors = to_gguf(model, "qwen3moe", dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    directory = tmp_path / "gguf"
    directory.mkdir()
    (directory / "config.json").write_bytes((full / "config.json").read_bytes())
    write_gguf(directory / "m.gguf", "qwen3moe", {}, tensors)
    want = logits(model)
    for actual in (
        load_model(directory, dtype=torch.float32),
        load_model(full, experts=directory / "m.gguf", dtype=torch.float32),
    ):
        assert stores(actual)[0].formats["up"] == "q8_0"
        torch.testing.assert_close(training_logits(actual), want, rtol=EXACT, atol=EXACT)
    prepare(directory, tmp_path / "kt")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "kt", dtype=torch.float32)
    assert stores(plain)[0].formats["up"] == "q8_0"
    torch.testing.assert_close(training_logits(plain), want, rtol=EXACT, atol=EXACT)
    prepare(full, tmp_path / "mixed", experts=directory / "m.gguf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed", dtype=torch.float32)
    assert stores(plain)[0].formats["up"] == "q8_0"
    torch.testing.assert_close(training_logits(plain), want, rtol=EXACT, atol=EXACT)


def test_gpt_oss_from_a_gguf_file(tmp_path: Path) -> None:
    """MXFP4 in GGUF's nibble order, expert biases, attention sinks; config.json from the model's directory."""
    pytest.importorskip("gguf")
    model = build("gpt_oss", hidden_size=64, intermediate_size=96)
    save(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = gpt_oss_to_gguf(model)
    write_gguf(tmp_path / "gpt-oss.gguf", "gpt-oss", {}, tensors)
    actual = load_model(tmp_path, dtype=torch.float32)
    assert stores(actual)[0].formats == dict.fromkeys(("gate", "up", "down"), "mxfp4")
    torch.testing.assert_close(training_logits(actual), logits(model), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("family", "arch"), [("mixtral", "llama"), ("qwen3_moe", "qwen3moe")])
def test_linear_layers_keep_the_bits_of_the_file(
    family: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and the head in Q8_0 and Q4_0; rows of q and k are in another order in one of the two architectures."""
    gguf = pytest.importorskip("gguf")
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64} | SIZES
    sizes |= {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 512}
    model = build(family, **sizes)
    tensors = to_gguf(model, arch, dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    kinds = {
        "attn_q.weight": "Q8_0",
        "attn_output.weight": "Q5_0",
        "output.weight": "Q8_0",
        "token_embd.weight": "Q8_0",
    }
    monkeypatch.setattr(quantized_weight, "ONE_PLANE_VARIANTS", ())
    for name, (numbers, _) in list(tensors.items()):
        kind = next((kind for ending, kind in kinds.items() if name.endswith(ending) and name != "output_norm"), None)
        if kind is not None:
            tensors[name] = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]), kind
    file = tmp_path / "model.gguf"
    write_gguf(file, arch, gguf_fields(model.config, arch), tensors)
    numbers, codes = (load_model(file, dtype=torch.float32, rest=rest) for rest in ("bf16", "keep"))
    kept = {name: one.spec for name, one in codes.named_parameters() if isinstance(one, QuantizedWeight)}
    layers = range(model.config.num_hidden_layers)
    expected = {f"model.layers.{layer}.self_attn.q_proj.weight": "q8_0" for layer in layers}
    expected |= {f"model.layers.{layer}.self_attn.o_proj.weight": "q5_0" for layer in layers}
    assert kept == expected | {"lm_head.weight": "q8_0", "model.embed_tokens.weight": "q8_0"}
    for name in kept:
        one, two = (model.get_parameter(name) + 0 for model in (codes, numbers))
        assert torch.equal(one.bfloat16(), two.bfloat16()), name
    actual, wanted = logits(codes), logits(numbers)
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-2  # weights are rounded to bf16 in one of the two
    monkeypatch.setattr(quantized_weight, "ONE_PLANE_VARIANTS", (_core.isa(),))
    fewer = load_model(file, dtype=torch.float32, rest="keep")
    left = {name for name in kept if not isinstance(fewer.get_parameter(name), QuantizedWeight)}
    assert left == {name for name, spec in kept.items() if spec == "q5_0"}
    shape = shape_beside(file, model.config)
    for variant, loaded in (("avx2", codes), ("neon", fewer)):
        held = [one for one in loaded.parameters() if isinstance(one, QuantizedWeight)]
        planned = shape.kept_on(variant)
        assert planned.quantized_weights == sum(weight.numel() for weight in held) > 0
        exact = sum(weight.numel() * bytes_in_format(weight.spec) for weight in held)
        assert planned.quantized_bytes == pytest.approx(exact, abs=1)
    work, choice, machine = Serving(), Choice("int8", linear_format="keep"), profile("arm2")
    arm, intel = (replace(machine, cpu=replace(machine.cpu, isa=isa)) for isa in ("neon", "avx2"))
    memory = [predict_memory(shape, work, choice, one).host["linear layers"] for one in (arm, intel)]
    assert memory == [shape.kept_on("neon").quantized_bytes, shape.quantized_bytes]


def test_the_plan_knows_which_projections_of_latents_stay_in_codes(tmp_path: Path) -> None:
    """One layer has `kv_b_proj` in one tensor, whose codes are multiplied; another in two, which are decoded, so that a
    server on a CPU keeps a copy of its keys."""
    gguf = pytest.importorskip("gguf")
    model = build("deepseek_v3", **SIZES, **MLA | {"kv_lora_rank": 512})
    tensors = to_gguf(model, "deepseek2", dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    numbers, _ = tensors["blk.0.attn_kv_b.weight"]
    tensors["blk.0.attn_kv_b.weight"] = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0), "Q8_0"
    file = tmp_path / "model.gguf"
    write_gguf(file, "deepseek2", gguf_fields(model.config, "deepseek2"), tensors)
    shape = shape_beside(file, model.config)
    loaded = load_model(file, dtype=torch.float32, rest="keep")
    coded = [isinstance(layer.self_attn.kv_b_proj.weight, QuantizedWeight) for layer in loaded.model.layers]
    assert coded == [True, False]
    config = model.config
    keys = config.num_attention_heads * config.qk_nope_head_dim * config.kv_lora_rank
    assert (shape.absorbed_numbers, shape.quantized_absorbed) == (2 * keys, keys)

    def planned(linear_format: str | None) -> int:
        choice = Choice("int8", linear_format=linear_format)
        return predict_memory(shape, Serving(), choice, profile("arm2")).host.get("absorbed keys", 0)

    copied = shape.rest_dtype_bytes * keys
    assert [planned(one) for one in (None, "keep", "q8_0")] == [2 * copied, copied, 0]
