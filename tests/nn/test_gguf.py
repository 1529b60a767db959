"""GGUF files as whole models, written as llama.cpp's converter writes them, against the stock model they came from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.releases import write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktransformers.nn import load_model
from ktransformers.nn.prepare import prepare

from .families import build, save
from .test_formats import EXACT, MLA, SIZES, logits, stores


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


def test_gpt_oss_gguf(tmp_path: Path) -> None:
    """MXFP4 in GGUF's order, biases of experts, sinks; config.json from the model's directory."""
    gguf = pytest.importorskip("gguf")
    model = build("gpt_oss", hidden_size=64, intermediate_size=96)
    save(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    leaves = {
        "self_attn.sinks": "attn_sinks.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "mlp.router.weight": "ffn_gate_inp.weight",
        "mlp.router.bias": "ffn_gate_inp.bias",
    }
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    tensors: dict[str, tuple[Any, str]] = {}
    kind = gguf.GGMLQuantizationType.MXFP4
    for name, parameter in model.state_dict().items():
        place = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if place is None:
            tensors[top.get(name, "output.weight")] = (parameter.numpy(), "F32")
            continue
        layer, rest = place.groups()
        if ".experts." not in rest:
            module, _, ending = rest.rpartition(".")
            leaf = leaves.get(rest) or f"{GGUF_LEAVES[module]}.{ending}"
            tensors[f"blk.{layer}.{leaf}"] = (parameter.numpy(), "F32")
            continue
        roles = {"down": parameter} if "down" in rest else {"gate": parameter[..., 0::2], "up": parameter[..., 1::2]}
        for role, part in roles.items():
            if rest.endswith("_bias"):
                tensors[f"blk.{layer}.ffn_{role}_exps.bias"] = (part.contiguous().numpy(), "F32")
                continue
            data = gguf.quants.quantize(part.transpose(1, 2).contiguous().numpy(), kind)
            tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, "MXFP4")
            part.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)).transpose(1, 2))
    write_gguf(tmp_path / "gpt-oss.gguf", "gpt-oss", {}, tensors)
    found = load_model(tmp_path, dtype=torch.float32)
    assert stores(found)[0].formats == dict.fromkeys(("gate", "up", "down"), "mxfp4")
    torch.testing.assert_close(logits(found), logits(model), rtol=EXACT, atol=EXACT)
