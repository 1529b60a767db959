"""What a plan needs to know of a model: how many numbers lie where, read from config.json and from shard headers.

`ModelShape` splits a model into routed experts (E experts of 3 H I numbers in each of `expert_layers` layers) and the
rest: embedding, head, and what a layer holds besides experts. With a checkpoint beside the config the rest is counted
in its headers, so that any family works; without, by the formulas of grouped-query and latent attention. The surprising
decision: nothing of transformers is asked, so a plan takes no seconds to import.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.errors import InputError

if TYPE_CHECKING:
    from ktransformers.checkpoint import ExpertTensors, Shards

ATTENTION = ("self_attn", "linear_attn", "attn", "attention", "self_attention", "mixer")
WEIGHTS = ("weight", "qweight", "weight_packed")
FLOATS = ("BF16", "F16", "F32", "F64")
# Endings of tensors that lie beside the codes of a matrix.
BESIDE = {
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
}
BESIDE |= {"scale", "scales", "qzeros", "g_idx", "input_scale", "input_global_scale"}
CODES = {"qweight": "gptq", "blocks": "mxfp4", "weight_global_scale": "nvfp4", "weight_packed": "int4"}  # by ending


@dataclass(frozen=True)
class LinearShape:
    """A matrix that LoRA may adapt."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    name: str
    layers: int
    hidden: int  # H
    vocabulary: int
    expert_layers: int
    experts: int  # E, of one layer
    top_k: int
    intermediate: int  # I, of one expert
    gated: bool
    rest_per_layer: int  # numbers of an average layer besides routed experts
    embedding: int  # numbers; the head has as many unless it is tied
    tied: bool
    linears: tuple[LinearShape, ...]  # attention of the whole model, what `lora_target: all` adapts beside the experts
    attention_width: int  # numbers of queries, keys, values and their result, of a token in one layer
    scores_width: int  # heads * (key + value size): what a token costs for each token before it
    mlp_width: int  # intermediate numbers of a token in dense and shared MLPs, of the widest layer
    cache_width: int  # numbers that a token leaves in the KV cache, all layers together
    context: int  # tokens, at most
    rest_dtype_bytes: int = 2
    checkpoint_bytes: int = 0  # on disk; 0: nothing is there
    stored: str = "bf16"  # format of the experts in the release
    published: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)

    @property
    def expert_numbers(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def expert_numbers_total(self) -> int:
        return self.expert_layers * self.experts * self.expert_numbers

    @property
    def head(self) -> int:
        return 0 if self.tied else self.embedding

    @property
    def rest(self) -> int:
        """Numbers of everything but the routed experts."""
        return self.layers * self.rest_per_layer + self.embedding + self.head

    @property
    def numbers(self) -> int:
        return self.expert_numbers_total + self.rest


def shipped() -> dict[str, dict[str, Any]]:
    """Short name -> document, of every model whose shapes are in the package."""
    folder = resources.files("ktransformers.plan") / "models"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".json"): json.loads(entry.read_text()) for entry in files}


def open_shape(model: str) -> ModelShape:
    """A directory with config.json, a hub id whose config is shipped, or a shipped short name."""
    path = Path(model)
    if (path / "config.json").is_file():
        return _of_directory(path)
    if path.is_dir():
        raise InputError("MODEL", f"{model}, a folder without config.json", "a model's folder")
    known = shipped()
    for short, document in known.items():
        names = {short, *(name.lower() for name in document["names"])}
        if model.lower() in names:
            shape = of_config(document["config"], short, stored=document["stored"])
            return replace(shape, published=tuple(document["published"]))
    raise InputError(
        "MODEL", model, "a folder with config.json, or one of " + ", ".join(known), "config.json alone is enough"
    )


