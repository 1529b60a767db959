"""Brings an adapter into the one form that every dialect is written from.

Dialects pad ranks with zeros, repeat an A that gate and up share, or stack gate and up into one block-diagonal pair.
Here the padding is cut off, a shared A is recognised, and a block-diagonal pair is taken apart, so that converting back
and forth ends where it began and ranks do not grow. Whether A is shared is one decision for the whole adapter: layers
that differed would need ranks that differ, which most readers do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.lora import Adapter, Experts, LoraPair, Module, PairForm, form_of_pair
from ktransformers.adapters.model import ModelFacts
from ktransformers.adapters.names import PROJ_NAMING, split_layer_name


@dataclass(frozen=True)
class _UsedRanks:
    """Which rank components hold anything, `[r]` each."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class _LayerRanks:
    same: bool  # gate and up have equal A
    used: Mapping[str, _UsedRanks]


@dataclass(frozen=True)
class _RankSlice:
    """Rank components first .. last of a raw pair."""

    first: int
    last: int

    def form(self, form: PairForm) -> PairForm:
        return replace(form, rank=self.last - self.first)

    def pair(self, pair: LoraPair) -> LoraPair:
        return LoraPair(pair.a[..., self.first : self.last, :], pair.b[..., self.first : self.last], pair.scaling)


def canonicalize(raw: Adapter) -> Adapter:
    """The same deltas in the least form; reads every pair once."""
    seen = [_inspect_layer(layer) for layer in raw.experts]
    gated = [one for one in seen if {"gate", "up"} <= set(one.used)]
    same = bool(gated) and all(one.same for one in gated)
    split = _split_points(gated) if same else None
    shared = same and split is None
    experts = tuple(_canonical_layer(layer, one, shared, split) for layer, one in zip(raw.experts, seen, strict=True))
    return replace(
        raw, experts=experts, modules=tuple(_canonical_module(module) for module in raw.modules), shared=shared
    )


def adapter_from_tensors(
    experts: Mapping[str, Mapping[str, LoraPair]],
    modules: Mapping[str, LoraPair],
    *,
    model: ModelFacts | None = None,
    config: Mapping[str, Any] | None = None,
) -> Adapter:
    """An adapter of tensors that exist already: root (`model.layers.3.mlp`) -> role -> stacked pair, name -> pair."""
    layers = tuple(_experts_of(root, pairs) for root, pairs in experts.items())
    linear = tuple(_module_of(name, pair) for name, pair in modules.items())
    words = model.words if model else PROJ_NAMING
    return canonicalize(Adapter(layers, linear, words=words, config=dict(config or {}), model=model))


def _experts_of(root: str, pairs: Mapping[str, LoraPair]) -> Experts:
    forms = {role: form_of_pair(pair) for role, pair in pairs.items()}
    return Experts(root, split_layer_name(root)[1], next(iter(pairs.values())).a.shape[0], forms, lambda: pairs)


def _module_of(name: str, pair: LoraPair) -> Module:
    return Module(name, form_of_pair(pair), lambda: pair)


def _used_ranks(pair: LoraPair) -> _UsedRanks:
    rank = pair.rank
    return _UsedRanks(
        (pair.a != 0).movedim(-2, 0).reshape(rank, -1).any(1), (pair.b != 0).movedim(-1, 0).reshape(rank, -1).any(1)
    )


def _inspect_layer(layer: Experts) -> _LayerRanks:
    pairs = layer.read()
    gate, up = pairs.get("gate"), pairs.get("up")
    same = gate is not None and up is not None and (gate.a is up.a or _equal(gate.a, up.a))
    return _LayerRanks(same, {role: _used_ranks(pair) for role, pair in pairs.items()})


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(torch.equal(one, two))


def _used_rank_end(used: Tensor) -> int:
    """One past the last component in use."""
    found = torch.nonzero(used)
    return int(found[-1]) + 1 if len(found) else 0


def _split_points(gated: list[_LayerRanks]) -> dict[int, int] | None:
    """Rank -> where gate's components end and up's begin, if every layer allows it; None if any mixes them."""
    bounds: dict[int, tuple[int, int]] = {}
    for one in gated:
        rank = len(one.used["gate"].a)
        low, high = bounds.get(rank, (0, rank))
        first_up = torch.nonzero(one.used["up"].b)
        bounds[rank] = (
            max(low, _used_rank_end(one.used["gate"].b)),
            min(high, int(first_up[0]) if len(first_up) else rank),
        )
    points: dict[int, int] = {}
    for rank, (low, high) in bounds.items():
        middle = rank // 2 if low <= rank // 2 <= high else low
        if not (low <= high and 0 < middle < rank):
            return None
        points[rank] = middle
    return points


def _canonical_layer(layer: Experts, seen: _LayerRanks, shared: bool, split: dict[int, int] | None) -> Experts:
    cuts: dict[str, _RankSlice] = {}
    for role, used in seen.used.items():
        first, last, busy = 0, len(used.a), used.a | used.b
        if shared and role in ("gate", "up"):
            busy = used.a | seen.used["gate"].b | seen.used["up"].b
        elif split is not None and role in ("gate", "up"):
            point = split[len(used.a)]
            first, last = (0, point) if role == "gate" else (point, last)
        cuts[role] = _RankSlice(first, first + max(1, _used_rank_end(busy[first:last])))

    def read() -> dict[str, LoraPair]:
        pairs = {role: cuts[role].pair(pair) for role, pair in layer.read().items()}
        if shared and "up" in pairs:
            pairs["up"] = replace(pairs["up"], a=pairs["gate"].a)
        return pairs

    return replace(layer, forms={role: cuts[role].form(form) for role, form in layer.forms.items()}, read=read)


def _canonical_module(module: Module) -> Module:
    used = _used_ranks(module.read())
    cut = _RankSlice(0, max(1, _used_rank_end(used.a | used.b)))
    return replace(module, form=cut.form(module.form), read=lambda: cut.pair(module.read()))
