"""Tiny random models of transformers' MoE families: two layers, a few experts, nothing downloaded.

Weights are representable in bf16, so that a float32 model and its packed experts have the same values, and large enough
that the experts influence the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 96

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 5, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {"num_experts": 6, "norm_topk_prob": True},
    "qwen3_next": {"num_experts": 6, "shared_expert_intermediate_size": 56, **LINEAR},
    "qwen3_5_moe_text": {"num_experts": 6, "shared_expert_intermediate_size": 56, **LINEAR},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v2": MLA | {"topk_method": "greedy"},
    "deepseek_v3": MLA,
    "olmoe": {"num_experts": 6},
    "glm4_moe": {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "minimax_m2": {"num_local_experts": 4, "rotary_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "kimi_linear": MLA
    | {
        "num_local_experts": 6,
        "q_lora_rank": None,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": MLA | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "deepseek_v32": MLA | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "glm4_moe_lite": MLA,
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "lfm2_moe": {"num_experts": 4, "layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "minimax": {"num_local_experts": 4, "layer_types": ["full_attention", "full_attention"]},
    "nemotron_h": {"n_routed_experts": 4, "layers_block_type": ["moe", "attention"]},
    "flex_olmo": {"num_experts": 6},
    "deepseek_v4": {"num_local_experts": 4},
    "mimo_v2_flash": {"n_routed_experts": 4},
    "solar_open": {"n_routed_experts": 4, "n_shared_experts": 1},
    "exaone_moe": {"num_experts": 4},
    "afmoe": {"num_experts": 4},
    "cohere2_moe": {"num_experts": 4},
    "hy_v3": {"num_experts": 4},
    "laguna": {"num_experts": 4},
    "bailing_hybrid": MLA
    | {
        "num_local_experts": 4,
        "head_dim": 16,
        "n_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "axk1": MLA,
    "mellum": {"num_experts": 4},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 32},
    "granitemoehybrid": {
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "layer_types": ["attention", "attention"],
    },
    "kolibri1": {"num_local_experts": 4},
    "axk2": MLA,
    "hy_v4": {"num_local_experts": 4},
    "minimax_m3_vl_text": {"num_local_experts": 4},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "flint": {"num_experts": 4, "mlp_only_layers": [0], "shared_expert_intermediate_size": 32},
    "beam": {"num_experts": 4, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1},
}


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The stock model in float32, its numbers bf16."""
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    return round_weights(model)


def round_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights of some size that bf16 holds exactly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 1.5 if "experts" in name else 1.0
                parameter.copy_(torch.randn_like(parameter) * scale / parameter.shape[-1] ** 0.5)
            elif "bias" in name or "sinks" in name:
                parameter.copy_(torch.randn_like(parameter) / 4)
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def logits(model: nn.Module) -> torch.Tensor:
    """Logits of `tokens()` in float32."""
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens()).logits
    return result.float()
