"""Several LoRA adapters, and none, in one batch on the device: what a server computes when requests differ.

Rows are sorted by expert and within an expert by adapter, those without an adapter last. The base product runs once
over all rows of an expert; the LoRA products run over the finer pieces, one matrix per (expert, adapter) and zeros for
rows without one, with ranks padded to the largest of the batch. Stacked factors of each (layer, adapter) stay on the
device in an LRU cache with a byte budget. A CUDA graph refers to factors by address, so those that it reads are pinned
in the cache, within the same budget; `LoraPointers` holds the addresses for `place/gpu/resident_decode.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.experts.lora import ExpertLora, LoraPair, MixedLora
from ktransformers.ground.errors import InputError
from ktransformers.place.gpu.device_lora import stack_factors, to_device
from ktransformers.place.gpu.grouped_mlp import GroupLora

CACHE_BYTES = 2 << 30
CACHE_SHARE = 0.05  # of a GPU's memory, where that is less

Pairs = dict[str, LoraPair]


class LoraCacheFull(InputError):
    """The adapters that a CUDA graph would pin exceed the budget; fewer of them may fit."""


def lora_cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CACHE_BYTES
    return min(CACHE_BYTES, int(CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory))


class LoraCache:
    """LRU cache of stacked factors on the device, by adapter and layer. An adapter never changes."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self._device, self._budget, self._free_bytes = device, budget, budget
        # By id of the factors, which are kept so that the id is not reused.
        self._entries: OrderedDict[int, tuple[ExpertLora, Pairs, int]] = OrderedDict()
        self._pins: Counter[int] = Counter()  # how many graphs rely on an entry's addresses

    def get(self, factors: ExpertLora, gate_up_rows: int) -> Pairs:
        """The factors of all experts of a layer, stacked; `gate_up_rows`: outputs of gate and up together."""
        entry = self._entries.get(id(factors))
        if entry is not None:
            self._entries.move_to_end(id(factors))
            return entry[1]
        pairs = stack_factors(factors, [to_device(tensor, self._device) for tensor in factors.tensors], gate_up_rows)
        size = sum(tensor.numel() * tensor.element_size() for pair in pairs.values() for tensor in (pair.a, pair.b))
        self._entries[id(factors)] = (factors, pairs, size)
        self._free_bytes -= size
        for oldest in list(self._entries)[:-1]:
            if self._free_bytes >= 0:
                break
            if not self._pins[oldest]:
                self._free_bytes += self._entries.pop(oldest)[2]
        return pairs

    def pin(self, factors: ExpertLora, gate_up_rows: int) -> Pairs:
        """As `get`; the entry keeps its addresses until it is unpinned as often as it was pinned."""
        pairs = self.get(factors, gate_up_rows)
        self._pins[id(factors)] += 1
        pinned = sum(size for key, (_, _, size) in self._entries.items() if self._pins[key])
        if pinned > self._budget:
            self.unpin(factors)
            remedy = "fewer adapters at once, or smaller ranks"
            raise LoraCacheFull(
                "CUDA graph", f"adapters of {pinned} bytes with residents", f"{self._budget} at most", remedy
            )
        return pairs

    def unpin(self, factors: ExpertLora) -> None:
        self._pins[id(factors)] -= 1
        if not self._pins[id(factors)]:
            del self._pins[id(factors)]


@dataclass(frozen=True)
class LoraPointers:
    """Addresses of a layer's expert LoRA factors in several adapters, for kernels that look adapters up by index."""

    # By "first" and "down": int64 [adapters, 3], addresses of A and B and their rank; 0: none.
    tables: dict[str, Tensor]
    ranks: dict[str, int]  # the largest
    pairs: tuple[Pairs, ...]  # of each adapter; pinned
    factors: tuple[ExpertLora, ...]

    @classmethod
    def pin(
        cls, cache: LoraCache, factors: Sequence[ExpertLora], gate_up_rows: int, device: torch.device
    ) -> LoraPointers:
        pinned: list[Pairs] = []
        try:
            for adapter in factors:
                pinned.append(cache.pin(adapter, gate_up_rows))
        except BaseException:
            for adapter in factors[: len(pinned)]:
                cache.unpin(adapter)
            raise
        rows_of = {name: [_addresses(pairs.get(name)) for pairs in pinned] for name in ("first", "down")}
        tables = {name: torch.tensor(rows, dtype=torch.int64, device=device) for name, rows in rows_of.items()}
        ranks = {name: max(rank for _, _, rank in rows) for name, rows in rows_of.items()}
        return cls(tables, ranks, tuple(pinned), tuple(factors))

    def kernel_arguments(self, adapters: Tensor, name: str) -> tuple[Tensor, Tensor, int] | None:
        """The arguments of a kernel of `resident_decode_triton.py`; None: no adapter has this matrix."""
        return (adapters, self.tables[name], self.ranks[name]) if self.ranks[name] else None

    def unpin(self, cache: LoraCache) -> None:
        for adapter in self.factors:
            cache.unpin(adapter)


def _addresses(pair: LoraPair | None) -> tuple[int, int, int]:
    return (0, 0, 0) if pair is None else (pair.a.data_ptr(), pair.b.data_ptr(), pair.a.shape[1])


def adapter_keys(mixed: MixedLora, positions: Tensor, top_k: int) -> Tensor:
    """Sort keys of rows: the position of the row's expert in the sweep, then its adapter, rows without one last."""
    adapters = torch.where(mixed.rows < 0, len(mixed.adapters), mixed.rows).to(torch.int32)
    adapters = adapters.to(positions.device, non_blocking=True)
    return positions * (len(mixed.adapters) + 1) + adapters.repeat_interleave(top_k)


def select_adapters(
    mixed: MixedLora, cache: LoraCache, gate_up_rows: int, experts: Tensor, keys: Tensor, first: int
) -> GroupLora:
    """LoRA of the group of experts from position `first` of the sweep on, whose rows have these sorted keys. The rows
    of an expert are cut into one piece per adapter and one without."""
    pieces = len(mixed.adapters) + 1
    bounds = torch.arange(1, experts.shape[0] * pieces + 1, device=keys.device, dtype=keys.dtype) + first * pieces
    ends = torch.searchsorted(keys, bounds).to(torch.int32)
    pairs = [cache.get(factors, gate_up_rows) for factors in mixed.factors]
    return GroupLora(ends, *(_stacked([stacked.get(name) for stacked in pairs], experts) for name in ("first", "down")))


def _stacked(pairs: Sequence[LoraPair | None], experts: Tensor) -> LoraPair | None:
    """[experts * (adapters + 1)] matrices, those of one expert next to each other."""
    present = [pair for pair in pairs if pair is not None]
    if not present:
        return None
    rank = max(pair.a.shape[1] for pair in present)
    count, like = experts.shape[0], present[0]
    none = LoraPair(like.a.new_zeros(count, rank, like.a.shape[2]), like.b.new_zeros(count, like.b.shape[1], rank))
    padded = [none if pair is None else _padded(pair, experts, rank) for pair in (*pairs, None)]
    a, b = (torch.stack([getattr(pair, name) for pair in padded], 1).flatten(0, 1) for name in ("a", "b"))
    return LoraPair(a, b)


def _padded(pair: LoraPair, experts: Tensor, rank: int) -> LoraPair:
    padding = rank - pair.a.shape[1]
    a, b = pair.a.index_select(0, experts), pair.b.index_select(0, experts)
    return LoraPair(F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))) if padding else LoraPair(a, b)
