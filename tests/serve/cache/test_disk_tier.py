"""The file of the disk tier: what a server finds in it after any end of the one before, and files that it refuses."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.serve.cache.disk_tier import FILE_HEADER, HEADER, DiskFile, DiskTier, RecordHeader, record_size
from ktransformers.serve.cache.host_tier import HostBlock, HostTier

SIZE = 20_000
MODEL = b"model"
KILLS = 20


def name_of(number: int) -> bytes:
    return number.to_bytes(20, "little")


def contents(number: int, size: int = SIZE) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(number).randbytes(size)), dtype=torch.uint8)


@contextmanager
def open_tier(path: Path, records: int = 16, size: int = SIZE) -> Iterator[DiskTier]:
    tier = DiskTier(DiskFile(path, MODEL), size, FILE_HEADER + records * record_size(size), queue_blocks=256)
    try:
        yield tier
    finally:
        tier.close()


def store(tier: DiskTier, *numbers: int) -> None:
    """Blocks whose parents have the name of the block before."""
    for number in numbers:
        block = HostBlock(name_of(number), name_of(number - 1), contents(number, tier.block_bytes))
        assert tier.offer(block, lambda _: None)
    assert tier.flush(10)


def load(tier: DiskTier, number: int) -> torch.Tensor | None:
    block = HostBlock(name_of(number), b"", torch.zeros(tier.block_bytes, dtype=torch.uint8))
    return block.row if tier.read(block).result() else None


def valid_numbers(tier: DiskTier, numbers: range = range(1, 40)) -> list[int]:
    """Numbers of blocks that the tier offers; each must be right."""
    offered = [number for number in numbers if name_of(number) in tier]
    for number in offered:
        loaded = load(tier, number)
        assert loaded is not None and torch.equal(loaded, contents(number, tier.block_bytes))
    return offered


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 16]))


def test_blocks_are_found_after_a_restart(tmp_path: Path) -> None:
    with open_tier(tmp_path / "kv") as tier:
        store(tier, 1, 2, 3)
        assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    with open_tier(tmp_path / "kv") as tier:
        assert valid_numbers(tier) == [1, 2, 3]
        assert tier.state.blocks == 3 and tier.counts.read_bytes == 3 * SIZE
        assert not tier.offer(HostBlock(name_of(2), b"", contents(2)), lambda _: None)  # which it has


def test_a_folder_has_a_file_for_each_model(tmp_path: Path) -> None:
    for model in (b"one", b"two"):
        DiskFile(tmp_path, model).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name.hex()}.ktkv" for name in (b"one", b"two"))


def test_the_bound_holds_and_the_end_of_a_chain_goes_first(tmp_path: Path) -> None:
    with open_tier(tmp_path / "kv", records=4) as tier:
        store(tier, 1, 2, 3, 11)
        store(tier, 21)
        assert valid_numbers(tier) == [1, 2, 11, 21]
        tier.touch([name_of(2), name_of(1)])
        store(tier, 31)
        assert valid_numbers(tier) == [1, 2, 21, 31] and tier.counts.evictions == 2
    assert (tmp_path / "kv").stat().st_size <= FILE_HEADER + 4 * record_size(SIZE)
    with open_tier(tmp_path / "kv", records=2) as tier:  # a smaller bound: records beyond it are gone
        assert len(valid_numbers(tier)) <= 2
    with open_tier(tmp_path / "kv", records=8) as tier:
        store(tier, 5, 6)
        assert {5, 6} <= set(valid_numbers(tier))


@pytest.mark.parametrize("place", ["header", "payload"])
def test_a_flipped_bit_is_not_trusted(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_tier(tmp_path / "kv") as tier:
        store(tier, 1, 2, 3)
    flip(tmp_path / "kv", FILE_HEADER + record_size(SIZE) + (20 if place == "header" else HEADER + 777))
    with open_tier(tmp_path / "kv") as tier:
        assert (name_of(2) in tier) == (place == "payload")
        assert load(tier, 2) is None and name_of(2) not in tier
        assert torch.equal(load(tier, 3), contents(3))  # type: ignore[arg-type]
        assert ("damaged block" in caplog.text) == (place == "payload")
        store(tier, 2)
        assert valid_numbers(tier) == [1, 2, 3]
        assert tier.state.blocks == 3


@pytest.mark.parametrize("cut", [1, 10_000, SIZE + HEADER - 1, record_size(SIZE), 2 * record_size(SIZE) + 5000])
def test_a_truncated_file_offers_what_is_whole(tmp_path: Path, cut: int) -> None:
    with open_tier(tmp_path / "kv") as tier:
        store(tier, 1, 2, 3)
    size = (tmp_path / "kv").stat().st_size
    os.truncate(tmp_path / "kv", size - cut)
    with open_tier(tmp_path / "kv") as tier:
        whole = [
            number
            for number in (1, 2, 3)
            if FILE_HEADER + (number - 1) * record_size(SIZE) + HEADER + SIZE <= size - cut
        ]
        assert valid_numbers(tier) == whole
        store(tier, 8, 9)
        assert valid_numbers(tier) == [*whole, 8, 9]


def test_a_file_cut_in_its_header_is_started_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_tier(tmp_path / "kv") as tier:
        store(tier, 1)
    os.truncate(tmp_path / "kv", 10)
    with open_tier(tmp_path / "kv") as tier:
        assert not tier.state.blocks
        store(tier, 1)
    assert caplog.text.count("started anew") == 1
    with open_tier(tmp_path / "kv") as tier:
        assert valid_numbers(tier) == [1]


def test_blocks_of_another_size_start_the_file_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_tier(tmp_path / "kv") as tier:
        store(tier, 1, 2)
    with open_tier(tmp_path / "kv", size=3 * SIZE) as tier:
        assert not tier.state.blocks
        store(tier, 4)
        assert valid_numbers(tier) == [4]
    assert caplog.text.count("started anew") == 1


def test_another_version_starts_the_file_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ktransformers.serve.cache.disk_tier.VERSION", 99)
        with open_tier(tmp_path / "kv") as tier:
            store(tier, 1)
    with open_tier(tmp_path / "kv") as tier:
        assert not tier.state.blocks
    assert caplog.text.count("started anew") == 1


def test_foreign_files_are_refused_and_kept(tmp_path: Path) -> None:
    foreign = tmp_path / "letter.txt"
    foreign.write_text("Dear all,")
    with pytest.raises(InputError, match="another kind of file"):
        DiskFile(foreign, MODEL)
    assert foreign.read_text() == "Dear all,"
    with pytest.raises(InputError, match="No such file"):
        DiskFile(tmp_path / "missing" / "kv", MODEL)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InputError, match="no regular file"):
        DiskFile(fifo, MODEL)


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "kv", MODEL)
    with pytest.raises(InputError, match="another server uses"):
        DiskFile(tmp_path / "kv", MODEL)
    file.close()
    DiskFile(tmp_path / "kv", MODEL).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        DiskFile(tmp_path / "kv", MODEL)


class HeldCopy:
    """Stands in for the event of a copy that has not ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def synchronize(self) -> None:
        self.ended.wait()


