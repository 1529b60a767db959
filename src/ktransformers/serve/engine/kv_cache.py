"""The KV cache: one slot per running sequence, kept after it ended so that another with the same beginning starts
there.

A slot holds for every layer keys `[heads, capacity, d]` and values `[heads, capacity, dv]`, where the first `length`
places belong to `tokens` under `owner`, the name and version of an adapter (None: the base): the same text under
another adapter has other keys. Where a prompt's log-probabilities were asked for, the slot remembers them too, so that
the four answers to one question are one prompt and four endings. The surprising decision: no pages. A sequence's keys
lie in one piece, so attention reads them as they are; what pages would share, a common beginning, is copied, which
costs a small part of computing it. Room is counted in tokens, over all slots together; idle slots give theirs back, the
longest unused first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ktransformers.serve.engine.sampling import Score

BLOCK = 64  # capacities are multiples of it

Owner = tuple[str, int] | None


@dataclass(eq=False)
class KVSlot:
    owner: Owner
    tokens: list[int] = field(default_factory=list)  # whose keys and values are held
    capacity: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)  # layer -> [heads, capacity, d]
    values: dict[int, Tensor] = field(default_factory=dict)
    scores: list[Score] = field(default_factory=list)  # of the first tokens, as far as they were asked for
    top: int = 0  # how many of the most likely each of them has
    cache: Any = None  # transformers' own, for families that need it; then keys and values are empty
    busy: bool = True
    last_use: int = 0
    _places: tuple[tuple[int, int], NDArray[np.int64]] | None = None  # for a capacity and a number of layers

    @property
    def length(self) -> int:
        return len(self.tokens)

    def room(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All places for keys and values like these `[heads, n, d]`."""
        if layer not in self.keys:
            self.keys[layer] = key.new_empty(key.shape[0], self.capacity, key.shape[2])
            self.values[layer] = value.new_empty(value.shape[0], self.capacity, value.shape[2])
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, position: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[heads, n, d]` at `position`; all keys and values up to their end."""
        keys, values = self.room(layer, key, value)
        end = position + key.shape[1]
        keys[:, position:end] = key
        values[:, position:end] = value
        return keys[:, :end], values[:, :end]

    def addresses(self) -> NDArray[np.int64]:
        """`[2 L]`: where the keys of every layer that was computed begin, by number, then the values. They lie there
        until the slot grows."""
        state = self.capacity, len(self.keys)
        if self._places is None or self._places[0] != state:
            layers = sorted(self.keys)
            held = [*(self.keys[layer] for layer in layers), *(self.values[layer] for layer in layers)]
            self._places = state, np.array([tensor.data_ptr() for tensor in held], np.int64)
        return self._places[1]

    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys.values(), *self.values.values()))


class KVCache:
    def __init__(self, tokens: int, whole_prefixes: bool = False) -> None:
        self._whole = whole_prefixes  # slots are continued where they end, not cut back or copied
        self.limit = -(-tokens // BLOCK) * BLOCK  # room of all slots together
        self.slots: list[KVSlot] = []
        self.most = 0  # room that was used at the same time
        self.reused = 0  # tokens that did not have to be computed
        self._clock = 0

    @property
    def room_used(self) -> int:
        return sum(slot.capacity for slot in self.slots)

    @property
    def room_busy(self) -> int:
        return sum(slot.capacity for slot in self.slots if slot.busy)

    def take(self, owner: Owner, tokens: Sequence[int], top: int | None = None) -> KVSlot | None:
        """A slot with room for the tokens and as much of their beginning in it as is known; None: no room now.

        At least one token is left to compute, because its output is wanted. With `top` scores of the tokens are wanted,
        so many of the most likely with each: then the slot has those of its tokens and of the one behind them."""
        source, shared = self._longest(owner, tokens, top)
        known = shared if top is None else shared + 1
        idle = source is not None and not source.busy
        if source is not None and idle:
            source.busy = True
            del source.tokens[shared:], source.scores[known:]
            if self.grow(source, len(tokens)):
                self.reused += shared
                return source
            source.busy = False
            return None
        slot = KVSlot(owner)
        self.slots.append(slot)
        if not self.grow(slot, len(tokens)):
            self.slots.remove(slot)
            return None
        if source is not None and shared:
            for layer, keys in source.keys.items():
                slot.write(layer, 0, keys[:, :shared], source.values[layer][:, :shared])
            slot.tokens, slot.scores, slot.top = list(tokens[:shared]), source.scores[:known], source.top
            self.reused += shared
        return slot

    def grow(self, slot: KVSlot, tokens: int) -> bool:
        """Make room for that many tokens; False where there is none left."""
        if tokens <= slot.capacity:
            return True
        wanted = -(-max(tokens, slot.capacity * 5 // 4) // BLOCK) * BLOCK
        if not self._make_room(wanted - slot.capacity):
            wanted = -(-tokens // BLOCK) * BLOCK
            if not self._make_room(wanted - slot.capacity):
                return False
        for held in (slot.keys, slot.values):
            for layer, old in held.items():
                held[layer] = old.new_empty(old.shape[0], wanted, old.shape[2])
                held[layer][:, : slot.length] = old[:, : slot.length]
        slot.capacity = wanted
        self.most = max(self.most, self.room_used)
        return True

    def release(self, slot: KVSlot) -> None:
        """The sequence has ended; what it computed stays while there is room."""
        self._clock += 1
        slot.busy, slot.last_use = False, self._clock
        if not slot.length:
            self.slots.remove(slot)

    def forget(self, owner: Owner) -> None:
        """Nobody will ask for this owner again."""
        self.slots = [slot for slot in self.slots if slot.busy or slot.owner != owner]

    def clear(self) -> None:
        self.slots.clear()

    def _make_room(self, tokens: int) -> bool:
        if self.limit - self.room_busy < tokens:
            return False
        idle = sorted((slot for slot in self.slots if not slot.busy), key=lambda slot: slot.last_use)
        while self.room_used + tokens > self.limit and idle:
            self.slots.remove(idle.pop(0))
        return self.room_used + tokens <= self.limit

    def _longest(self, owner: Owner, tokens: Sequence[int], top: int | None) -> tuple[KVSlot | None, int]:
        best, most = None, 0
        for slot in self.slots:
            if slot.owner != owner:
                continue
            shared = _common(slot.tokens, tokens[:-1])
            if top is not None:  # the row before a token tells its score
                shared = max(0, min(shared, len(slot.scores)) - 1) if slot.top >= top else 0
            if self._whole and (slot.busy or shared < slot.length):
                continue
            if shared > most or (shared == most and best is not None and best.busy and not slot.busy):
                best, most = slot, shared
        # A long idle conversation is worth more than a few tokens of it: below half of it, its beginning is copied.
        if best is not None and not best.busy and most < best.length // 2 and self._fits_beside(len(tokens)):
            best.last_use = self._clock
            return _Copy.of(best, most), most
        return best, most

    def _fits_beside(self, tokens: int) -> bool:
        return self.room_used + tokens + BLOCK <= self.limit


class _Copy(KVSlot):
    """A view of an idle slot that is to be copied from, not taken."""

    @classmethod
    def of(cls, slot: KVSlot, tokens: int) -> KVSlot:
        found = cls(slot.owner, slot.tokens[:tokens], slot.capacity, slot.keys, slot.values, slot.scores, slot.top)
        found.busy = True
        return found


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count
