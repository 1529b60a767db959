"""load_model on tiny models of many families, against the stock model from the same files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ktransformers.experts.interface import attach_store
from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore, KTConfig, load_model
from tests.support.forked import python
from tests.support.tiny_models import COMMON, FAMILIES, build, round_weights, save, tokens

EXACT = 1e-4  # float32 on both sides: rounding of sums only
MAIN = ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss"]


def stores(model: PreTrainedModel) -> list[ExpertStore]:
    return [module.kt.store for module in model.modules() if hasattr(module, "kt")]


def stock(directory: Path, dtype: torch.dtype = torch.float32, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_pretrained(directory, dtype=dtype, experts_implementation="eager")
    return model


def greedy(model: PreTrainedModel) -> torch.Tensor:
    return model.generate(tokens(1, 6), max_new_tokens=6, do_sample=False, use_cache=True)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_family_matches_the_stock_model(family: str, tmp_path: Path) -> None:
    save(build(family), tmp_path)
    want, got = stock(tmp_path), load_model(tmp_path, dtype=torch.float32)
    assert type(got) is type(want)
    assert len(stores(got)) > 0
    assert all(
        isinstance(tensor, Placeholder) for name, tensor in got.named_parameters() if re.search(r"\.experts\.", name)
    )
    buffers = dict(got.named_buffers())
    for name, buffer in want.named_buffers():  # RoPE among them: computed, not loaded, on a skeleton without memory
        assert buffers[name].device == buffer.device and torch.equal(buffers[name], buffer), name
    reference = logits(want)
    torch.testing.assert_close(logits(got), reference, rtol=EXACT, atol=EXACT)
    assert torch.equal(greedy(got), greedy(want))
    # The experts matter: with others in their place the logits would not fit.
    module = next(module for module in got.modules() if hasattr(module, "kt"))
    shape = module.kt.store
    ungated = ExpertStore(shape.num_experts, shape.hidden_size, shape.intermediate_size, gated=False)
    ungated.pack(
        up=torch.zeros(shape.num_experts, shape.intermediate_size, shape.hidden_size),
        down=torch.zeros(shape.num_experts, shape.hidden_size, shape.intermediate_size),
    )
    attach_store(module, module.kt.contract, ungated, {})
    assert (logits(got) - reference).abs().max() > 20 * EXACT


@pytest.mark.parametrize("family", MAIN)
def test_bf16_error_is_not_larger_than_stock(family: str, tmp_path: Path) -> None:
    """Measured against the float32 model."""
    save(build(family), tmp_path)
    exact = logits(stock(tmp_path))
    ours, theirs = logits(load_model(tmp_path)), logits(stock(tmp_path, torch.bfloat16))
    assert ours.dtype == torch.bfloat16
    error, noise = ((x.float() - exact).norm() / exact.norm() for x in (ours, theirs))
    assert error < 1.5 * noise + 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sharded_checkpoint_in_several_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    save(build("qwen3_moe").to(dtype), tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    calls: list[tuple[int, int]] = []
    model = load_model(
        str(tmp_path), dtype=torch.float32, device="cpu", progress=lambda done, layers: calls.append((done, layers))
    )
    assert calls == [(1, 2), (2, 2)]
    torch.testing.assert_close(logits(model), logits(stock(tmp_path)), rtol=2e-3, atol=2e-3)


def test_fused_checkpoint_of_a_per_expert_family(tmp_path: Path) -> None:
    """Fused tensors as transformers names its parameters, for a family whose files have single experts."""
    model = build("qwen3_moe")
    save(model, tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(load_model(tmp_path, dtype=torch.float32)), logits(model), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("family", "text"), [("qwen3_5_moe", "qwen3_5_moe_text"), ("qwen3_vl_moe", "qwen3_moe")])
def test_text_model_nested_in_a_vision_model(family: str, text: str, tmp_path: Path) -> None:
    """A vision model's checkpoint: text under `model.language_model`, a vision tower, and an MTP layer."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    words = COMMON | FAMILIES[text]
    if family == "qwen3_vl_moe":
        words |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    config = AutoConfig.for_model(family, text_config=words, vision_config=vision)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, experts_implementation="eager")
    save(round_weights(whole), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(40, 64)}
    save_file(tensors | (extra if family == "qwen3_5_moe" else {}), tmp_path / "model.safetensors")
    model = load_model(tmp_path, dtype=torch.float32)
    assert len(stores(model)) == 2
    want = logits(stock(tmp_path, kind=type(model)))
    torch.testing.assert_close(logits(model), want, rtol=EXACT, atol=EXACT)


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    model = build("deepseek_v3")
    save(model, tmp_path)
    edit_config(tmp_path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    torch.testing.assert_close(logits(load_model(tmp_path, dtype=torch.float32)), logits(model), rtol=EXACT, atol=EXACT)


def test_kimi_k25_with_released_tensor_names(tmp_path: Path) -> None:
    """With the names of the released files, `language_model.model.layers`; transformers 5.22 itself saves others."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = COMMON | FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3"}
    config = AutoConfig.for_model("kimi_k25", text_config=words, vision_config=vision, projection_hidden_size=32)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, experts_implementation="eager")
    save(round_weights(whole), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(r"^(language_model\.model)\.blocks\.", r"\1.layers.", name): t for name, t in tensors.items()}
    assert "language_model.model.layers.1.mlp.experts.0.up_proj.weight" in renamed
    save_file(renamed, tmp_path / "model.safetensors")
    model = load_model(tmp_path, dtype=torch.float32)
    want = logits(stock(tmp_path, kind=type(model)))
    torch.testing.assert_close(logits(model), want, rtol=EXACT, atol=EXACT)


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("method", ["argument", "config.json"])
def test_from_pretrained_with_a_kt_config(method: str, tmp_path: Path) -> None:
    model = build("mixtral")
    save(model, tmp_path)
    options: dict[str, Any] = {}
    if method == "argument":
        options["quantization_config"] = KTConfig(isa="generic")
    else:
        edit_config(tmp_path, quantization_config={"quant_method": "kt", "isa": "generic"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
    assert [store.isa for store in stores(loaded)] == ["generic", "generic"]
    torch.testing.assert_close(logits(loaded), logits(model), rtol=EXACT, atol=EXACT)
    assert loaded.config.to_dict()["quantization_config"] == {"quant_method": "kt", "isa": "generic"}
    if method == "config.json":  # load_model's own arguments count
        assert len(stores(load_model(tmp_path, dtype=torch.float32))) == 2


def test_gradients_of_non_expert_weights_match_the_stock_model(tmp_path: Path) -> None:
    """Gradients of attention, norms, routers and embeddings."""
    save(build("qwen3_moe"), tmp_path)
    want, got = stock(tmp_path), load_model(tmp_path, dtype=torch.float32)
    assert got.hf_quantizer.is_trainable
    for model in (want, got):
        model(tokens(), labels=tokens()).loss.backward()
    theirs = {name: parameter.grad for name, parameter in want.named_parameters()}
    for name, parameter in got.named_parameters():
        if isinstance(parameter, Placeholder):
            continue
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_model_is_loaded_to_the_given_device(tmp_path: Path) -> None:
    save(build("qwen3_moe"), tmp_path)
    want, model = logits(stock(tmp_path)), load_model(tmp_path, dtype=torch.float32, device="cuda", isa="generic")
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors if not isinstance(tensor, Placeholder)} == {"cuda"}
    with torch.no_grad():
        torch.testing.assert_close(model(tokens().cuda()).logits.cpu(), want, rtol=2e-3, atol=2e-3)


def test_saving_is_refused(tmp_path: Path) -> None:
    save(build("olmoe"), tmp_path / "model")
    with pytest.raises(ValueError, match="not serializable"):
        load_model(tmp_path / "model").save_pretrained(tmp_path / "copy")


def rewrite(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_bad_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    save(build("qwen3_moe"), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    words = (tmp_path / "config.json").read_text()
    expert = "model.layers.1.mlp.experts.2.down_proj.weight"

    rewrite(tmp_path, lambda tensors: tensors.pop(expert))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.experts\.2: down: given no such tensor"):
        load_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({expert: torch.zeros(40, 64)}))
    with pytest.raises(InputError, match=r"experts\.2\.down_proj\.weight: given shape \[40, 64\], expected \[64, 40\]"):
        load_model(tmp_path)

    (tmp_path / "model.safetensors").write_bytes(whole)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: given 1 tensors missing"):
        load_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 64)}))
    with pytest.raises(InputError, match=r"self_attn\.q_proj\.weight: given shape \[3, 64\], expected \[64, 64\]"):
        load_model(tmp_path)

    edit_config(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(InputError, match="a checkpoint quantised with 'awq'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(words[:-5])
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(InputError, match=r"no directory with a config\.json"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(words)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no supported weights"):
        load_model(tmp_path)


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    words = {key: value for key, value in COMMON.items() if key != "moe_intermediate_size"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **words))
    save(model, tmp_path)
    with pytest.raises(InputError, match="LlamaForCausalLM: given no expert layers behind"):
        load_model(tmp_path)


MEMORY = """
import sys, threading, torch
from ktransformers.nn import load_model
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
load_model(sys.argv[1])  # imports, threads, caches
highest, over = [0], threading.Event()
def watch():
    while not over.wait(0.002):
        highest[0] = max(highest[0], anonymous())
start = anonymous()
thread = threading.Thread(target=watch); thread.start()
model = load_model(sys.argv[2])
over.set(); thread.join()
packed = [module.kt.store.packed_bytes for module in model.modules() if hasattr(module, "kt")]
print(highest[0] - start, sum(packed), packed[0])
"""


def test_peak_memory_of_loading_is_bounded(tmp_path: Path) -> None:
    """Anonymous memory while loading stays below the packed experts, one layer and the non-expert weights."""
    save(build("qwen3_moe"), tmp_path / "small")
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 24, "num_hidden_layers": 4}
    save(build("qwen3_moe", **sizes).bfloat16(), tmp_path / "large")
    done = python(MEMORY, tmp_path / "small", tmp_path / "large")
    assert done.returncode == 0, done.stderr
    highest, packed, layer_bytes = map(int, done.stdout.split())
    # Blocks of 16 k tiles lie one tile further apart than they are long (csrc/moe/weights.cpp).
    assert packed == 4 * layer_bytes == 4 * 24 * 3 * 512 * 512 * 2 * 33 // 32
    assert 0.9 * packed < highest < packed + layer_bytes + (32 << 20)
