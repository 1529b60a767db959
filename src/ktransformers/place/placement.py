"""The engine put under a model whose experts are packed: `attach(model)`, and what it gives back.

Each layer is computed by the GPU that its router is on; layers of the same sizes and formats there share an engine with
its room. A store that the GPU cannot take over (float32 or float64 experts, a format without a decoder) stays with the
CPU and is named. Without a GPU nothing changes, and it is said once. Policy `cpu`, the default, leaves every store
where it was. Residents are placed for each engine apart, so that every GPU has its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ktransformers import _core, env, log
from ktransformers.errors import InputError
from ktransformers.nn.attention_graphs.replay import GraphedAttention, record_attention
from ktransformers.nn.contract import Contract, expert_modules
from ktransformers.nn.gate import Gate
from ktransformers.nn.operator import place_store
from ktransformers.nn.store import ExpertStore
from ktransformers.place import residents as chosen
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.free_memory import free_bytes
from ktransformers.place.gpu.executor import AHEAD, LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache, LayerBytes
from ktransformers.place.gpu.layer_costs import costs_of
from ktransformers.place.gpu.layout import Geometry, PackedMatrix, geometry
from ktransformers.place.gpu.pinned import MODES, Registered
from ktransformers.place.gpu.resident_decode import DECODED_BYTES
from ktransformers.place.placed_store import Deferral, PlacedStore
from ktransformers.place.tune import tune
from ktransformers.plan.modes import SPLIT
from ktransformers.plan.split import Costs
from ktransformers.plan.workload import DEFAULT, POLICIES

_log = log.logger(__name__)
NOMINAL = Costs(*[1e-6] * 9)  # of policies that do not ask
LAYERS = 1.2  # whose experts there is room for: one at work, the next arriving in what it leaves
SHARE = 0.25  # of the GPU's free memory that the room may take


@functools.cache
def _say_once(words: str) -> None:
    _log.warning(words)


@dataclass
class Placement:
    """What `attach` made; `detach` gives the layers back to the CPU."""

    policy: str
    names: list[str]
    layers: list[PlacedLayer]
    engines: list[ExpertEngine]
    left: dict[str, str]  # layers that stay with the CPU, and why
    _registered: Registered | None = None
    _placed: list[PlacedStore] = field(default_factory=list)  # in the order of `layers`
    _attention: list[GraphedAttention] = field(default_factory=list)
    _renewed: list[chosen.Row] = field(default_factory=list)  # counts of each layer when residents were last renewed

    def counts(self) -> list[chosen.Row]:
        """Rows of each expert so far, by layer."""
        for placed in self._placed:
            placed.engine.count_pending()
            placed.engine.callbacks.add_counts(placed.layer.packed.index, placed.layer.counts)
        return [layer.counts for layer in self.layers]

    def save_statistics(self, path: str | Path) -> None:
        chosen.save_counts(Path(path), self.names, self.counts())

    def devices(self) -> list[torch.device]:
        return list(dict.fromkeys(engine.device for engine in self.engines))

    def working_bytes(self, device: torch.device) -> int:
        """That the engines of a device will take when they first compute: decoded weights and rows of a group."""
        wide = [
            engine.executor.working_bytes(sizes)
            for engine in self.engines
            if engine.device == device
            for sizes in {layer.packed.geometry for layer in engine.layers.values()}
        ]
        return sum(wide)

    def captured_bytes(self, device: torch.device) -> int:
        """That CUDA graphs of few tokens hold besides: what encoded residents are decoded into."""
        sizes = {
            layer.packed.geometry
            for engine in self.engines
            if engine.device == device
            for layer in engine.layers.values()
        }
        return 0 if all(one.first.plain and one.down.plain for one in sizes) else DECODED_BYTES

    def place_residents(
        self,
        *,
        count: int = 0,
        ratio: float = 0.0,
        size: int | Mapping[torch.device, int] = 0,
        strategy: str = "uniform",
        statistics: str | Path | None = None,
        whole: Collection[str] = (),
    ) -> list[tuple[int, ...]]:
        """Copy experts to the GPU to stay there, in place of those before; the residents of each layer. `size` is in
        bytes, for all engines together or by device. `frequency` counts what was seen so far unless a file of
        statistics is given. Layers named in `whole` are resident with all of their experts, whatever the budget."""
        found: dict[int, tuple[int, ...]] = {}
        groups = [[at for at, placed in enumerate(self._placed) if placed.engine is one] for one in self.engines]
        packed = [sum(self.layers[at].packed.geometry.experts for at in group) for group in groups]
        counts = self._statistics(strategy, statistics)
        for engine, group, experts in zip(self.engines, groups, packed, strict=True):
            if isinstance(size, Mapping):  # by device: engines on one GPU share it by their experts
                mine = sum(n for one, n in zip(self.engines, packed, strict=True) if one.device == engine.device)
                room = size.get(engine.device, 0) * experts // mine
            else:
                room = size * experts // sum(packed)
            sizes = self.layers[group[0]].packed.geometry
            total = chosen.budget(len(group), sizes.experts, sizes.expert_bytes, count=count, ratio=ratio, size=room)
            seen = np.stack([counts[at] for at in group])
            picked = chosen.choose(strategy, total, len(group), sizes.experts, seen)
            found |= dict(zip(group, picked, strict=True))
            found |= {at: tuple(range(sizes.experts)) for at in group if self.names[at] in whole}
        for at, experts_of in found.items():
            self._settle(self._placed[at], experts_of)
        for engine in self.engines:
            engine.dispatcher.forget()
        return [found[at] for at in range(len(self.layers))]

    def _statistics(self, strategy: str, file: str | Path | None) -> list[chosen.Row]:
        counts = self.counts()
        if file is not None:
            widths = {layer.packed.geometry.experts for layer in self.layers}
            counts = chosen.load_counts(Path(file), self.names, widths.pop() if len(widths) == 1 else None)
        if strategy == "frequency" and not any(row.any() for row in counts):
            raise InputError("statistics", "none yet", "counts of routed tokens", "give a file, or run batches first")
        return counts

    def _settle(self, placed: PlacedStore, experts: tuple[int, ...]) -> None:
        engine, packed = placed.engine, placed.layer.packed
        engine.callbacks.retire(packed.index)
        room = engine.executor.residents.pop(packed.index, None)
        if room is not None and experts and room.count == len(experts):
            room.retain(packed.index, frozenset(experts))  # an update: only what is new crosses
        elif experts:
            room = None  # before there is another
            room = ExpertCache(packed.geometry, len(experts), engine.device, self._registered)
        if experts and room is not None:
            room.fetch(packed.index, packed.source, experts)
            engine.executor.residents[packed.index] = room

    def update_residents(self) -> int:
        """As many of each layer as before, by the routing since the last time; how many are new."""
        before = self._renewed or [np.zeros_like(row) for row in self.counts()]
        changed = 0
        for placed, now, then in zip(self._placed, self.counts(), before, strict=True):
            changed += placed.update_residents(now - then)
        self._renewed = [row.copy() for row in self.counts()]
        return changed

    def tune(self, sizes: Collection[int], *, training: bool = False) -> list[str]:
        """Decide the modes of batches of these sizes, by timing layers where the costs cannot tell modes apart; a line
        for each size. To be called once, when residents are placed."""
        lines = []
        for engine in self.engines:
            tune(engine, tuple(sizes), training)
            if self.policy == "auto":
                lines += [f"{n} tokens: {engine.dispatcher.decision(n, training).reason}" for n in sorted(set(sizes))]
        return list(dict.fromkeys(lines))

    def stream_from(self, tokens: int) -> None:
        """Batches of so many tokens are streamed whole, smaller ones not at all; 0: the policy says."""
        for engine in self.engines:
            engine.dispatcher.threshold = tokens
            engine.dispatcher.forget()

    def follow_routing(self, on: bool) -> None:
        """After every batch that was streamed whole its busiest experts become the residents of their layer."""
        for placed in self._placed:
            placed.updates_residents = on

    def defer(self, late: int) -> int:
        """Let `late` experts of a token come with the next layer; the number of layers that do."""
        deferral = Deferral(late) if late else None
        numbers = {placed.number for placed in self._placed if placed.number >= 0}
        for placed in self._placed:
            following = placed.number + 1
            placed.deferral, placed.first = deferral, placed.number == min(numbers, default=-1)
            placed.following = following if late and placed.number >= 0 and following in numbers else None
        return sum(placed.following is not None for placed in self._placed)

    @property
    def defers(self) -> bool:
        return any(placed.deferral is not None for placed in self._placed)

    @property
    def generation(self) -> int:
        """Another one when residents got another room: graphs that were captured before want to be captured again."""
        return sum(engine.callbacks.generation for engine in self.engines)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Batches are taken as in a capture: what a graph needs is made, and what it cannot hold is refused."""
        for engine in self.engines:
            engine.callbacks.rehearsing = True
        try:
            yield
        finally:
            for engine in self.engines:
                engine.callbacks.rehearsing = False

    def raise_pending(self, tokens: int) -> None:
        """Raise what went wrong on the CPU in replayed batches of so many tokens."""
        for engine in self.engines:
            engine.callbacks.raise_pending(tokens)

    def retain(self, used: Collection[tuple[_core.Adapter, ...]]) -> None:
        """Of what was kept for graphs with adapters this is still used: for each layer those of a graph."""
        for engine in self.engines:
            engine.callbacks.retain(used)

    def forget_graphs(self) -> None:
        """Nobody replays a graph that was captured so far."""
        for engine in self.engines:
            engine.callbacks.forget_graphs()

    def detach(self) -> None:
        for layer in self.layers:
            place_store(layer.store, None)
        for attention in self._attention:
            attention.close()
        for device in self.devices():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if self._registered is not None:
            self._registered.close()


