"""The KV cache: one contiguous slot per sequence, kept after the sequence ends as a prefix cache.

What a layer keeps between tokens is of two kinds. *Per token*: keys `[heads, capacity, d]` and values
`[heads, capacity, dv]`, latents in the form of keys of one head (`latent.py`), keys of an indexer; keys and values may
be FP8 with scales of their own (`cache_codes.py`). *Per sequence*:
convolution and recurrent states, of the last token only, with copies at some earlier positions (`snapshots.py`) at
which the slot can be truncated or copied. The first `length` positions of a slot belong to `tokens`,
computed under `owner`: the name and version of an adapter, None for the base, because another adapter computes other
keys for the same text. If log-probabilities of the prompt were requested, the slot keeps them too, so that several
completions of one prompt compute it once. The cache is not paged: the keys of a sequence are contiguous, so attention
reads them without a block table, and a shared prefix is copied, which costs a small part of computing it. Capacity is
counted in tokens over all slots, and in states that no running sequence needs; idle slots are evicted in LRU order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.ground.out_of_memory import exhausted_memory
from ktransformers.serve.cache.cache_codes import CODE_DTYPE, SCALE_OF, decode, encode, round_trip
from ktransformers.serve.cache.snapshots import Snapshots, States, copy_states
from ktransformers.serve.sampling.sampling import Score

CAPACITY_BLOCK = 64  # tokens; capacities are multiples of it

Owner = tuple[str, int] | None  # name and version of the adapter that computed the keys; None: the base


@dataclass(eq=False)
class KVSlot:
    owner: Owner
    tokens: list[int] = field(default_factory=list)  # whose keys and values the slot holds
    capacity: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)  # layer -> [heads, capacity, d]
    values: dict[int, Tensor] = field(default_factory=dict)  # none where they are the beginning of the keys (latents)
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # [1, capacity, d], of indexers
    fp8: bool = False  # keys and values are quantized
    rounded: bool = False  # values are rounded to FP8 before they are stored: what `fp8` is compared with
    key_scales: dict[int, Tensor] = field(default_factory=dict)  # uint8 [heads, capacity, 1], of FP8
    value_scales: dict[int, Tensor] = field(default_factory=dict)
    states: States = field(default_factory=States)  # per sequence, after the last of `tokens`
    snapshots: Snapshots = field(default_factory=Snapshots)  # of `states`, at earlier positions
    scores: list[Score] = field(default_factory=list)  # of the first tokens, as far as they were requested
    top_logprobs: int = 0  # alternatives that each of `scores` lists
    root: bytes | None = None  # where the names of its blocks begin (`cache_blocks.py`); None: no tier stores them
    hf_cache: Any = None  # DynamicCache of `SequentialForward`; keys and values are empty then
    busy: bool = True
    last_use: int = 0
    _addresses: tuple[tuple[int, int], NDArray[np.int64]] | None = None  # valid for (capacity, layers)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def parts(self) -> dict[str, dict[int, Tensor]]:
        """What is kept per token: name -> layer -> [heads, capacity, d]."""
        parts = {"keys": self.keys, "values": self.values, "index_keys": self.index_keys}
        return parts | ({"key_scales": self.key_scales, "value_scales": self.value_scales} if self.fp8 else {})

    def buffer(self, part: str, layer: int, like: Tensor) -> Tensor:
        """The whole buffer `[heads, capacity, d]` of a layer, allocated like `[heads, n, d]` on first use; of codes
        where the slot has them."""
        buffers = self.parts[part]
        if layer not in buffers:
            dtype = CODE_DTYPE if self.fp8 and part in SCALE_OF else like.dtype
            buffers[layer] = like.new_empty(like.shape[0], self.capacity, like.shape[2], dtype=dtype)
        return buffers[layer]

    def scales(self, part: str, layer: int, like: Tensor) -> Tensor:
        """The whole buffer of the scales of FP8, allocated on first use."""
        return self.buffer(SCALE_OF[part], layer, like.new_empty(like.shape[0], 0, 1, dtype=torch.uint8))

    def store(self, part: str, layer: int, position: int, rows: Tensor) -> None:
        """Store `[heads, n, d]` at `position`."""
        buffer, written = self.buffer(part, layer, rows), slice(position, position + rows.shape[1])
        if self.rounded and part in SCALE_OF:
            rows = round_trip(rows)
        if buffer.dtype == CODE_DTYPE and rows.dtype != CODE_DTYPE:
            rows, scales = encode(rows)
            self.scales(part, layer, rows)[:, written] = scales
        buffer[:, written] = rows

    def read(self, part: str, layer: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows `first` .. `end` - 1, `[heads, n, d]`: a view, or a decoded copy."""
        rows = self.parts[part][layer][:, first:end]
        return decode(rows, self.parts[SCALE_OF[part]][layer][:, first:end], dtype) if self.has_codes(part) else rows

    def select(self, part: str, layer: int, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the rows at these positions."""
        buffer = self.parts[part][layer]
        if not self.has_codes(part):
            return buffer.index_select(1, positions)
        quantized = buffer.view(torch.uint8).index_select(1, positions).view(CODE_DTYPE)
        return decode(quantized, self.parts[SCALE_OF[part]][layer].index_select(1, positions), dtype)

    def write(self, part: str, layer: int, position: int, rows: Tensor, first: int = 0) -> Tensor:
        """Store `[heads, n, d]` at `position`; returns everything from `first` up to the last one stored, as it is
        stored."""
        self.store(part, layer, position, rows)
        return self.read(part, layer, first, position + rows.shape[1], rows.dtype)

    def has_codes(self, part: str) -> bool:
        return self.fp8 and part in SCALE_OF

    def restart(self, shared: int) -> int:
        """The last position up to `shared` from which the slot can be continued or copied."""
        if self.hf_cache is not None:
            return 0 if self.busy or shared < self.length else shared
        return shared if not self.states or shared == self.length else self.snapshots.last(shared)

    def states_at(self, position: int) -> States:
        """A copy of the states after `position` tokens, which `restart` has found."""
        if not position or not self.states:
            return States()
        return copy_states(self.states if position == self.length else self.snapshots.by_position[position])

    def truncate(self, position: int) -> None:
        """Keep the first `position` tokens, which `restart` has found."""
        if position < self.length:
            self.states = self.states_at(position)
            self.snapshots.drop_after(position)
            del self.tokens[position:]

    @property
    def spare_states(self) -> int:
        """Copies of its states that no running sequence needs."""
        return len(self.snapshots) + (1 if self.states and not self.busy else 0)

    def tensors(self) -> Iterator[Tensor]:
        """Everything that the slot keeps per token."""
        return (tensor for buffers in self.parts.values() for tensor in buffers.values())

    def addresses(self) -> NDArray[np.int64]:
        """int64 `[2 L]`: device addresses of the keys of every computed layer in order, then of the values; 0 where
        there are none; `[4 L]` with those of the scales of FP8. They are valid until the slot grows."""
        state = self.capacity, len(self.keys)
        if self._addresses is None or self._addresses[0] != state:
            parts = (self.keys, self.values, *((self.key_scales, self.value_scales) if self.fp8 else ()))
            tensors = [part.get(layer) for part in parts for layer in sorted(self.keys)]
            found = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            self._addresses = state, np.array(found, np.int64)
        return self._addresses[1]

    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


class LowerTiers(Protocol):
    """Where blocks of slots go that are evicted or overwritten (`cache_tiers.py`)."""

    def schedule(self, slot: KVSlot) -> None:
        """The sequence of the slot has ended."""

    def save_now(self, slot: KVSlot) -> None:
        """The slot is about to be evicted or overwritten."""

    def forget(self, slot: KVSlot) -> None:
        """The contents of the slot are undefined."""


@dataclass(frozen=True)
class CachedPrefix:
    """The slot that shares the longest prefix with a prompt, and whether to copy from it instead of continuing it."""

    slot: KVSlot
    tokens: int
    copy: bool


class KVCache:
    """Allocates slots within `tokens` tokens, and keeps at most `spare_states` states that no running sequence needs.
    Without `reuse` every slot starts empty. With `fp8` slots hold quantized keys and values."""

    def __init__(self, tokens: int, *, reuse: bool = True, spare_states: int = 16, fp8: bool = False) -> None:
        self._reuse, self._spare_states, self._fp8 = reuse, spare_states, fp8
        self.peak_states = 0  # largest number of states so far, copies included
        self.limit = -(-tokens // CAPACITY_BLOCK) * CAPACITY_BLOCK
        self.slots: list[KVSlot] = []
        self.peak_tokens = 0  # largest sum of capacities so far
        self.reused_tokens = 0  # prompt tokens that were found in a slot
        self.lower: LowerTiers | None = None
        self._clock = 0

    @property
    def allocated_tokens(self) -> int:
        return sum(slot.capacity for slot in self.slots)

    @property
    def states(self) -> int:
        """States of sequences, copies included."""
        return sum(len(slot.snapshots) + bool(slot.states) for slot in self.slots)

    @property
    def busy_tokens(self) -> int:
        return sum(slot.capacity for slot in self.slots if slot.busy)

    def allocate(self, owner: Owner, tokens: Sequence[int], top_logprobs: int | None = None) -> KVSlot | None:
        """A slot with capacity for `tokens` that already holds the longest cached prefix; None: no capacity now.

        At least one token stays uncomputed, because the logits of its row are needed. With `top_logprobs`, scores of
        the prompt are requested with that many alternatives: the prefix is then one for which the slot has them, and
        that of the token after it."""
        prefix = self._find_prefix(owner, tokens, top_logprobs)
        shared = 0 if prefix is None else prefix.tokens
        scored = shared if top_logprobs is None else shared + 1
        if prefix is not None and not prefix.copy:
            slot = prefix.slot
            self._save(slot)
            slot.truncate(shared)  # before the slot is busy: memory may run out
            slot.busy = True
            del slot.scores[scored:]
            if self.grow(slot, len(tokens)):
                self.reused_tokens += shared
                return slot
            slot.busy = False
            return None
        slot = KVSlot(owner, fp8=self._fp8)
        self.slots.append(slot)
        if not self.grow(slot, len(tokens)):
            self.slots.remove(slot)
            return None
        if prefix is not None:
            source = prefix.slot
            try:
                for part, buffers in source.parts.items():
                    for layer, held in buffers.items():
                        slot.store(part, layer, 0, held[:, :shared])
                slot.states = source.states_at(shared)
            except Exception:  # no memory
                self.discard(slot)
                raise
            slot.tokens, slot.scores = list(tokens[:shared]), source.scores[:scored]
            slot.top_logprobs = source.top_logprobs
            self.reused_tokens += shared
        return slot

    def grow(self, slot: KVSlot, tokens: int) -> bool:
        """Raise the capacity to at least `tokens`, by a quarter where that fits; False: the cache is full."""
        if tokens <= slot.capacity:
            return True
        capacity = -(-max(tokens, slot.capacity * 5 // 4) // CAPACITY_BLOCK) * CAPACITY_BLOCK
        if not self._evict_idle(capacity - slot.capacity):
            capacity = -(-tokens // CAPACITY_BLOCK) * CAPACITY_BLOCK
            if not self._evict_idle(capacity - slot.capacity):
                return False
        try:
            for buffers in slot.parts.values():
                for layer, old in buffers.items():
                    buffers[layer] = old.new_empty(old.shape[0], capacity, old.shape[2])
                    buffers[layer][:, : slot.length] = old[:, : slot.length]
        except Exception:  # no memory: some layers have grown and others have not
            self.discard(slot)
            raise
        slot.capacity = capacity
        self.peak_tokens = max(self.peak_tokens, self.allocated_tokens)
        return True

    def release(self, slot: KVSlot) -> None:
        """The sequence has ended; its keys and values stay cached until they are evicted."""
        if self.lower is not None:
            self.lower.schedule(slot)
        self._clock += 1
        slot.busy, slot.last_use = False, self._clock
        if not slot.length:
            self.slots.remove(slot)
        try:
            slot.states = copy_states(slot.states)  # which may be rows of a tensor of the whole batch
        except Exception as error:
            if exhausted_memory(error) is None:
                raise
            self.discard(slot)  # it is not cached
        self._bound_states()

    def take_snapshot(self, slot: KVSlot) -> None:
        """Keep a copy of the slot's states as they are now."""
        slot.snapshots.add(slot.length, slot.states)
        self._bound_states()

    def _bound_states(self) -> None:
        """Drop copies of states beyond the bound: of the slots with the most, then of running sequences until half of
        the bound is left for idle slots, then idle slots. The least recently used ones go first."""
        self.peak_states = max(self.peak_states, self.states)
        while sum(slot.spare_states for slot in self.slots) > self._spare_states:
            spared = [slot for slot in self.slots if slot.spare_states]
            busy_first = sum(not slot.busy for slot in spared) <= self._spare_states // 2
            order = {slot: (-max(1, len(slot.snapshots)), slot.busy != busy_first, slot.last_use) for slot in spared}
            slot = min(spared, key=order.__getitem__)
            if slot.busy or len(slot.snapshots) > 1:
                slot.snapshots.drop_one()
            else:
                self._save(slot)
                self.slots.remove(slot)

    def discard(self, slot: KVSlot) -> None:
        """Remove a slot whose contents are undefined."""
        if self.lower is not None:
            self.lower.forget(slot)
        if slot in self.slots:
            self.slots.remove(slot)

    def evict_idle(self) -> None:
        """Evict all slots without a sequence, unsaved: memory has run out."""
        for slot in self.slots:
            if self.lower is not None and not slot.busy:
                self.lower.forget(slot)
        self.slots = [slot for slot in self.slots if slot.busy]

    def evict_owner(self, owner: Owner) -> None:
        """Evict the idle slots of an adapter that was unloaded."""
        for slot in [slot for slot in self.slots if slot.owner == owner and not slot.busy]:
            self._save(slot)
            self.slots.remove(slot)

    def clear(self) -> None:
        self.slots.clear()

    def _evict_idle(self, tokens: int) -> bool:
        """Evict idle slots, least recently used first, until `tokens` more fit."""
        if self.limit - self.busy_tokens < tokens:
            return False
        idle = sorted((slot for slot in self.slots if not slot.busy), key=lambda slot: slot.last_use)
        while self.allocated_tokens + tokens > self.limit and idle:
            self._save(idle[0])
            self.slots.remove(idle.pop(0))
        return self.allocated_tokens + tokens <= self.limit

    def _save(self, slot: KVSlot) -> None:
        if self.lower is not None:
            self.lower.save_now(slot)

    def cached_tokens(self, owner: Owner, tokens: Sequence[int]) -> int:
        """How many of `tokens` a slot holds that `allocate` would continue or copy."""
        prefix = self._find_prefix(owner, tokens, None)
        return 0 if prefix is None else prefix.tokens

    def _find_prefix(self, owner: Owner, tokens: Sequence[int], top_logprobs: int | None) -> CachedPrefix | None:
        best, longest = None, 0
        for slot in self.slots if self._reuse else ():
            if slot.owner != owner:
                continue
            shared = _shared_prefix(slot.tokens, tokens[:-1])
            if top_logprobs is not None:  # a token's score comes from the row before it
                shared = max(0, min(shared, len(slot.scores)) - 1) if slot.top_logprobs >= top_logprobs else 0
            shared = slot.restart(shared)
            if shared > longest or (shared == longest and best is not None and best.busy and not slot.busy):
                best, longest = slot, shared
        if best is None:
            return None
        # Continuing a slot truncates it. An idle slot that shares less than half of its tokens is copied from instead,
        # where a second slot fits, so that a long conversation is not lost for a short common prefix.
        if not best.busy and longest < best.length // 2 and self._fits_another(len(tokens)):
            best.last_use = self._clock
            return CachedPrefix(best, longest, copy=True)
        return CachedPrefix(best, longest, copy=best.busy)

    def _fits_another(self, tokens: int) -> bool:
        return self.allocated_tokens + tokens + CAPACITY_BLOCK <= self.limit


def _shared_prefix(cached: Sequence[int], wanted: Sequence[int]) -> int:
    count = 0
    for a, b in zip(cached, wanted, strict=False):
        if a != b:
            break
        count += 1
    return count
