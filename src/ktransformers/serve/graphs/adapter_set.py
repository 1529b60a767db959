"""A few adapters for steps in which numbers on the device say who wants which: LoRA that a CUDA graph can hold.

`who` int64 `[R]` is a line of the step's table: 1 + the place of a row's adapter in the set, or 0. For a linear layer
the factors of all adapters that have it are laid side by side, A `[S, in]` and B `[S, out]` with S the sum of their
ranks: one product with A, columns of other adapters than the row's set to zero, one product with B, all in float32 as
PEFT does. So a set costs about what one adapter does. Rows without an adapter keep what the base computed, bit for bit.
Experts get `MixedLora` with rows on the device; not every adapter has every layer, so these are looked up layer by
layer.

What a graph was captured with is known to it by addresses: it lives as long as the set does. The surprising decision: a
set of one adapter uses that adapter's own factors, larger ones have copies (`bytes`); whoever keeps sets bounds them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.errors import InputError
from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.mixed_lora import MixedLora, use_mixed_lora
from ktransformers.serve.engine.lora import LinearLora, LoadedAdapter, adding, as_rows

Adapters = tuple[LoadedAdapter, ...]  # in the order of `ordered`


def ordered(adapters: set[LoadedAdapter]) -> Adapters:
    return tuple(sorted(adapters, key=lambda one: (one.name, one.version)))


@dataclass(frozen=True, eq=False)
class RankColumns:
    """Whose the columns of a stack are; one for all layers that have the same adapters in the same ranks."""

    who: Tensor  # int64 [S]
    scales: Tensor  # float32 [S]
    has: Tensor  # bool [1 + adapters]: whether there is anything for this row

    def choose(self, who: Tensor) -> tuple[Tensor, Tensor]:
        """What the columns of each row are multiplied with, float32 [R, S], and bool [R, 1]: rows that have any."""
        return (who[:, None] == self.who) * self.scales, self.has[who][:, None]


@dataclass(frozen=True)
class StackedFactors:
    a: Tensor  # [S, in]
    b: Tensor  # [S, out]
    columns: RankColumns


@dataclass(frozen=True)
class ExpertAdapters:
    """Adapters on a layer of experts."""

    adapters: tuple[_core.Adapter, ...]
    factors: tuple[LoraFactors, ...]
    places: Tensor  # int32 [1 + adapters of the set]: theirs among these, or -1; one tensor for all layers alike


class AdapterSet:
    def __init__(self, adapters: Adapters, device: torch.device) -> None:
        self.adapters, self._device = adapters, device
        self.numbers = {one: at for at, one in enumerate(adapters, start=1)}
        self._columns: dict[tuple[tuple[int, int, float], ...], RankColumns] = {}
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._stacks = {module: self._stack(module) for module in {m for one in adapters for m in one.linears}}
        self.layers = {module: self._layer(module) for module in {m for one in adapters for m in one.experts}}

    @property
    def bytes(self) -> int:
        """Of copies on the device."""
        if len(self.adapters) < 2:
            return 0
        return sum((stack.a.numel() + stack.b.numel()) * 4 for stack in self._stacks.values())

    def _stack(self, module: nn.Module) -> StackedFactors:
        here = [(at, one.linears[module]) for one, at in self.numbers.items() if module in one.linears]
        pattern = tuple((at, linear.a.shape[0], linear.scaling) for at, linear in here)
        if pattern not in self._columns:
            self._columns[pattern] = self._columns_of(here)
        a, b = ([getattr(linear, side) for _, linear in here] for side in ("a", "b"))
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (a, b)]
        return StackedFactors(whole[0], whole[1], self._columns[pattern])

    def _columns_of(self, here: list[tuple[int, LinearLora]]) -> RankColumns:
        who = [at for at, linear in here for _ in range(linear.a.shape[0])]
        scales = [linear.scaling for _, linear in here for _ in range(linear.a.shape[0])]
        has = torch.zeros(len(self.adapters) + 1, dtype=torch.bool)
        has[who] = True
        numbers = torch.tensor(who), torch.tensor(scales, dtype=torch.float32), has
        return RankColumns(*(tensor.to(self._device) for tensor in numbers))

    def _layer(self, module: nn.Module) -> ExpertAdapters:
        here = {at: one for one, at in self.numbers.items() if module in one.experts}
        alone = next((one for one in here.values() if module not in one.factors), None)
        if alone is not None:
            given = f"adapter {alone.name!r}, whose experts only the CPU has"
            raise InputError("CUDA graph", given, "adapters that were loaded behind an engine for the experts")
        present = tuple(here)
        if present not in self._places:
            places = [present.index(at) if at in here else -1 for at in range(len(self.adapters) + 1)]
            self._places[present] = torch.tensor(places, dtype=torch.int32).to(self._device)
        adapters = tuple(one.experts[module] for one in here.values())
        return ExpertAdapters(adapters, tuple(one.factors[module] for one in here.values()), self._places[present])

    @contextmanager
    def applied(self, who: Tensor) -> Iterator[None]:
        """While the model is called for rows of these."""
        rows = {id(places): places[who] for places in self._places.values()}
        layers = {
            module: MixedLora(rows[id(layer.places)], layer.adapters, layer.factors)
            for module, layer in self.layers.items()
        }
        chosen = {columns: columns.choose(who) for columns in self._columns.values()}
        add = functools.partial(self._add, chosen, who.shape[0]) if self._stacks else None
        with adding(add), use_mixed_lora(layers):
            yield

    def _add(
        self,
        chosen: dict[RankColumns, tuple[Tensor, Tensor]],
        rows: int,
        module: nn.Module,
        inputs: Tensor,
        output: Tensor,
    ) -> None:
        stack = self._stacks.get(module)
        if stack is None:
            return
        x, y = as_rows(module, inputs, output, rows)
        scales, has = chosen[stack.columns]
        added = torch.addmm(y.float(), (x.float() @ stack.a.T) * scales, stack.b)
        y.copy_(torch.where(has, added, y))
