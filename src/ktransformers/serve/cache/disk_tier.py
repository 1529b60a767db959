"""The disk tier: blocks of cached tokens in one file of fixed records, which outlives the server.

    file     FILE_HEADER bytes, then records of one size; record i begins at FILE_HEADER + i * record size
    record   HEADER bytes: magic, version, stamp, name and parent of the block, bytes and CRC-32 of the payload, CRC-32
             of all before; then the payload

The headers are the index: a start reads each of them. A record is overwritten in three writes: zeros in the place of
its header, then the payload, then the new header. A process that is killed between any two leaves a record without a
header, which is free; a header whose payload did not reach the disk before power was lost fails the payload's checksum
when it is read. Neither needs fsync.
CRC-32 and not a cryptographic hash: damage is found, and it is three times as fast; the name is the hash of the tokens.

Reads and writes happen in threads of their own. The queue of writes is bounded and takes blocks or refuses them. After
the first write that fails (a full disk) the tier only reads. The least recently used record is overwritten first, the
end of a chain before its beginning; after a restart, use is counted from the order of writing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import struct
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import try_lock
from ktransformers.ground.log import logger
from ktransformers.serve.cache.cache_blocks import BlockHash
from ktransformers.serve.cache.host_tier import HostBlock
from ktransformers.serve.cache.tier_counts import TierCounts, TierState

LOG = logger(__name__)
MAGIC, RECORD_MAGIC, VERSION = b"KTKVTIER", b"KTKB", 1
FILE_HEADER = 4096
FILE_FIELDS = struct.Struct("<8sIQ")  # magic, version, record bytes; then CRC-32
RECORD_FIELDS = struct.Struct("<4sIQ20s20sQI")  # magic, version, stamp, name, parent, bytes and CRC of the payload
CHECKSUM = struct.Struct("<I")
HEADER = 128
SUFFIX = ".ktkv"
READERS = 8  # threads; one reads and checks 2 GB/s where the file is in memory, and less where the disk must answer
CLOSE_SECONDS = 5.0  # for a write and reads that are under way


@dataclass(frozen=True)
class RecordHeader:
    stamp: int  # order of writing
    name: BlockHash
    parent: BlockHash
    payload_bytes: int
    payload_crc: int

    def pack(self) -> bytes:
        fields = RECORD_FIELDS.pack(
            RECORD_MAGIC, VERSION, self.stamp, self.name, self.parent, self.payload_bytes, self.payload_crc
        )
        return (fields + CHECKSUM.pack(zlib.crc32(fields))).ljust(HEADER, b"\0")

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> RecordHeader | None:
        """None: no header of this version, or a damaged one."""
        if len(data) < RECORD_FIELDS.size + CHECKSUM.size:
            return None
        fields = bytes(data[: RECORD_FIELDS.size])
        if CHECKSUM.unpack_from(data, RECORD_FIELDS.size)[0] != zlib.crc32(fields):
            return None
        magic, version, stamp, name, parent, payload, crc = RECORD_FIELDS.unpack(fields)
        return cls(stamp, name, parent, payload, crc) if (magic, version) == (RECORD_MAGIC, VERSION) else None


class DiskFile:
    """The open and locked file. It is opened before the model is loaded, so that a path that cannot be used is an error
    at once; the size of a record is known after."""

    def __init__(self, path: Path, model: bytes) -> None:
        """`model`: identity of the model, which names the file in a directory."""
        self.path = path / f"{model.hex()[:16]}{SUFFIX}" if path.is_dir() else path
        try:
            self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            given = f"{self.path} ({error.strerror or error})"
            raise InputError("kv-disk", given, "a file that can be written, or a folder for it") from None
        try:
            self._check()
        except BaseException:
            os.close(self.handle)
            raise

    def _check(self) -> None:
        if not stat.S_ISREG(os.fstat(self.handle).st_mode):
            raise InputError("kv-disk", f"{self.path}, which is no regular file", "a file or a folder")
        if not try_lock(self.handle):
            raise InputError("kv-disk", f"{self.path}, which another server uses", "a file of its own for each server")
        size, start = os.fstat(self.handle).st_size, os.pread(self.handle, len(MAGIC), 0)
        if size and start != MAGIC:
            expected = "an empty one or one that a server wrote"
            raise InputError(
                "kv-disk", f"{self.path}, which is another kind of file", expected, "it is not overwritten"
            )

    def read_layout(self) -> int:
        """Bytes of a record; 0: the file is new, or of another version."""
        data = os.pread(self.handle, FILE_HEADER, 0)
        if len(data) < FILE_FIELDS.size + CHECKSUM.size:
            return 0
        magic, version, record_bytes = FILE_FIELDS.unpack_from(data)
        (crc,) = CHECKSUM.unpack_from(data, FILE_FIELDS.size)
        known = (magic, version, crc) == (MAGIC, VERSION, zlib.crc32(data[: FILE_FIELDS.size]))
        return int(record_bytes) if known else 0

    def start_anew(self, record_bytes: int) -> None:
        os.ftruncate(self.handle, 0)
        fields = FILE_FIELDS.pack(MAGIC, VERSION, record_bytes)
        write_all(self.handle, (fields + CHECKSUM.pack(zlib.crc32(fields))).ljust(FILE_HEADER, b"\0"), 0)

    def close(self) -> None:
        os.close(self.handle)


@dataclass(eq=False)
class _Record:
    index: int
    parent: BlockHash
    readers: int = 0


class DiskTier:
    def __init__(self, file: DiskFile, block_bytes: int, limit_bytes: int, queue_blocks: int) -> None:
        self._file, self.block_bytes, self.counts = file, block_bytes, TierCounts()
        self.record_bytes = record_size(block_bytes)
        self._capacity = max(0, (limit_bytes - FILE_HEADER) // self.record_bytes)
        self.note = ""  # why it only reads
        self._lock = threading.Lock()
        self._records: OrderedDict[BlockHash, _Record] = OrderedDict()  # least recently used first
        self._children: Counter[BlockHash] = Counter()  # records whose parent has this name
        self._free: list[int] = []
        self._used, self._stamp = 0, 0  # records of the file; the last stamp
        self._queued: set[BlockHash] = set()
        self._reads: set[Future[bool]] = set()  # that have not ended
        self._active, self._marked = 0, 0.0  # reads now; when the last one ended, or the first of these began
        self._closing = False
        self._open_records()
        self._queue: queue.Queue[tuple[HostBlock, Callable[[HostBlock], None]] | None] = queue.Queue(queue_blocks)
        self._readers = ThreadPoolExecutor(READERS, "kt-kv-read")
        self._writer = threading.Thread(target=self._write_loop, name="kt-kv-write", daemon=True)
        self._writer.start()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def state(self) -> TierState:
        held, size = len(self._records), self.record_bytes
        return TierState("disk", held, held * size, self._capacity * size, self.counts, self.note)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._records

    def _open_records(self) -> None:
        handle, size = self._file.handle, os.fstat(self._file.handle).st_size
        held = self._file.read_layout() if size else 0
        try:
            if held != self.record_bytes:
                if size:
                    LOG.warning("%s has blocks of another format or model: it is started anew", self.path)
                self._file.start_anew(self.record_bytes)
                return
            bound = FILE_HEADER + self._capacity * self.record_bytes
            if size > bound:
                os.ftruncate(handle, bound)
                size = bound
        except OSError as error:
            self._stop_writing(error)
            return
        self._used = -(-(size - FILE_HEADER) // self.record_bytes)
        found: dict[BlockHash, tuple[RecordHeader, int]] = {}  # with the record's index
        for index in range(self._used):
            offset = self._offset(index)
            header = RecordHeader.unpack(os.pread(handle, HEADER, offset))
            complete = header is not None and offset + HEADER + header.payload_bytes <= size
            if header is None or not complete or header.payload_bytes != self.block_bytes:
                self._free.append(index)
                continue
            older = found.get(header.name)
            if older is not None and older[0].stamp > header.stamp:
                self._free.append(index)
                continue
            if older is not None:
                self._free.append(older[1])
            found[header.name] = header, index
        for name in _use_order({name: header for name, (header, _) in found.items()}):
            self._add_record(name, found[name][1], found[name][0].parent)
        self._stamp = max((header.stamp for header, _ in found.values()), default=0)

    def _offset(self, index: int) -> int:
        return FILE_HEADER + index * self.record_bytes

    def read(self, block: HostBlock) -> Future[bool]:
        """Read a block into its row, in a thread; False: it is not there or damaged."""
        reading = self._readers.submit(self._read, block)
        self._reads.add(reading)
        reading.add_done_callback(self._reads.discard)
        return reading

    def _read(self, block: HostBlock) -> bool:
        block.wait()
        with self._lock:
            record = self._records.get(block.name)
            if record is None:
                return False
            record.readers += 1
            if not self._active:
                self._marked = time.perf_counter()
            self._active += 1
        valid = False
        try:
            valid = self._read_record(record.index, block)
        except OSError as error:
            LOG.warning("%s: a block of the KV cache could not be read: %s", self.path, error)
        finally:
            with self._lock:
                record.readers -= 1
                self._active -= 1
                # Seconds since the last read ended: of reads side by side the sum is the time that all of them took.
                now = time.perf_counter()
                seconds, self._marked = now - self._marked, now
                if valid:
                    self.counts.add_read(self.block_bytes, seconds)
                else:
                    self.counts.errors += 1
                    if self._records.get(block.name) is record:
                        self._free.append(self._pop_record(block.name))
        return valid

    def _read_record(self, index: int, block: HostBlock) -> bool:
        head, row, offset = bytearray(HEADER), block.bytes, self._offset(index)
        # Threads that read one file at several places defeat its readahead: a record would be read in many small
        # requests, one after the other. This starts all of them at once.
        os.posix_fadvise(self._file.handle, offset, self.record_bytes, os.POSIX_FADV_WILLNEED)
        done = os.preadv(self._file.handle, [head, row], offset)
        while done < HEADER + len(row):
            got = os.preadv(self._file.handle, [row[done - HEADER :]], offset + done) if done >= HEADER else 0
            if not got:
                break
            done += got
        header = RecordHeader.unpack(memoryview(head))
        valid = header is not None and done == HEADER + len(row) and header.name == block.name
        if header is None or not valid or header.payload_crc != zlib.crc32(row):
            LOG.warning("%s: a damaged block of the KV cache is ignored; its tokens are computed again", self.path)
            return False
        return True

    def touch(self, names: Iterable[BlockHash]) -> None:
        """Count a use of these blocks, the last one's as the most recent."""
        with self._lock:
            for name in names:
                if name in self._records:
                    self._records.move_to_end(name)

    @property
    def free_places(self) -> int:
        """Blocks that the queue takes now."""
        return self._queue.maxsize - self._queue.qsize()

    @property
    def writable(self) -> bool:
        return not self.note and self._capacity > 0

    def offer(self, block: HostBlock, done: Callable[[HostBlock], None]) -> bool:
        """Queue a block to be written; `done` is called afterwards, from the writer's thread. False: the tier has it
        already or does not take it."""
        with self._lock:
            if not self.writable or block.name in self._records or block.name in self._queued:
                return False
            try:
                self._queue.put_nowait((block, done))
            except queue.Full:
                self.counts.dropped += 1
                return False
            self._queued.add(block.name)
        return True

    def _write_loop(self) -> None:
        while (entry := self._queue.get()) is not None:
            block, done = entry
            try:
                if self.writable and not self._closing:
                    self._write(block)
            except Exception as error:  # a full disk, or a copy from the GPU that failed
                self._stop_writing(error)
            finally:
                with self._lock:
                    self._queued.discard(block.name)
                done(block)
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, block: HostBlock) -> None:
        block.wait()
        started = time.perf_counter()
        with self._lock:
            index = self._take_record()
        if index is None:
            self.counts.dropped += 1
            return
        row, offset = block.bytes, self._offset(index)
        header = RecordHeader(self._stamp + 1, block.name, block.parent, self.block_bytes, zlib.crc32(row))
        try:
            write_all(self._file.handle, bytes(HEADER), offset)
            write_all(self._file.handle, row, offset + HEADER)
            write_all(self._file.handle, header.pack(), offset)
        except BaseException:
            with self._lock:
                self._free.append(index)
            raise
        with self._lock:
            self._stamp += 1
            self._add_record(block.name, index, block.parent)
            self.counts.add_write(self.block_bytes, time.perf_counter() - started)

    def _take_record(self) -> int | None:
        """A record to overwrite; None: all are being read. A block that others continue is not evicted, because they
        would never be asked for."""
        if self._free:
            return self._free.pop()
        if self._used < self._capacity:
            self._used += 1
            return self._used - 1
        for name, record in self._records.items():
            if not record.readers and not self._children[name]:
                self.counts.evictions += 1
                return self._pop_record(name)
        return None

    def _add_record(self, name: BlockHash, index: int, parent: BlockHash) -> None:
        self._records[name] = _Record(index, parent)
        self._children[parent] += 1

    def _pop_record(self, name: BlockHash) -> int:
        record = self._records.pop(name)
        self._children[record.parent] -= 1
        if not self._children[record.parent]:
            del self._children[record.parent]
        return record.index

    def _stop_writing(self, error: Exception) -> None:
        self.counts.errors += 1
        if not self.note:
            self.note = (error.strerror if isinstance(error, OSError) else None) or str(error)
            LOG.warning("%s: %s: no more blocks of the KV cache are written there", self.path, self.note)

    def flush(self, seconds: float) -> bool:
        """Wait until everything queued is written; False: it took longer."""
        deadline = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._queue.unfinished_tasks

    def close(self) -> None:
        """Blocks that are queued still are dropped: `flush` has waited for them. The file stays open and locked while a
        thread hangs in it."""
        self._closing = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._writer.join(max(0.0, deadline - time.monotonic()))
        late = wait(list(self._reads), max(0.0, deadline - time.monotonic())).not_done
        if self._writer.is_alive() or late:
            LOG.warning("%s: the disk does not answer; it is left as it is", self.path)
            return
        self._file.close()


def record_size(block_bytes: int) -> int:
    return -(-(HEADER + block_bytes) // 4096) * 4096


def write_all(handle: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def _use_order(headers: Mapping[BlockHash, RecordHeader]) -> list[BlockHash]:
    """Names, least recently used first: by the newest block of each chain, the last of a chain before the first."""
    order = {name: (header.stamp, 0) for name, header in headers.items()}
    for name in sorted(headers, key=lambda name: headers[name].stamp, reverse=True):
        parent, (stamp, height) = headers[name].parent, order[name]
        if parent in order:
            order[parent] = max(order[parent], (stamp, height + 1))
    return sorted(order, key=lambda name: order[name])
