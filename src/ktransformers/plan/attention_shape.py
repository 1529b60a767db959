"""Attention of a model's layers by config.json: linear layers, numbers of parameters, and what a token leaves in the
cache.

Layers of one model differ: gated delta rule and full attention (Qwen3-Next, Qwen3.5), windowed layers with other
heads than full ones (Gemma 4, MiMo). Parameters are exact for the families whose shapes are shipped; the cache is exact
for every family that is served in batches. Tests compare both with transformers' models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short as shown
from ktransformers.plan.layer_kinds import KEYS, WINDOWED, layer_types

FULL_WIDTH_NORMS = ("minimax_m2", "olmoe")  # queries and keys are normalised over all heads at once
BIASED = ("gpt_oss",)  # linear layers of attention, router and experts have biases, and every head has a sink
GATED_QUERIES = ("qwen3_next", "qwen3_5_moe")  # prefixes of model types whose query projection also computes a gate
SPLIT_DELTA = "qwen3_5_moe"  # prefix of model types whose delta rule has four projections of its input, others have two


@dataclass(frozen=True)
class LinearShape:
    """A linear layer that LoRA can adapt."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class AttentionShape:
    """One layer."""

    linears: tuple[LinearShape, ...]
    extra: int  # numbers besides: norms, biases, convolutions
    width: int  # numbers of queries, keys, values and output of a token
    scores: int = 0  # multiplications of a token per earlier token
    cache: int = 0  # numbers of a token's keys and values, those of latents expanded
    latent: int = 0  # numbers of a token in a cache of latents; 0: no latent attention
    cache_rows: int = 0  # heads of a token's keys and values in the cache; of latents one
    absorbed: int = 0  # numbers that multiply queries for latents
    index: tuple[LinearShape, ...] = ()  # queries, key and weights of heads of an indexer; frozen
    windowed: bool = False  # a token attends to the last ones only

    @property
    def numbers(self) -> int:
        return sum(linear.inputs * linear.outputs for linear in self.linears) + self.extra


def config_number(text_config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = text_config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"config.json: {key}", shown(value), "an integer")
            return value
    if default is None:
        raise InputError("config.json", f"none of {', '.join(keys)}", "the size of a Mixture-of-Experts model")
    return default


def attention_layers(text_config: Mapping[str, Any], layers: int) -> tuple[AttentionShape, ...]:
    """Every layer of the model. Those without keys of tokens are counted as attention without a cache, unless they are
    of the gated delta rule: checkpoints of the other families are counted by their headers."""
    changes = text_config.get("per_layer_config") or {}  # by the number of a layer, a string in a file
    return tuple(
        _layer({**text_config, **changes.get(str(layer), changes.get(layer, {}))}, kind)
        for layer, kind in enumerate(layer_types(text_config, layers)[:layers])
    )


def _layer(text_config: Mapping[str, Any], kind: str) -> AttentionShape:
    if kind == "linear_attention" and text_config.get("linear_num_value_heads"):
        return _delta(text_config)
    shape = _latent(text_config) if text_config.get("kv_lora_rank") else _grouped(text_config, kind)
    if kind in KEYS:
        return shape
    return AttentionShape(shape.linears, shape.extra, shape.width, shape.scores, index=shape.index)


def _latent(text_config: Mapping[str, Any]) -> AttentionShape:
    hidden, heads = config_number(text_config, "hidden_size"), config_number(text_config, "num_attention_heads")
    latent, rope = config_number(text_config, "kv_lora_rank"), config_number(text_config, "qk_rope_head_dim")
    nope, value = config_number(text_config, "qk_nope_head_dim"), config_number(text_config, "v_head_dim")
    low, queries = text_config.get("q_lora_rank"), heads * (nope + rope)
    query = (LinearShape(hidden, int(low)), LinearShape(int(low), queries)) if low else (LinearShape(hidden, queries),)
    keys = (LinearShape(hidden, latent + rope), LinearShape(latent, heads * (nope + value)))
    out = LinearShape(heads * value, hidden)
    scores = heads * (nope + rope + value)
    return AttentionShape(
        (*query, *keys, out),
        extra=latent + (int(low) if low else 0),  # norms
        width=2 * queries + heads * 2 * value + latent + rope + (int(low) if low else 0),
        scores=scores,
        cache=scores,
        latent=latent + rope,
        cache_rows=1,
        absorbed=heads * nope * latent,
        index=_indexer(text_config),
    )


