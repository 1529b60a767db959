"""Brings an adapter into the canonical form that every format is written from.

Formats pad ranks with zeros, repeat an A that gate and up share, or stack gate and up into one block-diagonal pair.
The canonical form has no zero padding, marks a shared A, and splits a block-diagonal pair, so that a round trip through
a format returns the same adapter and ranks do not grow. A is shared in all layers or in none, because layers that
differ would need different ranks, which most readers do not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.lora import Adapter, Experts, Module, PairForm, form_of_pair
from ktransformers.adapters.model import ModelFacts
from ktransformers.adapters.names import PROJ_NAMING
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.lora import LoraPair


@dataclass(frozen=True)
class _UsedRanks:
    """Which rank components have a nonzero entry, `[r]` each."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class _LayerRanks:
    same_a: bool  # gate and up have equal A
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
    """The same deltas in the canonical form; reads every pair once."""
    ranks = [_inspect_layer(layer) for layer in raw.experts]
    gated = [layer_ranks for layer_ranks in ranks if {"gate", "up"} <= set(layer_ranks.used)]
    same_a = bool(gated) and all(layer_ranks.same_a for layer_ranks in gated)
    split = _split_points(gated) if same_a else None
    shared = same_a and split is None
    experts = tuple(
        _canonical_layer(layer, layer_ranks, shared, split)
        for layer, layer_ranks in zip(raw.experts, ranks, strict=True)
    )
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
    """An adapter of tensors in memory: root (`model.layers.3.mlp`) -> role -> stacked pair, module name -> pair."""
    layers = tuple(_experts_of(root, pairs) for root, pairs in experts.items())
    linear = tuple(_module_of(name, pair) for name, pair in modules.items())
    naming = model.naming if model else PROJ_NAMING
    return canonicalize(Adapter(layers, linear, naming=naming, config=dict(config or {}), model=model))


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
    same_a = gate is not None and up is not None and (gate.a is up.a or _equal(gate.a, up.a))
    return _LayerRanks(same_a, {role: _used_ranks(pair) for role, pair in pairs.items()})


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


def _used_rank_end(used: Tensor) -> int:
    """One past the last component in use."""
    nonzero = torch.nonzero(used)
    return int(nonzero[-1]) + 1 if len(nonzero) else 0


def _split_points(gated: list[_LayerRanks]) -> dict[int, int] | None:
    """Rank -> the component where gate ends and up begins, or None if a layer mixes the two."""
    bounds: dict[int, tuple[int, int]] = {}
    for layer_ranks in gated:
        rank = len(layer_ranks.used["gate"].a)
        low, high = bounds.get(rank, (0, rank))
        first_up = torch.nonzero(layer_ranks.used["up"].b)
        bounds[rank] = (
            max(low, _used_rank_end(layer_ranks.used["gate"].b)),
            min(high, int(first_up[0]) if len(first_up) else rank),
        )
    points: dict[int, int] = {}
    for rank, (low, high) in bounds.items():
        middle = rank // 2 if low <= rank // 2 <= high else low
        if not (low <= high and 0 < middle < rank):
            return None
        points[rank] = middle
    return points


def _canonical_layer(layer: Experts, ranks: _LayerRanks, shared: bool, split: dict[int, int] | None) -> Experts:
    slices: dict[str, _RankSlice] = {}
    for role, used in ranks.used.items():
        first, last, used_any = 0, len(used.a), used.a | used.b
        if shared and role in ("gate", "up"):
            used_any = used.a | ranks.used["gate"].b | ranks.used["up"].b
        elif split is not None and role in ("gate", "up"):
            point = split[len(used.a)]
            first, last = (0, point) if role == "gate" else (point, last)
        slices[role] = _RankSlice(first, first + max(1, _used_rank_end(used_any[first:last])))

    def read() -> dict[str, LoraPair]:
        pairs = {role: slices[role].pair(pair) for role, pair in layer.read().items()}
        if shared and "up" in pairs:
            pairs["up"] = replace(pairs["up"], a=pairs["gate"].a)
        return pairs

    return replace(layer, forms={role: slices[role].form(form) for role, form in layer.forms.items()}, read=read)


def _canonical_module(module: Module) -> Module:
    used = _used_ranks(module.read())
    rank_slice = _RankSlice(0, max(1, _used_rank_end(used.a | used.b)))
    return replace(module, form=rank_slice.form(module.form), read=lambda: rank_slice.pair(module.read()))
