"""Prefixes from host memory and from disk: answers equal to computed ones, and nothing of another model or adapter."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.serve.cache.cache_tiers import CacheTiers
from ktransformers.serve.cache.disk_tier import FILE_HEADER, DiskFile, DiskTier, record_size
from ktransformers.serve.cache.host_tier import HostBlock, HostTier
from tests.support.cache_tiers import IDENTITY, evict_slots, tiered_engine
from tests.support.serving import EngineHarness, random_prompt, same_completion, wait_for_finish

PROMPT = random_prompt(5, 200)  # three whole blocks before its last token


def ask(
    harness: EngineHarness, engine: Any, adapter: str | None = None, prompt: list[int] = PROMPT, **options: Any
) -> Any:
    sequence, recorded = harness.sequence(prompt, adapter, **options)
    harness.run(engine, sequence)
    assert recorded.finish == "length", recorded.events
    return recorded


@pytest.mark.parametrize("adapter", [None, "one"])
def test_a_prefix_from_host_memory_gives_the_computed_answer(tiers_harness: EngineHarness, adapter: str | None) -> None:
    expected = tiers_harness.alone(PROMPT, adapter)
    with tiered_engine(tiers_harness) as engine:
        ask(tiers_harness, engine, adapter)
        evict_slots(engine)
        again = ask(tiers_harness, engine, adapter)
        assert again.events[-1].cached == 192 == engine.tiers.host.counts.hit_tokens
        assert engine.kv_cache.reused_tokens == 192
    assert same_completion(expected, again)


@pytest.mark.parametrize("adapter", [None, "one"])
def test_a_prefix_from_disk_after_a_restart_gives_the_computed_answer(
    tiers_harness: EngineHarness, adapter: str | None, tmp_path: Path
) -> None:
    expected = tiers_harness.alone(PROMPT, adapter)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine, adapter)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        again = ask(tiers_harness, engine, adapter)
        assert again.events[-1].cached == 192 == engine.tiers.disk.counts.hit_tokens
        assert not engine.tiers.host.counts.hit_tokens
    assert same_completion(expected, again)


def test_blocks_of_an_adapter_are_its_own(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    expected = {adapter: tiers_harness.alone(PROMPT, adapter) for adapter in (None, "one", "two")}
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine, "one")
        evict_slots(engine)
        for adapter in (None, "two", "one"):
            answer = ask(tiers_harness, engine, adapter)
            assert answer.events[-1].cached == (192 if adapter == "one" else 0)
            assert same_completion(expected[adapter], answer)
            evict_slots(engine)


def test_an_adapter_of_other_content_under_the_same_name_is_no_hit(
    tiers_harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine, "one")
    original, directory = tiers_harness.loaded["one"], str(tiers_harness.directory)
    try:
        for source, cached in (("two", 0), ("one", 192)):  # the same content is found under any version
            loaded = tiers_harness.lora_modules.open(adapters[source], "one", 7, directory)
            tiers_harness.loaded["one"] = loaded
            with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
                assert ask(tiers_harness, engine, "one").events[-1].cached == cached
    finally:
        tiers_harness.loaded["one"] = original


def test_an_adapter_without_a_content_hash_has_no_blocks_on_disk(harness: EngineHarness, tmp_path: Path) -> None:
    expected = harness.alone(PROMPT, "one")
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        ask(harness, engine, "one")
        evict_slots(engine)
        assert ask(harness, engine, "one").events[-1].cached == 0
        assert not engine.tiers.host.state.blocks
    with tiered_engine(harness) as engine:  # in this process, its name and version are enough
        ask(harness, engine, "one")
        evict_slots(engine)
        again = ask(harness, engine, "one")
        assert again.events[-1].cached == 192
        evict_slots(engine)
        assert ask(harness, engine, "two").events[-1].cached == 0
    assert same_completion(expected, again)


def test_a_file_of_another_model_is_not_used(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", identity=b"other weights") as engine:
        assert ask(tiers_harness, engine).events[-1].cached == 0
        assert not engine.tiers.disk.counts.errors


def test_evicted_and_preempted_sequences_come_back_from_host_memory(tiers_harness: EngineHarness) -> None:
    """The cache has slots for one of them at a time."""
    prompts = [random_prompt(seed, 150) for seed in (11, 12, 13)]
    expected = [tiers_harness.alone(prompt) for prompt in prompts]
    with tiered_engine(tiers_harness, max_total_tokens=256) as engine:
        for prompt in prompts:
            ask(tiers_harness, engine, prompt=prompt)
        for prompt, completion in zip(prompts, expected, strict=True):
            answer = ask(tiers_harness, engine, prompt=prompt)
            assert answer.events[-1].cached >= 128
            assert same_completion(completion, answer)
        assert engine.tiers.host.counts.hit_tokens >= 2 * 128


def test_one_copy_of_a_block_serves_all_sequences(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    prompts = [PROMPT[:192] + random_prompt(seed, 20) for seed in (1, 2, 3, 4)]
    expected = [tiers_harness.alone(prompt) for prompt in prompts]
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        pairs = [tiers_harness.sequence(prompt) for prompt in prompts]
        tiers_harness.run(engine, *(sequence for sequence, _ in pairs))
        assert engine.tiers.disk.counts.read_bytes == 3 * engine.tiers.layout.bytes
        assert all(block.references == 0 for block in engine.tiers.host._blocks.values())
    for completion, (_, recorded) in zip(expected, pairs, strict=True):
        assert recorded.events[-1].cached == 192
        assert same_completion(completion, recorded)


def test_prompt_scores_are_computed(tiers_harness: EngineHarness) -> None:
    with tiered_engine(tiers_harness) as engine:
        ask(tiers_harness, engine)
        evict_slots(engine)
        scored = ask(tiers_harness, engine, prompt_logprobs=True)
        assert scored.events[-1].cached == 0
    expected = tiers_harness.alone(PROMPT, prompt_logprobs=True)
    first, second = (
        next(event.prompt_scores for event in run.events if event.prompt_scores) for run in (expected, scored)
    )
    assert [score.token for score in first] == [score.token for score in second] == PROMPT


def test_a_tier_slower_than_computing_is_skipped_and_tried_again(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        counts = engine.tiers.disk.counts
        counts.read_rate.add(engine.tiers.layout.bytes, 10.0)  # seconds for a block
        engine.cache.prefill_rate.add(64, 8.0)
        assert ask(tiers_harness, engine).events[-1].cached == 0
        assert counts.skipped_tokens == 192 and not counts.read_bytes
        before = counts.read_rate.value
        evict_slots(engine)
        engine.tiers.host._blocks.clear()  # what was computed again is there
        engine.cache.prefill_rate = type(engine.cache.prefill_rate)()
        engine.cache.prefill_rate.add(64, 8.0)
        for _ in range(8):
            root = engine.tiers.root_of(None)
            fetch = engine.tiers.fetch(root, PROMPT, 0, engine.cache.prefill_rate)
            if fetch.blocks:
                break
        assert fetch.blocks and counts.read_rate.value > before
        engine.tiers.release(fetch)


def test_a_damaged_record_is_computed_again(
    tiers_harness: EngineHarness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tiers_harness.alone(PROMPT)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine)
        size, record = engine.tiers.layout.bytes, engine.tiers.disk.record_bytes
    with (tmp_path / "kv").open("r+b") as stream:
        stream.seek(4096 + record + 128 + size // 2)  # in the payload of the second block
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 4]))
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        again = ask(tiers_harness, engine)
        assert again.events[-1].cached == 64
        assert engine.tiers.disk.counts.errors == 1
    assert same_completion(expected, again)
    assert "a damaged block of the KV cache is ignored" in caplog.text
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:  # it was written again
        assert ask(tiers_harness, engine).events[-1].cached == 192


def test_a_full_disk_is_one_warning_and_no_error(
    tiers_harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tiers_harness.alone(PROMPT)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("ktransformers.serve.cache.disk_tier.os.pwrite", full)
        assert same_completion(expected, ask(tiers_harness, engine))
        evict_slots(engine)
        ask(tiers_harness, engine, prompt=random_prompt(8, 150))
        evict_slots(engine)
        assert engine.tiers.disk.state.note == os.strerror(errno.ENOSPC)
        assert engine.tiers.disk.counts.errors == 1
        again = ask(tiers_harness, engine)  # from host memory
        assert again.events[-1].cached == 192
    assert caplog.text.count("no more blocks of the KV cache are written there") == 1
    assert same_completion(expected, again)


def test_small_buffers_pass_long_prompts_on_to_disk(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    """Saving pauses while the queue of the disk is full; slots keep the blocks until then."""
    prompt = random_prompt(6, 460)
    expected = tiers_harness.alone(prompt)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", host_blocks=2, buffers=True) as engine:
        ask(tiers_harness, engine, prompt=prompt)
        evict_slots(engine)
        assert engine.tiers.disk.state.blocks == 7
        assert not engine.tiers.disk.counts.dropped and not engine.tiers.host.counts.dropped
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", host_blocks=16, buffers=True) as engine:
        again = ask(tiers_harness, engine, prompt=prompt)
        assert again.events[-1].cached == 448
    assert same_completion(expected, again)


def test_the_beginning_of_a_chain_is_evicted_last(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", host_blocks=4, disk_blocks=4) as engine:
        ask(tiers_harness, engine)  # three blocks
        evict_slots(engine)
        ask(tiers_harness, engine, prompt=random_prompt(9, 140))  # two
        evict_slots(engine)
        assert engine.tiers.host.counts.evictions == engine.tiers.disk.counts.evictions == 1
        assert ask(tiers_harness, engine).events[-1].cached == 128
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", host_blocks=4, disk_blocks=2) as engine:  # a smaller bound
        assert engine.tiers.disk.state.blocks <= 2
        assert ask(tiers_harness, engine).finish == "length"


def test_a_failed_step_saves_nothing(tiers_harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered_engine(tiers_harness) as engine:
        sequence, _ = tiers_harness.sequence(PROMPT)
        engine.submit([sequence])
        engine.step()
        engine._fail_all("an error")
        assert engine.tiers.flush() and not engine.tiers.host.state.blocks


def test_a_cancelled_sequence_lets_go_of_its_blocks(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", max_running_requests=1) as engine:
        root = engine.tiers.root_of(None)
        sequence, recorded = tiers_harness.sequence(PROMPT)
        sequence.fetch = engine.tiers.fetch(root, PROMPT, 0, engine.cache.prefill_rate)
        engine.submit([sequence])
        engine.cancel([sequence])
        engine.step()
        assert recorded.finish == "cancelled" and sequence.fetch is None
        assert engine.tiers.disk.flush(5) and engine.tiers.host.reserve(b"x" * 20, b"") is not None
        engine.tiers.disk._readers.shutdown()
        assert all(not block.references for name, block in engine.tiers.host._blocks.items() if name != b"x" * 20)


def test_memory_that_runs_out_while_saving_drops_blocks(
    tiers_harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiers_harness.alone(PROMPT)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with tiered_engine(tiers_harness) as engine:
        monkeypatch.setattr(engine.tiers._copies, "save", exhausted)
        ask(tiers_harness, engine)
        evict_slots(engine)
        assert engine.tiers.host.counts.dropped == 3 and not engine.tiers.host.state.blocks
        assert engine.tiers.host.reserve(b"x" * 20, b"") is not None
        assert same_completion(expected, ask(tiers_harness, engine))


def test_a_prefix_longer_than_host_memory_is_fetched_in_part(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    prompt = random_prompt(6, 460)
    expected = tiers_harness.alone(prompt)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", host_blocks=3) as engine:
        ask(tiers_harness, engine, prompt=prompt)
        evict_slots(engine)
        assert engine.tiers.disk.state.blocks == 7
    with tiered_engine(tiers_harness, disk=tmp_path / "kv", host_blocks=3) as engine:
        again = ask(tiers_harness, engine, prompt=prompt)
        assert again.events[-1].cached == 192
    assert same_completion(expected, again)


def test_other_sequences_go_on_while_the_disk_is_read(
    tiers_harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after another sequence has ended does the disk deliver."""
    expected, other_prompt = tiers_harness.alone(PROMPT), random_prompt(31, 40)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        ask(tiers_harness, engine)
    allowed, read = threading.Event(), DiskTier._read

    def slow_read(tier: DiskTier, block: HostBlock) -> bool:
        assert allowed.wait(30)
        return read(tier, block)

    monkeypatch.setattr(DiskTier, "_read", slow_read)
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        fetched, first = tiers_harness.sequence(PROMPT)
        other, second = tiers_harness.sequence(other_prompt)
        engine.submit([fetched, other])
        while second.finish is None:
            engine.step()
        assert not first.events and fetched in engine.waiting
        allowed.set()
        while engine.busy:
            engine.step()
        assert first.events[-1].cached == 192
    assert same_completion(expected, first)
    assert same_completion(tiers_harness.alone(other_prompt), second)


