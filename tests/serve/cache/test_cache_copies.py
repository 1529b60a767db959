"""Copies of blocks over staging buffers, with streams and events that do nothing in the place of a GPU's: which bytes
go where. That streams wait for each other is tested on a GPU (`test_cache_tiers_families.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ktransformers.serve.cache import cache_copies
from ktransformers.serve.cache.cache_blocks import BlockLayout
from ktransformers.serve.cache.cache_copies import DeviceCopies, HostCopies
from ktransformers.serve.cache.host_tier import HostBlock, HostTier
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, BlockMemory, KVSlot
from ktransformers.serve.cache.snapshots import States

BLOCKS = 7


class Instant:
    """A stream, or an event that has ended."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recorded = False

    def wait_event(self, event: Instant) -> None: ...

    def wait_stream(self, stream: Instant) -> None: ...

    def record(self, stream: Instant) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def elapsed_time(self, end: Instant) -> float:
        return 2.0

    def synchronize(self) -> None:
        assert self.recorded


@contextmanager
def nothing(*_: object) -> Iterator[None]:
    yield


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Instant)
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "current_stream", Instant)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def make_slot() -> KVSlot:
    torch.manual_seed(3)
    slot = KVSlot.alone(BLOCKS * BLOCK_TOKENS)
    slot.tokens = list(range(BLOCKS * BLOCK_TOKENS))
    for layer in range(3):
        slot.write("keys", layer, 0, torch.randn(2, slot.length, 6).bfloat16())
        slot.write("values", layer, 0, torch.randn(2, slot.length, 5).bfloat16())
    slot.states = States({4: {"convolution0": torch.randn(5, 3), "recurrent0": torch.randn(2, 40, 40)}})
    return slot


def rows(layout: BlockLayout, count: int, *, scattered: bool) -> list[HostBlock]:
    tier = HostTier(layout.bytes, 2 * count * layout.bytes, pinned=False)
    taken: list[Any] = [tier.reserve(bytes([number]), b"") for number in range(2 * count)]
    return taken[::2] if scattered else taken[:count]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("staged", [1, 2, 3, 100])
def test_staged_copies_are_those_of_the_cpu(
    without_streams: None, monkeypatch: pytest.MonkeyPatch, staged: int, scattered: bool
) -> None:
    slot = make_slot()
    layout = BlockLayout.of_memory(slot.memory, slot.states)
    assert layout is not None
    monkeypatch.setattr(cache_copies, "STAGING_BYTES", staged * layout.bytes)
    host, device = HostCopies(layout), DeviceCopies(layout)
    expected, actual = (rows(layout, BLOCKS - 1, scattered=scattered) for _ in range(2))
    for block in [*expected, *actual]:
        block.row.zero_()
    numbers = list(range(1, BLOCKS)) if scattered else [3, 1, 2, 6, 4, 5]
    host.save(slot.memory, numbers, expected)
    device.save(slot.memory, numbers, actual)
    for first, second in zip(expected, actual, strict=True):
        assert torch.equal(first.row, second.row) and first.row.any()
        second.wait()
    restored = BlockMemory(BLOCKS)
    pending = device.restore(restored, numbers, expected)
    assert pending is not None and pending.done and pending.seconds == 0.002
    for part, buffers in slot.memory.parts.items():
        for layer, buffer in buffers.items():
            assert torch.equal(restored.parts[part][layer][:, 1:], buffer[:, 1:])


@pytest.mark.parametrize("scattered", [False, True])
def test_states_are_copied_in_pieces(without_streams: None, scattered: bool) -> None:
    slot = make_slot()
    layout = BlockLayout.of_memory(slot.memory, slot.states)
    assert layout is not None and layout.state_pieces == 2
    for copies in (HostCopies(layout), DeviceCopies(layout)):
        blocks = rows(layout, layout.state_pieces, scattered=scattered)
        copies.save_states(slot.states, blocks)
        restored, _ = copies.restore_states(blocks)
        assert layout.matches_states(restored)
        for layer, kept in slot.states.items():
            for name, state in kept.items():
                assert torch.equal(restored[layer][name], state)
                assert restored[layer][name].data_ptr() not in [block.row.data_ptr() for block in blocks]
    assert not layout.matches_states(States()) and not layout.matches_states(States({4: {"recurrent0": torch.ones(1)}}))


def test_layers_on_two_devices_have_segments_of_their_own(without_streams: None) -> None:
    slot = make_slot()
    layout = BlockLayout.of_memory(slot.memory, slot.states)
    assert layout is not None
    ((device, first, last),) = layout.segments
    assert (device.type, first, last) == ("cpu", 0, layout.bytes)
    moved = tuple(
        type(place)(**{**vars(place), "device": torch.device("meta" if place.layer else "cpu")})
        for place in layout.places
    )
    split = BlockLayout(moved, layout.bytes)
    border = next(place.offset for place in moved if place.layer)
    assert [(device.type, *ends) for device, *ends in split.segments] == [
        ("cpu", 0, border),
        ("meta", border, layout.bytes),
    ]