def _indexer(text_config: Mapping[str, Any]) -> tuple[LinearShape, ...]:
    """Projections of the module that selects keys (DeepSeek-V3.2, GLM-5): its queries, key and weights of heads."""
    if not text_config.get("index_n_heads"):
        return ()
    heads, size = config_number(text_config, "index_n_heads"), config_number(text_config, "index_head_dim")
    hidden = config_number(text_config, "hidden_size")
    low = config_number(text_config, "q_lora_rank", default=hidden)
    return LinearShape(low, heads * size), LinearShape(hidden, size), LinearShape(hidden, heads)


def index_layers(text_config: Mapping[str, Any], layers: int) -> int:
    """Layers with an indexer of their own; others may use the selection of an earlier layer (GLM-5)."""
    kinds = text_config.get("indexer_types") or text_config.get("index_topk_pattern")
    if kinds:
        return sum(kind in ("full", "F") for kind in kinds)
    step = max(1, config_number(text_config, "index_topk_freq", default=1))
    first = config_number(text_config, "index_skip_topk_offset", default=2)
    return sum(max(layer - first + 1, 0) % step == 0 for layer in range(layers))


def _grouped(text_config: Mapping[str, Any], kind: str) -> AttentionShape:
    model_type = str(text_config.get("model_type", ""))
    hidden, heads = config_number(text_config, "hidden_size"), config_number(text_config, "num_attention_heads")
    size, value, pairs = _head_sizes(text_config, kind, hidden, heads)
    queries = heads * size * (2 if model_type.startswith(GATED_QUERIES) else 1)
    linears = (
        LinearShape(hidden, queries),
        LinearShape(hidden, pairs * size),
        LinearShape(hidden, pairs * value),
        LinearShape(heads * value, hidden),
    )
    extra = sum(linear.outputs for linear in linears) + heads if model_type in BIASED else 0
    if model_type in FULL_WIDTH_NORMS:
        extra = (heads + pairs) * size
    elif model_type.startswith(("qwen3", "glm4_moe", "hy_v3")) and text_config.get("use_qk_norm", True):
        extra = 2 * size
    if model_type == "glm4_moe" and text_config.get("attention_bias"):
        extra += queries + pairs * (size + value)
    cache = pairs * (size + value)
    return AttentionShape(
        linears,
        extra,
        width=queries + heads * value + cache,
        scores=heads * (size + value),
        cache=cache,
        cache_rows=2 * pairs,
        windowed=kind in WINDOWED,
    )


def _head_sizes(text_config: Mapping[str, Any], kind: str, hidden: int, heads: int) -> tuple[int, int, int]:
    """Numbers of a head's key and of its value, and the heads of keys, where the cache has them."""
    size = config_number(text_config, "head_dim", "kv_channels", default=hidden // heads)
    value = config_number(text_config, "v_head_dim", default=size)
    pairs = config_number(text_config, "num_key_value_heads", default=heads)
    if text_config.get("model_type") == "mimo_v2_flash" and kind in WINDOWED:
        pairs = config_number(text_config, "swa_num_key_value_heads", default=2 * pairs)
    if text_config.get("kv_channels"):  # JetMoE repeats its keys for the experts of the queries
        pairs *= config_number(text_config, "num_experts_per_tok")
    if text_config.get("global_head_dim") and kind not in WINDOWED:  # Gemma 4 as it was released
        size = value = config_number(text_config, "global_head_dim")
        if text_config.get("attention_k_eq_v"):
            pairs = config_number(text_config, "num_global_key_value_heads", default=pairs)
    return size, value, pairs


def _delta(text_config: Mapping[str, Any]) -> AttentionShape:
    """The gated delta rule."""
    hidden = config_number(text_config, "hidden_size")
    heads = config_number(text_config, "linear_num_value_heads")
    size = config_number(text_config, "linear_value_head_dim")
    keys = config_number(text_config, "linear_num_key_heads") * config_number(text_config, "linear_key_head_dim")
    values, mixed = heads * size, 2 * keys + heads * size
    inputs: tuple[int, ...] = (mixed + values, 2 * heads)
    if str(text_config.get("model_type", "")).startswith(SPLIT_DELTA):
        inputs = (mixed, values, heads, heads)
    linears = (*(LinearShape(hidden, outputs) for outputs in inputs), LinearShape(values, hidden))
    convolution = mixed * config_number(text_config, "linear_conv_kernel_dim", default=4)
    return AttentionShape(linears, extra=convolution + 2 * heads + size, width=2 * mixed + 2 * values)
