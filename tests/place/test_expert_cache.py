"""The cache of packed experts: what a copy that fails leaves behind. The cache uses torch's CPU device here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ktransformers.experts.gate import Gate
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.placement import geometry_of, new_layer
from tests.support.placed_experts import SMALL, make_store


def test_a_copy_that_fails_leaves_no_expert_in_the_cache() -> None:
    store, device = make_store(SMALL), torch.device("cpu")
    cache = ExpertCache(geometry_of(store), 4, device, None)
    source = new_layer(ExpertEngine(device, "stream", cache), 0, store, Gate("silu"), cache.geometry).packed.source
    cache.fetch(0, source, [0, 1])
    short = tuple(replace(part, bytes=part.bytes[:3]) for part in source.down)
    with pytest.raises(RuntimeError, match="must match the size"):
        cache.fetch(0, replace(source, down=short), [1, 2, 3])  # expert 3 has no bytes
    assert cache.present(0) == {0, 1}
    slots = cache.fetch(0, source, [2, 3])
    down = store.memory()["down"].view(store.num_experts, -1)
    assert all(torch.equal(cache.down[slot], down[expert]) for slot, expert in zip(slots, (2, 3), strict=True))
    assert cache.present(0) == {0, 1, 2, 3}