def _number(words: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        if words.get(key) is not None:
            return int(words[key])
    if default is None:
        raise InputError("config.json", f"none of {', '.join(keys)}", "the size of a Mixture-of-Experts model")
    return default


def _expert_layers(words: Mapping[str, Any], layers: int) -> int:
    """Qwen's step and exceptions, DeepSeek's first dense layers and frequency, or a list of kinds."""
    kinds = words.get("mlp_layer_types")
    if kinds:
        return sum(kind == "sparse" for kind in kinds)
    exceptions = set(words.get("mlp_only_layers") or ())
    first = _number(words, "first_k_dense_replace", "moe_layer_start_index", default=0)
    step = _number(words, "decoder_sparse_step", default=1)
    every = words.get("moe_layer_freq", 1)
    every = every if isinstance(every, int) and every > 0 else 1
    return sum(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in exceptions
        for layer in range(layers)
    )


@dataclass(frozen=True)
class _Attention:
    linears: tuple[LinearShape, ...]  # of one layer
    norms: int
    width: int
    scores: int
    cache: int


def _attention(words: Mapping[str, Any]) -> _Attention:
    hidden, heads = _number(words, "hidden_size"), _number(words, "num_attention_heads")
    if words.get("kv_lora_rank"):  # latent attention
        latent, rope = _number(words, "kv_lora_rank"), _number(words, "qk_rope_head_dim")
        nope, value = _number(words, "qk_nope_head_dim"), _number(words, "v_head_dim")
        low, queries = words.get("q_lora_rank"), heads * (nope + rope)
        query = (
            (LinearShape(hidden, int(low)), LinearShape(int(low), queries)) if low else (LinearShape(hidden, queries),)
        )
        keys = (LinearShape(hidden, latent + rope), LinearShape(latent, heads * (nope + value)))
        out = LinearShape(heads * value, hidden)
        width = 2 * queries + heads * 2 * value + latent + rope + (int(low) if low else 0)
        norms = latent + (int(low) if low else 0)
        return _Attention((*query, *keys, out), norms, width, heads * (nope + rope + value), latent + rope)
    size = _number(words, "head_dim", default=hidden // heads)
    pairs = _number(words, "num_key_value_heads", default=heads)
    linears = (
        LinearShape(hidden, heads * size),
        LinearShape(hidden, pairs * size),
        LinearShape(hidden, pairs * size),
        LinearShape(heads * size, hidden),
    )
    norms = 2 * size if str(words.get("model_type", "")).startswith(("qwen3", "glm4_moe")) else 0
    return _Attention(linears, norms, 2 * heads * size + 2 * pairs * size, heads * 2 * size, 2 * pairs * size)


def _full_layers(words: Mapping[str, Any], layers: int) -> int:
    """Layers whose cache grows with every token."""
    kinds = words.get("layer_types")
    return sum(kind == "full_attention" for kind in kinds) if kinds else layers


def _dtype_bytes(words: Mapping[str, Any]) -> int:
    return 4 if "float32" in (words.get("dtype"), words.get("torch_dtype")) else 2


def of_config(config: Mapping[str, Any], name: str, *, stored: str = "bf16") -> ModelShape:
    """By formulas alone; the counts are those of transformers' models (tested)."""
    words: Mapping[str, Any] = config.get("text_config") or config
    layers, hidden = _number(words, "num_hidden_layers"), _number(words, "hidden_size")
    experts = _number(words, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    inner = _number(words, "moe_intermediate_size", "intermediate_size")
    sparse = _expert_layers(words, layers)
    attention = _attention(words)
    shared = _number(words, "n_shared_experts", "moe_num_shared_experts", default=0) * inner
    shared += _number(words, "shared_expert_intermediate_size", default=0)
    dense = _number(words, "intermediate_size", default=0) if sparse < layers else 0
    correction = experts if str(words.get("model_type")) in ("deepseek_v3", "kimi_k2", "glm4_moe") else 0
    gate = hidden if words.get("shared_expert_intermediate_size") else 0
    per_layer = sum(linear.inputs * linear.outputs for linear in attention.linears) + attention.norms + 2 * hidden
    rest = layers * per_layer + hidden  # the last norm
    rest += sparse * (experts * hidden + correction + 3 * hidden * shared + gate)
    rest += (layers - sparse) * 3 * hidden * dense
    vocabulary = _number(words, "vocab_size")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        expert_layers=sparse,
        experts=experts,
        top_k=_number(words, "num_experts_per_tok", "moe_k", "moe_topk"),
        intermediate=inner,
        gated=True,
        rest_per_layer=rest // layers,
        embedding=vocabulary * hidden,
        tied=bool(words.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        linears=attention.linears * layers,
        attention_width=attention.width,
        scores_width=attention.scores,
        mlp_width=3 * max(shared, dense),
        cache_width=attention.cache * _full_layers(words, layers),
        context=_number(words, "max_position_embeddings", default=32768),
        rest_dtype_bytes=_dtype_bytes(words),
        stored=stored,
    )


def _of_directory(folder: Path) -> ModelShape:
    from ktransformers.checkpoint.packed import is_packed, read_manifest  # imports torch, which formulas do without

    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise InputError(str(folder / "config.json"), str(error), "a JSON object") from error
    shape = of_config(config, folder.name, stored=_stored(config))
    if not any(folder.glob("*.safetensors")):
        return shape
    shape = replace(shape, **_counted(folder, shape))
    if not is_packed(folder):
        return shape
    # What stands for a parameter there has its name, but bytes in place of its shape.
    layers = read_manifest(folder).layers
    first = layers[0]
    return replace(
        shape,
        expert_layers=len(layers),
        experts=first.experts,
        intermediate=first.intermediate,
        gated=first.gated,
        stored=first.formats["up"].partition(":")[0],
    )


def _stored(config: Mapping[str, Any]) -> str:
    quantisation = config.get("quantization_config") or {}
    if quantisation.get("quant_method") == "kt":  # a prepared directory: what the files have is its source
        quantisation = quantisation.get("source") or {}
    method = quantisation.get("quant_method")
    return {None: "bf16", "fp8": "fp8", "compressed-tensors": "int4", "mxfp4": "mxfp4"}.get(method, str(method))


def _beyond(name: str, layers: int) -> bool:
    """A layer that the model itself does not have: MTP."""
    parts = name.split(".")
    at = parts.index("layers") + 1 if "layers" in parts else len(parts)
    return "mtp" in parts or (at < len(parts) and parts[at].isdigit() and int(parts[at]) >= layers)


def _stood_for(shards: Shards, name: str) -> tuple[int, ...] | None:
    """[N, K] of the matrix whose codes a tensor holds, several to a word; None: scales and the like, beside one."""
    stem, _, ending = name.rpartition(".")
    size = shards.shape(name)
    if ending == "qweight":  # GPTQ: eight to a word, transposed
        return size[1], 8 * size[0]
    dtype = shards.dtype(name)
    if ending == "weight_packed" or (ending == "weight" and dtype == "U8" and len(size) == 2):
        return size[0], size[1] * (8 if dtype == "I32" else 2)
    beside = ending in BESIDE and any(f"{stem}.{word}" in shards for word in ("weight", "qweight", "weight_packed"))
    return None if beside else size


def _experts_of(shards: Shards, tensors: ExpertTensors, shape: ModelShape) -> dict[str, Any]:
    """Sizes and format of one layer. Down has H I numbers for each expert in every layout; where a tensor holds codes
    of fewer bits than a byte, only config.json says how many that are."""
    roles = tensors.fused or tensors.single[min(tensors.single)]
    downs = {
        role.removeprefix("down").removeprefix("_"): name for role, name in roles.items() if role.startswith("down")
    }
    count = len(tensors.single)
    if tensors.fused:
        count = shards.shape(next(iter(downs.values())))[0] if downs else shape.experts
    found: dict[str, Any] = {"experts": count, "gated": any(role.startswith("gate") for role in roles)}
    if "" not in downs:
        kinds = [kind for ending, kind in CODES.items() if ending in downs]
        return found | ({"stored": kinds[0]} if kinds else {})
    inner = math.prod(shards.shape(downs[""])) // shape.hidden // (count if tensors.fused else 1)
    dtype = shards.dtype(downs[""])
    if dtype in FLOATS:
        return found | {"intermediate": inner, "stored": "bf16"}
    if dtype.startswith("F8"):
        return found | {"intermediate": inner, "stored": "mxfp8" if shape.stored == "mxfp8" else "fp8"}
    return found | {"stored": "int8" if inner == shape.intermediate else "mxfp4"}  # two of four bits to a byte


def _counted(folder: Path, shape: ModelShape) -> dict[str, Any]:
    """What the headers say in place of formulas. Layers beyond the model's own count on disk only."""
    from ktransformers.checkpoint import Shards, find_experts

    shards = Shards.of_directory(folder)
    found = find_experts(shards.names)
    expert_names = {
        name
        for tensors in found
        for name in (*tensors.fused.values(), *(name for roles in tensors.single.values() for name in roles.values()))
    }
    own = [tensors for tensors in found if not _beyond(f"{tensors.root}.experts", shape.layers)]
    if not own:
        raise InputError(str(folder), "a checkpoint without routed experts", "a Mixture-of-Experts model")
    rest, linears, embedding = 0, [], 0
    for name in shards.names:
        if name in expert_names or _beyond(name, shape.layers):
            continue
        size = _stood_for(shards, name)
        if size is None:
            continue
        parts = name.split(".")
        if "embed_tokens" in parts:
            embedding = math.prod(size)
        elif "lm_head" not in parts:
            rest += math.prod(size)
            if len(size) == 2 and parts[-1] in WEIGHTS and any(word in parts for word in ATTENTION):
                linears.append(LinearShape(size[1], size[0]))
    counts = _experts_of(shards, own[0], shape) | {"expert_layers": len(own)}
    files = {shards.file(name) for name in shards.names}
    shards.release()
    return counts | {
        "rest_per_layer": rest // shape.layers,
        "embedding": embedding or shape.embedding,
        "tied": "lm_head.weight" not in shards,
        "linears": tuple(linears) or shape.linears,
        "checkpoint_bytes": sum(file.stat().st_size for file in files),
    }
