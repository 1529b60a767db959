"""What the conversions to a directory have in common: a pool of threads that compute, a background thread that syncs
and hashes a file and records it in the journal while the next one is written, and progress in bytes of the source."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ktransformers import __version__
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.packed import ShardRecord
from ktransformers.checkpoint.recode import single_threaded_workers
from ktransformers.checkpoint.rest import RestShard
from ktransformers.checkpoint.tensorfile import read_layout, sha256
from ktransformers.ground.errors import InputError

MAX_QUEUED_MATRICES = 6  # matrices in flight beyond one per thread
Progress = Callable[[int, int, str], None]  # source bytes done, source bytes in total, current module


class ConversionRun:
    """One call that writes files of a conversion."""

    def __init__(
        self,
        journal: ConversionJournal,
        threads: int,
        source_bytes: int,
        progress: Progress | None,
        kept_bytes: int = 0,
    ) -> None:
        """`kept_bytes`: of the source, that an earlier call has converted."""
        self.journal = journal
        self.bytes_read = 0
        self.max_in_flight = threads + MAX_QUEUED_MATRICES
        self._threads, self._source_bytes, self._progress = threads, source_bytes, progress
        self._bytes_done = kept_bytes
        self._pending_file: Future[None] | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """With the threads; every file is recorded when it ends without an error."""
        with (
            ThreadPoolExecutor(1, "kt-quant-files") as self._background,
            single_threaded_workers(self._threads, "kt-quant") as self.workers,
        ):
            yield
            self._wait_for_file()

    def report(self, count: int, what: str) -> None:
        self._bytes_done += count
        self.bytes_read += count
        if self._progress is not None:
            self._progress(self._bytes_done, self._source_bytes, what)

    def take_back(self, bytes_read: int) -> None:
        """Count what was read since `bytes_read` again."""
        self._bytes_done -= self.bytes_read - bytes_read
        self.bytes_read = bytes_read

    def write(self, name: str, size: int, write: Callable[[], dict[str, Any]]) -> None:
        """Have `write` write the file `name`, whose source has `size` bytes, unless an earlier call has; it returns
        what the journal records of it."""
        if name in self.journal.shards:
            self._bytes_done += size
            return
        details = write()
        self.finish_in_background(name, lambda: (shard_record(self.journal.directory / name), details))

    def write_rest(self, shard: RestShard) -> None:
        def write() -> dict[str, Any]:
            shard.write(self.journal.directory, lambda count: self.report(count, "non-expert weights"))
            return {}

        self.write(shard.file, shard.bytes, write)

    def finish_in_background(self, name: str, finish: Callable[[], tuple[ShardRecord, dict[str, Any]]]) -> None:
        """Record what `finish` returns, while the next file is written."""
        self._wait_for_file()
        self._pending_file = self._background.submit(lambda: self.journal.record(name, *finish()))

    def _wait_for_file(self) -> None:
        if self._pending_file is not None:
            self._pending_file.result()
            self._pending_file = None


def seconds_on_one_thread(work: Callable[[], object]) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)


def open_journal(target: Path, source: Path, files: Iterable[Path], **facts: Any) -> ConversionJournal:
    """Start writing `target`, or resume a conversion that agrees in `facts` and in the files of the source."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(str(target), "something that exists", "a new directory", "remove it or name another")
    stats = [(path.name, path.stat()) for path in files]
    plan = {"conversion": os.urandom(16).hex(), "made_by": __version__, **facts, "source": str(source.absolute())}
    plan["files"] = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return ConversionJournal(target, plan)


def check_layer_numbers(layers: set[int] | None, numbers: list[int]) -> None:
    unknown = sorted((layers or set()) - set(numbers))
    if unknown:
        raise InputError("layers", unknown[0], f"layers with experts, {min(numbers)} to {max(numbers)}")


def shard_record(file: Path) -> ShardRecord:
    """Size and hashes of a finished file."""
    header = hashlib.sha256(read_layout(file).header).hexdigest()
    return ShardRecord(bytes=file.stat().st_size, header_sha256=header, sha256=sha256(file))


def check_free_space(out: Path, missing: int) -> None:
    """Refuse to write `missing` bytes to `out`, which need not exist, if its disk has no room for them."""
    folder = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise InputError(str(out), f"{free / 1e9:.1f} GB free on its disk", f"{missing / 1e9:.1f} GB to be written")
