"""What a sequence gets of the KV cache: a slot with as much of its tokens as is cached, from other slots or from lower
tiers. It is the `Capacity` that the scheduler reserves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ktransformers.serve.cache.kv_cache import KVCache
from ktransformers.serve.cache.tier_counts import Rate
from ktransformers.serve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from ktransformers.serve.cache.cache_tiers import CacheTiers


class SequenceCache:
    """`settle` is called before a slot is given to a sequence: it ends steps that may still write to it."""

    def __init__(self, kv_cache: KVCache, settle: Callable[[], None]) -> None:
        self._kv_cache, self._settle = kv_cache, settle
        self.tiers: CacheTiers | None = None
        self.prefill_rate = Rate()  # prompt tokens/s of one sequence, from its admission to its first token

    def fetched(self, sequence: Sequence) -> bool:
        """Fetch what lower tiers hold of the sequence; False: some of it is still being read. They hold no scores."""
        if self.tiers is None or sequence.request.prompt_logprobs:
            return True
        in_slots = self._kv_cache.cached_tokens(sequence.owner, sequence.tokens)
        if sequence.fetch is not None and in_slots < sequence.fetch.start:  # the slot was evicted meanwhile
            self.tiers.release(sequence.fetch)
            sequence.fetch = None
        if sequence.fetch is None:
            root = self.tiers.root_of(sequence.request.adapter)
            sequence.fetch = self.tiers.fetch(root, sequence.tokens, in_slots, self.prefill_rate)
        if not sequence.fetch.ready and time.monotonic() > sequence.fetch.deadline:
            self.tiers.cut(sequence.fetch)
        return sequence.fetch.ready

    def has_room(self, tokens: int) -> bool:
        return self._kv_cache.busy_tokens + tokens <= self._kv_cache.limit

    def allocate(self, sequence: Sequence) -> bool:
        """Give the sequence a slot with everything of it that is cached; False: no capacity now."""
        if not self.has_room(len(sequence.tokens)):
            return False
        scores = (sequence.request.logprobs or 0) if sequence.request.prompt_logprobs else None
        self._settle()
        slot = sequence.slot = self._kv_cache.allocate(sequence.owner, sequence.tokens, scores)
        if slot is None:
            return False
        slot.snapshots.border = sequence.request.border
        if self.tiers is not None:
            slot.root = self.tiers.root_of(sequence.request.adapter)
            if sequence.fetch is not None:
                self._kv_cache.reused_tokens += self.tiers.restore(sequence.fetch, slot, sequence.tokens)
                sequence.fetch = None
        if scores is not None and slot.length:
            sequence.prompt_scores = [score.with_top(scores) for score in slot.scores]
        sequence.cached = min(slot.length, len(sequence.request.prompt))
        sequence.admitted = time.monotonic()
        return True

    def grow(self, sequence: Sequence) -> bool:
        assert sequence.slot is not None
        return self._kv_cache.grow(sequence.slot, len(sequence.tokens))

    def release(self, sequence: Sequence) -> None:
        """Its slot stays cached until another sequence needs the capacity."""
        if sequence.slot is not None:
            self._kv_cache.release(sequence.slot)
            sequence.slot = None
        if sequence.fetch is not None and self.tiers is not None:
            self.tiers.release(sequence.fetch)
            sequence.fetch = None

    def discard(self, sequence: Sequence) -> None:
        """The contents of its slot are undefined; not released: that may save it to a lower tier."""
        if sequence.slot is not None:
            self._kv_cache.discard(sequence.slot)
            sequence.slot = None
