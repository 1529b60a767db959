"""The host tier: blocks of cached tokens in host memory, pinned where a GPU copies them.

All memory is allocated at the start, in slabs, because pinning pages takes about a second for some gigabytes and would
stall a request; without a GPU the system maps a page when it is first written. A row of a slab holds one block. Blocks
are evicted in LRU order; a block that is being copied, read from disk or written to disk has references and stays. The
disk tier's threads hold references too, so the index is locked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.ground.log import logger
from ktransformers.serve.cache.cache_blocks import BlockHash
from ktransformers.serve.cache.tier_counts import TierCounts, TierState

LOG = logger(__name__)
SLAB_BYTES = 256 << 20  # torch's pinned allocator rounds up to a power of two


@dataclass(eq=False)
class HostBlock:
    name: BlockHash
    parent: BlockHash
    row: Tensor  # uint8 [bytes]
    references: int = 1
    reading: Future[bool] | None = None  # from disk; the row is undefined until it is done
    copied: Sequence[torch.cuda.Event] = ()  # after them a GPU no longer writes to the row

    @property
    def bytes(self) -> memoryview:
        array: Any = self.row.numpy()
        return memoryview(array)

    @property
    def valid(self) -> bool:
        """Whether its row is defined; waits for the disk."""
        if self.reading is None:
            return True
        return not self.reading.cancelled() and self.reading.exception() is None and self.reading.result()

    def wait(self) -> None:
        """Until the copy from the GPU has ended."""
        for event in self.copied:
            event.synchronize()


class HostTier:
    def __init__(self, block_bytes: int, limit_bytes: int, pinned: bool) -> None:
        self.block_bytes, self.counts = block_bytes, TierCounts()
        self._blocks: OrderedDict[BlockHash, HostBlock] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._free: list[tuple[Tensor, Sequence[torch.cuda.Event]]] = []  # rows, with the `copied` of their last block
        self._rows, self._pinned = 0, pinned
        wanted = limit_bytes // block_bytes
        while self._rows < wanted:
            count = min(wanted - self._rows, max(1, SLAB_BYTES // block_bytes))
            try:
                slab = torch.empty(count, block_bytes, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:  # the system pins no more
                held = self._rows * block_bytes / 2**30
                LOG.warning("the host tier of the KV cache has %.2f GiB: no more memory (%s)", held, error)
                break
            self._free += [(row, ()) for row in slab.unbind(0)]
            self._rows += count
        self._free.reverse()

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that are in use: all rows where they are pinned, otherwise those that were ever written."""
        return self.block_bytes * (self._rows if self._pinned else self._rows - len(self._free))

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def state(self) -> TierState:
        held, size = len(self._blocks), self.block_bytes
        return TierState("host", held, held * size, self._rows * size, self.counts)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._blocks

    def is_reading(self, name: BlockHash) -> bool:
        """Whether the row of the block is not defined yet."""
        block = self._blocks.get(name)
        return block is not None and block.reading is not None and not block.reading.done()

    def get(self, name: BlockHash) -> HostBlock | None:
        """The block, with one more reference."""
        with self._lock:
            block = self._blocks.get(name)
            if block is not None:
                block.references += 1
            return block

    def reserve(self, name: BlockHash, parent: BlockHash) -> HostBlock | None:
        """A new block with one reference, to be filled; None: every row is in use."""
        with self._lock:
            if self._free:
                row, copied = self._free.pop()
                block = HostBlock(name, parent, row, copied=copied)
            else:
                unused = next((block for block in self._blocks.values() if not block.references), None)
                if unused is None:
                    return None
                del self._blocks[unused.name]
                self.counts.evictions += 1
                block = HostBlock(name, parent, unused.row, copied=unused.copied)
            self._blocks[name] = block
            return block

    def release(self, block: HostBlock) -> None:
        with self._lock:
            block.references -= 1
            if not block.references and self._blocks.get(block.name) is not block:
                self._free.append((block.row, block.copied))  # it was removed meanwhile

    def remove(self, block: HostBlock) -> None:
        """Forget a block whose contents are not valid, and one reference; others may still hold it."""
        with self._lock:
            if self._blocks.get(block.name) is block:
                del self._blocks[block.name]
        self.release(block)

    def hold(self, block: HostBlock) -> None:
        """One more reference."""
        with self._lock:
            block.references += 1

    def touch(self, names: Iterable[BlockHash]) -> None:
        """Count a use of these blocks, the last one's as the most recent."""
        with self._lock:
            for name in names:
                if name in self._blocks:
                    self._blocks.move_to_end(name)
