"""config.json of a model, read once for all: a JSON object whose sizes a model can have.

Stock transformers builds what the file says. A count of layers or experts that was mistyped, or damaged by one byte,
makes it build modules until memory ends, and a text where a number belongs is a traceback from the middle of a layer.
So every size is checked before a library sees it, in the object itself and in the configurations nested in it. What a
family leaves out or writes as null stays so; keys that are not in these tables are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, short

# Key -> the largest value. The smallest is 1, and 0 for counts that may be absent.
LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 65_536),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), 1 << 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "vocab_size", "head_dim", "v_head_dim"), 1 << 28),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank", "kv_lora_rank"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 65_536),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "num_shared_experts"), 65_536),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_nextn_predict_layers"), 65_536),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "sliding_window", "max_position_embeddings"), 1 << 40),
}
MAY_BE_ZERO = {
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size", "intermediate_size", "qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank",
    "kv_lora_rank", "v_head_dim", "num_experts_per_tok", "n_shared_experts", "num_shared_experts",
    "n_group", "topk_group", "first_k_dense_replace", "num_nextn_predict_layers", "sliding_window", "moe_layer_freq",
}  # fmt: skip
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
ROPE_KEYS = ("rope_parameters", "rope_scaling")
ROPE_WORDS = ("rope_type", "type", "mrope_interleaved", "interleaved", "truncate", "finetuned")  # no numbers
LISTS = {"layer_types": str, "mlp_layer_types": str, "mlp_only_layers": int}
MAX_NESTED = 8


def read_model_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory, checked."""
    file = Path(directory) / "config.json"
    config = read_json_object(file, "the model's config.json, a JSON object", remedy="download it again")
    check_model_config(config, str(file))
    return config


def check_model_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that no model has; `where` names the file."""
    for path, section in _sections(config, "", 0):
        for key in LARGEST.keys() & section.keys():
            optional = key in MAY_BE_ZERO or path not in ("", "text_config.")
            optional |= key == "head_dim" and section.get("qk_rope_head_dim") == 0  # the same number in MLA
            _check_size(f"{where}: {path}{key}", section[key], 0 if optional else 1, LARGEST[key])
        for key, kind in LISTS.items():
            values = section.get(key)
            if values is not None and not (isinstance(values, list) and all(type(value) is kind for value in values)):
                raise InputError(f"{where}: {path}{key}", short(values), f"a list of {kind.__name__}")
        _check_chosen_experts(f"{where}: {path}", section)
        for key in ROPE_KEYS:
            _check_rope(f"{where}: {path}{key}", section.get(key))
    for key, kind, expected in (
        ("model_type", str, "the name of a model family"),
        ("quantization_config", dict, "an object"),
        ("text_config", dict, "an object"),
    ):
        if config.get(key) is not None and not isinstance(config[key], kind):
            raise InputError(f"{where}: {key}", short(config[key]), expected)
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None and not isinstance(method, str):
        raise InputError(f"{where}: quantization_config.quant_method", short(method), "the name of a method")


def _sections(config: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("config") and depth < MAX_NESTED:
            yield from _sections(value, f"{path}{key}.", depth + 1)


def _check_chosen_experts(where: str, section: Mapping[str, Any]) -> None:
    counts = [count for key in EXPERT_COUNTS if isinstance(count := section.get(key), int) and count > 0]
    for key in CHOSEN_EXPERTS:
        chosen = section.get(key)
        if counts and isinstance(chosen, int) and chosen > max(counts):
            raise InputError(f"{where}{key}", chosen, f"at most {max(counts)}, the experts of a layer")


def _check_rope(where: str, parameters: Any) -> None:
    """Numbers and lists of numbers; some families have an object for each type of layer."""
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        if isinstance(value, dict):
            _check_rope(f"{where}.{key}", value)
        elif key not in ROPE_WORDS:
            for number in value if isinstance(value, list) else [value]:
                if not isinstance(number, int | float | None):
                    raise InputError(f"{where}.{key}", short(value), "a number, or a list of numbers")


def _check_size(where: str, value: Any, smallest: int, largest: int) -> None:
    values = value if isinstance(value, list) else [value]  # a value for each layer, or for each group of experts
    for number in values:
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not smallest <= number <= largest:
            raise InputError(where, short(number), f"an integer from {smallest} to {largest}")
