"""One LoRA adapter in memory, independent of the format that it was read from.

An Adapter lists its pairs (`LoraPair`) with their sizes and reads their values on demand, one layer at a time, because
an adapter of 48 layers by 128 experts takes gigabytes. If gate and up share A (`Adapter.shared`), both pairs refer to
the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.model import ModelFacts
from ktransformers.adapters.names import PROJ_NAMING, ExpertNaming, order_targets
from ktransformers.experts.lora import LoraPair

ROLES = ("gate", "up", "down")


@dataclass(frozen=True)
class PairForm:
    """Rank, sizes, dtype and scaling of a pair, available before its tensors are read."""

    rank: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    scaling: float
    rounds: bool = False  # the factors are rounded to `dtype` when they are written, after a change of scaling

    @property
    def alpha(self) -> float:
        """scaling * rank, rounded to an integer where it differs from one only by floating-point error."""
        alpha = self.scaling * self.rank
        return float(round(alpha)) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


@dataclass(frozen=True)
class Module:
    """LoRA on one linear layer (attention, router, shared expert, ...), with the model's own name, without prefixes."""

    name: str
    form: PairForm
    read: Callable[[], LoraPair]
    stored: Mapping[str, str] = field(default_factory=dict)  # tensor of the file -> its name in the model


@dataclass(frozen=True)
class Experts:
    """LoRA on the routed experts of one layer; `root` is the part before ".experts" in the model's names."""

    root: str
    layer: int
    experts: int
    forms: Mapping[str, PairForm]  # keys: the adapted ones of gate, up, down
    read: Callable[[], Mapping[str, LoraPair]]
    stored: Mapping[str, str] = field(default_factory=dict)  # tensor of the file -> its name in the model


@dataclass(frozen=True)
class Extra:
    """A tensor that is not a LoRA factor (modules_to_save, biases), copied unchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    stored: Mapping[str, str] = field(default_factory=dict)  # tensor of the file -> its name in the model


@dataclass(frozen=True)
class Adapter:
    experts: tuple[Experts, ...]
    modules: tuple[Module, ...]
    extras: tuple[Extra, ...] = ()
    shared: bool = False  # gate and up use the same A
    naming: ExpertNaming = PROJ_NAMING  # names of the expert matrices in per-expert files of this model
    config: Mapping[str, Any] = field(default_factory=dict)  # adapter_config.json as it was read
    model: ModelFacts | None = None

    def stored(self) -> Iterator[tuple[str, str]]:
        """(tensor of the file, its name in the model), of every tensor that was read."""
        names = [part.stored for part in self.experts] + [part.stored for part in self.modules]
        for stored in (*names, *(part.stored for part in self.extras)):
            yield from stored.items()

    def forms(self) -> Iterator[PairForm]:
        for layer in self.experts:
            yield from layer.forms.values()
        for module in self.modules:
            yield module.form

    def target_names(self) -> list[str]:
        """target_modules of a reader that knows names of matrices alone."""
        leaves = {module.name.rpartition(".")[2] for module in self.modules}
        return order_targets(leaves | {self.naming.matrix(role) for layer in self.experts[:1] for role in layer.forms})

    def only_experts(self) -> Adapter:
        return replace(self, modules=(), extras=())

    def without_experts(self) -> Adapter:
        return replace(self, experts=())


def form_of_pair(pair: LoraPair) -> PairForm:
    dtype = torch.promote_types(pair.a.dtype, pair.b.dtype)
    return PairForm(pair.rank, pair.a.shape[-1], pair.b.shape[-2], dtype, pair.scaling)
