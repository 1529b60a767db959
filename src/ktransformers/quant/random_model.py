"""A packed directory of the shapes of a released model with random weights, for measurements of speed and memory.

It is a conversion (`quant/convert.py`) whose source is random numbers instead of files. Every matrix is a window of one
pool of normal numbers, so that making them takes less time than quantizing them. The input embedding is scaled up until
it outweighs what layers add: otherwise the hidden states of random layers grow alike, and the tokens of a batch would
share their experts as those of a trained model do not.

A *linked* model has fewer layers of experts on disk than in the model: layer i maps the file of layer i modulo their
number, which is such that the files together are several times as large as the last-level cache. Routers and all dense
weights differ by layer, and so do the experts that a token takes; bytes read for a token are then those of the whole
model, while host memory holds a few layers.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape
from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.packed import MANIFEST_FILE, manifest_document, read_manifest
from ktransformers.checkpoint.sources import LayerSource, PlainTensor
from ktransformers.experts.contract import Contract, expert_modules, read_contract
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, write_json
from ktransformers.modeling.prepare import to_stock_config
from ktransformers.quant.convert import convert
from ktransformers.quant.origin import Origin, OriginLayer, build_meta_model
from ktransformers.quant.plan import ConversionPlan, plan_conversion

POOL_NUMBERS = 4_000_037  # a prime, so that no two rows of a matrix are the same window
CACHES = 8  # last-level caches that the distinct layers of a linked model are as large as
# Keys of a configuration with an entry for each layer.
BY_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "num_attention_heads_per_layer",
    "hybrid_override_pattern",
)
EMBEDDING_SCALE = 32.0


@functools.cache
def _pool() -> Tensor:
    return torch.randn(POOL_NUMBERS, generator=torch.Generator().manual_seed(0))


def fill_from_pool(target: Tensor, pool: Tensor, start: int) -> None:
    """Normal numbers from the pool on, again and again, scaled to products of unit variance."""
    flat, place = target.view(-1), 0
    while place < flat.numel():
        piece = pool[start : start + flat.numel() - place]
        flat[place : place + piece.numel()] = piece
        place, start = place + piece.numel(), 0
    target.mul_(target.shape[-1] ** -0.5)


def random_tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Weights of norms are 1, other vectors 0, matrices normal, by the tensor's name."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if tensor.dim() < 2:
        return tensor.fill_(1.0 if name.endswith("weight") else 0.0)
    fill_from_pool(tensor, _pool(), zlib.crc32(name.encode()) % POOL_NUMBERS)
    return tensor.mul_(EMBEDDING_SCALE * tensor.shape[-1] ** 0.5) if "embed_tokens" in name else tensor


class RandomOrigin(Origin):
    """`folder` has config.json and a tokenizer alone."""

    def __init__(self, folder: Path) -> None:
        self.path, self.experts, self.notes, self.quantisation = folder, None, [], None
        self.config, self._tokenizer = read_json_object(folder / "config.json"), {}
        model = build_meta_model(folder)
        modules = expert_modules(model)
        self.layers = [_random_layer(name, read_contract(name, module)) for name, module in modules.items()]
        parameters = {name: tensor.dtype for name, tensor in model.named_parameters()}
        shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
        self._rest = [
            PlainTensor(name, dtype, tuple(tensor.shape), functools.partial(random_tensor, name, tensor.shape, dtype))
            for name, tensor in model.state_dict().items()
            if name.rpartition(".")[0] not in modules and name not in shared
            for dtype in (torch.bfloat16 if name in parameters else tensor.dtype,)
        ]

    def rest(self) -> list[PlainTensor]:
        return self._rest

    def release(self) -> None:
        pass

    @property
    def paths(self) -> list[Path]:
        return []


def _random_layer(name: str, contract: Contract) -> OriginLayer:
    shape = contract.shape

    def chunks(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
        for expert in range(shape.num_experts) if experts is None else experts:
            tensors: dict[str, Tensor | Encoded] = {
                role: random_tensor(f"{name}.{expert}.{role}", size, torch.bfloat16)
                for role, size in shape.single().items()
            }
            yield ExpertChunk(expert, False, tensors)

    size = 2 * shape.num_experts * sum(rows * columns for rows, columns in shape.matrices().values())
    match = PLACE.fullmatch(name)
    source = LayerSource(dict.fromkeys(shape.matrices(), "bf16"), size, chunks)
    return OriginLayer(name, int(match["layer"]) if match else 0, contract, source)


@dataclass(frozen=True)
class RandomModel:
    directory: Path
    layers: int  # of experts
    distinct: int  # of them on disk; as many as `layers` if the model is not linked


def cut_config(config: Mapping[str, Any], layers: int | None) -> tuple[dict[str, Any], int]:
    """The first so many layers, all by default, and how many there are."""
    text = dict(config.get("text_config") or config)
    total = text.get("num_hidden_layers") or len(text["hybrid_override_pattern"])
    if layers is not None and not 1 <= layers <= total:
        raise InputError("layers", layers, f"1 to {total}")
    text |= {"num_hidden_layers": layers or total} if "num_hidden_layers" in text else {}
    text |= {name: text[name][: layers or total] for name in BY_LAYER if text.get(name)}
    return ({**config, "text_config": text} if config.get("text_config") else text), total


def plan_random(config: Mapping[str, Any], folder: Path, formats: dict[str, str]) -> ConversionPlan:
    """The conversion to all layers. config.json and a tokenizer of bytes are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {**to_stock_config(dict(config)), "dtype": "bfloat16", "eos_token_id": None, "bos_token_id": None}
    words.pop("torch_dtype", None)
    write_json(folder / "config.json", words | {"pad_token_id": None})
    _write_tokenizer(folder)
    plan = plan_conversion(RandomOrigin(folder), formats)
    if not plan.layers:
        raise InputError("layers", "a model without layers of experts", "more layers")
    return plan


