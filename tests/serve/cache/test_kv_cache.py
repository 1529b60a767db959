"""Allocation, sharing and eviction of the blocks of the KV cache."""

from __future__ import annotations

import pytest
import torch

from ktransformers.serve.cache.kv_cache import KVCache, KVSlot, _shared_prefix


def computed(cache: KVCache, tokens: list[int]) -> KVSlot:
    """A sequence of which all tokens but the last are computed: its keys are its tokens."""
    slot = cache.allocate(None, tokens)
    assert slot is not None
    rows = torch.tensor(tokens[slot.length : -1]).float()[None, :, None]
    if rows.numel():
        slot.store("keys", 0, slot.length, rows)
    slot.tokens = tokens[:-1]
    return slot


def keys(slot: KVSlot) -> list[int]:
    held: list[int] = slot.read("keys", 0, 0, slot.length, torch.float32)[0, :, 0].int().tolist()
    return held


def test_slots_stay_within_capacity() -> None:
    cache = KVCache(256)
    one = cache.allocate(None, range(100))
    two = cache.allocate(("a", 1), range(100))
    assert one is not None and two is not None and one is not two and cache.allocated_tokens == 256
    assert cache.allocate(None, range(10)) is None
    one.tokens = list(range(100))
    cache.release(one)
    again = cache.allocate(None, [*range(50), 7, 7])  # no room beside it
    assert again is one and again.length == 50
    cache.release(again)
    assert cache.allocate(("b", 1), range(120)) is not None  # the idle one gave way
    assert one not in cache.slots and cache.allocated_tokens <= 256


def test_blocks_of_a_common_beginning_are_shared() -> None:
    cache = KVCache(1024)
    first = computed(cache, list(range(200)))
    second = computed(cache, [*range(150), *range(500, 560)])
    assert second.blocks[:2] == first.blocks[:2] and not set(second.blocks[2:]) & set(first.blocks[2:])
    assert keys(first) == list(range(199)) and keys(second) == [*range(150), *range(500, 559)]
    assert cache.allocated_tokens == cache.busy_tokens == (4 + 2) * 64
    cache.release(first)
    assert cache.allocated_tokens == 6 * 64 and cache.busy_tokens == 4 * 64
    cache.evict_idle()
    assert cache.allocated_tokens == 4 * 64 and keys(second) == [*range(150), *range(500, 559)]
    cache.clear()
    assert cache.allocated_tokens == 0


def test_a_block_that_cannot_be_copied_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1024)
    first = computed(cache, list(range(200)))

    def no_memory(*_: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache.memory, "copy_block", no_memory)
        with pytest.raises(MemoryError):
            cache.allocate(None, [*range(150), 7, 7])
    assert cache.slots == [first] and cache.allocated_tokens == 4 * 64 and keys(first) == list(range(199))
    assert keys(computed(cache, [*range(150), 7, 8])) == [*range(150), 7]


def test_an_idle_slot_stays_beside_a_prompt_that_diverges() -> None:
    cache = KVCache(1024)
    first = computed(cache, list(range(200)))
    cache.release(first)
    second = computed(cache, [*range(100), 7, 8])
    assert second is not first and first in cache.slots and keys(first) == list(range(199))
    cache.release(second)
    third = computed(cache, [*range(300)])  # all of the first
    assert third is first and keys(third) == list(range(299))


def test_growing_copies_nothing() -> None:
    cache = KVCache(1024)
    first, second = computed(cache, list(range(60))), computed(cache, list(range(900, 960)))
    before = first.memory.parts["keys"][0].data_ptr()
    assert cache.grow(first, 200) and cache.grow(second, 100) and cache.grow(first, 300)
    first.store("keys", 0, 59, torch.arange(59, 250).float()[None, :, None])
    first.tokens = list(range(250))
    assert keys(first) == list(range(250)) and keys(second) == list(range(900, 959))
    assert first.memory.parts["keys"][0].data_ptr() == before
    assert not cache.grow(second, 2000)


def test_shared_prefix() -> None:
    long = list(range(5000))
    for differs in (0, 1, 15, 128, 1023, 1024, 1025, 3000, 4999):
        other = [*long[:differs], -1, *long[differs + 1 :]]
        assert _shared_prefix(long, other) == differs == _shared_prefix(other, [*long, 3])
    assert _shared_prefix(long, long[:77]) == 77 and _shared_prefix([], long) == 0
