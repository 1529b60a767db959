"""Tiny models as GGUF tensors and metadata, in the names and row order of llama.cpp's converter."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def permuted(matrix: Tensor, heads: int) -> Tensor:
    """The rows of q or k in the order of llama.cpp's converter."""
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
    """Tensors under llama.cpp's names, experts in the given types; writes their decoded values to the model."""
    import gguf

    tensors: dict[str, tuple[Any, str]] = {}
    config = model.config
    for name, parameter in model.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            tensors[f"{top[name.removesuffix('.weight')]}.weight"] = (parameter.numpy(), "F32")
            continue
        layer, rest = match.groups()
        if ".experts." in rest:
            matrices = {"down": parameter} if rest.endswith("down_proj") else {}
            if not matrices:
                half = parameter.shape[1] // 2
                matrices = {"gate": parameter[:, :half], "up": parameter[:, half:]}
            for role, matrix in matrices.items():
                kind = gguf.GGMLQuantizationType[kinds[role]]
                data = gguf.quants.quantize(matrix.contiguous().numpy(), kind)
                tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, kinds[role])
                matrix.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)).bfloat16())
            continue
        if rest.endswith("e_score_correction_bias"):
            tensors[f"blk.{layer}.exp_probs_b.bias"] = (parameter.numpy(), "F32")
            continue
        module, _, ending = rest.rpartition(".")
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
            parameter = permuted(parameter, heads).contiguous()
        if module == "mlp.shared_expert_gate":
            parameter = parameter[0]
        if module == "self_attn.kv_b_proj" and arch == "deepseek2" and layer == "1":  # the layout of newer files
            per_head = parameter.reshape(config.num_attention_heads, -1, parameter.shape[1])
            keys, values = per_head[:, : config.qk_nope_head_dim], per_head[:, config.qk_nope_head_dim :]
            tensors[f"blk.{layer}.attn_k_b.weight"] = (keys.transpose(1, 2).contiguous().numpy(), "F32")
            tensors[f"blk.{layer}.attn_v_b.weight"] = (values.contiguous().numpy(), "F32")
            continue
        leaf = GGUF_LEAVES[module]
        tensors[f"blk.{layer}.{leaf}.{ending}"] = (parameter.numpy(), "F32")
    return tensors


def gpt_oss_to_gguf(model: PreTrainedModel) -> dict[str, tuple[Any, str]]:
    """Tensors of gpt-oss with experts in MXFP4; writes their decoded values to the model."""
    import gguf

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
    return tensors


def gguf_fields(config: Any, arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes into the header."""
    fields = {
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
        fields |= {"expert_count": config.num_local_experts}
    if arch in ("qwen2moe", "qwen3moe"):
        fields |= {"expert_count": config.num_experts, "expert_feed_forward_length": config.moe_intermediate_size}
    if arch != "deepseek2":
        fields |= {"attention.key_length": config.head_dim}
    if arch == "deepseek2":
        fields |= {
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
    return {f"{arch}.{key}": value for key, value in fields.items()}