def distinct_layers(plan: ConversionPlan) -> int:
    """Layers of a linked model that are on disk."""
    largest = max(layer.packed_bytes for layer in plan.layers)
    return min(len(plan.layers), max(1, -(-CACHES * _core.machine()["l3"] // largest)))


def write_random(plan: ConversionPlan, out: Path, distinct: int) -> RandomModel:
    """Write the model, or find it there. Layers of another shape than the first have files of their own."""
    layers, shapes = plan.layers, dict[ExpertShape, list[str]]()
    source: dict[str, str] = {}  # module -> module whose file it maps
    for layer in layers:
        made = shapes.setdefault(layer.origin.contract.shape, [])
        module = layer.origin.module
        place = sum(layer.origin.contract.shape == other.origin.contract.shape for other in layers[: len(source)])
        if place < distinct:
            made.append(module)
        source[module] = made[place % len(made)]
    kept = [layer for layer in layers if source[layer.origin.module] == layer.origin.module]
    if not (out / MANIFEST_FILE).is_file():
        convert(replace(plan, layers=kept), out)
        if len(kept) < len(layers):
            _link(out, source)
    return RandomModel(out, len(layers), len(kept))


def _link(directory: Path, source: Mapping[str, str]) -> None:
    """Enter all layers into the manifest; those that are linked name the file and the tensors of another."""
    manifest = read_manifest(directory)
    by_module = {layer.module: layer for layer in manifest.layers}
    linked = [by_module[other].model_copy(update={"module": module}) for module, other in source.items()]
    document = manifest_document(manifest.model_copy(update={"layers": linked}))
    config = read_json_object(directory / "config.json")
    config["quantization_config"]["packed"]["sha256"] = document["sha256"]
    write_json(directory / MANIFEST_FILE, document)
    write_json(directory / "config.json", config)


def _write_tokenizer(folder: Path) -> None:
    """256 tokens of a byte each; tokens beyond are no text, which costs a server nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    stock: Any = PreTrainedTokenizerFast
    stock(tokenizer_object=tokenizer).save_pretrained(folder)
