"""Several adapters, and none, in one batch on the device: what a server computes when requests differ.

Rows lie sorted by expert and inside an expert by adapter, those without one last. The base product runs once over all
rows of an expert; LoRA's products run over the finer pieces, one matrix for each (expert, adapter), zeros for the rows
without. Ranks are filled up to the largest of the batch. Pairs of every (layer, adapter) that was asked for stay on the
device as long as a budget of bytes allows; what has gone is brought again when it is wanted. A CUDA graph knows pairs
by their addresses: what it reads is held, within the same budget, and `LoraPointers` has the addresses (`routes.py`).
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.errors import InputError
from ktransformers.nn.lora_factors import LoraFactors
from ktransformers.nn.mixed_lora import MixedLora
from ktransformers.place.gpu.device_lora import lay, to_device
from ktransformers.place.gpu.grouped_mlp import GroupLora, StackedLora

SHELF_BYTES = 2 << 30
SHELF_SHARE = 0.05  # of a GPU's memory, where that is less

Pairs = dict[str, StackedLora]


class LoraCacheFull(InputError):
    """Of adapters that a graph would hold: with fewer of them it may be possible."""


def shelf_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return SHELF_BYTES
    return min(SHELF_BYTES, int(SHELF_SHARE * torch.cuda.get_device_properties(device).total_memory))


class LoraCache:
    """Pairs of adapters on the device, the longest unused given up first. An adapter never changes."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device, self._budget, self._left = device, budget, budget
        self._known: OrderedDict[int, tuple[LoraFactors, Pairs, int]] = (
            OrderedDict()
        )  # factors are kept: ids stay theirs
        self._held: Counter[int] = Counter()  # how many rely on where they lie

    def of(self, factors: LoraFactors, wide: int) -> Pairs:
        """Of all experts of the layer that the factors belong to; `wide`: outputs of gate and up together."""
        known = self._known.get(id(factors))
        if known is not None:
            self._known.move_to_end(id(factors))
            return known[1]
        pairs = lay(factors, [to_device(tensor, self._device) for tensor in factors.tensors], wide)
        size = sum(tensor.numel() * tensor.element_size() for pair in pairs.values() for tensor in (pair.a, pair.b))
        self._known[id(factors)] = (factors, pairs, size)
        self._left -= size
        for other in list(self._known)[:-1]:
            if self._left >= 0:
                break
            if not self._held[other]:
                self._left += self._known.pop(other)[2]
        return pairs

    def hold(self, factors: LoraFactors, wide: int) -> Pairs:
        """As `of`; they stay where they are until they are released as often as they were held."""
        pairs = self.of(factors, wide)
        self._held[id(factors)] += 1
        held = sum(size for at, (_, _, size) in self._known.items() if self._held[at])
        if held > self._budget:
            self.release(factors)
            remedy = "fewer adapters at once, or smaller ranks"
            raise LoraCacheFull(
                "CUDA graph", f"adapters of {held} bytes beside residents", f"{self._budget} at most", remedy
            )
        return pairs

    def release(self, factors: LoraFactors) -> None:
        self._held[id(factors)] -= 1
        if not self._held[id(factors)]:
            del self._held[id(factors)]


@dataclass(frozen=True)
class LoraPointers:
    """LoRA of a layer's experts by several adapters, for whoever looks it up by numbers on the device."""

    tables: dict[str, Tensor]  # by "first" and "down": int64 [adapters, 3], where A and B lie and their rank; 0: none
    ranks: dict[str, int]  # the largest
    pairs: tuple[Pairs, ...]  # of each adapter; held
    factors: tuple[LoraFactors, ...]

    @classmethod
    def hold(cls, shelf: LoraCache, factors: Sequence[LoraFactors], wide: int, device: torch.device) -> LoraPointers:
        held: list[Pairs] = []
        try:
            for one in factors:
                held.append(shelf.hold(one, wide))
        except BaseException:
            for one in factors[: len(held)]:
                shelf.release(one)
            raise
        found = {name: [_whereabouts(pairs.get(name)) for pairs in held] for name in ("first", "down")}
        tables = {name: torch.tensor(rows, dtype=torch.int64, device=device) for name, rows in found.items()}
        ranks = {name: max(rank for _, _, rank in rows) for name, rows in found.items()}
        return cls(tables, ranks, tuple(held), tuple(factors))

    def told(self, adapters: Tensor, name: str) -> tuple[Tensor, Tensor, int] | None:
        """As `gemv.py` takes them; None: no adapter has this matrix."""
        return (adapters, self.tables[name], self.ranks[name]) if self.ranks[name] else None

    def release(self, shelf: LoraCache) -> None:
        for one in self.factors:
            shelf.release(one)


def _whereabouts(pair: StackedLora | None) -> tuple[int, int, int]:
    return (0, 0, 0) if pair is None else (pair.a.data_ptr(), pair.b.data_ptr(), pair.a.shape[1])


@dataclass(frozen=True)
class MultiLora:
    """The adapters of one batch and who wants which."""

    lora: MixedLora
    device: torch.device

    @functools.cached_property
    def slots(self) -> Tensor:
        """int32 [T] on the device: places in `lora`, with -1 as the number behind the last."""
        slots = torch.where(self.lora.rows < 0, len(self.lora.adapters), self.lora.rows).to(torch.int32)
        return slots.to(self.device, non_blocking=True)

    @property
    def each(self) -> int:
        """Pieces of an expert's rows."""
        return len(self.lora.adapters) + 1

    def keys(self, places: Tensor, top_k: int) -> Tensor:
        """Numbers to sort rows by: the place of a row's expert in the walk, then its adapter."""
        return places * self.each + self.slots.repeat_interleave(top_k)

    def chosen(self, shelf: LoraCache, wide: int, experts: Tensor, keys: Tensor, first: int) -> GroupLora:
        """For a group of experts from place `first` of the walk on, whose rows have these keys, sorted."""
        count = experts.shape[0]
        bounds = torch.arange(1, count * self.each + 1, device=keys.device, dtype=keys.dtype) + first * self.each
        ends = torch.searchsorted(keys, bounds).to(torch.int32)
        pairs = [shelf.of(factors, wide) for factors in self.lora.factors]
        return GroupLora(ends, *(_stacked([found.get(name) for found in pairs], experts) for name in ("first", "down")))


def _stacked(pairs: Sequence[StackedLora | None], experts: Tensor) -> StackedLora | None:
    """[experts * (adapters + 1)] matrices, those of one expert side by side."""
    there = [pair for pair in pairs if pair is not None]
    if not there:
        return None
    rank = max(pair.a.shape[1] for pair in there)
    count, like = experts.shape[0], there[0]
    none = StackedLora(
        like.a.new_zeros(count, rank, like.a.shape[2]),
        like.b.new_zeros(count, like.b.shape[1], rank),
    )
    chosen = [none if pair is None else _padded(pair, experts, rank) for pair in (*pairs, None)]
    a, b = (torch.stack([getattr(pair, side) for pair in chosen], 1).flatten(0, 1) for side in ("a", "b"))
    return StackedLora(a, b)


def _padded(pair: StackedLora, experts: Tensor, rank: int) -> StackedLora:
    more = rank - pair.a.shape[1]
    a, b = pair.a.index_select(0, experts), pair.b.index_select(0, experts)
    return StackedLora(F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else StackedLora(a, b)


def host_options(several: MultiLora | None) -> dict[str, Any]:
    """For `ExpertStore.forward`: the same adapters as the core has them packed."""
    return {} if several is None else {"adapter": several.lora.rows, "adapters": several.lora.adapters}
