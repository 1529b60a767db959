"""The engine put under a model whose experts are packed: `attach(model)`, and what it gives back.

Layers of the same sizes and formats share an engine with its room on the GPU. A store that the GPU cannot take over
(float32 or float64 experts, a format without a decoder, experts spread over NUMA nodes) stays with the CPU and is
named. Without a GPU nothing changes, and it is said once. Policy `cpu`, the default, leaves every store where it was:
`auto` has not been measured since it was corrected, and `stream` is slower than the CPU for a few tokens.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ktransformers import env, log
from ktransformers.errors import InputError
from ktransformers.nn.contract import Contract, expert_modules
from ktransformers.nn.gate import Gate
from ktransformers.nn.operator import place_store
from ktransformers.nn.store import ExpertStore
from ktransformers.place import residents as chosen
from ktransformers.place.autograd import PlacedStore
from ktransformers.place.engine import Engine, Layer
from ktransformers.place.gpu.layout import Geometry, Matrix, geometry
from ktransformers.place.gpu.measure import costs_of
from ktransformers.place.gpu.pinned import MODES, Registered
from ktransformers.place.gpu.side import AHEAD, Packed
from ktransformers.place.gpu.slots import Slots, Source
from ktransformers.place.split import POLICIES, Costs

_log = log.logger(__name__)
NOMINAL = Costs(*[1e-6] * 9)  # of policies that do not ask
LAYERS = 1.25  # whose experts there is room for: one at work, the next arriving in what it has left
SHARE = 0.25  # of the GPU's free memory that the room may take


@functools.cache
def _say_once(words: str) -> None:
    _log.warning(words)


@dataclass
class Placement:
    """What `attach` made; `detach` gives the layers back to the CPU."""

    policy: str
    names: list[str]
    layers: list[Layer]
    engines: list[Engine]
    left: dict[str, str]  # layers that stay with the CPU, and why
    _registered: Registered | None = None
    _rooms: list[Slots] = field(default_factory=list)

    def counts(self) -> chosen.Counts:
        """Rows of each expert so far, [layers, experts]."""
        return np.stack([layer.counts for layer in self.layers])

    def save_statistics(self, path: str | Path) -> None:
        chosen.save_counts(Path(path), self.names, self.counts())

    def place_residents(
        self,
        *,
        count: int = 0,
        ratio: float = 0.0,
        size: int = 0,
        strategy: str = "uniform",
        statistics: str | Path | None = None,
    ) -> list[tuple[int, ...]]:
        """Copy experts to the GPU to stay there, in place of those before. `frequency` counts what was seen so far
        unless a file of statistics is given."""
        sizes = self.layers[0].packed.geometry
        if any(layer.packed.geometry != sizes for layer in self.layers):
            raise InputError("residents", "layers of several sizes", "one size", "place none, or attach them apart")
        total = chosen.budget(len(self.layers), sizes.experts, sizes.expert_bytes, count=count, ratio=ratio, size=size)
        counts = self.counts() if statistics is None else chosen.load_counts(Path(statistics), self.names)
        if strategy == "frequency" and not counts.any():
            raise InputError("statistics", "none yet", "counts of routed tokens", "give a file, or run batches first")
        found = chosen.choose(strategy, total, len(self.layers), sizes.experts, counts)
        engine = self.engines[0]
        for layer, experts in zip(self.layers, found, strict=True):
            index = layer.packed.index
            room = engine.side.residents.pop(index, None)
            if room is not None and experts and room.count == len(experts):
                room.retain(index, frozenset(experts))  # an update: only what is new crosses
            elif experts:
                room = Slots(sizes, len(experts), engine.device, self._registered)
            if experts and room is not None:
                room.fetch(index, layer.packed.source, experts)
                engine.side.residents[index] = room
        return found

    def detach(self) -> None:
        for layer in self.layers:
            place_store(layer.store, None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._registered is not None:
            self._registered.close()


def attach(
    model: nn.Module,
    *,
    policy: str | None = None,
    device: torch.device | str | None = None,
    pin: str | None = None,
    pin_bytes: int | None = None,
    buffer_bytes: int | None = None,
    calibrate: bool = False,
) -> Placement | None:
    """Let the engine compute the model's experts for hidden states on a GPU; None: there is no GPU, or `cpu` is asked.

    `policy` is one of auto, cpu, stream and resident (KT_PLACE, else cpu), `pin` map or stage (KT_PIN, else map).
    `pin_bytes` bounds what is registered with the driver, `buffer_bytes` the room for streamed experts on the GPU.
    """
    word = policy or env.text("KT_PLACE") or "cpu"
    mode = pin or env.text("KT_PIN") or "map"
    for name, value, known in (("KT_PLACE", word, POLICIES), ("KT_PIN", mode, MODES)):
        if value not in known:
            raise InputError(name, value, "one of " + ", ".join(known))
    if word == "cpu":
        return None
    where = _device_of(model) if device is None else torch.device(device)
    if where is None:
        _say_once("no CUDA device: all experts are computed on the CPU")
        return None
    registered = Registered(pin_bytes if pin_bytes is not None else 1 << 62) if mode == "map" else None
    placement = Placement(word, [], [], [], {}, registered)
    kinds: dict[Geometry, list[tuple[str, ExpertStore, Contract]]] = {}
    for name, module in expert_modules(model).items():
        if not hasattr(module, "kt_store"):
            placement.left[name] = "not packed"
            continue
        store, contract = _parts(module)
        try:
            kinds.setdefault(geometry_of(store), []).append((name, store, contract))
        except InputError as error:
            placement.left[name] = str(error)
    for name, reason in placement.left.items():
        _log.info("%s stays with the CPU: %s", name, reason)
    for sizes, found in kinds.items():
        slots = Slots(sizes, _slots(sizes, where, buffer_bytes), where, registered)
        engine = Engine(where, word, slots)
        placement.engines.append(engine)
        for name, store, contract in found:
            layer = new_layer(engine, len(engine.layers), store, contract.gate, sizes)
            if not engine.layers and word == "auto":
                costs, slots.link_rate = costs_of(layer.packed, store, engine.side, anew=calibrate)
                layer.costs = costs
            elif engine.layers:
                layer.costs = engine.layers[0].costs
            engine.layers[layer.packed.index] = layer
            placement.names.append(name)
            placement.layers.append(layer)
            place_store(store, PlacedStore(engine, layer))
    return placement


def new_layer(engine: Engine, index: int, store: ExpertStore, gate: Gate, sizes: Geometry) -> Layer:
    memory = store.memory()
    source = Source(_by_expert(memory["gate_up"], sizes.experts), _by_expert(memory["down"], sizes.experts))
    biases = (
        _bias(memory.get("gate_up_bias"), sizes.first, sizes.experts, engine.device),
        _bias(memory.get("down_bias"), sizes.down, sizes.experts, engine.device),
    )
    packed = Packed(index, sizes, gate, source, biases)
    return Layer(
        packed, weakref.ref(store), dict.fromkeys(("forward", "backward"), NOMINAL), np.zeros(sizes.experts, np.int64)
    )


def _by_expert(packed: Tensor, experts: int) -> Tensor:
    """[E, bytes] of the same memory, not as a view: torch keeps the tensor behind a view until after the interpreter
    has gone, and the store behind that tensor would be reported as leaked."""
    return torch.from_numpy(packed.numpy().reshape(experts, -1))


def _bias(bias: Tensor | None, matrix: Matrix, experts: int, device: torch.device) -> Tensor | None:
    """As blocks lie -> [E, rows], gate's before up's."""
    if bias is None:
        return None
    blocks = bias.view(experts, matrix.blocks, 2, 16)
    rows = blocks.transpose(1, 2).flatten(2)[..., : matrix.rows] if matrix.paired else blocks.flatten(1)
    return rows.flatten(1)[:, : matrix.out_rows].to(device, copy=True).contiguous()


def _parts(module: Any) -> tuple[ExpertStore, Contract]:
    return module.kt_store, module.kt_contract


def geometry_of(store: ExpertStore) -> Geometry:
    if store.precision != "bf16":
        raise InputError("precision", store.precision, "bf16", "such experts are computed on the CPU")
    return geometry(store.num_experts, store.hidden_size, store.intermediate_size, store.gated, store.formats)


def _device_of(model: nn.Module) -> torch.device | None:
    found = next((parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), None)
    if found is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _slots(sizes: Geometry, device: torch.device, given: int | None) -> int:
    """How many experts there is room for."""
    wanted = int(LAYERS * sizes.experts)
    if given is None and device.type == "cuda":
        given = int(SHARE * torch.cuda.mem_get_info(device)[0])
    if given is not None:
        wanted = min(wanted, given // sizes.expert_bytes)
    if wanted < AHEAD + 1:
        raise InputError("buffer_bytes", given, f"room for {AHEAD + 1} experts of {sizes.expert_bytes} bytes at least")
    return wanted