def attach(
    model: nn.Module,
    *,
    policy: str | None = None,
    device: torch.device | str | None = None,
    homes: Mapping[str, str] | None = None,
    pin: str | None = None,
    pin_bytes: int | None = None,
    buffer_bytes: int | None = None,
    streams: bool = True,
    calibrate: bool = False,
) -> Placement | None:
    """Let the engine compute the model's experts for hidden states on a GPU; None: there is no GPU, or `cpu` is asked.

    `policy` is auto or one mode of `plan/modes.py` (KT_PLACE, else cpu), `pin` map or stage (KT_PIN, else map).
    `device` is that of all layers; without, each has the one of its router. `homes` says by name what becomes of a
    layer of experts: "cpu" leaves it to the CPU. `pin_bytes` bounds what is registered with the driver, `buffer_bytes`
    the room for streamed experts on a GPU; without `streams` there will be none, and the room is the least.
    """
    word = policy or env.text("KT_PLACE") or DEFAULT
    mode = pin or env.text("KT_PIN") or "map"
    for name, value, known in (("KT_PLACE", word, POLICIES), ("KT_PIN", mode, MODES)):
        if value not in known:
            raise InputError(name, value, "one of " + ", ".join(known))
    if word == "cpu":
        return None
    given = None if device is None else _with_index(torch.device(device))
    if given is None and not torch.cuda.is_available():
        _say_once("no CUDA device: all experts are computed on the CPU")
        return None
    registered = Registered(pin_bytes if pin_bytes is not None else 1 << 62) if mode == "map" else None
    placement = Placement(word, [], [], [], {}, registered)
    kinds: dict[tuple[torch.device, Geometry], ExpertEngine] = {}
    for name, module in expert_modules(model).items():
        if not hasattr(module, "kt_store"):
            placement.left[name] = "not packed"
            continue
        if homes is not None and homes.get(name) == "cpu":
            placement.left[name] = "a rule keeps it on the CPU"
            continue
        store, contract = _parts(module)
        try:
            where, sizes = given or device_of(model, name), geometry_of(store)
            if where is None or (where.type != "cuda" and given is None):
                raise InputError(name, "a router on the CPU", "a router on a GPU")
        except InputError as error:
            placement.left[name] = str(error)
            continue
        engine = kinds.get((where, sizes))
        if engine is None:
            room = _slots(sizes, where, buffer_bytes) if streams else AHEAD + 1
            engine = ExpertEngine(where, word, ExpertCache(sizes, room, where, registered))
            engine.dispatcher.top_k = min(_top_k(model), sizes.experts)
            kinds[where, sizes] = engine
            placement.engines.append(engine)
        _add(placement, engine, name, store, contract, calibrate)
    for name, reason in placement.left.items():
        _log.warning("%s stays with the CPU: %s", name, reason)
    placement._attention = record_attention(model, [one for one in placement.devices() if one.type == "cuda"])
    return placement


