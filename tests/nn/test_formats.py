"""Released formats as whole models: a tiny model in each, against stock transformers on the numbers it stands for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.releases import KINDS, kt_parts, write_gguf, write_kt_tree
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktransformers.errors import InputError
from ktransformers.nn import ExpertStore, load_model
from ktransformers.nn.prepare import prepare

from .families import build, save, tokens

EXACT = 1e-4  # float32 around the experts on both sides: rounding of sums only
SIZES: dict[str, Any] = {"hidden_size": 192, "moe_intermediate_size": 64, "intermediate_size": 96}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32, "n_routed_experts": 4}


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens()).logits
    return found.float()


def stores(model: PreTrainedModel) -> list[ExpertStore]:
    return [module.kt_store for module in model.modules() if hasattr(module, "kt_store")]


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def stock(directory: Path, tensors: dict[str, Tensor]) -> Tensor:
    """Logits of the stock model on these numbers; leaves them in the directory."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    return logits(model)


def release(directory: Path, kind: str, only: str = "") -> Tensor:
    """Write a DeepSeek-V3 in this format, every linear layer of it or those that match; the logits it must have."""
    make, _, words = KINDS[kind]
    save(build("deepseek_v3", **SIZES, **MLA), directory)
    written, numbers = {}, {}
    for seed, (name, tensor) in enumerate(load_file(directory / "model.safetensors").items()):
        if tensor.dim() == 2 and name.endswith("_proj.weight") and re.search(only, name):
            parts, value = make(*tensor.shape, seed)
            written |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in parts.items()}
            numbers[name] = value.bfloat16().float()
        else:
            written[name] = numbers[name] = tensor
    want = stock(directory, numbers)
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, directory / "model.safetensors")
    edit(directory, quantization_config=words)
    return want


@pytest.mark.parametrize("kind", KINDS)
def test_release(kind: str, tmp_path: Path) -> None:
    want = release(tmp_path, kind)
    model = load_model(tmp_path, dtype=torch.float32)
    (store,) = stores(model)
    assert store.formats == dict.fromkeys(("gate", "up", "down"), KINDS[kind][1])
    torch.testing.assert_close(logits(model), want, rtol=EXACT, atol=EXACT)
    assert model.name_or_path == str(tmp_path)
    assert model.config.quantization_config.to_dict() == {"quant_method": "kt", "source": KINDS[kind][2]}


