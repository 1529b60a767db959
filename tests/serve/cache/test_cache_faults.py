"""Faults where slots, states and tiers meet: failed steps, memory that runs out, disks that do not answer, and the end
of a server in the middle of requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktransformers.serve.cache import cache_tiers, disk_tier, kv_cache
from ktransformers.serve.cache.cache_tiers import CacheTiers
from ktransformers.serve.cache.disk_tier import FILE_HEADER, DiskFile, DiskTier, record_size
from ktransformers.serve.cache.host_tier import HostBlock, HostTier
from ktransformers.serve.cache.kv_cache import KVCache
from ktransformers.serve.cache.snapshots import States
from ktransformers.serve.flags import Launch
from ktransformers.serve.kv_tiers import TierRequest, make_tiers
from tests.support.cache_tiers import IDENTITY, tiered_engine
from tests.support.serving import EngineHarness, random_prompt, same_completion

PROMPT = random_prompt(5, 200)  # three whole blocks before its last token


class SavedSlots:
    """Stands in for lower tiers."""

    def __init__(self) -> None:
        self.saved, self.forgotten = list[Any](), list[Any]()

    def schedule(self, slot: Any) -> None:
        pass

    def save_now(self, slot: Any) -> None:
        self.saved.append(slot)

    def forget(self, slot: Any) -> None:
        self.forgotten.append(slot)


def states(value: float = 1.0) -> States:
    return States({0: {"recurrent0": torch.full((2,), value)}})


def no_memory(*_: object) -> Any:
    raise MemoryError


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads end after the event is set."""
    answers, read = threading.Event(), DiskTier._read

    def slow_read(tier: DiskTier, block: HostBlock) -> bool:
        assert answers.wait(30)
        return read(tier, block)

    monkeypatch.setattr(DiskTier, "_read", slow_read)
    yield answers
    answers.set()


def test_slots_of_a_failed_step_are_not_saved(harness: EngineHarness) -> None:
    """Releasing them would: there is room for the copy of one idle sequence's states."""
    engine = harness.engine(max_running_requests=1)
    lower: Any = SavedSlots()
    engine.kv_cache.lower = lower
    for seed in (1, 2, 3):
        sequence, _ = harness.sequence(random_prompt(seed, 70))
        sequence.slot = engine.kv_cache.allocate(None, sequence.tokens)
        assert sequence.slot is not None
        sequence.slot.tokens, sequence.slot.states = sequence.tokens[:64], states()
        engine.running.append(sequence)
    engine._fail_all("a step failed")
    assert not lower.saved and len(lower.forgotten) == 3
    assert not engine.busy and not engine.kv_cache.slots


