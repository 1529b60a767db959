"""config.json from the keys of a GGUF file, for the families where these say enough.

Numbers that GGUF keeps in float32 are rounded to the seven digits that they were written with. What a file does not say
and the model needs (scaled RoPE of an unknown kind, DeepSeek-V3's groups of experts in older files) is asked for in the
form of the model's own config.json in the file's directory, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ktransformers.checkpoint.model_config import check_model_config
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short

LARGEST_SIZE = 1 << 40
BESIDE = "put the model's config.json into the directory of the file"


class Keys:
    """Keys under the architecture's name."""

    def __init__(self, path: str, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path, self.fields, self.shapes = path, fields, shapes
        self.architecture = str(fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InputError(self.path, f"no {self.architecture}.{key} in it", "what the model needs", BESIDE)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, rounded to the seven digits that float32 holds."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"{self.path}: {self.architecture}.{key}", short(value), "a number")
        return float(f"{value:.7g}")

    def size(self, key: str, default: int | None = None, smallest: int = 1) -> int:
        """An integer from `smallest` to LARGEST_SIZE; without a default the key has to be there."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= LARGEST_SIZE:
            expected = f"an integer from {smallest} to {LARGEST_SIZE}"
            raise InputError(f"{self.path}: {self.architecture}.{key}", short(value), expected)
        return value

    def rows(self, leaf: str) -> int:
        """Of the first layer that has this tensor."""
        for name, shape in self.shapes.items():
            if name.startswith("blk.") and name.endswith(f".{leaf}.weight"):
                if len(shape) < 2:
                    raise InputError(f"{self.path}: {name}", f"shape {list(shape)}", "a matrix")
                return shape[-2]
        raise InputError(self.path, f"no {leaf} in it", "a Mixture of Experts", BESIDE)


def config_of(path: str, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    keys = Keys(path, fields, shapes)
    family = _FAMILIES.get(keys.architecture)
    if family is None:
        raise InputError(path, f"architecture {keys.architecture!r}", "one of " + ", ".join(_FAMILIES), BESIDE)
    if "rope_freqs.weight" in shapes:
        raise InputError(path, "frequency factors of RoPE (rope_freqs.weight)", "plain RoPE", BESIDE)
    words = decoder_config(keys) | {"num_experts_per_tok": keys.size("expert_used_count"), "dtype": "bfloat16"}
    config = words | family(keys, words)
    check_model_config(config, path)
    return config


def decoder_config(keys: Keys) -> dict[str, Any]:
    """What every family has, dense or not."""
    shapes = keys.shapes
    if "token_embd.weight" not in shapes:
        raise InputError(keys.path, "no token_embd.weight in it", "all tensors of the model")
    heads = keys.size("attention.head_count")
    layers = _count_layers(keys)
    hidden = keys.size("embedding_length")
    words: dict[str, Any] = {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "hidden_act": "silu",
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = keys.fields.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            raise InputError(f"{keys.path}: tokenizer.ggml.{name}_token_id", short(token), "the number of a token")
        words[f"{key}_token_id"] = token
    return words


def _count_layers(keys: Keys) -> int:
    """Layers of the model itself. A wrong count would have stock transformers build modules without end, so it has to
    be that of the layers in the file."""
    layers, extra = keys.size("block_count"), keys.size("nextn_predict_layers", 0, 0)
    present = {name.split(".", 2)[1] for name in keys.shapes if name.startswith("blk.") and name.count(".") > 1}
    if len(present) != layers or not all(number.isdecimal() and int(number) < layers for number in present):
        given = f"{layers}, and tensors of {len(present)} layers"
        raise InputError(f"{keys.path}: {keys.architecture}.block_count", given, "the number of layers in the file")
    if extra >= layers:
        raise InputError(f"{keys.path}: {keys.architecture}.nextn_predict_layers", extra, f"fewer than {layers}")
    return layers - extra


def _experts(keys: Keys) -> int:
    return keys.size("expert_count")


def _plain_rope(keys: Keys) -> None:
    kind = keys.get("rope.scaling.type", "none")
    if kind != "none":
        raise InputError(keys.path, f"RoPE scaled by {kind!r}", "plain RoPE", BESIDE)


def head_size(keys: Keys, words: Mapping[str, Any]) -> int:
    return keys.size("attention.key_length", words["hidden_size"] // words["num_attention_heads"])


def _mixtral(keys: Keys, words: Mapping[str, Any]) -> dict[str, Any]:
    _plain_rope(keys)
    return {
        "model_type": "mixtral",
        "head_dim": head_size(keys, words),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_local_experts": _experts(keys),
        "sliding_window": None,
    }


def _qwen2(keys: Keys, words: Mapping[str, Any]) -> dict[str, Any]:
    _plain_rope(keys)
    return {
        "model_type": "qwen2_moe",
        "head_dim": head_size(keys, words),
        "intermediate_size": keys.size("feed_forward_length", 0, 0) or keys.rows("ffn_gate_exps"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length", 0, 0) or keys.rows("ffn_gate_exps"),
        "shared_expert_intermediate_size": keys.rows("ffn_gate_shexp"),
        "num_experts": _experts(keys),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }


def _qwen3(keys: Keys, words: Mapping[str, Any]) -> dict[str, Any]:
    _plain_rope(keys)
    inner = keys.size("expert_feed_forward_length", 0, 0) or keys.rows("ffn_gate_exps")
    return {
        "model_type": "qwen3_moe",
        "head_dim": head_size(keys, words),
        "intermediate_size": keys.size("feed_forward_length", 0, 0) or inner,
        "moe_intermediate_size": inner,
        "num_experts": _experts(keys),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek(keys: Keys, words: Mapping[str, Any]) -> dict[str, Any]:
    rope = keys.size("rope.dimension_count")
    third = keys.size("expert_gating_func", 1) == 2  # sigmoid
    groups = keys.get("expert_group_count")
    if third and groups is None:
        raise InputError(keys.path, "no deepseek2.expert_group_count in it", "groups of experts", BESIDE)
    groups = keys.size("expert_group_count", 1, 0) or 1
    key_length = keys.size("attention.key_length_mla", 0, 0) or keys.size("attention.key_length")
    config = {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": words["num_attention_heads"],
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key_length - rope,
        "v_head_dim": keys.size("attention.value_length_mla", 0, 0) or keys.size("attention.value_length"),
        "q_lora_rank": keys.size("attention.q_lora_rank", 0, 0) or None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "intermediate_size": keys.size("feed_forward_length"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_routed_experts": _experts(keys),
        "n_shared_experts": keys.size("expert_shared_count"),
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0, 0),
        "routed_scaling_factor": keys.number("expert_weights_scale") if keys.get("expert_weights_scale") else 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": keys.size("expert_group_used_count", 1, 0),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }
    if keys.get("rope.scaling.type", "none") == "none":
        return config
    if keys.get("rope.scaling.type") != "yarn":
        _plain_rope(keys)
    scale = float(f"{keys.number('rope.scaling.yarn_log_multiplier', 0.1) * 10:.6g}")
    return config | {
        "rope_scaling": {
            "type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": scale,
            "mscale_all_dim": scale,
        }
    }


_FAMILIES: dict[str, Callable[[Keys, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _mixtral,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen3,
    "deepseek2": _deepseek,
}
