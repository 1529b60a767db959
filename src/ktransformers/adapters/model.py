"""What an adapter has to know of its model, from config.json alone: sizes, which layers have experts, and the two
things that no adapter file tells, the model's family and whether gate and up lie interleaved in its fused tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ktransformers import model_registry
from ktransformers.adapters.names import PROJ, W123, W123_FAMILIES, ExpertNaming, place
from ktransformers.checkpoint import find_experts
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.errors import InputError

INTERLEAVED = {"gpt_oss"}
# Families whose config.json says by the fields read here which layers have experts and which have self_attn. Others
# have fields of their own; for them the checkpoint's index is asked, or nothing is claimed.
PLAIN = {"qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "mixtral", "gpt_oss", "olmoe"}
PLAIN |= {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "dots1", "minimax_m2"}
NO_ATTENTION = ("linear", "mamba", "conv", "recurrent")  # words of layer_types for layers without self_attn


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
    model_type: str
    hidden: int | None
    intermediates: tuple[int, ...]  # what a routed expert's size may be: families read it from one of two fields
    layers: int | None
    experts: int | None
    heads: int | None = None
    kv_heads: int | None = None
    sparse_layers: tuple[int, ...] | None = None  # those with routed experts, None where config.json does not say
    layer_types: tuple[str, ...] = ()

    @property
    def interleaved(self) -> bool:
        return self.model_type in INTERLEAVED

    @property
    def words(self) -> ExpertNaming:
        return W123 if self.model_type in W123_FAMILIES else PROJ

    def attention_layers(self, block: str) -> tuple[int, ...] | None:
        """Layers that have `self_attn` or `linear_attn`; None where that cannot be told."""
        if self.layers is None or self.model_type not in PLAIN or block not in ("self_attn", "linear_attn"):
            return None
        kinds = self.layer_types or ("full_attention",) * self.layers
        plain = [not any(word in kind for word in NO_ATTENTION) for kind in kinds]
        return tuple(i for i, full in enumerate(plain) if full == (block == "self_attn"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> ModelFacts:
        sparse = stored.get("sparse_layers")
        return cls(
            **{
                **stored,
                "intermediates": tuple(stored.get("intermediates", ())),
                "sparse_layers": None if sparse is None else tuple(sparse),
                "layer_types": tuple(stored.get("layer_types", ())),
            }
        )


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """From the parsed config.json; of a model with several parts the text part counts."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    try:
        known = _Config.model_validate(merged)
    except ValidationError as error:
        raise InputError("config.json", str(error.errors()[0]["msg"]), "the configuration of a model") from error
    experts = known.num_experts or known.num_local_experts or known.n_routed_experts or known.moe_num_experts
    wide = [size for size in (known.moe_intermediate_size, known.intermediate_size) if isinstance(size, int)]
    return ModelFacts(
        model_type=known.model_type,
        hidden=known.hidden_size,
        intermediates=tuple(wide),
        layers=known.num_hidden_layers,
        experts=experts,
        heads=known.num_attention_heads,
        kv_heads=known.num_key_value_heads,
        sparse_layers=_sparse(known) if experts else (),
        layer_types=tuple(known.layer_types or ()),
    )


def _sparse(known: _Config) -> tuple[int, ...] | None:
    if known.num_hidden_layers is None or known.model_type not in PLAIN:
        return None
    layers = range(known.num_hidden_layers)
    if known.mlp_layer_types:
        return tuple(i for i in layers if known.mlp_layer_types[i] == "sparse")
    first, step, dense = known.first_k_dense_replace or 0, known.decoder_sparse_step or 1, known.mlp_only_layers or []
    return tuple(i for i in layers if i >= first and i not in dense and (i + 1) % step == 0)


def find_facts(name: str | None) -> ModelFacts | None:
    """Of a local directory, or of a hub name whose config.json is in the cache; None where there is neither."""
    if not name:
        return None
    name = model_registry.resolve(name)
    file: Path | str | None = Path(name) / "config.json"
    if Path(name).is_dir() or name.startswith((".", "/", "~")):
        if not Path(file or "").is_file():
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
    try:
        parsed = json.loads(Path(file).read_text())
    except ValueError as error:
        raise InputError(str(file), f"a file that is not JSON ({error})", "the model's config.json") from error
    facts = facts_of(parsed)
    sparse = _sparse_in_files(Path(file).parent)
    return facts if sparse is None else replace(facts, sparse_layers=sparse)


def _sparse_in_files(directory: Path) -> tuple[int, ...] | None:
    """Layers with experts by the names in the checkpoint's index, which is right for every family."""
    index = directory / INDEX_FILE
    if not index.is_file():
        return None
    try:
        names = list(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        return None  # who reads the weights words that error
    places = [place(tensors.root) for tensors in find_experts(names)]
    return tuple(sorted(layer for outer, layer, _ in places if not outer and layer >= 0)) or None
