"""The tiers below the slots of the KV cache: when blocks are saved, and when a prompt begins with fetched ones.

A slot is scheduled to be saved when its sequence ends. Each step of the engine then copies some of its blocks to the
host tier, and what is left at once before the slot is evicted or overwritten. With a disk tier, blocks of the host tier
are written through to the file in a thread; while its queue is full, saving pauses, and blocks of a slot that must go
are dropped. With `--kv-disk` alone the host tier is a small buffer for blocks on their way. Of families with states,
copies of the states that lie at the end of a block are saved too, and only blocks before the last of them.

A prompt that begins with blocks of the tiers waits in the queue while they are read from disk into host memory, and
other sequences go on. Then its slot is filled, and only the rest is computed. One rule says how many blocks are
fetched: each saves the time to compute its tokens, at the rate measured for prompts, and costs the time to copy it, at
the rate measured for its tier; the prefix with the largest sum is taken, and none where every sum is negative. A tier
whose rate is not measured yet costs nothing, and before the first prompt is measured everything is fetched. A tier that
was skipped is assumed to be a little faster each time, so that it is tried again. A fetch that takes much longer than
predicted is cut: what has been read is used, and the rest is computed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ktransformers.ground.log import logger
from ktransformers.ground.out_of_memory import exhausted_memory
from ktransformers.serve.cache.cache_blocks import BlockHash, BlockLayout, block_hashes, root_hash, state_names
from ktransformers.serve.cache.cache_copies import PendingCopy, make_copies
from ktransformers.serve.cache.disk_tier import DiskTier
from ktransformers.serve.cache.host_tier import HostBlock, HostTier
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, KVSlot
from ktransformers.serve.cache.snapshots import States
from ktransformers.serve.cache.tier_counts import Rate, TierCounts, TierState
from ktransformers.serve.scheduler.lora import LoadedAdapter

LOG = logger(__name__)
SAVED_BYTES_PER_STEP = 64 << 20
RETRY_SHARE = 0.05  # by which the assumed rate of a tier rises each time it is skipped
MIN_PATIENCE_SECONDS = 5.0  # that a prompt waits for the disk at least, or twice the time to compute it
FIRST_PATIENCE_SECONDS = 60.0  # before the first prompt is measured
FLUSH_SECONDS = 20.0  # at the end of a server, for blocks that are not on disk yet


@dataclass(eq=False)
class _Unsaved:
    """A slot with blocks that no tier has."""

    slot: KVSlot
    names: list[BlockHash]  # the root, then those of its blocks
    states: list[int]  # positions whose states are to be saved
    next: int = 0

    @property
    def done(self) -> bool:
        return self.next >= len(self.names) - 1 and not self.states


@dataclass(eq=False)
class PrefixFetch:
    """Blocks of a prompt on their way to its slot."""

    first_block: int = 0
    blocks: list[HostBlock] = field(default_factory=list)
    counts: list[TierCounts] = field(default_factory=list)  # of the tier that had each block
    states: list[HostBlock] = field(default_factory=list)  # pieces of the states after the last block
    started: float = field(default_factory=time.monotonic)
    patience: float = FIRST_PATIENCE_SECONDS

    @property
    def deadline(self) -> float:
        return self.started + self.patience

    @property
    def start(self) -> int:
        """Tokens that a slot must hold already."""
        return self.first_block * BLOCK_TOKENS

    @property
    def ready(self) -> bool:
        return all(map(_is_read, [*self.blocks, *self.states]))


def _is_read(block: HostBlock) -> bool:
    return block.reading is None or block.reading.done()


class CacheTiers:
    """`identity`: the hash of everything that keys and values depend on except tokens, adapter and layout. `buffers`:
    the host tier only holds blocks on their way to and from disk."""

    def __init__(
        self, layout: BlockLayout, identity: bytes, host: HostTier, disk: DiskTier | None, *, buffers: bool = False
    ) -> None:
        self.layout, self.host, self.disk, self._buffers = layout, host, disk, buffers
        self._identity = identity
        self._copies = make_copies(layout)
        self._roots: dict[bytes, BlockHash] = {}
        self._unsaved: dict[KVSlot, _Unsaved] = {}
        self._copying: list[tuple[PendingCopy, list[HostBlock]]] = []

    @property
    def states(self) -> list[TierState]:
        return [self.host.state, *([] if self.disk is None else [self.disk.state])]

    @property
    def pending(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._unsaved or self._copying)

    def root_of(self, adapter: LoadedAdapter | None) -> BlockHash | None:
        """Where the chains of an adapter begin; None: its content was not hashed, and its blocks have no name outside
        of this process."""
        content = b"" if adapter is None else adapter.content
        if adapter is not None and not content:
            if self.disk is not None:
                return None
            content = f"{adapter.name} version {adapter.version}".encode()
        if content not in self._roots:
            self._roots[content] = root_hash(self._identity, content, self.layout)
        return self._roots[content]

    # Saving

    def schedule(self, slot: KVSlot) -> None:
        """Save the whole blocks of a slot, in the next steps."""
        if slot.root is None or slot.length < BLOCK_TOKENS or not self.layout.matches(slot.memory):
            return
        names, states = [slot.root, *block_hashes(slot.root, slot.tokens)], list[int]()
        if self.layout.states:
            kept = [*slot.snapshots.by_position, slot.length]
            states = sorted({position for position in kept if position and position % BLOCK_TOKENS == 0})
            names = names[: max(states, default=0) // BLOCK_TOKENS + 1]
        if self.disk is None:  # the end of a chain must not evict its beginning
            names = names[: max(0, self.host.rows - self.layout.state_pieces) + 1]
        states = [position for position in states if position // BLOCK_TOKENS < len(names)]
        if len(names) > 1:
            self._unsaved[slot] = _Unsaved(slot, names, states)

    def save_now(self, slot: KVSlot) -> None:
        """Save what is left of a slot that is about to be overwritten; blocks that find no room are dropped."""
        unsaved = self._unsaved.pop(slot, None)
        if unsaved is not None:
            self._save(unsaved, len(unsaved.names))
            self._save_states(unsaved)
            left = unsaved.names[unsaved.next + 1 :]
            self.host.counts.dropped += sum(not self._has(name) for name in left)

    def forget(self, slot: KVSlot) -> None:
        """The contents of the slot are undefined."""
        self._unsaved.pop(slot, None)

    def forget_all(self) -> None:
        self._unsaved.clear()

    def advance(self) -> None:
        """Copy some of the blocks that are not saved yet."""
        self._end_copies()
        budget = max(1, SAVED_BYTES_PER_STEP // self.layout.bytes)
        for slot, unsaved in list(self._unsaved.items()):
            budget -= self._save(unsaved, budget)
            if unsaved.next >= len(unsaved.names) - 1:
                budget -= self._save_states(unsaved)
            if unsaved.done:
                self._unsaved.pop(slot, None)
                self._touch(unsaved.names)
            if budget <= 0:
                break

    def _touch(self, names: Sequence[BlockHash]) -> None:
        """Count a use of these blocks. The first of a chain counts as the most recent: without it the others are never
        asked for."""
        self.host.touch(reversed(names))
        if self.disk is not None:
            self.disk.touch(reversed(names))

    def _has(self, name: BlockHash) -> bool:
        return name in self.host or (self._buffers and self.disk is not None and name in self.disk)

    def _save(self, unsaved: _Unsaved, limit: int) -> int:
        """Copy at most `limit` blocks; returns how many."""
        saved, last = 0, len(unsaved.names) - 1
        while unsaved.next < last and saved < limit:
            if self._has(unsaved.names[unsaved.next + 1]):
                unsaved.next += 1
                continue
            first, blocks = unsaved.next, list[HostBlock]()
            while first + len(blocks) < last and saved + len(blocks) < limit:
                parent, name = unsaved.names[first + len(blocks)], unsaved.names[first + len(blocks) + 1]
                block = (
                    None if self._has(name) or not self._takes_more(len(blocks)) else self.host.reserve(name, parent)
                )
                if block is None:
                    break
                blocks.append(block)
            if not blocks:
                break
            numbers = unsaved.slot.blocks[first : first + len(blocks)]
            self._copy_to_host(blocks, functools.partial(self._copies.save, unsaved.slot.memory, numbers, blocks))
            saved += len(blocks)
            unsaved.next += len(blocks)
        return saved

    def _save_states(self, unsaved: _Unsaved) -> int:
        """Copy the states that are not saved yet as far as there is room for all pieces of one; returns how many pieces
        were copied."""
        saved, slot = 0, unsaved.slot
        while unsaved.states:
            position = unsaved.states[-1]
            states = slot.states if position == slot.length else slot.snapshots.by_position.get(position, States())
            parent = unsaved.names[position // BLOCK_TOKENS]
            names = state_names(parent, self.layout.state_pieces)
            if self.layout.matches_states(states) and not all(map(self._has, names)):
                blocks = self._reserve_pieces(names, parent)
                if blocks is None and len(names) <= self.host.rows:
                    return saved  # again in a later step
                if blocks is not None:
                    self._copy_to_host(blocks, functools.partial(self._copies.save_states, states, blocks))
                    saved += len(blocks)
            unsaved.states.pop()
        return saved

    def _reserve_pieces(self, names: list[BlockHash], parent: BlockHash) -> list[HostBlock] | None:
        """Rows for all of them, or None."""
        blocks = list[HostBlock]()
        for name in names:
            known = self.host.get(name)  # a piece whose others were evicted
            if known is not None:
                self.host.remove(known)
            block = self.host.reserve(name, parent) if self._takes_more(len(blocks)) else None
            if block is None:
                for reserved in blocks:
                    self.host.remove(reserved)
                return None
            blocks.append(block)
        return blocks

    def _takes_more(self, reserved: int) -> bool:
        """Whether the disk tier takes another block after `reserved` ones; a tier that no longer writes holds up
        nothing."""
        return self.disk is None or not self.disk.writable or self.disk.free_places > reserved

    def _copy_to_host(self, blocks: list[HostBlock], copy: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            copy()
        except BaseException as error:
            for block in blocks:
                self.host.remove(block)
            if not isinstance(error, Exception) or exhausted_memory(error) is None:
                raise
            self.host.counts.dropped += len(blocks)
            return
        self.host.counts.add_write(len(blocks) * self.layout.bytes, time.perf_counter() - started)
        for block in blocks:
            if self.disk is None or not self.disk.offer(block, self.host.release):
                self.host.release(block)

    # Fetching

    def fetch(self, root: BlockHash | None, tokens: Sequence[int], in_slots: int, prefill: Rate) -> PrefixFetch:
        """Start to fetch the blocks at the beginning of `tokens` that are worth it, beyond the `in_slots` tokens that a
        slot has. The last token stays uncomputed, because its logits are needed."""
        fetch = PrefixFetch(in_slots // BLOCK_TOKENS)
        if root is None:
            return fetch
        names = [root, *block_hashes(root, tokens[:-1])]
        count = self._worth_fetching(names[fetch.first_block + 1 :], fetch.first_block, in_slots, prefill)
        if prefill.value:
            fetch.patience = max(MIN_PATIENCE_SECONDS, 2 * prefill.seconds_for(count * BLOCK_TOKENS))
        for index in range(fetch.first_block + 1, fetch.first_block + count + 1):
            counts = self.host.counts if names[index] in self.host or self.disk is None else self.disk.counts
            block = self._hold(names[index], names[index - 1])
            if block is None:  # evicted meanwhile, or every row is in use
                break
            fetch.blocks.append(block)
            fetch.counts.append(counts)
        pieces = list[BlockHash]()
        if self.layout.states and count:
            parent = names[fetch.first_block + count]
            pieces = state_names(parent, self.layout.state_pieces)
            held = [self._hold(name, parent) for name in pieces]
            fetch.states = [block for block in held if block is not None]
            if len(fetch.blocks) < count or len(fetch.states) < len(pieces):
                self.release(fetch)
        self._touch([*names, *pieces])
        return fetch

    def _hold(self, name: BlockHash, parent: BlockHash) -> HostBlock | None:
        """The block with a reference, being read if it is on disk alone; None: no tier has it, or no row is free."""
        block = self.host.get(name)
        if block is None and self.disk is not None and name in self.disk:
            block = self.host.reserve(name, parent)
            if block is not None:
                block.reading = self.disk.read(block)
        return block

    def _worth_fetching(self, names: Sequence[BlockHash], first_block: int, in_slots: int, prefill: Rate) -> int:
        """How many of these blocks to fetch: the prefix with the largest predicted saving."""
        savings, gains, tiers = [0.0], list[int](), list[TierCounts]()
        fitting = max(0, self.host.rows - self.layout.state_pieces)  # all blocks are in host memory before the copy
        for count, name in enumerate(names[:fitting], 1):
            counts = self._tier_of(name)
            if counts is None:
                break
            gained = min(BLOCK_TOKENS, (first_block + count) * BLOCK_TOKENS - in_slots)
            savings.append(savings[-1] + prefill.seconds_for(gained) - self._cost(counts))
            gains.append(gained)
            tiers.append(counts)
        possible = {0: 0.0}  # number of blocks -> predicted saving in seconds
        for count, saving in enumerate(savings[1:], 1):
            if self.layout.states and self._tier_of(state_names(names[count - 1], 1)[0]) is None:
                continue  # most positions have no copy: the names of all pieces would take long
            pieces = state_names(names[count - 1], self.layout.state_pieces)
            held = [counts for counts in map(self._tier_of, pieces) if counts is not None]
            if len(held) == len(pieces):
                possible[count] = saving - sum(map(self._cost, held))
        if len(possible) == 1:
            return 0
        taken = max(possible, key=lambda count: possible[count]) if prefill.value else max(possible)
        for gained, counts in zip(gains[taken:], tiers[taken:], strict=True):
            counts.skipped_tokens += gained
        for counts in {id(counts): counts for counts in tiers[taken:]}.values():
            counts.read_rate.raise_by(RETRY_SHARE)
        return taken

    def _tier_of(self, name: BlockHash) -> TierCounts | None:
        """The fastest tier that has the block; one that is still being read is the disk's."""
        if name in self.host:
            return self.disk.counts if self.disk is not None and self.host.is_reading(name) else self.host.counts
        return self.disk.counts if self.disk is not None and name in self.disk else None

    def _cost(self, counts: TierCounts) -> float:
        """Predicted seconds until a block of this tier is in a slot."""
        seconds = self.host.counts.read_rate.seconds_for(self.layout.bytes)
        return seconds if counts is self.host.counts else seconds + counts.read_rate.seconds_for(self.layout.bytes)

    def restore(self, fetch: PrefixFetch, slot: KVSlot, tokens: Sequence[int]) -> int:
        """Fill a slot with fetched blocks as far as they are valid and it has not more already; returns how many tokens
        it holds in addition."""
        valid = 0
        for block in fetch.blocks:
            if not block.valid:
                break
            valid += 1
        if self.layout.states and not (valid == len(fetch.blocks) and all(block.valid for block in fetch.states)):
            valid = 0
        end = (fetch.first_block + valid) * BLOCK_TOKENS
        gained = end - slot.length
        if gained <= 0 or slot.length < fetch.start:
            self.release(fetch)
            return 0
        first = slot.length // BLOCK_TOKENS  # a slot may hold more by now
        blocks = fetch.blocks[first - fetch.first_block : valid]
        self._copy_to_slot(slot, first, blocks, fetch.states)
        for index, counts in enumerate(fetch.counts[first - fetch.first_block : valid], first):
            counts.hit_tokens += min(BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS - slot.length)
        slot.tokens = list(tokens[:end])
        self.release(fetch)
        return gained

    def _copy_to_slot(self, slot: KVSlot, first: int, blocks: list[HostBlock], pieces: list[HostBlock]) -> None:
        started = time.perf_counter()
        numbers = slot.blocks[first : first + len(blocks)]
        copies = [(self._copies.restore(slot.memory, numbers, blocks), blocks)]
        if pieces:
            slot.states, pending = self._copies.restore_states(pieces)
            copies.append((pending, pieces))
        for pending, copied in copies:
            if pending is None:
                continue
            for block in copied:
                self.host.hold(block)  # until the copy has ended
            self._copying.append((pending, copied))
        if copies[0][0] is None:
            self.host.counts.add_read((len(blocks) + len(pieces)) * self.layout.bytes, time.perf_counter() - started)

    def _end_copies(self) -> None:
        """Let go of blocks that the GPU has copied."""
        while self._copying and self._copying[0][0].done:
            pending, blocks = self._copying.pop(0)
            self.host.counts.add_read(len(blocks) * self.layout.bytes, pending.seconds)
            for block in blocks:
                self.host.release(block)

    def release(self, fetch: PrefixFetch) -> None:
        """Let go of its blocks; a block that could not be read is forgotten."""
        for block in [*fetch.blocks, *fetch.states]:
            if block.reading is None:
                self.host.release(block)
            else:
                block.reading.add_done_callback(self._release_callback(block))
                if block.references == 1:  # no other sequence waits for it
                    block.reading.cancel()
        fetch.blocks, fetch.counts, fetch.states = [], [], []

    def cut(self, fetch: PrefixFetch) -> None:
        """Keep the blocks that have been read, of a fetch that takes too long."""
        kept = 0
        if not fetch.states:
            late_ones = (index for index, block in enumerate(fetch.blocks) if not _is_read(block))
            kept = next(late_ones, len(fetch.blocks))
        late = PrefixFetch(blocks=fetch.blocks[kept:], counts=fetch.counts[kept:], states=fetch.states)
        fetch.blocks, fetch.counts, fetch.states = fetch.blocks[:kept], fetch.counts[:kept], []
        seconds, read = time.monotonic() - fetch.started, sum(map(_is_read, late.blocks)) + kept
        for counts in late.counts:
            counts.skipped_tokens += BLOCK_TOKENS
        if self.disk is not None:
            self.disk.counts.read_rate.add(max(1, read * self.layout.bytes), seconds)
            LOG.warning(
                "%s: %d blocks were not read in %.1f s: computed instead", self.disk.path, len(late.blocks), seconds
            )
        self.release(late)

    def _release_callback(self, block: HostBlock) -> Callable[[object], None]:
        def release(_: object) -> None:
            if block.valid:
                self.host.release(block)
            else:
                self.host.remove(block)

        return release

    # The end

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Save everything scheduled and wait until it is on disk; False: it took longer."""
        deadline = time.monotonic() + seconds
        while self.pending and time.monotonic() < deadline:
            self.advance()
            time.sleep(0.001)
        return self.disk is None or self.disk.flush(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.forget_all()
        if self.disk is not None:
            self.disk.close()
