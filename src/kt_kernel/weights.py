"""The experts of one layer from a path or from tensors, packed into an `ExpertStore`.

A path may be anything that ktransformers opens: a released directory (bf16, FP8, INT4, MXFP4, ...), GGUF files, a
directory packed by `kt quant`, and the two outputs of kt-kernel's converter. The layer is found by its number whatever
precedes it in the names. Runtime expert i is the checkpoint's expert `order[i]`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kt_kernel.methods import Method, method_for, method_of
from ktransformers.checkpoint import Encoded, ExpertChunk, ExpertShape, encode
from ktransformers.checkpoint.kt_codes import encode_rows, spec_of
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.recode import numbers, single_experts
from ktransformers.checkpoint.sources import LayerSource, Source, open_source
from ktransformers.experts.contract import Contract, new_store
from ktransformers.experts.gate import Gate
from ktransformers.experts.packed import PackedExperts
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.modeling.prepare import open_expert_source, read_checkpoint_facts

Weight = Tensor | Encoded
# Beginnings of formats -> the one in which tensors are encoded: what releases have.
ENCODED_AS = {"fp8": "fp8:128x128", "int4": "int4:32"}


@dataclass(frozen=True)
class LayerPlace:
    """One layer of experts, as the arguments of `KTMoEWrapper` describe it."""

    index: int
    experts: int
    hidden: int
    intermediate: int
    limit: float = 0.0  # swiglu_limit
    alpha: float = 0.0  # swiglu_alpha
    name: str = ""  # of the experts module, if it is known

    @property
    def module(self) -> str:
        return self.name or f"model.layers.{self.index}.mlp.experts"

    def contract(self, transposed: bool = False) -> Contract:
        gate = Gate("swiglu_oai" if self.alpha else "silu", self.limit, self.alpha)
        shape = ExpertShape(self.experts, self.hidden, self.intermediate, transposed=transposed)
        return Contract(shape, False, gate)


@functools.lru_cache(maxsize=2)
def open_experts(path: Path) -> Source | PackedExperts:
    """A model has as many wrappers as layers, and all of them read the same headers."""
    if is_packed(path):
        return PackedExperts(path)
    if path.is_dir() and not (path / "config.json").is_file():  # experts alone, as kt-kernel reads them
        return open_source(path)
    facts = read_checkpoint_facts(path)
    return open_expert_source(facts, None) or open_source(path, facts.rest)


def release_sources() -> None:
    """Close the files that were opened; a later load opens them again."""
    open_experts.cache_clear()


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Experts are read and packed in host memory, whatever the default device is: SGLang builds its models with a GPU
    as the default."""
    with torch.device("cpu"):
        yield


@_on_host()
def load_store(weight_path: str | Path, place: LayerPlace, method: str, order: Tensor | None = None) -> ExpertStore:
    """The layer's experts from files."""
    if not str(weight_path):
        raise InputError("weight_path", "''", "a directory or GGUF file", "or call load_weights_from_tensors")
    path = Path(weight_path).expanduser()
    experts = check_order(order, place.experts)
    source, chosen = open_experts(path), method_of(method)
    if isinstance(source, PackedExperts):
        _check_formats(path, source.check(place.module, place.contract()).formats, chosen, method)
        return source.store(place.module, place.contract(), order=experts)
    contract, layer = read_layer(source, place)
    try:
        if chosen.bits and not chosen.takes(layer.formats):
            return _quantise(contract, layer.chunks(), chosen.bits, experts)
        _check_formats(path, layer.formats, chosen, method)
        return _pack(new_store(contract, formats=layer.formats), contract, layer.chunks(), experts)
    finally:
        source.release()


@_on_host()
def open_layer(weight_path: str | Path, place: LayerPlace) -> LayerSource:
    """The layer in its files, from which single experts can be read in the bytes of the release."""
    source = open_experts(Path(weight_path).expanduser())
    if not isinstance(source, PackedExperts):
        layer = read_layer(source, place)[1]
        if layer.expert is not None:
            return layer
    given = f"{weight_path}, whose files hold no single experts in a released format"
    raise InputError("weight_path", given, "a released directory of safetensors")


