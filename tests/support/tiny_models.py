"""Tiny random models of transformers' MoE families: two layers, a few experts, nothing downloaded.

Weights are representable in bf16, so that a float32 model and its packed experts have the same values, and large enough
that the experts influence the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

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
# So many heads that hardly two keys have the same score: ties are selected at random.
INDEX: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
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
    "glm_moe_dsa": MLA | INDEX,
    "deepseek_v32": MLA | INDEX,
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
    "axk2": MLA | INDEX,
    "hy_v4": MLA | INDEX | {"num_local_experts": 4, "n_group": 1},
    "minimax_m3_vl_text": {"num_local_experts": 4},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "flint": {"num_experts": 4, "mlp_only_layers": [0], "shared_expert_intermediate_size": 32},
    "beam": {"num_experts": 4, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1},
    "granitemoe_swa": {"num_local_experts": 4, "sliding_window": 8},
    "gemma4_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
    },
}

# Text models that transformers has only inside a model with vision: family -> (text, other sections).
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_position_embeddings": 16}
VISION |= {"deepstack_visual_indexes": [0]}
SAM: dict[str, Any] = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SAM |= {"image_size": 64, "mlp_dim": 32, "global_attn_indexes": [0], "downsample_channels": [16, 32]}
ENCODER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER |= {"num_key_value_heads": 2, "image_size": 28}
AUDIO: dict[str, Any] = {"encoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
AUDIO |= {"output_dim": 64, "out_hidden_size": 64, "num_mel_bins": 16, "downsample_hidden_size": 16}
SECTIONED_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def _nested(vision: dict[str, Any] | None = None, rope: list[int] | None = None, **text: Any) -> dict[str, Any]:
    if rope is not None:
        text["rope_parameters"] = SECTIONED_ROPE | {"mrope_section": rope}
    return {"text_config": COMMON | text, "vision_config": VISION if vision is None else vision}


NESTED_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": _nested(rope=[2, 3, 3], num_experts=6),
    "qwen3_5_moe": _nested(**FAMILIES["qwen3_5_moe_text"]),
    "gemma4": _nested(**FAMILIES["gemma4_text"]),
    "mistral_large4": _nested(**MLA | INDEX),
    "glm4v_moe": _nested(rope=[1, 1, 2], **FAMILIES["glm4_moe"]),
    "glm5_next": _nested(
        **MLA
        | INDEX
        | {
            "qk_rope_head_dim": 0,
            "index_topk": 16,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        }
    ),
    "minimax_m3_vl": _nested(num_local_experts=4),
    "ernie4_5_vl_moe": _nested(rope=[3, 3, 2], moe_num_experts=4, moe_k=2, moe_intermediate_size=[40, 24]),
    "unlimited_ocr": _nested(
        {"sam_config": SAM, "encoder_config": ENCODER}, n_routed_experts=4, n_shared_experts=1, sliding_window=8
    ),
    "deepseek_ocr2": _nested(
        {"sam_config": SAM, "encoder_config": ENCODER},
        n_routed_experts=4,
        n_shared_experts=1,
        mlp_layer_types=["dense", "sparse"],
    ),
    "qwen3_omni_moe_thinker": _nested(rope=[2, 3, 3], num_experts=4)
    | {"audio_config": AUDIO, "vision_start_token_id": 3},
    "muse_spark": _nested(num_local_experts=4, moe_hidden_size=64)
    | {"audio_config": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "out_hidden_size": 64}},
    "diffusion_gemma": _nested(**FAMILIES["gemma4_text"]),
    "step3p7": _nested(moe_num_experts=4, sliding_window=8),
}
# Under another auto class, hybrids, and models that do not dispatch their experts through the experts interface.
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral4": MLA,
    "inkling_text": {"n_routed_experts": 4},
    "qwen4_exp_text": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 56,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        **LINEAR,
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "ffn_hidden_size": 48},
    },
    "doge": {"num_experts": 4, "is_moe": True},
    "jetmoe": {"num_local_experts": 4},
    "llama4_text": {
        "num_local_experts": 4,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "longcat_flash": MLA,
}
NESTED_FAMILIES["llama4"] = _nested(
    ENCODER | {"patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    **OTHER_FAMILIES["llama4_text"],
)

# Layers with convolution or recurrent states, for families whose tiny model above has none.
RECURRENT_LAYERS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
}


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The stock model in float32, its numbers bf16. Changes are to the text model."""
    if family in NESTED_FAMILIES:
        sections = NESTED_FAMILIES[family]
        config = AutoConfig.for_model(family, **sections | {"text_config": sections["text_config"] | changes})
    else:
        own = FAMILIES[family] if family in FAMILIES else OTHER_FAMILIES[family]
        config = AutoConfig.for_model(family, **(COMMON | own | changes))
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32, experts_implementation="eager")
    return round_weights(model)


def tie_experts(model: Any, gap: float = 1e-7) -> None:
    """Experts 0 and 1 of a qwen3_moe get the same router row but for `gap`, so that roundings choose between them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[1] = weight[0] + gap * torch.randn(weight.shape[1], generator=generator)


@contextmanager
def rounding_otherwise(model: Any, size: float = 1e-7) -> Iterator[None]:
    """Another program: noise of the size of a rounding in the embeddings, other noise for another number of tokens."""

    def add_noise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(output.shape[1])
        return output + size * torch.randn(output.shape, generator=generator)

    handle = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


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
