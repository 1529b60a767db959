"""Adapters in memory, beside the one resident base: read from any dialect, bound to the model's modules, applied to the
rows that ask for them.

Linear layers get a forward hook, all at the start because a server loads adapters while it answers; it adds s * B (A
x), in float32 as PEFT does, to the rows of each adapter and leaves all other rows as the base computed them, bit for
bit. Experts are packed for their stores and computed there (`nn/mixed_lora.py`). Every tensor of an adapter has to find
its place; what finds none is an error that names it. The surprising decision: an adapter is never changed. Loading the
same name again makes a new version, and requests under way keep the one that they began with."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.adapters import Adapter, LoraPair, read_adapter
from ktransformers.adapters.names import split_layer_name
from ktransformers.errors import InputError
from ktransformers.nn import ExpertStore
from ktransformers.nn.contract import IMPLEMENTATION, is_experts
from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.mixed_lora import MixedLora
from ktransformers.nn.operator import is_placed
from ktransformers.serve.engine.kv_cache import Owner

LOADING = threading.Lock()  # held while factors go to their device, and by who must see no other thread wait for it
FEW = 8  # rows that the core adds to on the thread that asks: torch would wake all of its threads for them
TYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class LinearLora:
    a: Tensor  # [r, in], float32
    b: Tensor  # [r, out], float32
    scaling: float


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One version of an adapter, ready to be applied."""

    name: str
    version: int
    source: str
    linears: Mapping[nn.Module, LinearLora]
    experts: Mapping[nn.Module, _core.Adapter]
    matrices: int = 0  # that have factors: each linear layer, and gate, up and down of each layer of experts
    factors: Mapping[nn.Module, LoraFactors] = field(default_factory=dict)  # of experts that a GPU may compute

    @property
    def owner(self) -> Owner:
        return (self.name, self.version)

    def bytes(self) -> int:
        small = sum((one.a.numel() + one.b.numel()) * 4 for one in self.linears.values())
        return small + sum(packed.packed_bytes for packed in self.experts.values())


@dataclass(frozen=True)
class AdapterRows:
    """Rows first .. last of the batch want this adapter."""

    adapter: LoadedAdapter
    first: int
    last: int


Adding = Callable[[nn.Module, Tensor, Tensor], None]  # a linear layer, what entered it, what left it: to be added to

_active: ContextVar[Adding | None] = ContextVar("adding", default=None)


@contextmanager
def adding(add: Adding | None) -> Iterator[None]:
    """Every linear layer's output goes through this; None: it stays as it is."""
    token = _active.set(add)
    try:
        yield
    finally:
        _active.reset(token)


def linear_shares(shares: Sequence[AdapterRows], rows: int) -> AbstractContextManager[None]:
    return adding(functools.partial(_add_shares, shares, rows) if shares else None)


def expert_shares(shares: Sequence[AdapterRows], rows: int) -> dict[nn.Module, MixedLora]:
    """For every layer of experts that one of the adapters has: who is where."""
    layers: dict[nn.Module, MixedLora] = {}
    known: dict[tuple[bool, ...], Tensor] = {}
    for module in {module for share in shares for module in share.adapter.experts}:
        present = tuple(module in share.adapter.experts for share in shares)
        if present not in known:
            known[present] = torch.full((rows,), -1, dtype=torch.int32)
            asking = [share for share, has in zip(shares, present, strict=True) if has]
            for index, share in enumerate(asking):
                known[present][share.first : share.last] = index
        here = [share.adapter for share in shares if module in share.adapter.experts]
        factors = [one.factors[module] for one in here if module in one.factors]
        adapters = [one.experts[module] for one in here]
        layers[module] = MixedLora(known[present], adapters, factors if len(factors) == len(adapters) else ())
    return layers


class LoraModules:
    """The model's modules by the names that adapters use."""

    def __init__(self, model: nn.Module) -> None:
        self._linears: dict[tuple[str, int, str], nn.Module] = {}
        self._experts: dict[tuple[str, int, str], nn.Module] = {}
        self.device = next(model.parameters()).device
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                self._linears[split_layer_name(name)] = module
                module.register_forward_hook(_add)
            elif is_experts(module) and _ours(module):
                self._experts[split_layer_name(name.removesuffix(".experts"))] = module

    def open(self, source: str | Path, name: str, version: int, model: str | None) -> LoadedAdapter:
        """Read and check an adapter, and bind it. `model` is where the base's config.json lies."""
        return self.bind(read_adapter(source, model=model), str(source), name, version)

    def bind(self, adapter: Adapter, source: str, name: str, version: int) -> LoadedAdapter:
        if adapter.extras:
            first = adapter.extras[0].name
            remedy = "fold it in with `kt merge`"
            raise InputError(f"{source}: {first}", "a whole tensor", "LoRA factors alone", remedy)
        linears = {self._linear(source, one.name): one for one in adapter.modules}
        experts = {self._layer(source, one.root): one for one in adapter.experts}
        given = {module: (one.name, one.read()) for module, one in linears.items()}
        with LOADING:
            bound = {module: self._factors(source, name, module, pair) for module, (name, pair) in given.items()}
        packed: dict[nn.Module, _core.Adapter] = {}
        factors: dict[nn.Module, LoraFactors] = {}
        for module, one in experts.items():
            pairs = one.read()
            packed[module] = _packed(f"{source}: {one.root}.experts", module, pairs)
            if _may_move(module):
                factors[module] = _factors(pairs)
        matrices = len(bound) + sum(len(one.forms) for one in experts.values())
        return LoadedAdapter(name, version, source, bound, packed, matrices, factors)

    def _linear(self, source: str, name: str) -> nn.Module:
        module = self._linears.get(split_layer_name(name))
        if module is None:
            expected = "LoRA on linear layers of this model, apart from lm_head, and on its experts"
            raise InputError(f"{source}: {name}", "no such layer", expected, "another base, or fold it with `kt merge`")
        return module

    def _layer(self, source: str, root: str) -> nn.Module:
        module = self._experts.get(split_layer_name(root))
        if module is None:
            raise InputError(f"{source}: {root}.experts", "no such layer of experts", "this model's layers")
        return module

    def _factors(self, source: str, name: str, module: nn.Module, pair: LoraPair) -> LinearLora:
        linear: Any = module
        if (pair.a.shape[1], pair.b.shape[0]) != (linear.in_features, linear.out_features):
            given = f"{pair.b.shape[0]} by {pair.a.shape[1]}"
            raise InputError(f"{source}: {name}", given, f"{linear.out_features} by {linear.in_features}")
        a, b = (one.to(linear.weight.device, torch.float32).contiguous() for one in (pair.a, pair.b.T))
        return LinearLora(a, b, pair.scaling)