def test_a_full_queue_drops_blocks(tmp_path: Path) -> None:
    tier = DiskTier(DiskFile(tmp_path / "kv", MODEL), SIZE, FILE_HEADER + 64 * record_size(SIZE), queue_blocks=2)
    copy: Any = HeldCopy()
    assert tier.offer(HostBlock(name_of(1), b"", contents(1), copied=[copy]), lambda _: None)
    while tier.free_places < 2:  # until the writer waits for the copy
        time.sleep(0.001)
    blocks = [HostBlock(name_of(number), b"", contents(number)) for number in (2, 3, 4)]
    assert [tier.offer(block, lambda _: None) for block in blocks] == [True, True, False]
    assert tier.counts.dropped == 1 and not tier.flush(0.01)
    copy.ended.set()
    assert tier.flush(10) and valid_numbers(tier) == [1, 2, 3]
    tier.close()


def test_a_header_survives_packing_and_nothing_else() -> None:
    header = RecordHeader(7, name_of(1), name_of(2), 12345, 678)
    packed = header.pack()
    assert len(packed) == HEADER and RecordHeader.unpack(packed) == header
    used = len(packed.rstrip(b"\0"))
    for index in range(used):
        damaged = bytearray(packed)
        damaged[index] ^= 1
        assert RecordHeader.unpack(bytes(damaged)) is None
    assert RecordHeader.unpack(packed[:20]) is None and RecordHeader.unpack(bytes(HEADER)) is None


def test_rows_of_the_host_tier_are_evicted_without_references() -> None:
    tier = HostTier(64, 3 * 64, pinned=False)
    first, second, third = (tier.reserve(name_of(number), b"") for number in (1, 2, 3))
    assert first and second and third and tier.reserve(name_of(4), b"") is None
    tier.release(second)
    fourth = tier.reserve(name_of(4), b"")
    assert fourth is not None and fourth.row.data_ptr() == second.row.data_ptr()
    assert name_of(2) not in tier and tier.counts.evictions == 1
    tier.release(first)
    again = tier.get(name_of(1))
    assert again is first and tier.reserve(name_of(5), b"") is None
    tier.remove(third)  # a block that could not be read
    assert name_of(3) not in tier and tier.reserve(name_of(6), b"") is not None


def write_for_ever(path: Path, size: int, first: int, written: Any) -> None:
    def count(_: HostBlock) -> None:
        written.value += 1

    with open_tier(path, records=12, size=size) as tier:
        number, parent = first, os.getppid()
        while os.getppid() == parent:  # not beyond a test that was killed itself
            tier.offer(HostBlock(name_of(number), name_of(0), contents(number, size)), count)
            number += 1


def test_nothing_wrong_is_offered_after_kills(tmp_path: Path) -> None:
    """A writer overwrites a file of 12 records without end and is killed after a random number of records."""
    rng, size, path, survived = random.Random(3), 300_000, tmp_path / "kv", set[int]()
    context = multiprocessing.get_context("fork")
    for kill in range(KILLS):
        written: Any = context.Value("q", 0, lock=False)
        writer = context.Process(target=write_for_ever, args=(path, size, 1 + 1000 * kill, written), daemon=True)
        writer.start()
        enough = rng.randint(1, 24)
        while written.value < enough and writer.is_alive():
            time.sleep(0.001)
        writer.kill()
        writer.join()
        with open_tier(path, records=12, size=size) as tier:
            survived.update(valid_numbers(tier, range(1, 1000 * (kill + 1))))
            assert not tier.counts.errors
    assert {number // 1000 for number in survived} == set(range(KILLS))
