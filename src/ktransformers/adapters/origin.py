"""A checkpoint with an adapter merged into it, as a source for `quant/convert.py`, which writes a packed directory.

Layers yield one expert at a time, `[1, N, K]` in float32 with the delta W + scaling * B A added, or unchanged if the
layer has no LoRA. Of the other tensors those that the adapter names are merged when they are read. The base may be
anything that `kt quant` reads, or a packed directory, whose experts are then decoded. Nothing is rounded here: the
encoder rounds once, from the float32 sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ktransformers.adapters.fold import find_tensor, index_tensors
from ktransformers.adapters.lora import Adapter, Experts, Extra, Module
from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.checkpoint.packed import is_packed, read_manifest, read_packed_section
from ktransformers.checkpoint.recode import Weight, numbers
from ktransformers.checkpoint.sources import LayerSource, PlainTensor, open_source
from ktransformers.experts.contract import Contract, expert_modules, read_contract
from ktransformers.experts.lora import LoraPair
from ktransformers.experts.packed import PackedExperts
from ktransformers.ground.errors import InputError
from ktransformers.modeling.prepare import read_config, split_quantisation, to_stock_config
from ktransformers.quant.origin import Origin, OriginLayer, build_meta_model

TILE_ROWS = 16  # rows of a packed tile


def open_origin(model: Path) -> Origin:
    return PackedOrigin(model) if is_packed(model) else Origin(model)


class PackedOrigin(Origin):
    """A packed directory, decoded expert by expert."""

    def __init__(self, path: Path) -> None:
        self.path, self.experts, self.notes = path, None, []
        self._packed = PackedExperts(path)
        self._manifest = read_manifest(path)
        config, _ = split_quantisation(read_config(path))
        self.config = to_stock_config(config)
        self.quantisation = read_packed_section(path).get("source")
        self._plain = open_source(path)
        modules = expert_modules(build_meta_model(path))
        self.layers = [self._packed_layer(name, read_contract(name, module)) for name, module in modules.items()]

    def _packed_layer(self, name: str, contract: Contract) -> OriginLayer:
        packed = self._packed.check(name, contract)

        def chunks(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
            store = self._packed.store(name, contract)
            vectors = store.biases()
            for expert in range(packed.experts) if experts is None else experts:
                matrices: dict[str, Weight] = {role: store.decode(role, expert)[None] for role in packed.formats}
                yield ExpertChunk(expert, False, matrices | _biases(vectors, expert, contract))

        tensors = LayerSource(packed.formats, sum(packed.bytes.values()), chunks)
        return OriginLayer(name, split_layer_name(name)[1], contract, tensors)

    def rest(self) -> list[PlainTensor]:
        packed = set(self._packed.tensors)
        return [tensor for tensor in self._plain.rest() if tensor.name not in packed]

    def write_small_files(self, target: Path) -> None:
        from ktransformers.checkpoint.rest import copy_small_files

        copy_small_files(self.path, target)

    def release(self) -> None:
        self._plain.release()

    @property
    def paths(self) -> list[Path]:
        return [self.path / name for name in self._manifest.shards]


def _biases(vectors: dict[str, Tensor], expert: int, contract: Contract) -> dict[str, Weight]:
    """gate, up and down `[1, N]` from the store's padded row per expert, in which blocks of 16 values of gate and up
    alternate."""
    shape, biases = contract.shape, dict[str, Weight]()
    rows = {role: vector.reshape(shape.num_experts, -1)[expert] for role, vector in vectors.items()}
    if "down_bias" in rows:
        biases["down_bias"] = rows["down_bias"][None, : shape.hidden]
    if "gate_up_bias" in rows and shape.gated:
        gate, up = rows["gate_up_bias"].reshape(-1, 2, TILE_ROWS).unbind(1)
        biases["gate_bias"] = gate.reshape(1, -1)[:, : shape.intermediate]
        biases["up_bias"] = up.reshape(1, -1)[:, : shape.intermediate]
    elif "gate_up_bias" in rows:
        biases["up_bias"] = rows["gate_up_bias"][None, : shape.intermediate]
    return biases


@dataclass(frozen=True)
class FoldedLayer(OriginLayer):
    """A layer whose experts get the LoRA delta added, or a plain layer if `lora` is None."""

    lora: Experts | None = None

    def experts(self) -> Iterator[tuple[int, dict[str, Weight]]]:
        if self.lora is None:
            yield from super().experts()
            return
        pairs = self.lora.read()
        for expert, weights in super().experts():
            yield expert, weights | {role: _add_delta(weights[role], pair, expert) for role, pair in pairs.items()}


def _add_delta(matrix: Weight, pair: LoraPair, expert: int) -> Tensor:
    delta = (pair.b[expert].float() @ pair.a[expert].float()).mul_(pair.scaling)
    return delta.add_(numbers(matrix)[0])[None]


class FoldedOrigin(Origin):
    """`base` with the adapter merged; every pair of the adapter must match exactly one tensor."""

    def __init__(self, base: Origin, adapter: Adapter, files: Sequence[Path]) -> None:
        self._base, self._files = base, list(files)
        self.path, self.experts, self.notes = base.path, base.experts, base.notes
        self.config, self.quantisation = base.config, base.quantisation
        lora = _match_layers(base, adapter)
        self.layers = [
            FoldedLayer(layer.module, layer.number, layer.contract, layer.tensors, lora.get(layer.module))
            for layer in base.layers
        ]
        self._rest = _fold_rest(base.rest(), adapter)
        self.changed = len(adapter.modules) + len(adapter.extras) + sum(len(layer.forms) for layer in adapter.experts)
        if not self.changed:
            raise InputError("adapter", "no deltas", "an adapter with LoRA in it")

    def rest(self) -> list[PlainTensor]:
        return self._rest

    def write_small_files(self, target: Path) -> None:
        self._base.write_small_files(target)

    def release(self) -> None:
        self._base.release()

    @property
    def paths(self) -> list[Path]:
        return [*self._base.paths, *self._files]


def _match_layers(base: Origin, adapter: Adapter) -> dict[str, Experts]:
    """Module of the model -> LoRA on its experts, with the sizes checked."""
    by_position = {split_layer_name(layer.module.removesuffix(".experts")): layer for layer in base.layers}
    matched: dict[str, Experts] = {}
    for experts in adapter.experts:
        layer = by_position.get(split_layer_name(experts.root))
        if layer is None:
            raise InputError(f"{experts.root}.experts", "no such layer of experts", "this model's layers")
        shape = layer.contract.shape
        for role, form in experts.forms.items():
            if role not in layer.formats:
                raise InputError(f"{experts.root}.experts: {role}", "no such matrix", ", ".join(layer.formats))
            sizes = (experts.experts, form.outputs, form.inputs)
            expected = (shape.num_experts, *shape.matrices()[role])
            if sizes != expected:
                raise InputError(
                    f"{experts.root}.experts: {role}", f"factors of {sizes}", f"{expected}, as the model's"
                )
        matched[layer.module] = experts
    return matched


def _fold_rest(tensors: list[PlainTensor], adapter: Adapter) -> list[PlainTensor]:
    positions = index_tensors(tensor.name for tensor in tensors)
    by_name = {tensor.name: tensor for tensor in tensors}
    folded: dict[str, PlainTensor] = {}

    def take(name: str, shape: tuple[int, ...]) -> PlainTensor:
        tensor = by_name[find_tensor(positions, name)]
        if tensor.shape != shape:
            raise InputError(tensor.name, f"shape {list(tensor.shape)}", f"{list(shape)}, as the adapter has it")
        if tensor.name in folded:
            raise InputError(tensor.name, "two deltas", "one")
        return tensor

    for module in adapter.modules:
        tensor = take(f"{module.name}.weight", (module.form.outputs, module.form.inputs))
        folded[tensor.name] = _fold_tensor(tensor, module)
    for extra in adapter.extras:
        tensor = take(extra.name, extra.shape)
        folded[tensor.name] = _replace_tensor(tensor, extra)
    return [folded.get(tensor.name, tensor) for tensor in tensors]


def _fold_tensor(tensor: PlainTensor, module: Module) -> PlainTensor:
    def read() -> Tensor:
        pair = module.read()
        delta = (pair.b.float() @ pair.a.float()).mul_(pair.scaling)
        return delta.add_(tensor.numbers()).to(tensor.dtype)

    return PlainTensor(tensor.name, tensor.dtype, tensor.shape, read)


def _replace_tensor(tensor: PlainTensor, extra: Extra) -> PlainTensor:
    return PlainTensor(tensor.name, tensor.dtype, tensor.shape, lambda: extra.read().to(tensor.dtype))
