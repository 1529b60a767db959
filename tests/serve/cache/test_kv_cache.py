"""Allocation, reuse and eviction of KV cache slots."""

from __future__ import annotations

from ktransformers.serve.cache.kv_cache import KVCache


def test_slots_stay_within_capacity() -> None:
    slots = KVCache(256)
    one = slots.allocate(None, range(100))
    two = slots.allocate(("a", 1), range(100))
    assert one is not None and two is not None and one is not two and slots.allocated_tokens == 256
    assert slots.allocate(None, range(10)) is None
    one.tokens = list(range(100))
    slots.release(one)
    again = slots.allocate(None, [*range(50), 7, 7])
    assert again is one and again.length == 50
    slots.release(again)
    assert slots.allocate(("b", 1), range(120)) is not None  # the idle one gave way
    assert one not in slots.slots and slots.allocated_tokens <= 256
