"""Shape of a model as a plan needs it: how many numbers are where, read from config.json and from shard headers.

`ModelShape` splits a model into routed experts (E experts of 3 H I numbers in each of `expert_layers` layers) and the
rest: embedding, head, and what a layer holds besides experts. With a checkpoint next to the config the rest is counted
in its headers, so that any model family works; without one, by the formulas of grouped-query and latent attention.
transformers is not imported, because that alone would take seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import ONE_PLANE_VARIANTS
from ktransformers.ground.model_registry import TOP_K_KEYS, did_you_mean, known_model, known_names
from ktransformers.plan.attention_shape import BIASED, LinearShape, attention_layers, config_number, index_layers
from ktransformers.plan.formats import bytes_in_format, name_of, planes_of
from ktransformers.plan.layer_kinds import NO_STATES, StateNumbers, layer_types, scan_numbers, state_numbers

if TYPE_CHECKING:
    from ktransformers.checkpoint import ExpertTensors, Shards
    from ktransformers.checkpoint.packed import Manifest

ATTENTION_MODULES = ("self_attn", "linear_attn", "attn", "attention", "self_attention", "mixer")
WEIGHT_ENDINGS = ("weight", "qweight", "weight_packed")
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
GGUF_NUMBERS = ("f32", "f16", "bf16")
# Endings of tensors with scales and the like of a quantised matrix.
SCALE_ENDINGS = {
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
}
SCALE_ENDINGS |= {"scale", "scales", "qzeros", "g_idx", "input_scale", "input_global_scale"}
FORMAT_BY_ENDING = {
    "qweight": "gptq",
    "blocks": "mxfp4",
    "weight_global_scale": "nvfp4",
    "weight_packed": "int4",
}  # by ending

# Methods of releases that quantise linear layers besides the experts too, except router, embedding and head.
QUANTIZED_LINEARS = {"fp8": "fp8:128x128", "gptq": "int4:128:f16"}

SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# Model types whose router adds a number to the score of every expert, or has a bias.
CORRECTED_ROUTERS = (
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v3",
    "minimax_m2",
    *BIASED,
)


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
    linears: tuple[LinearShape, ...]  # attention of all layers, which `lora_target: all` adapts besides the experts
    attention_width: int  # numbers of queries, keys, values and output of a token in one layer
    scores_width: int  # heads * (key + value size): multiplications of a token per earlier token
    mlp_width: int  # intermediate numbers of a token in dense and shared MLPs, of the widest layer
    cache_width: int  # numbers of a token in the KV cache, all layers together, keys and values of latents expanded;
    # layers with a sliding window keep every token too (serve/cache/kv_cache.py)
    context: int  # maximal tokens
    rest_dtype_bytes: int = 2
    checkpoint_bytes: int = 0  # on disk; 0: unknown
    counted: bool = False  # from shard headers, not by formulas
    latent_width: int = 0  # numbers of a token in a KV cache of latents, all layers together; 0: no latent attention
    cache_rows: int = 0  # heads of a token's keys and values in the KV cache, all layers together: scales in fp8
    absorbed_numbers: int = 0  # that multiply queries for latents (serve/attention/latent.py), all layers together
    absorbed_layers: int = 0  # that have such numbers, each as many; a hybrid's other layers have none
    index_width: int = 0  # numbers of a token's keys for indexers, all layers together; 0: keys are not selected
    index_topk: int = 0  # keys that a new token attends to, if an indexer selects them
    window: int = 0  # keys that a new token attends to in layers with a sliding window
    window_width: int = 0  # part of `cache_width` in these layers
    expert_biases: int = 0  # numbers of one expert besides its matrices
    states: StateNumbers = NO_STATES  # convolution and recurrent states of a sequence, all layers together
    scan_width: int = 0  # float32 numbers of a prompt's token while one layer computes its states
    stored: str = "bf16"  # format of the experts in the release
    quantized_weights: int = 0  # of dense linear layers and embeddings that the checkpoint has quantized
    quantized_bytes: int = 0  # of these weights and their scales
    quantized_absorbed: int = 0  # of `absorbed_numbers`: the checkpoint has these projections quantized
    # Of the three before, in formats with two bit planes, which some CPU variants dequantize.
    two_plane_weights: int = 0
    two_plane_bytes: int = 0
    two_plane_absorbed: int = 0
    score_heads: int = 0  # of attention with sinks, whose scores a server on a CPU holds for a block of queries
    mapped_experts: int = 0  # bytes of packed experts on disk, which are mapped and not copied
    mapped_linears: int = 0  # and of packed dense weights
    published: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)

    def kept_on(self, isa: str) -> ModelShape:
        """With the quantized weights that this CPU variant keeps; the others are dense there."""
        if isa not in ONE_PLANE_VARIANTS:
            return self
        return replace(
            self,
            quantized_weights=self.quantized_weights - self.two_plane_weights,
            quantized_bytes=self.quantized_bytes - self.two_plane_bytes,
            quantized_absorbed=self.quantized_absorbed - self.two_plane_absorbed,
            two_plane_weights=0,
            two_plane_bytes=0,
            two_plane_absorbed=0,
        )

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token in the KV cache of `kt serve`, which holds latents."""
        return (self.latent_width or self.cache_width) + self.index_width

    def read_numbers(self, context: float) -> float:
        """Numbers that a new token reads in the KV cache of its `context` tokens."""
        attended = min(context, self.index_topk) if self.index_width else context
        unread = max(0.0, context - self.window) * self.window_width
        return attended * (self.latent_width or self.cache_width) - unread + context * self.index_width

    def cached_bytes(self, number_bytes: int, *, fp8: bool) -> int:
        """Of a token in the KV cache. In fp8 every head of keys and values is bytes and a scale of one byte; keys of
        indexers keep their dtype (serve/cache/cache_codes.py)."""
        if not fp8:
            return self.cached_numbers * number_bytes
        return (self.latent_width or self.cache_width) + self.cache_rows + self.index_width * number_bytes

    def read_bytes(self, context: float, number_bytes: int, *, fp8: bool) -> float:
        """That a new token reads in the KV cache of its `context` tokens."""
        index = context * self.index_width
        keys = self.read_numbers(context) - index
        if not fp8:
            return (keys + index) * number_bytes
        scale_bytes = 1 + self.cache_rows / max(1, self.latent_width or self.cache_width)
        return keys * scale_bytes + index * number_bytes

    @property
    def expert_numbers(self) -> int:
        """Numbers of the matrices of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def expert_numbers_total(self) -> int:
        return self.expert_layers * self.experts * (self.expert_numbers + self.expert_biases)

    @property
    def head(self) -> int:
        return 0 if self.tied else self.embedding

    @property
    def rest(self) -> int:
        """Numbers of everything but the routed experts."""
        return self.layers * self.rest_per_layer + self.embedding + self.head

    @property
    def router_numbers(self) -> int:
        """Of the linear layers that choose experts, which stay as they are."""
        return self.expert_layers * self.experts * self.hidden

    @property
    def numbers(self) -> int:
        return self.expert_numbers_total + self.rest


def shipped_shapes() -> dict[str, dict[str, Any]]:
    """Short name -> document of every model whose shape is in the package."""
    folder = resources.files("ktransformers.plan") / "models"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".json"): json.loads(entry.read_text()) for entry in files}


def open_shape(model: str) -> ModelShape:
    """A directory with config.json, a hub id whose config is shipped, or a shipped short name."""
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        from ktransformers.checkpoint.gguf_directory import model_directory  # imports torch

        return _of_directory(model_directory(path))
    if (path / "config.json").is_file():
        return _of_directory(path)
    if path.is_dir():
        raise InputError("MODEL", f"{model}, a folder without config.json", "a model's folder")
    short, document, stored = known_shape(model)
    shape = shape_from_config(document["config"], short, stored=stored)
    if counted := dict(document.get("counted", {})):  # in transformers' model, where formulas do not know the layers
        rest = counted.pop("rest") - shape.embedding - shape.head
        shape = replace(shape, rest_per_layer=rest // shape.layers, **counted)
    if model.lower() not in {short, *map(str.lower, (*document["names"], *document.get("bf16_names", ())))}:
        return shape  # a later release of the same shape
    size = document.get("checkpoint_bytes", 0) if stored == document["stored"] else 0
    return replace(shape, checkpoint_bytes=size, published=tuple(document["published"]))


def known_shape(model: str) -> tuple[str, dict[str, Any], str]:
    """Short name and document of the shipped shape of a hub id, a short name or an alias, and the format in which its
    experts were released."""
    known = shipped_shapes()
    for short, document in known.items():
        if model.lower() in {short, *map(str.lower, document["names"])}:
            return short, document, document["stored"]
        if model.lower() in map(str.lower, document.get("bf16_names", ())):
            return short, document, "bf16"
    released_as = known_model(model)
    if released_as is not None and released_as.shape is not None:
        return released_as.shape, known[released_as.shape], released_as.format_of(model)
    if released_as is not None:
        raise InputError(
            "MODEL",
            f"{model}, whose shape is not shipped",
            "its config.json",
            f"`kt model download {model}` fetches it",
        )
    hint = did_you_mean(model, (*known, *known_names())) or "config.json alone is enough"
    raise InputError("MODEL", model, "a folder with config.json, or one of " + ", ".join(known), hint)


def _expert_layers(text_config: Mapping[str, Any], layers: int) -> int:
    """By Qwen's step and exceptions, DeepSeek's first dense layers and frequency, or a list of layer types."""
    kinds = text_config.get("mlp_layer_types")
    if kinds:
        return sum(kind != "dense" for kind in kinds)
    exceptions = set(text_config.get("mlp_only_layers") or ())
    first = config_number(text_config, "first_k_dense_replace", "moe_layer_start_index", default=0)
    step = config_number(text_config, "decoder_sparse_step", default=1)
    frequency = text_config.get("moe_layer_freq", 1)
    frequency = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return sum(
        layer >= first and layer % frequency == 0 and (layer + 1) % step == 0 and layer not in exceptions
        for layer in range(layers)
    )


def _dtype_bytes(text_config: Mapping[str, Any]) -> int:
    return 4 if "float32" in (text_config.get("dtype"), text_config.get("torch_dtype")) else 2


def stored_as(shape: ModelShape, spec: str | None) -> ModelShape:
    """The shape with experts in another format; None: as released."""
    return shape if spec is None else replace(shape, stored=spec.partition(":")[0], mapped_experts=0)


def shape_from_config(config: Mapping[str, Any], name: str, *, stored: str = "bf16") -> ModelShape:
    """The shape by formulas alone; a test compares the counts with transformers' models."""
    text_config: Mapping[str, Any] = config.get("text_config") or config
    named = len(layer_types(text_config, 0)) or None
    layers = config_number(text_config, "num_hidden_layers", default=named)
    hidden = config_number(text_config, "hidden_size")
    experts = config_number(text_config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    inner = config_number(text_config, "moe_intermediate_size", "intermediate_size")
    sparse = _expert_layers(text_config, layers)
    attention = attention_layers(text_config, layers)
    shared = config_number(text_config, *SHARED_KEYS, default=0) * inner
    shared += config_number(text_config, "shared_expert_intermediate_size", default=0)
    if text_config.get("enable_moe_block"):  # gemma4 adds its experts to a dense MLP
        shared += config_number(text_config, "intermediate_size")
    dense = config_number(text_config, "intermediate_size", default=0) if sparse < layers else 0
    correction = experts if str(text_config.get("model_type")) in CORRECTED_ROUTERS else 0
    gate = hidden if text_config.get("shared_expert_intermediate_size") else 0
    rest = sum(layer.numbers for layer in attention) + 2 * layers * hidden + hidden  # the last norm
    index, indexers = attention[0].index, index_layers(text_config, layers)
    if index:  # projections, and the norm of the key
        numbers = sum(linear.inputs * linear.outputs for linear in index) + 2 * index[1].outputs
        rest += indexers * numbers
    rest += sparse * (experts * hidden + correction + 3 * hidden * shared + gate)
    rest += (layers - sparse) * 3 * hidden * dense
    linears = sum(linear.inputs * linear.outputs for layer in attention for linear in layer.linears)
    coded = linears + 3 * hidden * (sparse * shared + (layers - sparse) * dense) if stored in QUANTIZED_LINEARS else 0
    absorbed = sum(layer.absorbed for layer in attention)
    vocabulary, window = config_number(text_config, "vocab_size"), text_config.get("sliding_window")
    window = window if type(window) is int else 0
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        expert_layers=sparse,
        experts=experts,
        top_k=config_number(text_config, *TOP_K_KEYS),
        intermediate=inner,
        gated=True,
        rest_per_layer=rest // layers,
        embedding=vocabulary * hidden,
        tied=bool(text_config.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        linears=tuple(linear for layer in attention for linear in layer.linears),
        attention_width=max(layer.width for layer in attention),
        scores_width=max(layer.scores for layer in attention),
        mlp_width=3 * max(shared, dense),
        cache_width=sum(layer.cache for layer in attention),
        latent_width=sum(layer.latent for layer in attention),
        cache_rows=sum(layer.cache_rows for layer in attention),
        absorbed_numbers=absorbed,
        absorbed_layers=sum(layer.absorbed > 0 for layer in attention),
        context=config_number(text_config, "max_position_embeddings", default=32768),
        rest_dtype_bytes=_dtype_bytes(text_config),
        stored=stored,
        quantized_weights=coded,
        quantized_bytes=round(coded * bytes_in_format(QUANTIZED_LINEARS[stored])) if coded else 0,
        quantized_absorbed=absorbed if coded else 0,
        index_width=index[1].outputs * indexers if index else 0,
        index_topk=config_number(text_config, "index_topk", default=0),
        window=window,
        window_width=sum(layer.cache for layer in attention if layer.windowed and window),
        score_heads=config_number(text_config, "num_attention_heads") if text_config.get("model_type") in BIASED else 0,
        expert_biases=2 * inner + hidden if str(text_config.get("model_type")) in BIASED else 0,
        states=state_numbers(text_config, layers),
        scan_width=scan_numbers(text_config, layers),
    )


def _of_directory(folder: Path) -> ModelShape:
    # These import torch, which formulas do without.
    from ktransformers.checkpoint.gguf_directory import is_gguf_directory
    from ktransformers.checkpoint.model_config import read_model_config
    from ktransformers.checkpoint.packed import is_packed, read_manifest

    config = read_model_config(folder)
    shape = shape_from_config(config, folder.name, stored=_stored(config))
    if is_gguf_directory(folder):
        return replace(shape, **_counted_gguf(folder, shape))
    if not any(folder.glob("*.safetensors")):
        return shape
    manifest = read_manifest(folder) if is_packed(folder) else None
    shape = replace(shape, **_counted(folder, shape, manifest))
    if manifest is None:
        return shape
    # Packed tensors have the names of parameters, but byte counts as shapes.
    first = manifest.layers[0]
    return replace(
        shape,
        expert_layers=len(manifest.layers),
        experts=first.experts,
        intermediate=first.intermediate,
        gated=first.gated,
        stored=name_of(first.formats["up"]),
        mapped_experts=sum({layer.file: sum(layer.bytes.values()) for layer in manifest.layers}.values()),
        mapped_linears=sum(linear.bytes for linear in manifest.linears),
    )


def _counted_gguf(folder: Path, shape: ModelShape) -> dict[str, Any]:
    """Size on disk and type of the experts from the headers; types may differ between matrices, `up` stands for all."""
    from ktransformers.checkpoint.sources.gguf import gguf_files
    from ktransformers.checkpoint.sources.gguf_header import read_header

    files = gguf_files(folder)
    tensors = [tensor for file in files for tensor in read_header(file).tensors]
    kinds = [tensor.kind for tensor in tensors if "ffn_up_exps" in tensor.name]
    stored = {} if not kinds else {"stored": "bf16" if kinds[0] in GGUF_NUMBERS else kinds[0]}
    quantized = _QuantizedSums(shape)
    for tensor in tensors:
        if len(tensor.shape) == 2 and tensor.kind not in GGUF_NUMBERS and "_exps" not in tensor.name:
            numbers = math.prod(tensor.shape)
            quantized.add(
                numbers,
                numbers * bytes_in_format(tensor.kind),
                projects_latents="attn_kv_b" in tensor.name,  # in two tensors (attn_k_b, attn_v_b) it is decoded
                two_planes=planes_of(tensor.kind) > 1,
            )
    return {"checkpoint_bytes": sum(file.stat().st_size for file in files), **stored, **quantized.fields()}


class _QuantizedSums:
    """Sums over the quantized dense weights of a checkpoint, and over those in formats with two bit planes."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._sums = {"quantized": (0, 0.0, 0), "two_plane": (0, 0.0, 0)}  # numbers, bytes, projections of latents

    def add(self, numbers: int, size: float, *, projects_latents: bool, two_planes: bool) -> None:
        for kind in ("quantized", "two_plane") if two_planes else ("quantized",):
            before = self._sums[kind]
            self._sums[kind] = before[0] + numbers, before[1] + size, before[2] + projects_latents

    def fields(self) -> dict[str, int]:
        """Of a `ModelShape`."""
        shape, fields = self._shape, dict[str, int]()
        for kind, (numbers, size, projections) in self._sums.items():
            layers = min(projections, shape.absorbed_layers)
            absorbed = shape.absorbed_numbers * layers // max(1, shape.absorbed_layers)
            fields |= {f"{kind}_weights": numbers, f"{kind}_bytes": round(size), f"{kind}_absorbed": absorbed}
        return fields


def _stored(config: Mapping[str, Any]) -> str:
    quantisation = config.get("quantization_config") or {}
    if quantisation.get("quant_method") == "kt":  # a directory prepared by kt: the files have the source's format
        quantisation = quantisation.get("source") or {}
    method = quantisation.get("quant_method")
    return {None: "bf16", "fp8": "fp8", "compressed-tensors": "int4", "mxfp4": "mxfp4"}.get(method, str(method))


def _is_extra_layer(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer beyond the model's own: multi-token prediction."""
    parts = name.split(".")
    at = parts.index("layers") + 1 if "layers" in parts else len(parts)
    return "mtp" in parts or (at < len(parts) and parts[at].isdigit() and int(parts[at]) >= layers)


def _matrix_shape(shards: Shards, name: str) -> tuple[int, ...] | None:
    """[N, K] of the matrix that a packed tensor holds. None for scales and the like of another tensor."""
    stem, _, ending = name.rpartition(".")
    size = shards.shape(name)
    if ending == "qweight":
        return _qweight_shape(shards, stem)
    dtype = shards.dtype(name)
    if ending == "weight_packed" or (ending == "weight" and dtype == "U8" and len(size) == 2):
        return size[0], size[1] * (8 if dtype == "I32" else 2)
    is_scale = ending in SCALE_ENDINGS and any(
        f"{stem}.{word}" in shards for word in ("weight", "qweight", "weight_packed")
    )
    return None if is_scale else size


def _quantized_bytes_of(shards: Shards, name: str) -> float:
    """Bytes of a weight of a quantized tensor with its share of the scales; 0 for a dense tensor."""
    ending, dtype = name.rpartition(".")[2], shards.dtype(name)
    if ending == "qweight":
        return _qweight_bits(shards, name.rpartition(".")[0]) / 8 + 3 / 128
    if ending == "weight_packed" or (ending == "weight" and dtype == "U8"):
        return bytes_in_format("int4:32")
    if ending == "weight" and (dtype.startswith("F8") or dtype == "I8"):
        return bytes_in_format("fp8:128x128")
    return 0.0


def _qweight_bits(shards: Shards, stem: str) -> int:
    """Bits of a code: `qzeros` has one for each scale, in words of 32 bits."""
    scales, zeros = f"{stem}.scales", f"{stem}.qzeros"
    if scales not in shards or zeros not in shards:
        return 4
    return 32 * shards.shape(zeros)[1] // shards.shape(scales)[1]


def _qweight_shape(shards: Shards, stem: str) -> tuple[int, int]:
    """[N, K] of a transposed matrix with several values in a word: GPTQ `[K / values in a word, N]`, AWQ `[K, N /
    values in a word]`; scales are `[groups, N]`."""
    first, second = shards.shape(f"{stem}.qweight")
    outputs = shards.shape(f"{stem}.scales")[1] if f"{stem}.scales" in shards else second
    return (second, first * 32 // _qweight_bits(shards, stem)) if outputs == second else (outputs, first)


def _experts_of(shards: Shards, tensors: ExpertTensors, shape: ModelShape) -> dict[str, Any]:
    """Sizes and format of one layer's experts. Down has H I numbers per expert in every layout; for formats of fewer
    bits than a byte only config.json says how many numbers there are."""
    roles = tensors.fused or tensors.single[min(tensors.single)]
    downs = {
        role.removeprefix("down").removeprefix("_"): name for role, name in roles.items() if role.startswith("down")
    }
    count = len(tensors.single)
    if tensors.fused:
        count = shards.shape(next(iter(downs.values())))[0] if downs else shape.experts
    facts: dict[str, Any] = {"experts": count, "gated": any(role.startswith("gate") for role in roles)}
    if "" not in downs:
        if "qweight" in downs and _qweight_bits(shards, downs["qweight"].rpartition(".")[0]) == 8:
            return facts | {"stored": "int8"}
        kinds = [kind for ending, kind in FORMAT_BY_ENDING.items() if ending in downs]
        return facts | ({"stored": kinds[0]} if kinds else {})
    inner = math.prod(shards.shape(downs[""])) // shape.hidden // (count if tensors.fused else 1)
    dtype = shards.dtype(downs[""])
    if dtype in FLOAT_DTYPES:
        return facts | {"intermediate": inner, "stored": "bf16"}
    if dtype.startswith("F8"):
        return facts | {"intermediate": inner, "stored": "mxfp8" if shape.stored == "mxfp8" else "fp8"}
    return facts | {"stored": "int8" if inner == shape.intermediate else "mxfp4"}  # two 4-bit values per byte


def _rest_matrices(
    shards: Shards, experts: set[str], manifest: Manifest | None
) -> Iterator[tuple[str, tuple[int, ...], float, bool]]:
    """Name and shape of what is not an expert, bytes of a quantized weight (0: dense) and whether it has two bit
    planes. Headers of packed files have byte counts as shapes; the manifest of the directory has the sizes of its
    linear layers."""
    linears, layers = ([], []) if manifest is None else (manifest.linears, manifest.layers)
    packed_files = {layer.file for layer in layers} | {linear.file for linear in linears}
    for name in shards.names:
        size = None if name in experts or shards.file(name).name in packed_files else _matrix_shape(shards, name)
        if size is not None:
            yield name, size, math.prod(size) * _quantized_bytes_of(shards, name) if len(size) == 2 else 0.0, False
    for linear in linears:
        yield linear.name, (linear.rows, linear.columns), linear.bytes, planes_of(linear.format) > 1


def _counted(folder: Path, shape: ModelShape, manifest: Manifest | None) -> dict[str, Any]:
    """Counts from the shard headers instead of formulas. Layers beyond the model's own count on disk only."""
    from ktransformers.checkpoint import Shards, find_experts

    shards = Shards.of_directory(folder)
    expert_tensors = find_experts(shards.names)
    expert_names = {
        name
        for tensors in expert_tensors
        for name in (*tensors.fused.values(), *(name for roles in tensors.single.values() for name in roles.values()))
    }
    own = [tensors for tensors in expert_tensors if not _is_extra_layer(f"{tensors.root}.experts", shape.layers)]
    if not own:
        raise InputError(str(folder), "a checkpoint without routed experts", "a Mixture-of-Experts model")
    rest, linears, embedding, tied, quantized = 0, [], 0, True, _QuantizedSums(shape)
    for name, size, code_bytes, two_planes in _rest_matrices(shards, expert_names, manifest):
        if _is_extra_layer(name, shape.layers):
            continue
        parts = name.split(".")
        if code_bytes:
            quantized.add(math.prod(size), code_bytes, projects_latents="kv_b_proj" in parts, two_planes=two_planes)
        if "embed_tokens" in parts:
            embedding = math.prod(size)
        elif "lm_head" in parts:
            tied = False
        else:
            rest += math.prod(size)
            adapted = len(size) == 2 and parts[-1] in WEIGHT_ENDINGS and "indexer" not in parts
            if adapted and any(word in parts for word in ATTENTION_MODULES):
                linears.append(LinearShape(size[1], size[0]))
    counts = _experts_of(shards, own[0], shape) | {"expert_layers": len(own)}
    files = {shards.file(name) for name in shards.names}
    shards.release()
    return counts | {
        "rest_per_layer": rest // shape.layers,
        "embedding": embedding or shape.embedding,
        "tied": tied,
        "linears": tuple(linears) or shape.linears,
        **quantized.fields(),
        "checkpoint_bytes": sum(file.stat().st_size for file in files),
        "counted": True,
    }
