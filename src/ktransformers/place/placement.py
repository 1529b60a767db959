"""`attach(model)` puts the placement engine under a model whose experts are packed, and returns a `Placement`.

Each layer is computed on the GPU that its router is on; layers of one geometry and format on a GPU share an engine with
its expert cache. A store that the GPU cannot compute (float32 or float64 experts, a format without a decoder) stays
with the CPU and is named in `Placement.left`. Without a GPU nothing changes and a warning says so once. Policy `cpu`,
the default, leaves every store as it is. Residents are placed per engine, so that every GPU has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.experts.backend import KtExperts, packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.gate import Gate
from ktransformers.experts.store import ExpertStore
from ktransformers.ground import env, log, system
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import DEFAULT_POLICY, POLICIES
from ktransformers.ground.out_of_memory import free_bytes
from ktransformers.modeling.attention_graphs.replay import GraphedAttention, record_attention
from ktransformers.place import residents
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.copy_plan import check_parts
from ktransformers.place.gpu.executor import PREFETCHED_GROUPS, LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache, ExpertPart, LayerBytes
from ktransformers.place.gpu.layer_costs import measured_costs
from ktransformers.place.gpu.pinned import MODES, RegisteredMemory
from ktransformers.place.gpu.resident_decode import DECODED_BYTES, decodes_first
from ktransformers.place.placed_experts import PlacedExperts
from ktransformers.plan.memory import ENGINE_LIMITS
from ktransformers.plan.modes import SPLIT
from ktransformers.plan.split import Costs
from ktransformers.quantized.gpu.layout import Geometry, PackedMatrix, geometry

_log = log.logger(__name__)
UNMEASURED = Costs(*[1e-6] * 9)  # for policies that do not use costs
CACHED_LAYERS = ENGINE_LIMITS.cached_layers
CACHE_SHARE = ENGINE_LIMITS.cache_share


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


@dataclass
class Placement:
    """The placed layers of a model and their engines; `detach` gives the layers back to the CPU."""

    policy: str
    names: list[str]
    layers: list[PlacedLayer]
    engines: list[ExpertEngine]
    left: dict[str, str]  # layers that stay with the CPU, and why
    _registered: RegisteredMemory | None = None
    _placed: list[PlacedExperts] = field(default_factory=list)  # in the order of `layers`
    _kt: list[KtExperts] = field(default_factory=list)
    _attention: list[GraphedAttention] = field(default_factory=list)

    def counts(self) -> list[residents.Row]:
        """Rows of each expert so far, by layer."""
        for placed in self._placed:
            placed.engine.count_pending()
            placed.engine.callbacks.add_counts(placed.layer.packed.index, placed.layer.counts)
        return [layer.counts for layer in self.layers]

    def statistics(self) -> tuple[list[str], list[residents.Row]]:
        """Names of the layers of experts, and the routed tokens of each expert of each."""
        return list(self.names), list(self.counts())

    def devices(self) -> list[torch.device]:
        return list(dict.fromkeys(engine.device for engine in self.engines))

    def working_bytes(self, device: torch.device) -> int:
        """Bytes that the engines of a device allocate at their first pass: dequantised weights and rows of a group."""
        per_geometry = [
            engine.executor.working_bytes(sizes)
            for engine in self.engines
            if engine.device == device
            for sizes in {layer.packed.geometry for layer in engine.layers.values()}
        ]
        return sum(per_geometry)

    def captured_bytes(self, device: torch.device) -> int:
        """Bytes that CUDA graphs of decode steps hold besides: what quantised residents are dequantised into."""
        sizes = {
            layer.packed.geometry
            for engine in self.engines
            if engine.device == device
            for layer in engine.layers.values()
        }
        return DECODED_BYTES if any(decodes_first(one, device) for one in sizes) else 0

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
        """Copy experts to the GPU to stay there, replacing the residents before; the residents of each layer. `size` is
        in bytes, for all engines together or by device. `frequency` uses the counts so far unless a file of statistics
        is given. Layers named in `whole` are resident with all of their experts, whatever the budget."""
        by_layer: dict[int, tuple[int, ...]] = {}
        groups = [
            [index for index, placed in enumerate(self._placed) if placed.engine is engine] for engine in self.engines
        ]
        packed = [sum(self.layers[index].packed.geometry.experts for index in group) for group in groups]
        counts = self._statistics(strategy, statistics)
        for engine, group, experts in zip(self.engines, groups, packed, strict=True):
            if isinstance(size, Mapping):  # by device: engines on one GPU share it by their experts
                on_device = sum(n for peer, n in zip(self.engines, packed, strict=True) if peer.device == engine.device)
                budget = size.get(engine.device, 0) * experts // on_device
            else:
                budget = size * experts // sum(packed)
            sizes = self.layers[group[0]].packed.geometry
            total = residents.budget(
                len(group), sizes.experts, sizes.expert_bytes, count=count, ratio=ratio, size=budget
            )
            counts_of_group = np.stack([counts[index] for index in group])
            picked = residents.choose(strategy, total, len(group), sizes.experts, counts_of_group)
            by_layer |= dict(zip(group, picked, strict=True))
            by_layer |= {index: tuple(range(sizes.experts)) for index in group if self.names[index] in whole}
        for index, experts_of in by_layer.items():
            self._fill_residents(self._placed[index], experts_of)
        for engine in self.engines:
            engine.dispatcher.forget()
        return [by_layer[index] for index in range(len(self.layers))]

    def _statistics(self, strategy: str, file: str | Path | None) -> list[residents.Row]:
        counts = self.counts()
        if file is not None:
            widths = {layer.packed.geometry.experts for layer in self.layers}
            counts = residents.load_counts(Path(file), self.names, widths.pop() if len(widths) == 1 else None)
        if strategy == "frequency" and not any(row.any() for row in counts):
            raise InputError(
                "statistics", "no counts yet", "counts of routed tokens", "give a file, or run batches first"
            )
        return counts

    def _fill_residents(self, placed: PlacedExperts, experts: tuple[int, ...]) -> None:
        engine, packed = placed.engine, placed.layer.packed
        engine.callbacks.drop_calls(packed.index)
        cache = engine.executor.residents.pop(packed.index, None)
        if cache is not None and experts and cache.count == len(experts):
            cache.evict_except(packed.index, frozenset(experts))  # experts that stay are not copied again
        elif experts:
            cache = None  # freed before the new one is allocated
            cache = ExpertCache(packed.geometry, len(experts), engine.device, self._registered)
        if experts and cache is not None:
            cache.fetch(packed.index, packed.source, experts)
            engine.executor.residents[packed.index] = cache

    def tune(self, sizes: Collection[int], *, training: bool = False) -> list[str]:
        """Decide the modes of batches of these sizes; a line per size. Residents are placed before."""
        if self.policy != "auto":
            return []
        decided = [(n, engine.dispatcher.decision(n, training)) for engine in self.engines for n in sorted(set(sizes))]
        return list(dict.fromkeys(f"{n} tokens: {decision.reason}" for n, decision in decided))

    def stream_from(self, tokens: int) -> None:
        """Stream batches of at least `tokens` tokens, and no smaller ones; 0: the policy decides."""
        for engine in self.engines:
            engine.dispatcher.threshold = tokens
            engine.dispatcher.forget()

    @property
    def all_resident(self) -> bool:
        """Whether every expert of every layer is on the GPU, so that a captured step has no share of the CPU."""
        return all(
            (cache := placed.engine.executor.residents.get(placed.layer.packed.index)) is not None
            and len(cache.present(placed.layer.packed.index)) == placed.layer.packed.geometry.experts
            for placed in self._placed
        )

    @property
    def generation(self) -> int:
        """Changes when residents get another cache: graphs captured before have to be captured again."""
        return sum(engine.callbacks.generation for engine in self.engines)

    @contextmanager
    def capture_warmup(self, recaptured: bool = False) -> Iterator[None]:
        """Batches run as in a capture: what a graph needs is allocated, and what it cannot hold is refused. With
        `recaptured` the caller promises not to replay graphs captured here once `generation` has changed: they have no
        share of the CPU in layers whose experts are all resident."""
        for engine in self.engines:
            engine.callbacks.warming_up, engine.callbacks.recaptured = True, recaptured
        try:
            yield
        finally:
            for engine in self.engines:
                engine.callbacks.warming_up = engine.callbacks.recaptured = False

    def raise_pending(self, tokens: int) -> None:
        """Raise errors of the CPU in replayed batches of `tokens` tokens."""
        for engine in self.engines:
            engine.callbacks.raise_pending(tokens)

    def raise_launched(self) -> None:
        """Raise errors of the CPU in batches that were launched without waiting for it; to be called before their
        results are used, in the thread that launched them."""
        for engine in self.engines:
            engine.callbacks.raise_launched()

    def release_unused_adapters(self, used: Collection[tuple[_core.Adapter, ...]]) -> None:
        """Free what is kept for graphs with adapters outside of `used`: for each layer the adapters of a graph."""
        for engine in self.engines:
            engine.callbacks.release_unused_adapters(used)

    def release_graphs(self) -> None:
        """Free what graphs captured so far need; none of them is replayed any more."""
        for engine in self.engines:
            engine.callbacks.release_graphs()

    def detach(self) -> None:
        for kt in self._kt:
            kt.place(None)
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
    device_by_layer: Mapping[str, str] | None = None,
    pin: str | None = None,
    pin_bytes: int | None = None,
    buffer_bytes: int | None = None,
    streams: bool = True,
    calibrate: bool = False,
) -> Placement | None:
    """Let the engine compute the model's experts for hidden states on a GPU; None: there is no GPU, or the policy is
    `cpu`.

    `policy` is one of `POLICIES` (KT_PLACE, else cpu), `pin` map (the default) or stage. `device` is that of all
    layers; without it, each has the device of its router. `device_by_layer`, by module name: "cpu" leaves a layer of
    experts to the CPU. `pin_bytes` bounds what is registered with the driver, `buffer_bytes` the expert cache of a GPU;
    without `streams` nothing is streamed, and the cache has the smallest size.
    """
    policy_name = policy or env.text("KT_PLACE") or DEFAULT_POLICY
    pin_mode = pin or "map"
    for name, value, known in (("KT_PLACE", policy_name, POLICIES), ("pin", pin_mode, MODES)):
        if value not in known:
            raise InputError(name, value, "one of " + ", ".join(known))
    if policy_name == "cpu":
        return None
    fixed_device = None if device is None else _with_index(torch.device(device))
    if fixed_device is not None:
        system.require_supported(str(fixed_device), "device", "another GPU, or no placement")
    if fixed_device is None and not system.has_gpu():
        _warn_once("no CUDA device: all experts are computed on the CPU")
        return None
    registered = RegisteredMemory(pin_bytes if pin_bytes is not None else 1 << 62) if pin_mode == "map" else None
    placement = Placement(policy_name, [], [], [], {}, registered)
    engines: dict[tuple[torch.device, Geometry], ExpertEngine] = {}
    for name, module in expert_modules(model).items():
        kt = packed_experts(module)
        if kt is None or kt.store is None:
            placement.left[name] = "not packed"
            continue
        if kt.local is None:
            placement.left[name] = "other processes have some of its experts"
            continue
        if device_by_layer is not None and device_by_layer.get(name) == "cpu":
            placement.left[name] = "a rule keeps it on the CPU"
            continue
        try:
            layer_device, sizes = fixed_device or device_of(model, name), geometry_of(kt.store)
            if layer_device is None or (layer_device.type != "cuda" and fixed_device is None):
                raise InputError(name, "a router on the CPU", "a router on a GPU")
        except InputError as error:
            placement.left[name] = str(error)
            continue
        engine = engines.get((layer_device, sizes))
        if engine is None:
            count = cache_size(sizes, layer_device, buffer_bytes) if streams else PREFETCHED_GROUPS + 1
            engine = ExpertEngine(layer_device, policy_name, ExpertCache(sizes, count, layer_device, registered))
            engine.dispatcher.top_k = min(_top_k(model), sizes.experts)
            engines[layer_device, sizes] = engine
            placement.engines.append(engine)
        _add(placement, engine, name, kt, calibrate)
    for name, reason in placement.left.items():
        _log.warning("%s stays with the CPU: %s", name, reason)
    placement._attention = record_attention(model, [device for device in placement.devices() if device.type == "cuda"])
    return placement


def _add(placement: Placement, engine: ExpertEngine, name: str, kt: KtExperts, calibrate: bool) -> None:
    store = kt.store
    assert store is not None
    layer = new_layer(engine, len(engine.layers), store, kt.contract.gate, geometry_of(store))
    if not engine.layers and placement.policy in ("auto", SPLIT):
        layer.costs, engine.cache.link_rate = measured_costs(layer.packed, store, engine.executor, remeasure=calibrate)
        engine.dispatcher.costs = layer.costs
    engine.layers[layer.packed.index] = layer
    placed = PlacedExperts(engine, layer)
    placement.names.append(name)
    placement.layers.append(layer)
    placement._placed.append(placed)
    placement._kt.append(kt)
    kt.place(placed)


def new_layer(engine: ExpertEngine, index: int, store: ExpertStore, gate: Gate, sizes: Geometry) -> PlacedLayer:
    vectors = store.biases()
    source = LayerBytes(
        _expert_parts(store, "gate_up", sizes.first),
        _expert_parts(store, "down", sizes.down),
        store.verify,
        store.place_pages,
    )
    biases = (
        _bias(vectors.get("gate_up_bias"), sizes.first, sizes.experts, engine.device),
        _bias(vectors.get("down_bias"), sizes.down, sizes.experts, engine.device),
    )
    packed = LayerOnDevice(index, sizes, gate, source, biases)
    costs = engine.dispatcher.costs or dict.fromkeys(("forward", "backward"), UNMEASURED)
    engine.dispatcher.costs = costs
    return PlacedLayer(packed, store, costs, np.zeros(sizes.experts, np.int64))


def _expert_parts(store: ExpertStore, name: str, matrix: PackedMatrix) -> tuple[ExpertPart, ...]:
    parts = tuple(ExpertPart(offset, data) for offset, data in store.parts()[name])
    check_parts(name, [(part.offset, part.bytes.shape[1]) for part in parts], matrix.expert_bytes)
    return parts


def _bias(bias: Tensor | None, matrix: PackedMatrix, experts: int, device: torch.device) -> Tensor | None:
    """A bias in packed block order -> [E, rows], gate's rows before up's."""
    if bias is None:
        return None
    blocks = bias.view(experts, matrix.blocks, 2, 16)
    rows = blocks.transpose(1, 2).flatten(2)[..., : matrix.rows] if matrix.paired else blocks.flatten(1)
    return rows.flatten(1)[:, : matrix.out_rows].to(device, copy=True).contiguous()


def geometry_of(store: ExpertStore) -> Geometry:
    if store.precision != "bf16":
        raise InputError("precision", store.precision, "bf16", "such experts are computed on the CPU")
    return geometry(store.num_experts, store.hidden_size, store.intermediate_size, store.gated, store.formats)


def _top_k(model: nn.Module) -> int:
    """Experts per token, under the names that configurations use; 8 if there is none."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = (getattr(config, name, None) for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"))
    return next((value for value in values if isinstance(value, int)), 8)


def _with_index(device: torch.device) -> torch.device:
    """With the device index that tensors report."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_of(model: nn.Module, name: str) -> torch.device | None:
    """The device of a layer's hidden states: that of the nearest other parameters in the module tree, the router first.
    LoRA factors of experts do not count, because they stay in host memory. None: there are no others."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module, below = model.get_submodule(".".join(parts[:end])), f"{parts[end]}."
        for parameter_name, parameter in module.named_parameters():
            if not parameter_name.startswith(below) and ".lora_" not in f".{parameter_name}":
                return parameter.device
    return None


def cache_size(sizes: Geometry, device: torch.device, budget: int | None) -> int:
    """Number of experts in the cache."""
    wanted = int(CACHED_LAYERS * sizes.experts)
    if budget is None and device.type == "cuda":
        budget = int(CACHE_SHARE * free_bytes(device))
    if budget is not None:
        wanted = min(wanted, budget // sizes.expert_bytes)
    if wanted < PREFETCHED_GROUPS + 1:
        raise InputError(
            "buffer_bytes", budget, f"at least {PREFETCHED_GROUPS + 1} experts of {sizes.expert_bytes} bytes"
        )
    return wanted