def _add(
    placement: Placement, engine: ExpertEngine, name: str, store: ExpertStore, contract: Contract, calibrate: bool
) -> None:
    layer = new_layer(engine, len(engine.layers), store, contract.gate, geometry_of(store))
    if not engine.layers and placement.policy in ("auto", SPLIT):
        layer.costs, engine.cache.link_rate = costs_of(layer.packed, store, engine.executor, anew=calibrate)
        engine.dispatcher.costs = layer.costs
    engine.layers[layer.packed.index] = layer
    number = chosen.layer_number(name)
    placed = PlacedStore(engine, layer, -1 if number is None else number)
    placement.names.append(name)
    placement.layers.append(layer)
    placement._placed.append(placed)
    place_store(store, placed)


def new_layer(engine: ExpertEngine, index: int, store: ExpertStore, gate: Gate, sizes: Geometry) -> PlacedLayer:
    memory = store.memory()
    source = LayerBytes(_by_expert(memory["gate_up"], sizes.experts), _by_expert(memory["down"], sizes.experts))
    biases = (
        _bias(memory.get("gate_up_bias"), sizes.first, sizes.experts, engine.device),
        _bias(memory.get("down_bias"), sizes.down, sizes.experts, engine.device),
    )
    packed = LayerOnDevice(index, sizes, gate, source, biases)
    costs = engine.dispatcher.costs or dict.fromkeys(("forward", "backward"), NOMINAL)
    engine.dispatcher.costs = costs
    return PlacedLayer(packed, weakref.ref(store), costs, np.zeros(sizes.experts, np.int64))


