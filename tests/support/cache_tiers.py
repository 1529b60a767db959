"""Engines of tests with lower tiers of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.serving import EngineHarness

IDENTITY = b"a tiny model"


@contextmanager
def tiered_engine(
    harness: EngineHarness, *, host_blocks: int = 64, disk: Path | None = None, disk_blocks: int = 64, **options: Any
) -> Iterator[Any]:
    """An engine whose tiers hold so many blocks; `disk`: the file. `identity` and limits of the engine in `options`."""
    from ktransformers.serve.cache.cache_tiers import CacheTiers
    from ktransformers.serve.cache.disk_tier import FILE_HEADER, DiskFile, DiskTier, record_size
    from ktransformers.serve.cache.host_tier import HostTier

    identity, buffers = options.pop("identity", IDENTITY), options.pop("buffers", False)
    layout = harness.forward.block_layout
    assert layout is not None
    tier = None
    if disk is not None:
        limit = FILE_HEADER + disk_blocks * record_size(layout.bytes)
        tier = DiskTier(DiskFile(disk, identity), layout.bytes, limit, queue_blocks=host_blocks)
    pinned = layout.places[0].device.type == "cuda"
    host = HostTier(layout.bytes, host_blocks * layout.bytes, pinned)
    engine = harness.engine(**options)
    engine.attach_tiers(CacheTiers(layout, identity, host, tier, buffers=buffers))
    try:
        yield engine
    finally:
        assert engine.tiers.flush()
        engine.tiers.close()


def evict_slots(engine: Any) -> None:
    """Save all idle slots, then leave their prefixes to the lower tiers alone."""
    assert engine.tiers.flush()
    engine.kv_cache.evict_idle()
