"""One adapter in memory, whatever files it came from.

A Pair holds the two LoRA factors of a matrix, delta = scaling * b @ a: a `[r, in]`, b `[out, r]`; of the experts of a
layer all are stacked, a `[E, r, in]`, b `[E, out, r]`. An Adapter lists what there is with its sizes and reads the
numbers only when asked, one layer at a time, because an adapter of 48 layers by 128 experts is gigabytes. Where gate
and up share their A (`Adapter.shared`), both pairs hold the same tensor; otherwise each has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.model import ModelFacts
from ktransformers.adapters.names import PROJ_NAMING, ExpertNaming

ROLES = ("gate", "up", "down")


@dataclass(frozen=True)
class LoraPair:
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def delta(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """`[out, in]`, or `[E, out, in]` of stacked experts."""
        return (self.b.to(dtype) @ self.a.to(dtype)) * self.scaling


@dataclass(frozen=True)
class PairForm:
    """What is known of a pair before it is read."""

    rank: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    scaling: float

    @property
    def alpha(self) -> float:
        """scaling * rank, whole where only rounding kept it from being so."""
        alpha = self.scaling * self.rank
        return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


@dataclass(frozen=True)
class Module:
    """LoRA on one linear layer (attention, router, shared expert ...), named as in the model, without prefixes."""

    name: str
    form: PairForm
    read: Callable[[], LoraPair]


@dataclass(frozen=True)
class Experts:
    """LoRA on the routed experts of one layer; `root` is what stands before ".experts" in the model's names."""

    root: str
    layer: int
    experts: int
    forms: Mapping[str, PairForm]  # gate, up, down: those that there are
    read: Callable[[], Mapping[str, LoraPair]]


@dataclass(frozen=True)
class Extra:
    """A tensor that is no LoRA factor (modules_to_save, biases): carried along as it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Adapter:
    experts: tuple[Experts, ...]
    modules: tuple[Module, ...]
    extras: tuple[Extra, ...] = ()
    shared: bool = False  # gate and up have one A
    words: ExpertNaming = PROJ_NAMING  # how per-expert files call this model's expert matrices
    config: Mapping[str, Any] = field(default_factory=dict)  # adapter_config.json as it was read
    model: ModelFacts | None = None

    def forms(self) -> Iterator[PairForm]:
        for layer in self.experts:
            yield from layer.forms.values()
        for module in self.modules:
            yield module.form

    def only_experts(self) -> Adapter:
        return replace(self, modules=(), extras=())

    def without_experts(self) -> Adapter:
        return replace(self, experts=())


def form_of_pair(pair: LoraPair) -> PairForm:
    dtype = torch.promote_types(pair.a.dtype, pair.b.dtype)
    return PairForm(pair.rank, pair.a.shape[-1], pair.b.shape[-2], dtype, pair.scaling)
