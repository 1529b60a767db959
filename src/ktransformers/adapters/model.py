"""Facts about the base model that an adapter needs, from config.json alone: sizes, which layers have experts, the model
family, and whether gate and up are interleaved in its fused tensors (no adapter file says that).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.adapters.names import PROJ_NAMING, W123_FAMILIES, W123_NAMING, ExpertNaming
from ktransformers.checkpoint import find_experts
from ktransformers.checkpoint.gguf_directory import model_directory
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.checkpoint.model_config import LARGEST, read_model_config
from ktransformers.checkpoint.shards import INDEX_FILE, read_weight_map
from ktransformers.checkpoint.small_model import resolve_model
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists, validate

INTERLEAVED_FAMILIES = {"gpt_oss"}
# Families for which the fields read here decide which layers have experts and which have self_attn. For the others
# the checkpoint's index decides, and without an index the layers are unknown.
PLAIN_FAMILIES = {
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "mixtral", "gpt_oss", "olmoe",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "dots1", "minimax_m2",
}  # fmt: skip
NON_ATTENTION_WORDS = ("linear", "mamba", "conv", "recurrent")  # substrings of layer_types entries without self_attn


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model_type: str
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    moe_num_experts: int | None = None
    moe_intermediate_size: int | list[int] | None = None
    intermediate_size: int | list[int] | None = None
    first_k_dense_replace: int | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: int | None = None
    mlp_layer_types: list[str] | None = None
    layer_types: list[str] | None = None


@dataclass(frozen=True)
class ModelFacts:
    __pydantic_config__ = ConfigDict(extra="forbid")  # of what a manifest holds

    model_type: str
    hidden: int | None = None
    intermediates: tuple[int, ...] = ()  # candidates for the size of a routed expert: families use one of two fields
    layers: Annotated[int | None, Field(ge=0, le=LARGEST["num_hidden_layers"])] = None
    experts: Annotated[int | None, Field(ge=0, le=LARGEST["num_experts"])] = None
    heads: int | None = None
    kv_heads: int | None = None
    sparse_layers: tuple[int, ...] | None = None  # layers with routed experts, None if config.json does not say
    layer_types: tuple[str, ...] = ()

    @property
    def interleaved(self) -> bool:
        return self.model_type in INTERLEAVED_FAMILIES

    @property
    def naming(self) -> ExpertNaming:
        return W123_NAMING if self.model_type in W123_FAMILIES else PROJ_NAMING

    def attention_layers(self, block: str) -> tuple[int, ...] | None:
        """Layers that have `self_attn` or `linear_attn`; None if unknown."""
        if self.layers is None or self.model_type not in PLAIN_FAMILIES or block not in ("self_attn", "linear_attn"):
            return None
        layer_types = self.layer_types or ("full_attention",) * self.layers
        has_self_attn = [not any(word in layer_type for word in NON_ATTENTION_WORDS) for layer_type in layer_types]
        return tuple(i for i, softmax in enumerate(has_self_attn) if softmax == (block == "self_attn"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], where: str) -> ModelFacts:
        """From what `to_json` wrote; `where` names the file and the key."""
        return validate(cls, stored, where)


def facts_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelFacts:
    """Facts from a parsed config.json; a multimodal model's text_config takes precedence."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    parsed = validate(_Config, merged, where)
    experts = parsed.num_experts or parsed.num_local_experts or parsed.n_routed_experts or parsed.moe_num_experts
    intermediates = [size for size in (parsed.moe_intermediate_size, parsed.intermediate_size) if isinstance(size, int)]
    return ModelFacts(
        model_type=parsed.model_type,
        hidden=parsed.hidden_size,
        intermediates=tuple(intermediates),
        layers=parsed.num_hidden_layers,
        experts=experts,
        heads=parsed.num_attention_heads,
        kv_heads=parsed.num_key_value_heads,
        sparse_layers=_sparse_layers(parsed) if experts else (),
        layer_types=tuple(parsed.layer_types or ()),
    )


def _sparse_layers(config: _Config) -> tuple[int, ...] | None:
    if config.num_hidden_layers is None or config.model_type not in PLAIN_FAMILIES:
        return None
    layers = range(config.num_hidden_layers)
    if config.mlp_layer_types:
        return tuple(i for i, kind in zip(layers, config.mlp_layer_types, strict=False) if kind == "sparse")
    first, step = config.first_k_dense_replace or 0, config.decoder_sparse_step or 1
    dense = config.mlp_only_layers or []
    return tuple(i for i in layers if i >= first and i not in dense and (i + 1) % step == 0)


def find_facts(name: str | None) -> ModelFacts | None:
    """Facts of a local directory, or of a hub name whose config.json is in the cache; None if neither exists."""
    if not name:
        return None
    name = str(model_directory(Path(resolve_model(name))))
    file: Path | str | None = Path(name) / "config.json"
    if (path_exists(name) and Path(name).is_dir()) or name.startswith((".", "/", "~")):
        if not path_exists(Path(name) / "config.json"):
            raise InputError(name, "a path without config.json", "the directory of the base model")
    else:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:
            return None
        file = cached if isinstance(cached, str) else None
    if file is None or not Path(file).is_file():
        return None
    facts = facts_from_config(read_model_config(Path(file).parent), str(file))
    sparse = _sparse_layers_in_index(Path(file).parent)
    return facts if sparse is None else replace(facts, sparse_layers=sparse)


def _sparse_layers_in_index(directory: Path) -> tuple[int, ...] | None:
    """Layers with experts according to the tensor names in the checkpoint's index, correct for every family."""
    index = directory / INDEX_FILE
    if not index.is_file():
        return None
    names = list(read_weight_map(index))
    positions = [split_layer_name(tensors.root) for tensors in find_experts(names)]
    return tuple(sorted(layer for outer, layer, _ in positions if not outer and layer >= 0)) or None
