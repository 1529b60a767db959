"""What the layers of a model keep between tokens, by the words of config.json: keys and values, which grow with every
token, and convolution and recurrent states, which a sequence has once.

Releases name their layers in several ways: a list of types, an interval of full attention, a pattern of letters, lists
of layer numbers. The sizes of states follow the modules of transformers, whose convolutions keep as many inputs as
their kernel is wide; recurrent states are float32 but for MiniMax and Zaya. A test compares with served models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

WINDOWED = ("sliding_attention", "hybrid_sliding")  # layer types that attend to a window; slots keep every token
# Layer types with keys of every token.
KEYS = ("full_attention", "attention", "indexed_attention", "chunked_attention", "hybrid", *WINDOWED)
STATES = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")  # layer types with states
PATTERN = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}  # letters of NemotronH


class StateNumbers(NamedTuple):
    """Numbers of one sequence's states: in the dtype of the model, and in float32."""

    model_dtype: int = 0
    float32: int = 0

    def bytes(self, dtype_bytes: int) -> int:
        return self.model_dtype * dtype_bytes + 4 * self.float32


NO_STATES = StateNumbers()


def layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """The type of each layer; without any of the words below all have full attention."""
    explicit = config.get("layer_types") or config.get("layers_block_type")
    if explicit:
        return [str(kind) for kind in explicit]
    if config.get("hybrid_override_pattern"):
        return [PATTERN.get(letter, "mlp") for letter in config["hybrid_override_pattern"]]
    if config.get("attn_type_list"):  # MiniMax
        return ["full_attention" if kind else "linear_attention" for kind in config["attn_type_list"]]
    if config.get("attn_layer_period"):  # Jamba
        period, offset = config["attn_layer_period"], config.get("attn_layer_offset", 0)
        return ["attention" if layer % period == offset else "mamba" for layer in range(layers)]
    if config.get("linear_attn_config"):  # Kimi-Linear counts from 1
        full = set(config["linear_attn_config"].get("full_attn_layers", ()))
        return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
    interval = config.get("full_attention_interval") or config.get("layer_group_size")
    if interval is None and config.get("linear_num_value_heads"):
        interval = 4
    if interval:
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    return ["full_attention"] * layers


def state_numbers(config: Mapping[str, Any], layers: int) -> StateNumbers:
    """Of all layers of one sequence."""
    count = sum(kind in STATES for kind in layer_types(config, layers))
    one = _layer_states(config) if count else NO_STATES
    return StateNumbers(count * one.model_dtype, count * one.float32)


def scan_numbers(config: Mapping[str, Any], layers: int) -> int:
    """Float32 numbers of a prompt's token while torch computes one layer of Mamba. Mamba-1 keeps what enters its states
    for all tokens at once: the decay, and the input before and after it is multiplied. Mamba-2 goes in chunks: decays
    and products of the tokens of a chunk with each other, and its two projections repeated for every head."""
    heads, mamba = _mamba_heads(config), config.get("mamba_d_state") or config.get("ssm_state_size")
    if not mamba or not any(kind in STATES for kind in layer_types(config, layers)):
        return 0
    if not heads:
        return 3 * _layer_states(config).float32
    chunk = config.get("mamba_chunk_size") or config.get("chunk_size") or 256
    return heads * (4 * int(chunk) + 2 * int(mamba))


def _mamba_heads(config: Mapping[str, Any]) -> int:
    """Heads of Mamba-2; 0: another kind."""
    return int(config.get("mamba_n_heads") or config.get("mamba_num_heads") or 0)


def _layer_states(config: Mapping[str, Any]) -> StateNumbers:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = config.get("head_dim") or hidden // heads
    if config.get("linear_num_value_heads"):  # gated delta rule
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        kernel = config.get("linear_conv_kernel_dim", 4)
        return StateNumbers((2 * keys + values) * kernel, values * config["linear_key_head_dim"])
    mamba_heads = _mamba_heads(config)
    if mamba_heads:  # Mamba-2
        inner = mamba_heads * _mamba_head(config, hidden, mamba_heads)
        state = config.get("mamba_d_state") or config["ssm_state_size"]
        groups = config.get("mamba_n_groups") or config.get("n_groups", 1)
        kernel = config.get("mamba_d_conv") or config.get("conv_kernel", 4)
        return StateNumbers((inner + 2 * groups * state) * kernel, inner * state)
    if config.get("mamba_d_state"):
        inner = config.get("mamba_expand", 2) * hidden
        return StateNumbers(inner * config.get("mamba_d_conv", 4), inner * config["mamba_d_state"])
    if config.get("conv_L_cache"):
        return StateNumbers(hidden * config["conv_L_cache"])
    if config.get("cca_time0"):
        pairs = config.get("num_key_value_heads", heads)
        kept = config["cca_time0"] + config.get("cca_time1", 2) - 2
        return StateNumbers((heads + pairs) * size * kept + pairs * size // 2)
    return _delta_or_lightning(config, heads, size)


def _mamba_head(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    size = config.get("mamba_d_head") or config.get("mamba_head_dim")
    return size if isinstance(size, int) else config.get("mamba_expand", 2) * hidden // heads


def _delta_or_lightning(config: Mapping[str, Any], heads: int, size: int) -> StateNumbers:
    nested = config.get("linear_attn_config") or {}
    delta_heads = nested.get("num_heads") or config.get("linear_num_heads")
    if delta_heads is None and not config.get("layer_group_size"):  # MiniMax: one matrix for each head
        return StateNumbers(heads * size * size)
    delta_heads = delta_heads or heads
    width = nested.get("head_dim") or config.get("linear_head_dim") or size
    kernel = nested.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim")
    kernel = kernel or config.get("short_conv_kernel_size", 4)
    return StateNumbers(3 * delta_heads * width * kernel, delta_heads * width * width)
