"""A checkpoint with an adapter folded into it, as something that `quant/convert.py` can turn into a packed directory.

Layers of experts give one expert at a time, `[1, N, K]` in float32 where it has LoRA, W + scaling * B A; what has none
is handed on as it was released. Of all other tensors those that the adapter names are folded when they are read. The
base may be anything that `kt quant` reads, and a packed directory as well: its experts are then the numbers that are
multiplied. The surprising decision: nothing here rounds. Whoever encodes the result rounds once, from the float32 sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ktransformers.adapters.fold import find_tensor, tensor_places
from ktransformers.adapters.lora import Adapter, Experts, Extra, LoraPair, Module
from ktransformers.adapters.names import place
from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.checkpoint.packed import is_packed, read_manifest, read_packed_section
from ktransformers.checkpoint.recode import Weight, experts_of, numbers
from ktransformers.checkpoint.sources import LayerSource, PlainTensor, open_source
from ktransformers.errors import InputError
from ktransformers.nn.contract import Contract, expert_modules, read_contract
from ktransformers.nn.packed import PackedExperts
from ktransformers.nn.prepare import read_config, split_quantisation, to_stock_config
from ktransformers.quant.origin import Origin, OriginLayer, build_meta_model

TILE = 16  # rows of a tile


def open_origin(model: Path) -> Origin:
    return PackedOrigin(model) if is_packed(model) else Origin(model)


class PackedOrigin(Origin):
    """A packed directory read back."""

    def __init__(self, path: Path) -> None:
        self.path, self.experts, self.notes = path, None, []
        self._packed = PackedExperts(path)
        self._manifest = read_manifest(path)
        words, _ = split_quantisation(read_config(path))
        self.config = to_stock_config(words)
        self.quantisation = read_packed_section(path).get("source")
        self._plain = open_source(path)
        modules = expert_modules(build_meta_model(path))
        self.layers = [self._packed_layer(name, read_contract(name, module)) for name, module in modules.items()]

    def _packed_layer(self, name: str, contract: Contract) -> OriginLayer:
        found = self._packed.check(name, contract)

        def pieces() -> Iterator[ExpertChunk]:
            store = self._packed.store(name, contract)
            vectors = {role: tensor for role, tensor in store.memory().items() if role.endswith("_bias")}
            for expert in range(found.experts):
                given: dict[str, Weight] = {role: store.decode(role, expert)[None] for role in found.formats}
                yield ExpertChunk(expert, False, given | _biases(vectors, expert, contract))

        tensors = LayerSource(found.formats, sum(found.bytes.values()), pieces)
        return OriginLayer(name, place(name)[1], contract, tensors)

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
    """gate, up and down `[1, N]` out of what the store holds: a padded row for each expert, in it 16 numbers of gate
    and 16 of up by turns, as the blocks lie."""
    shape, found = contract.shape, dict[str, Weight]()
    rows = {role: vector.reshape(shape.num_experts, -1)[expert] for role, vector in vectors.items()}
    if "down_bias" in rows:
        found["down_bias"] = rows["down_bias"][None, : shape.hidden]
    if "gate_up_bias" in rows and shape.gated:
        gate, up = rows["gate_up_bias"].reshape(-1, 2, TILE).unbind(1)
        found["gate_bias"] = gate.reshape(1, -1)[:, : shape.intermediate]
        found["up_bias"] = up.reshape(1, -1)[:, : shape.intermediate]
    elif "gate_up_bias" in rows:
        found["up_bias"] = rows["gate_up_bias"][None, : shape.intermediate]
    return found


@dataclass(frozen=True)
class FoldedLayer(OriginLayer):
    lora: Experts | None = None

    def experts(self) -> Iterator[tuple[int, dict[str, Weight]]]:
        if self.lora is None:
            yield from super().experts()
            return
        pairs = self.lora.read()
        for first, roles in super().experts():
            for at in range(_count(roles["down"])):
                own = {role: experts_of(matrix, at, at + 1) for role, matrix in roles.items()}
                yield first + at, own | {role: _added(own[role], pair, first + at) for role, pair in pairs.items()}


def _count(matrix: Weight) -> int:
    return matrix.shape[0] if isinstance(matrix, Tensor) else matrix.experts


def _added(matrix: Weight, pair: LoraPair, expert: int) -> Tensor:
    delta = (pair.b[expert].float() @ pair.a[expert].float()).mul_(pair.scaling)
    return delta.add_(numbers(matrix)[0])[None]


class FoldedOrigin(Origin):
    """`base` with the adapter in it; every pair of the adapter has exactly one place, or this is an error."""

    def __init__(self, base: Origin, adapter: Adapter, files: Sequence[Path]) -> None:
        self._base, self._files = base, list(files)
        self.path, self.experts, self.notes = base.path, base.experts, base.notes
        self.config, self.quantisation = base.config, base.quantisation
        lora = _layers(base, adapter)
        self.layers = [
            FoldedLayer(layer.module, layer.number, layer.contract, layer.tensors, lora.get(layer.module))
            for layer in base.layers
        ]
        self._rest = _rest(base.rest(), adapter)
        self.changed = len(adapter.modules) + len(adapter.extras) + sum(len(one.forms) for one in adapter.experts)
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


def _layers(base: Origin, adapter: Adapter) -> dict[str, Experts]:
    """The model's module -> LoRA on its experts, of the right sizes."""
    known = {place(layer.module.removesuffix(".experts")): layer for layer in base.layers}
    found: dict[str, Experts] = {}
    for experts in adapter.experts:
        layer = known.get(place(experts.root))
        if layer is None:
            raise InputError(f"{experts.root}.experts", "no such layer of experts", "this model's layers")
        shape = layer.contract.shape
        for role, form in experts.forms.items():
            if role not in layer.formats:
                raise InputError(f"{experts.root}.experts: {role}", "no such matrix", ", ".join(layer.formats))
            given = (experts.experts, form.outputs, form.inputs)
            wanted = (shape.num_experts, *shape.matrices()[role])
            if given != wanted:
                raise InputError(f"{experts.root}.experts: {role}", f"factors of {given}", f"{wanted}, as the model's")
        found[layer.module] = experts
    return found


def _rest(tensors: list[PlainTensor], adapter: Adapter) -> list[PlainTensor]:
    places = tensor_places(tensor.name for tensor in tensors)
    found = {tensor.name: tensor for tensor in tensors}
    folded: dict[str, PlainTensor] = {}

    def take(name: str, shape: tuple[int, ...]) -> PlainTensor:
        tensor = found[find_tensor(places, name)]
        if tensor.shape != shape:
            raise InputError(tensor.name, f"shape {list(tensor.shape)}", f"{list(shape)}, as the adapter has it")
        if tensor.name in folded:
            raise InputError(tensor.name, "two deltas", "one")
        return tensor

    for module in adapter.modules:
        tensor = take(f"{module.name}.weight", (module.form.outputs, module.form.inputs))
        folded[tensor.name] = _plus(tensor, module)
    for extra in adapter.extras:
        tensor = take(extra.name, extra.shape)
        folded[tensor.name] = _instead(tensor, extra)
    return [folded.get(tensor.name, tensor) for tensor in tensors]


def _plus(tensor: PlainTensor, module: Module) -> PlainTensor:
    def read() -> Tensor:
        pair = module.read()
        delta = (pair.b.float() @ pair.a.float()).mul_(pair.scaling)
        return delta.add_(tensor.read().float()).to(tensor.dtype)

    return replace(tensor, read=read)


def _instead(tensor: PlainTensor, extra: Extra) -> PlainTensor:
    return replace(tensor, read=lambda: extra.read().to(tensor.dtype))