def _ours(module: Any) -> bool:
    """Computed from a store; a store beside experts that transformers computes itself would never see an adapter."""
    return module.config._experts_implementation == IMPLEMENTATION and hasattr(module, "kt_store")


def _may_move(module: Any) -> bool:
    """An engine may compute this layer somewhere else than on the CPU."""
    return is_placed(module.kt_store)


def _factors(pairs: Mapping[str, LoraPair]) -> LoraFactors:
    """As a GPU takes them, in its precision; gate and up keep a shared A once."""
    found: dict[str, Tensor] = {}
    gate, up = pairs.get("gate"), pairs.get("up")
    shared = gate is not None and up is not None and gate.a is up.a
    for role, pair in pairs.items():
        if not (role == "up" and shared):
            found[f"{role}_a"] = pair.a.to(torch.bfloat16)
        found[f"{role}_b"] = pair.b.to(torch.bfloat16)
    scales = [pairs[role].scaling if role in pairs else 1.0 for role in ("gate", "up", "down")]
    return LoraFactors(tuple(found), tuple(found.values()), (scales[0], scales[1], scales[2]))


def _packed(what: str, module: nn.Module, pairs: Mapping[str, LoraPair]) -> _core.Adapter:
    store = module.kt_store
    assert isinstance(store, ExpertStore)
    sizes = dict.fromkeys(("gate", "up"), (store.hidden_size, store.intermediate_size))
    sizes["down"] = (store.intermediate_size, store.hidden_size)
    for role, pair in pairs.items():
        given = (pair.a.shape[0], pair.a.shape[2], pair.b.shape[1])
        if given != (store.num_experts, *sizes[role]) or (role == "gate" and not store.gated):
            raise InputError(
                f"{what}: {role}", f"experts, inputs, outputs {given}", f"{(store.num_experts, *sizes[role])}"
            )
    gate, up, down = (pairs.get(role) for role in ("gate", "up", "down"))
    shared = gate is not None and up is not None and gate.a is up.a
    packed = store.new_adapter(*(0 if pair is None else pair.rank for pair in (gate, up, down)), shared=shared)
    packed.pack(
        None if gate is None else gate.a,
        None if gate is None else gate.b,
        None if up is None or shared else up.a,
        None if up is None else up.b,
        None if down is None else down.a,
        None if down is None else down.b,
        gate_scale=1.0 if gate is None else gate.scaling,
        up_scale=1.0 if up is None else up.scaling,
        down_scale=1.0 if down is None else down.scaling,
    )
    return packed


def _add(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """A forward hook: what adapters add to a linear layer, into its output."""
    add = _active.get()
    if add is not None:
        add(module, inputs[0], output)


def as_rows(module: nn.Module, entered: Tensor, left: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """What entered a linear layer and what left it, a row for each token of the batch."""
    entered, left = entered.reshape(-1, entered.shape[-1]), left.view(-1, left.shape[-1])
    if entered.shape[0] != rows:
        given = f"{entered.shape[0]} rows in a batch of {rows}"
        raise InputError(type(module).__name__, given, "every token once", "LoRA on this layer cannot be served")
    return entered, left


def _add_shares(shares: Sequence[AdapterRows], rows: int, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
    """Each adapter's share of the rows."""
    shares = [share for share in shares if module in share.adapter.linears]
    if not shares:
        return
    entered, left = as_rows(module, inputs, output, rows)
    for share in shares:
        part, linear = slice(share.first, share.last), share.adapter.linears[module]
        x, y = entered[part], left[part]
        if x.device.type == "cpu" and x.shape[0] <= FEW and x.dtype == y.dtype and x.dtype in TYPES:
            _core.add_lora(x, linear.a, linear.b, y, linear.scaling)
        else:
            y.copy_(y.float() + (x.float() @ linear.a.T) @ linear.b * linear.scaling)