def test_plain_attention_beside_quantised_experts(tmp_path: Path) -> None:
    """As Kimi-K2-Thinking is released: from_pretrained itself reads the rest, from links as well."""
    source, out = tmp_path / "model", tmp_path / "kt"
    want = release(source, "compressed int4", only=r"\.experts\.")
    edit(source, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    torch.testing.assert_close(logits(load_model(source, dtype=torch.float32)), want, rtol=EXACT, atol=EXACT)
    assert prepare(source, out).links > 0 and (out / "model.safetensors").is_symlink()
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert [store.formats["up"] for store in stores(plain)] == ["int4:32"]
    torch.testing.assert_close(logits(plain), want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq"])
def test_prepared(kind: str, tmp_path: Path) -> None:
    """What is not experts is written anew in bf16; the experts stay in the source."""
    source, out = tmp_path / "model", tmp_path / "kt"
    want = release(source, kind)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    found = prepare(source, out)
    assert found.quantised is not None and found.quantised.startswith(f"'{KINDS[kind][2]['quant_method']}'")
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    assert written == {"quant_method": "kt", "source": KINDS[kind][2], "experts": str(source)}
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        model = load(out, dtype=torch.float32)
        assert [store.formats["down"] for store in stores(model)] == [KINDS[kind][1]]
        torch.testing.assert_close(logits(model), want, rtol=EXACT, atol=EXACT)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    # A program without us stops at the experts instead of making some up.
    words = json.loads((out / "config.json").read_text())
    del words["quantization_config"]
    (out / "config.json").write_text(json.dumps(words))
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(out)


def test_exact_precision(tmp_path: Path) -> None:
    """float32 experts compute with the decoded numbers before bf16 rounds them."""
    make, _, words = KINDS["fp8 blocks"]
    save(build("qwen3_moe", **SIZES), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    made = {name: make(*t.shape, i) for i, (name, t) in enumerate(tensors.items()) if ".experts." in name}
    want = stock(tmp_path, tensors | {name: value for name, (_, value) in made.items()})
    for name, (parts, _) in made.items():
        del tensors[name]
        tensors |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    edit(tmp_path, quantization_config=words)
    model = load_model(tmp_path, dtype=torch.float32, precision="f32")
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5)


def test_gpt_oss(tmp_path: Path) -> None:
    """Blocks and scales of all experts in one tensor, rows of gate and up in turns, biases beside them."""
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
    torch.testing.assert_close(logits(model), want, rtol=EXACT, atol=EXACT)


def permuted(matrix: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter turns the rows of q and k."""
    return matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(matrix.shape)


GGUF_LEAVES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
GGUF_LEAVES |= {
    f"mlp.shared_expert{s}.{role}_proj": f"ffn_{role}_shexp" for s in ("", "s") for role in ("gate", "up", "down")
}


def to_gguf(model: PreTrainedModel, arch: str, kinds: dict[str, str]) -> dict[str, tuple[Any, str]]:
    """Tensors under llama.cpp's names, experts in the given types; the model gets the numbers that these stand for."""
    import gguf

    found: dict[str, tuple[Any, str]] = {}
    config = model.config
    for name, parameter in model.state_dict().items():
        place = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if place is None:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found[f"{top[name.removesuffix('.weight')]}.weight"] = (parameter.numpy(), "F32")
            continue
        layer, rest = place.groups()
        if ".experts." in rest:
            matrices = {"down": parameter} if rest.endswith("down_proj") else {}
            if not matrices:
                half = parameter.shape[1] // 2
                matrices = {"gate": parameter[:, :half], "up": parameter[:, half:]}
            for role, matrix in matrices.items():
                kind = gguf.GGMLQuantizationType[kinds[role]]
                data = gguf.quants.quantize(matrix.contiguous().numpy(), kind)
                found[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, kinds[role])
                matrix.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)).bfloat16())
            continue
        if rest.endswith("e_score_correction_bias"):
            found[f"blk.{layer}.exp_probs_b.bias"] = (parameter.numpy(), "F32")
            continue
        module, _, ending = rest.rpartition(".")
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            parameter = permuted(parameter, heads).contiguous()
        if module == "mlp.shared_expert_gate":
            parameter = parameter[0]
        if module == "self_attn.kv_b_proj" and arch == "deepseek2" and layer == "1":  # as newer files have it
            whole = parameter.reshape(config.num_attention_heads, -1, parameter.shape[1])
            keys, values = whole[:, : config.qk_nope_head_dim], whole[:, config.qk_nope_head_dim :]
            found[f"blk.{layer}.attn_k_b.weight"] = (keys.transpose(1, 2).contiguous().numpy(), "F32")
            found[f"blk.{layer}.attn_v_b.weight"] = (values.contiguous().numpy(), "F32")
            continue
        leaf = GGUF_LEAVES[module]
        found[f"blk.{layer}.{leaf}.{ending}"] = (parameter.numpy(), "F32")
    return found


