"""The KV cache: blocks of 64 tokens, and for each sequence the numbers of its blocks. Kept after the sequence ends as a
prefix cache.

What a layer keeps between tokens is of two kinds. *Per token*: keys and values, latents in the form of keys of one head
(`latent.py`), keys of an indexer; keys and values may be FP8 with scales of their own (`cache_codes.py`). All sequences
share one `BlockMemory`: a tensor `[heads, blocks, 64, d]` for each part of each layer, allocated once. A sequence grows
by taking another block, and nothing is copied. Sequences with the same beginning share its blocks; a block that another
one shares is copied before it is written. *Per sequence*: convolution and recurrent states, of the last token only,
with copies at some earlier positions (`snapshots.py`) at which a sequence can be truncated or continued by another.

The first `length` positions of a slot belong to `tokens`, computed under `owner`: the name and version of an adapter,
None for the base, because another adapter computes other keys for the same text. If log-probabilities of the prompt
were requested, the slot keeps them too, so that several completions of one prompt compute it once. The slot of a
sequence that has ended is idle: its blocks stay until others need them; idle slots are evicted in LRU order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
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

BLOCK_TOKENS = 64
PARTS = ("keys", "values", "index_keys", "key_scales", "value_scales")

Owner = tuple[str, int] | None  # name and version of the adapter that computed the keys; None: the base
_numbers = itertools.count()
Rows = slice | Tensor  # of all tokens of a memory, `block * BLOCK_TOKENS + offset`


class BlockMemory:
    """What `blocks` blocks hold. `fp8`: keys and values are quantized; `rounded`: they are rounded to FP8 before they
    are stored, which is what `fp8` is compared with. No sequence has more than `longest` blocks."""

    def __init__(self, blocks: int, *, longest: int | None = None, fp8: bool = False, rounded: bool = False) -> None:
        self.blocks, self.fp8, self.rounded = blocks, fp8, rounded
        self.longest = blocks if longest is None else min(longest, blocks)
        self.parts: dict[str, dict[int, Tensor]] = {part: {} for part in PARTS}

    @property
    def layers(self) -> tuple[int, ...]:
        """Those with keys."""
        return tuple(sorted(self.parts["keys"]))

    @property
    def block_bytes(self) -> int:
        """Of all parts of all layers."""
        return sum(t.nbytes // self.blocks for tensors in self.parts.values() for t in tensors.values())

    def has_codes(self, part: str) -> bool:
        return self.fp8 and part in SCALE_OF

    def part(self, part: str, layer: int, like: Tensor) -> Tensor:
        """`[heads, blocks, BLOCK_TOKENS, d]`, allocated like `[heads, n, d]` on first use; bytes where it has codes."""
        tensors = self.parts[part]
        if layer not in tensors:
            heads, _, size = like.shape
            dtype = torch.uint8 if self.has_codes(part) else like.dtype
            with torch.inference_mode(False):
                tensors[layer] = torch.empty(heads, self.blocks, BLOCK_TOKENS, size, dtype=dtype, device=like.device)
        return tensors[layer]

    def scales(self, part: str, layer: int, like: Tensor) -> Tensor:
        """`[heads, blocks, BLOCK_TOKENS, 1]`, of FP8."""
        return self.part(SCALE_OF[part], layer, like.new_empty(like.shape[0], 0, 1, dtype=torch.uint8))

    def of_layer(self, layer: int, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, ...]:
        """Keys and values of all blocks, and of FP8 their scales; without `value` those of latents, whose values are
        the beginning of the keys."""
        names = ("keys", "values" if value is not None else "keys")
        likes = (key, key if value is None else value)
        tensors = [self.part(name, layer, like) for name, like in zip(names, likes, strict=True)]
        if self.fp8:
            tensors += [self.scales(name, layer, like) for name, like in zip(names, likes, strict=True)]
        return tuple(tensors)

    def store(self, part: str, layer: int, where: Rows, rows: Tensor) -> None:
        """Store `[heads, n, d]`."""
        buffer = self.part(part, layer, rows)
        if self.rounded and part in SCALE_OF:
            rows = round_trip(rows)
        if self.has_codes(part):
            rows, scales = encode(rows)
            _put(self.scales(part, layer, rows), where, scales)
            rows = rows.view(torch.uint8)
        _put(buffer, where, rows)

    def read(self, part: str, layer: int, where: Rows, dtype: torch.dtype) -> Tensor:
        """`[heads, n, d]`: a view where rows follow each other and are no codes."""
        rows = _take(self.parts[part][layer], where)
        if not self.has_codes(part):
            return rows
        return decode(rows.view(CODE_DTYPE), _take(self.parts[SCALE_OF[part]][layer], where), dtype)

    def copy_block(self, source: int, target: int) -> None:
        for tensors in self.parts.values():
            for tensor in tensors.values():
                tensor[:, target] = tensor[:, source]


def _put(buffer: Tensor, where: Rows, rows: Tensor) -> None:
    flat = buffer.flatten(1, 2)
    if isinstance(where, slice):
        flat[:, where] = rows
    else:
        flat.index_copy_(1, where.to(flat.device), rows)


def _take(buffer: Tensor, where: Rows) -> Tensor:
    flat = buffer.flatten(1, 2)
    return flat[:, where] if isinstance(where, slice) else flat.index_select(1, where.to(flat.device))


@dataclass(eq=False)
class KVSlot:
    """One sequence, running or idle."""

    owner: Owner
    memory: BlockMemory
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # whose keys and values the slot holds
    states: States = field(default_factory=States)  # per sequence, after the last of `tokens`
    snapshots: Snapshots = field(default_factory=Snapshots)  # of `states`, at earlier positions
    scores: list[Score] = field(default_factory=list)  # of the first tokens, as far as they were requested
    top_logprobs: int = 0  # alternatives that each of `scores` lists
    root: bytes | None = None  # where the names of its blocks begin (`cache_blocks.py`); None: no tier stores them
    hf_cache: Any = None  # DynamicCache of `SequentialForward`; its blocks are empty then
    busy: bool = True
    last_use: int = 0
    number: int = field(default_factory=_numbers.__next__)  # of this list of blocks, which may still grow
    _table: NDArray[np.int64] | None = None

    @classmethod
    def alone(cls, capacity: int, *, fp8: bool = False, rounded: bool = False) -> KVSlot:
        """A sequence with a memory of its own."""
        return cls.together(1, capacity, fp8=fp8, rounded=rounded)[0]

    @classmethod
    def together(cls, count: int, capacity: int, *, fp8: bool = False, rounded: bool = False) -> list[KVSlot]:
        """Sequences that share a memory of their own."""
        each = -(-capacity // BLOCK_TOKENS)
        memory = BlockMemory(count * each, fp8=fp8, rounded=rounded)
        return [cls(None, memory, list(range(index * each, (index + 1) * each))) for index in range(count)]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        """Tokens."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def table(self) -> NDArray[np.int64]:
        """The numbers of its blocks."""
        if self._table is None or len(self._table) != len(self.blocks):
            self._table = np.array(self.blocks, np.int64)
        return self._table

    def set_blocks(self, blocks: Iterable[int]) -> None:
        self.blocks, self._table, self.number = list(blocks), None, next(_numbers)

    def rows(self, first: int, end: int) -> Rows:
        """Where tokens `first` .. `end` - 1 lie in its memory."""
        blocks = self.blocks[first // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            start = blocks[0] * BLOCK_TOKENS + first % BLOCK_TOKENS
            return slice(start, start + end - first)
        positions = np.arange(first, end)
        return torch.from_numpy(self.table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)

    def store(self, part: str, layer: int, position: int, rows: Tensor) -> None:
        """Store `[heads, n, d]` at `position`."""
        self.memory.store(part, layer, self.rows(position, position + rows.shape[1]), rows)

    def read(self, part: str, layer: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows `first` .. `end` - 1, `[heads, n, d]`: a view, or a copy."""
        return self.memory.read(part, layer, self.rows(first, end), dtype)

    def select(self, part: str, layer: int, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the rows at these positions."""
        table = torch.from_numpy(self.table).to(positions.device)
        rows = table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return self.memory.read(part, layer, rows, dtype)

    def write(self, part: str, layer: int, position: int, rows: Tensor, first: int = 0) -> Tensor:
        """Store `[heads, n, d]` at `position`; returns everything from `first` up to the last one stored, as it is
        stored."""
        self.store(part, layer, position, rows)
        return self.read(part, layer, first, position + rows.shape[1], rows.dtype)

    def restart(self, shared: int) -> int:
        """The last position up to `shared` from which the sequence can be continued, by itself or by another one."""
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


class BlockAllocator:
    """Which blocks are free, and how many sequences share each of the others. The lowest numbers are taken first, so
    that a prompt's blocks mostly follow each other and memory that was never written is taken last."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks))
        self._sharing = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._sharing[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._sharing[block] -= 1
            if not self._sharing[block]:
                heapq.heappush(self._free, block)

    def is_shared(self, block: int) -> bool:
        return self._sharing[block] > 1


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
    """The slot that shares the longest prefix with a prompt, and whether it stays beside the new sequence, which then
    shares its blocks, or becomes the new sequence."""

    slot: KVSlot
    tokens: int
    stays: bool


class KVCache:
    """Slots within `tokens` tokens, and at most `spare_states` states that no running sequence needs. Without `reuse`
    every slot starts empty. With `fp8` keys and values are quantized. No sequence is longer than `longest` tokens."""

    def __init__(
        self, tokens: int, *, reuse: bool = True, spare_states: int = 16, fp8: bool = False, longest: int | None = None
    ) -> None:
        self._reuse, self._spare_states = reuse, spare_states
        blocks = -(-tokens // BLOCK_TOKENS)
        self.memory = BlockMemory(blocks, longest=None if longest is None else -(-longest // BLOCK_TOKENS), fp8=fp8)
        self._allocator = BlockAllocator(blocks)
        self.slots: list[KVSlot] = []
        self.peak_states = 0  # largest number of states so far, copies included
        self.peak_tokens = 0  # largest capacity of all slots so far
        self.reused_tokens = 0  # prompt tokens that were found in a slot
        self.lower: LowerTiers | None = None
        self._clock = 0

    @property
    def limit(self) -> int:
        """Tokens."""
        return self.memory.blocks * BLOCK_TOKENS

    @property
    def allocated_tokens(self) -> int:
        return (self.memory.blocks - self._allocator.free) * BLOCK_TOKENS

    @property
    def busy_tokens(self) -> int:
        """In blocks of running sequences, each counted once."""
        return len({block for slot in self.slots if slot.busy for block in slot.blocks}) * BLOCK_TOKENS

    @property
    def states(self) -> int:
        """States of sequences, copies included."""
        return sum(len(slot.snapshots) + bool(slot.states) for slot in self.slots)

    def allocate(self, owner: Owner, tokens: Sequence[int], top_logprobs: int | None = None) -> KVSlot | None:
        """A slot with capacity for `tokens` that already holds the longest cached prefix; None: no capacity now.

        At least one token stays uncomputed, because the logits of its row are needed. With `top_logprobs`, scores of
        the prompt are requested with that many alternatives: the prefix is then one for which the slot has them, and
        that of the token after it."""
        prefix = self._find_prefix(owner, tokens, top_logprobs)
        shared = 0 if prefix is None else prefix.tokens
        scored = shared if top_logprobs is None else shared + 1
        if prefix is not None and not prefix.stays:
            slot = prefix.slot
            self._save(slot)
            slot.truncate(shared)  # before the slot is busy: memory may run out
            slot.busy = True
            del slot.scores[scored:]
            self._cut(slot)
        else:
            slot = KVSlot(owner, self.memory)
            if prefix is not None:
                source = prefix.slot
                slot.states = source.states_at(shared)
                slot.set_blocks(source.blocks[: -(-shared // BLOCK_TOKENS)])
                slot.tokens, slot.scores = list(tokens[:shared]), source.scores[:scored]
                slot.top_logprobs = source.top_logprobs
                self._allocator.share(slot.blocks)
            self.slots.append(slot)
        if self._make_writable(slot) and self.grow(slot, len(tokens)):
            self.reused_tokens += shared
            return slot
        if prefix is not None and not prefix.stays:
            slot.busy = False
        else:
            self._remove(slot)
        return None

    def grow(self, slot: KVSlot, tokens: int) -> bool:
        """Raise the capacity to at least `tokens`; False: the cache is full."""
        missing = -(-tokens // BLOCK_TOKENS) - len(slot.blocks)
        if missing <= 0:
            return True
        if not self._evict_idle(missing):
            return False
        slot.blocks += self._allocator.take(missing)
        self.peak_tokens = max(self.peak_tokens, self.allocated_tokens)
        return True

    def _make_writable(self, slot: KVSlot) -> bool:
        """Give the slot a copy of its last block if it will write to it and another slot has it too; False: there is no
        block."""
        if not slot.length % BLOCK_TOKENS or not self._allocator.is_shared(slot.blocks[-1]):
            return True
        if not self._evict_idle(1):
            return False
        last, (copy,) = slot.blocks[-1], self._allocator.take(1)
        slot.set_blocks([*slot.blocks[:-1], copy])
        self._allocator.release([last])
        try:
            self.memory.copy_block(last, copy)
        except Exception:  # no memory
            self.discard(slot)
            raise
        return True

    def _cut(self, slot: KVSlot) -> None:
        """Release the blocks behind its tokens."""
        kept = -(-slot.length // BLOCK_TOKENS)
        self._allocator.release(slot.blocks[kept:])
        slot.set_blocks(slot.blocks[:kept])

    def _remove(self, slot: KVSlot) -> None:
        """Release all that a slot has."""
        self.slots.remove(slot)
        self._allocator.release(slot.blocks)
        slot.set_blocks([])

    def release(self, slot: KVSlot) -> None:
        """The sequence has ended; its keys and values stay cached until they are evicted."""
        if self.lower is not None:
            self.lower.schedule(slot)
        self._clock += 1
        slot.busy, slot.last_use = False, self._clock
        if not slot.length:
            self._remove(slot)
            return
        self._cut(slot)
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
                self._evict(slot)

    def discard(self, slot: KVSlot) -> None:
        """Remove a slot whose contents are undefined."""
        if self.lower is not None:
            self.lower.forget(slot)
        if slot in self.slots:
            self._remove(slot)

    def evict_idle(self) -> None:
        """Evict all slots without a sequence, unsaved: memory has run out, or their contents are undefined."""
        for slot in [slot for slot in self.slots if not slot.busy]:
            self.discard(slot)

    def evict_owner(self, owner: Owner) -> None:
        """Evict the idle slots of an adapter that was unloaded."""
        for slot in [slot for slot in self.slots if slot.owner == owner and not slot.busy]:
            self._evict(slot)

    def clear(self) -> None:
        for slot in list(self.slots):
            self._remove(slot)

    def _evict(self, slot: KVSlot) -> None:
        self._save(slot)
        self._remove(slot)

    def _evict_idle(self, blocks: int) -> bool:
        """Evict idle slots, least recently used first, until so many blocks are free; none if that is not enough."""
        if self._allocator.free >= blocks:
            return True
        if self.limit - self.busy_tokens < blocks * BLOCK_TOKENS:
            return False
        for slot in sorted((slot for slot in self.slots if not slot.busy), key=lambda slot: slot.last_use):
            self._evict(slot)
            if self._allocator.free >= blocks:
                break
        return self._allocator.free >= blocks

    def _save(self, slot: KVSlot) -> None:
        if self.lower is not None:
            self.lower.save_now(slot)

    def cached_tokens(self, owner: Owner, tokens: Sequence[int]) -> int:
        """How many of `tokens` a slot holds that `allocate` would use."""
        prefix = self._find_prefix(owner, tokens, None)
        return 0 if prefix is None else prefix.tokens

    def _find_prefix(self, owner: Owner, tokens: Sequence[int], top_logprobs: int | None) -> CachedPrefix | None:
        best, longest, wanted = None, 0, list(tokens[:-1])
        for slot in self.slots if self._reuse else ():
            if slot.owner != owner:
                continue
            shared = _shared_prefix(slot.tokens, wanted)
            if top_logprobs is not None:  # a token's score comes from the row before it
                shared = max(0, min(shared, len(slot.scores)) - 1) if slot.top_logprobs >= top_logprobs else 0
            shared = slot.restart(shared)
            if shared > longest or (shared == longest and best is not None and best.busy and not slot.busy):
                best, longest = slot, shared
        if best is None:
            return None
        # An idle slot of which the prompt has all tokens becomes the sequence's. Others stay as they are if there is
        # room; one with states, of which few are kept, only if the prompt has less than half of its tokens.
        diverges = longest < best.length // 2 if best.states else longest < best.length
        diverges = diverges and self._fits_beside(best, len(tokens), longest)
        best.last_use = self._clock
        return CachedPrefix(best, longest, stays=best.busy or diverges)

    def _fits_beside(self, slot: KVSlot, tokens: int, shared: int) -> bool:
        missing = -(-tokens // BLOCK_TOKENS) - shared // BLOCK_TOKENS
        kept = slot.length // BLOCK_TOKENS + 1
        return self.busy_tokens // BLOCK_TOKENS + kept + missing <= self.memory.blocks


def _shared_prefix(cached: list[int], wanted: list[int]) -> int:
    """Slices are compared, which takes a small part of the time of single tokens."""
    count, step = 0, 1024
    limit = min(len(cached), len(wanted))
    while count < limit:
        if cached[count : count + step][: limit - count] == wanted[count : count + step][: limit - count]:
            count = min(count + step, limit)
        elif step == 1:
            break
        else:
            step //= 8 if step >= 8 else step
    return count