def test_an_error_while_sequences_are_admitted_ends_all_of_them(
    tiers_harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered_engine(tiers_harness) as engine:
        sequences, recorded = zip(*(tiers_harness.sequence(random_prompt(seed, 80)) for seed in (1, 2, 3)), strict=True)
        sequences[1].shares_prompt_with = sequences[0]

        def broken(*_: object) -> Any:
            raise ValueError("a broken tier")

        monkeypatch.setattr(engine.tiers, "root_of", broken)
        engine.submit(sequences)
        with pytest.raises(ValueError, match="a broken tier"):
            engine.step()
        assert list(engine.waiting) == list(sequences)
        engine._fail_all("a broken tier")
        assert [one.finish for one in recorded] == ["error"] * 3


def test_memory_that_runs_out_in_a_deterministic_step_loses_no_token(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks before the one that fails have been computed, but their results are not used."""
    expected = harness.alone(random_prompt(1, 9))
    run, failed = harness.forward._run_eager, list[int]()

    def fails_once(chunks: Any) -> Any:
        if len(chunks[0].tokens) == 30 and not failed:
            failed.append(1)
            raise MemoryError
        return run(chunks)

    monkeypatch.setattr(harness.forward, "_run_eager", fails_once)
    engine = harness.engine(deterministic=True)
    short, recorded = harness.sequence(random_prompt(1, 9))
    large, ended = harness.sequence(random_prompt(2, 30))
    harness.run(engine, short, large)
    assert ended.finish == "out_of_memory" and failed
    assert same_completion(recorded, expected)


def test_a_slot_whose_states_cannot_be_copied_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(256)
    slot = cache.allocate(None, [1, 2, 3])
    assert slot is not None
    slot.tokens, slot.states = [1, 2], states()
    monkeypatch.setattr(kv_cache, "copy_states", no_memory)
    cache.release(slot)
    assert not cache.slots and not cache.allocated_tokens


def test_a_slot_that_cannot_be_truncated_stays_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(256)
    slot = cache.allocate(None, list(range(10)))
    assert slot is not None
    slot.tokens, slot.states = list(range(8)), states(8)
    slot.snapshots.add(6, states(6))
    cache.release(slot)
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "copy_states", no_memory)
        with pytest.raises(MemoryError):
            cache.allocate(None, [*range(7), 99, 98])
    assert not slot.busy and slot.length == 8
    assert cache.allocate(None, [*range(7), 99, 98]) is slot and slot.length == 6


def test_slots_of_an_unloaded_adapter_are_saved_before_they_go() -> None:
    cache, lower = KVCache(512), SavedSlots()
    cache.lower = lower
    slots = [cache.allocate(owner, [1, 2, 3]) for owner in (("a", 1), ("a", 1), None)]
    for slot in slots:
        assert slot is not None
        slot.tokens = [1, 2]
    for slot in (slots[0], slots[2]):
        assert slot is not None
        cache.release(slot)
    cache.evict_owner(("a", 1))
    assert lower.saved == [slots[0]] and cache.slots == [slots[1], slots[2]]


def test_a_disk_that_does_not_answer_is_not_waited_for(
    tiers_harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging_disk: threading.Event
) -> None:
    expected = tiers_harness.alone(PROMPT)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        tiers_harness.run(engine, tiers_harness.sequence(PROMPT)[0])
    monkeypatch.setattr(cache_tiers, "MIN_PATIENCE_SECONDS", 0.05)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        engine.cache.prefill_rate.add(64, 1e-3)
        sequence, recorded = tiers_harness.sequence(PROMPT)
        tiers_harness.run(engine, sequence)
        assert recorded.events[-1].cached == 0
        assert engine.tiers.disk.counts.skipped_tokens == 192
        assert 0 < engine.tiers.disk.counts.read_rate.value < 1000  # bytes/s: the next prompt is computed at once
        engine.kv_cache.clear()
        engine.tiers.forget_all()
        sequence, _ = tiers_harness.sequence(PROMPT)
        assert engine.cache.fetched(sequence) and not sequence.fetch.blocks
        hanging_disk.set()
        wait_until(lambda: not engine.tiers.disk._reads)
        assert all(not block.references for block in engine.tiers.host._blocks.values())
    assert same_completion(expected, recorded)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_reads_of_a_cancelled_request_are_given_up(
    tiers_harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging_disk: threading.Event
) -> None:
    """Those that have not begun; the others let go of their rows when they end."""
    monkeypatch.setattr(disk_tier, "READERS", 4)
    prompt = random_prompt(6, 460)  # seven blocks
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        tiers_harness.run(engine, tiers_harness.sequence(prompt)[0])
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        sequence, recorded = tiers_harness.sequence(prompt)
        engine.submit([sequence])
        assert not engine.step() and len(engine.tiers.disk._reads) == 7
        engine.cancel([sequence])
        engine.step()
        assert recorded.finish == "cancelled"
        assert len(engine.tiers.disk._reads) == 4 == engine.tiers.host.state.blocks
        hanging_disk.set()
        wait_until(lambda: not engine.tiers.disk._reads)
        assert all(not block.references for block in engine.tiers.host._blocks.values())


def test_a_server_ends_while_the_disk_does_not_answer(
    tiers_harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging_disk: threading.Event
) -> None:
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        tiers_harness.run(engine, tiers_harness.sequence(PROMPT)[0])
    monkeypatch.setattr(disk_tier, "CLOSE_SECONDS", 0.05)
    layout = tiers_harness.forward.block_layout
    assert layout is not None
    limit = FILE_HEADER + 8 * record_size(layout.bytes)
    disk = DiskTier(DiskFile(tmp_path / "kv", IDENTITY), layout.bytes, limit, queue_blocks=4)
    engine = tiers_harness.engine()
    engine.attach_tiers(CacheTiers(layout, IDENTITY, HostTier(layout.bytes, 8 * layout.bytes, False), disk))
    engine.start()
    sequence, recorded = tiers_harness.sequence(PROMPT)
    engine.submit([sequence])
    wait_until(lambda: disk._reads)
    engine.stop()
    assert recorded.finish == "error" and "stopped" in recorded.events[-1].error
    assert not engine.alive


def test_a_stopped_engine_saves_sequences_that_run(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    layout = tiers_harness.forward.block_layout
    assert layout is not None
    limit = FILE_HEADER + 8 * record_size(layout.bytes)
    disk = DiskTier(DiskFile(tmp_path / "kv", IDENTITY), layout.bytes, limit, queue_blocks=4)
    engine = tiers_harness.engine()
    engine.attach_tiers(CacheTiers(layout, IDENTITY, HostTier(layout.bytes, 8 * layout.bytes, False), disk))
    sequence, recorded = tiers_harness.sequence(PROMPT, max_tokens=250)
    engine.submit([sequence])
    while not sequence.new_tokens:
        engine.step()
    engine.start()
    engine.stop()
    assert recorded.finish == "error"
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as again:
        assert again.tiers.disk.state.blocks >= 3


def test_blocks_queued_for_a_slow_disk_are_dropped_at_the_end(tmp_path: Path) -> None:
    tier = DiskTier(DiskFile(tmp_path / "kv", b"model"), 64, FILE_HEADER + 8 * record_size(64), queue_blocks=4)
    begun, ended, released = threading.Event(), threading.Event(), list[HostBlock]()

    class SlowCopy:
        def synchronize(self) -> None:
            begun.set()
            ended.wait()

    copy: Any = SlowCopy()
    blocks = [HostBlock(bytes([number] * 20), b"", torch.zeros(64, dtype=torch.uint8)) for number in (1, 2, 3)]
    blocks[0].copied = [copy]
    assert all(tier.offer(block, released.append) for block in blocks)
    assert begun.wait(10)
    closing = threading.Thread(target=tier.close)
    closing.start()
    wait_until(lambda: tier._closing)
    ended.set()
    closing.join(10)
    assert not closing.is_alive() and released == blocks and tier.state.blocks == 1


def test_the_queue_of_the_disk_takes_a_whole_copy_of_states(tmp_path: Path) -> None:
    from tests.serve.cache.test_cache_tiers_families import Family

    layout = Family("qwen3_next").forward.block_layout
    assert layout is not None
    layout.__dict__["state_pieces"] = 48  # as of Qwen3-Next with a context of 2,048 tokens
    request = TierRequest(Launch("m", kv_disk=tmp_path / "kv"), 0.0, b"model", DiskFile(tmp_path / "kv", b"model"))
    tiers = make_tiers(request, SimpleNamespace(block_layout=layout), 2048, lambda _: None)
    assert tiers is not None and tiers.disk is not None
    assert tiers.disk.free_places >= 48
    tiers.close()