def gguf_fields(config: Any, arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes into the header."""
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_used_count": config.num_experts_per_tok,
        "feed_forward_length": config.intermediate_size,
    }
    if arch == "llama":
        found |= {"expert_count": config.num_local_experts}
    if arch in ("qwen2moe", "qwen3moe"):
        found |= {"expert_count": config.num_experts, "expert_feed_forward_length": config.moe_intermediate_size}
    if arch != "deepseek2":
        found |= {"attention.key_length": config.head_dim}
    if arch == "deepseek2":
        found |= {
            "expert_count": config.n_routed_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_gating_func": 2,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": bool(config.norm_topk_prob),
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": config.v_head_dim,
            "rope.dimension_count": config.qk_rope_head_dim,
        }
    return {f"{arch}.{key}": value for key, value in found.items()}


GGUF_MODELS = {
    "qwen3_moe": ("qwen3moe", {}),
    "qwen2_moe": ("qwen2moe", {}),
    "mixtral": ("llama", {}),
    "deepseek_v3": ("deepseek2", MLA),
}


@pytest.mark.parametrize("family", GGUF_MODELS)
def test_gguf_file(family: str, tmp_path: Path) -> None:
    """Everything from one file: configuration, names, order of rows; experts in the types of the file."""
    pytest.importorskip("gguf")
    arch, changes = GGUF_MODELS[family]
    model = build(family, **SIZES, **changes)
    kinds = {"gate": "Q4_0", "up": "Q8_0", "down": "Q5_1"}
    tensors = to_gguf(model, arch, kinds)
    file = tmp_path / "model-Q4_M.gguf"
    write_gguf(file, arch, gguf_fields(model.config, arch), tensors)
    found = load_model(file, dtype=torch.float32)
    assert type(found) is type(model)
    assert {role: kind.upper() for role, kind in stores(found)[-1].formats.items()} == kinds
    torch.testing.assert_close(logits(found), logits(model), rtol=EXACT, atol=EXACT)


def test_gguf_beside_a_configuration(tmp_path: Path) -> None:
    """A directory with config.json and a GGUF; experts alone from the GGUF; and the directory that others open."""
    pytest.importorskip("gguf")
    model = build("qwen3_moe", **SIZES)
    full = save(model, tmp_path / "full")
    tensors = to_gguf(model, "qwen3moe", dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    directory = tmp_path / "gguf"
    directory.mkdir()
    (directory / "config.json").write_bytes((full / "config.json").read_bytes())
    write_gguf(directory / "m.gguf", "qwen3moe", {}, tensors)
    want = logits(model)
    for found in (
        load_model(directory, dtype=torch.float32),
        load_model(full, experts=directory / "m.gguf", dtype=torch.float32),
    ):
        assert stores(found)[0].formats["up"] == "q8_0"
        torch.testing.assert_close(logits(found), want, rtol=EXACT, atol=EXACT)
    prepare(directory, tmp_path / "kt")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "kt", dtype=torch.float32)
    assert stores(plain)[0].formats["up"] == "q8_0"
    torch.testing.assert_close(logits(plain), want, rtol=EXACT, atol=EXACT)
    prepare(full, tmp_path / "mixed", experts=directory / "m.gguf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed", dtype=torch.float32)
    assert stores(plain)[0].formats["up"] == "q8_0"
    torch.testing.assert_close(logits(plain), want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("method", ["INT8", "INT4"])
def test_kt_kernel_tree(method: str, tmp_path: Path) -> None:
    """Experts that kt-kernel's converter wrote for two NUMA nodes, the rest from the model they were made from."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 3}
    save(build("qwen3_moe", **sizes), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    original = dict(tensors)
    for seed, name in enumerate(tensors):
        if found := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj", name):
            layer, expert, role = int(found[1]), int(found[2]), found[3]
            parts, value = kt_parts(*tensors[name].shape, role, method, 2, seed)
            write_kt_tree(tmp_path / "tree", layer, expert, role, method, parts)
            tensors[name] = value.bfloat16().float()
    want = stock(tmp_path / "model", tensors)
    save_file(original, tmp_path / "model" / "model.safetensors")
    model = load_model(tmp_path / "model", experts=tmp_path / "tree", dtype=torch.float32)
    torch.testing.assert_close(logits(model), want, rtol=EXACT, atol=EXACT)
    with pytest.raises(InputError, match="tree: given experts alone, expected a model"):
        load_model(tmp_path / "tree")


def test_refusals(tmp_path: Path) -> None:
    release(tmp_path, "fp8 blocks")
    good = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    for act in (load_model, lambda path: prepare(path, tmp_path / "kt")):
        with pytest.raises(InputError, match=r"config\.json: given a checkpoint quantised with 'awq' \(bits 4\)"):
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


def test_gradients_reach_an_adapter(tmp_path: Path) -> None:
    """Experts in their released bits train like those in bf16: same loss, same gradients of LoRA."""
    from peft import LoraConfig, get_peft_model

    source, plain = tmp_path / "int4", tmp_path / "plain"
    release(source, "compressed int4")
    release(plain, "compressed int4")
    numbers = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        _, _, ending = name.rpartition(".")
        if not ending.startswith("weight_"):
            numbers[name] = tensor
    from ktransformers.checkpoint import Encoded, ExpertShape, decode
    from ktransformers.checkpoint.sources import open_source

    opened = open_source(plain, KINDS["compressed int4"][2])
    numbers |= {tensor.name: tensor.read().clone() for tensor in opened.rest()}
    layer = opened.layer("model.layers.1.mlp.experts", ExpertShape(4, 192, 64))
    for piece in layer.pieces():
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