@_on_host()
def store_from_tensors(
    gate: Tensor, up: Tensor, down: Tensor, place: LayerPlace, method: str, order: Tensor | None = None
) -> ExpertStore:
    """From gate and up `[E, I, H]` and down `[E, H, I]` in any float dtype, quantised where the method says so."""
    experts, chosen, contract = check_order(order, place.experts), method_of(method), place.contract()
    tensors: dict[str, Weight] = {}
    for role, given in (("gate", gate), ("up", up), ("down", down)):
        shape = (place.experts, *contract.shape.matrices()[role])
        if tuple(given.shape) != shape:
            raise InputError(f"{role}_proj", f"shape {list(given.shape)}", str(list(shape)))
        tensors[role] = given.detach().cpu()
    chunk = ExpertChunk(0, False, tensors)
    if chosen.bits:
        return _quantise(contract, [chunk], chosen.bits, experts)
    target = ENCODED_AS.get(chosen.formats[0], chosen.formats[0]) if chosen.formats else "bf16"
    store = new_store(contract, formats=dict.fromkeys(tensors, target))
    if target == "bf16":
        return _pack(store, contract, [chunk], experts)
    return _pack(store, contract, [chunk], experts, lambda matrix: encode(numbers(matrix), target))


@_on_host()
def store_from_encoded(matrices: Mapping[str, Encoded], place: LayerPlace, order: Tensor | None = None) -> ExpertStore:
    """From gate, up and down of all experts in a quantized format, which is kept."""
    experts, contract = check_order(order, place.experts), place.contract()
    store = new_store(contract, formats={role: matrix.format for role, matrix in matrices.items()})
    return _pack(store, contract, [ExpertChunk(0, False, dict(matrices))], experts)


def check_order(order: Tensor | None, experts: int) -> list[int]:
    """The checkpoint's expert of each runtime expert."""
    if order is None:
        return list(range(experts))
    given: list[int] = order.flatten().tolist()
    if len(given) != experts or not all(0 <= expert < experts for expert in given):
        expected = f"[{experts}] of numbers from 0 to {experts - 1}"
        raise InputError("physical_to_logical_map", f"{list(order.shape)} that begins with {given[:8]}", expected)
    return given


def read_layer(source: Source, place: LayerPlace) -> tuple[Contract, LayerSource]:
    """Fused tensors are output-major or input-major: their shapes tell which."""
    contract = place.contract()
    try:
        return contract, source.layer(place.module, contract.shape)
    except InputError as refused:
        transposed = place.contract(transposed=True)
        try:
            return transposed, source.layer(place.module, transposed.shape)
        except InputError:
            raise refused from None


def _check_formats(path: Path, formats: dict[str, str], method: Method, name: str) -> None:
    if not method.takes(formats):
        given = f"experts in {', '.join(sorted(set(formats.values())))}"
        expected = f"{' or '.join(method.formats)}, for method {name}"
        raise InputError(str(path), given, expected, f"use method {method_for(formats)}")


def _as_it_is(matrix: Weight) -> Weight:
    return matrix


def _pack(
    store: ExpertStore,
    contract: Contract,
    chunks: Iterable[ExpertChunk],
    order: list[int],
    convert: Callable[[Weight], Weight] = _as_it_is,
) -> ExpertStore:
    """Every expert of the chunks at its places in `order`, each matrix `[1, N, K]` through `convert`."""
    places: dict[int, list[int]] = {}
    for runtime, expert in enumerate(order):
        places.setdefault(expert, []).append(runtime)
    with ThreadPoolExecutor(store.threads, "kt-quantise") as workers:
        for chunk in chunks:
            experts = single_experts([chunk], transposed=contract.shape.transposed, interleaved=False)
            wanted = (one for one in experts if one[0] in places)
            # As many at a time as there are threads, so that few experts are in memory twice.
            while some := list(itertools.islice(wanted, store.threads)):
                converted = workers.map(lambda one: {role: convert(matrix) for role, matrix in one[1].items()}, some)
                for (expert, _), matrices in zip(some, converted, strict=True):
                    for runtime in places[expert]:
                        store.pack(**matrices, first_expert=runtime)  # type: ignore[arg-type]  # roles are arguments
    return store


def _quantise(contract: Contract, chunks: Iterable[ExpertChunk], bits: int, order: list[int]) -> ExpertStore:
    """By the rule of kt-kernel's converter for one NUMA node: one scale for each row."""
    formats = {role: spec_of(bits, columns, 1) for role, (_, columns) in contract.shape.matrices().items()}
    store = new_store(contract, formats=formats)
    # Its converter reads bf16, whatever the checkpoint has.
    return _pack(store, contract, chunks, order, lambda matrix: encode_rows(numbers(matrix).bfloat16(), bits))


def generate_gpu_experts_masks(activation_freq: Tensor, num_gpu_experts: int) -> Tensor:
    """Bool `[layers, E]` in host memory, True for the `num_gpu_experts` most frequent experts of all layers together;
    `activation_freq` is a table of numbers `[layers, E]`. Layers may get unequal counts."""
    counts = activation_freq.detach().cpu().flatten()
    kept = min(max(int(num_gpu_experts), 0), counts.numel())
    masks = torch.zeros(counts.numel(), dtype=torch.bool, device="cpu")
    masks[torch.topk(counts, kept).indices] = True
    return masks.view(activation_freq.shape)