def _by_expert(packed: Tensor, experts: int) -> Tensor:
    """[E, bytes] of the same memory, not as a view: torch keeps the tensor behind a view until after the interpreter
    has gone, and the store behind that tensor would be reported as leaked."""
    return torch.from_numpy(packed.numpy().reshape(experts, -1))


def _bias(bias: Tensor | None, matrix: PackedMatrix, experts: int, device: torch.device) -> Tensor | None:
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


def _top_k(model: nn.Module) -> int:
    """Experts per token, by the names that configurations have for it; 8 where none of them is there."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = (getattr(config, name, None) for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"))
    return next((value for value in values if isinstance(value, int)), 8)


def _with_index(device: torch.device) -> torch.device:
    """As tensors on it say it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_of(model: nn.Module, name: str) -> torch.device | None:
    """Where a layer of experts gets its hidden states from: where its nearest relatives are, the router first.
    LoRA on experts is no relative: it stays in host memory. None: there are none."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module, below = model.get_submodule(".".join(parts[:end])), f"{parts[end]}."
        for word, parameter in module.named_parameters():
            if not word.startswith(below) and ".lora_" not in f".{word}":
                return parameter.device
    return None


def _slots(sizes: Geometry, device: torch.device, given: int | None) -> int:
    """How many experts there is room for."""
    wanted = int(LAYERS * sizes.experts)
    if given is None and device.type == "cuda":
        given = int(SHARE * free_bytes(device))
    if given is not None:
        wanted = min(wanted, given // sizes.expert_bytes)
    if wanted < AHEAD + 1:
        raise InputError("buffer_bytes", given, f"room for {AHEAD + 1} experts of {sizes.expert_bytes} bytes at least")
    return wanted