def test_a_stopped_engine_leaves_its_blocks_in_the_file(tiers_harness: EngineHarness, tmp_path: Path) -> None:
    layout = tiers_harness.forward.block_layout
    assert layout is not None
    limit = FILE_HEADER + 8 * record_size(layout.bytes)
    disk = DiskTier(DiskFile(tmp_path / "kv", IDENTITY), layout.bytes, limit, queue_blocks=4)
    engine = tiers_harness.engine()
    engine.attach_tiers(CacheTiers(layout, IDENTITY, HostTier(layout.bytes, 8 * layout.bytes, False), disk))
    engine.start()
    sequence, recorded = tiers_harness.sequence(PROMPT)
    engine.submit([sequence])
    wait_for_finish(recorded)
    engine.stop()
    with tiered_engine(tiers_harness, disk=tmp_path / "kv") as engine:
        assert engine.tiers.disk.state.blocks == 3
        assert ask(tiers_harness, engine).events[-1].cached == 192


def test_an_idle_engine_saves_without_requests(tiers_harness: EngineHarness) -> None:
    with tiered_engine(tiers_harness) as engine:
        engine.start()
        sequence, recorded = tiers_harness.sequence(PROMPT)
        engine.submit([sequence])
        wait_for_finish(recorded)
        end = time.monotonic() + 10
        while engine.tiers.host.state.blocks < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.tiers.host.state.blocks == 3
        engine.stop()


def test_a_slot_that_is_evicted_while_a_sequence_waits_is_fetched_instead(tiers_harness: EngineHarness) -> None:
    expected = tiers_harness.alone(PROMPT)
    with tiered_engine(tiers_harness) as engine:
        ask(tiers_harness, engine)
        sequence, recorded = tiers_harness.sequence(PROMPT)
        assert engine.cache.fetched(sequence) and not sequence.fetch.blocks and sequence.fetch.start == 192
        evict_slots(engine)
        tiers_harness.run(engine, sequence)
        assert recorded.events[-1].cached == 192
    assert same_completion(expected, recorded)
