"""`kt quant`: converts a checkpoint into a packed directory, layer by layer, in bounded memory and on all cores.

Every thread of a pool recodes one matrix of one expert; the number of matrices in flight is bounded. Experts are packed
in order into a store of a few experts, whose bytes are then written to their offset in the layer's file
(`quant/layer_file.py`). A background thread syncs and hashes the previous file and records it in the journal, from
which an interrupted conversion resumes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers import __version__, _core
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.packed import ShardRecord, SourceFile
from ktransformers.checkpoint.recode import Recoded, Weight, experts_of, recode
from ktransformers.checkpoint.rest import RestShard, split_into_shards
from ktransformers.checkpoint.tensorfile import read_layout, sha256
from ktransformers.experts.store import LAYOUT_VERSION, PatchOverflowError
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.quant.directory import find_existing, write_directory
from ktransformers.quant.layer_file import LayerFile
from ktransformers.quant.linears_file import LinearsFile, split_linears
from ktransformers.quant.plan import ConversionPlan, LayerPlan, partial_store, without_patches
from ktransformers.quant.report import QuantizationReport, build_report, relative_error

STORE_BYTES = 256 << 20  # packed size of the staging store
MAX_QUEUED_MATRICES = 6  # matrices in flight beyond one per thread
Progress = Callable[[int, int, str], None]  # source bytes done, source bytes in total, current module

log = logger(__name__)


@dataclass(frozen=True)
class Converted:
    directory: Path
    whole: bool  # False: layers are missing, and `directory` is the unfinished `.partial` one
    report: QuantizationReport
    seconds: float
    source_bytes: int  # read by this call
    kept_layers: int = 0  # converted by an earlier call
    redone: list[str] = field(default_factory=list)  # files in the journal with a wrong checksum, converted again


def convert(
    plan: ConversionPlan,
    out: str | Path,
    *,
    layers: set[int] | None = None,
    hash_source: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the packed directory `out`, or resume writing it. `layers` restricts this call to some layers; the
    directory gets its name when all layers are converted."""
    target = Path(out).absolute()
    unknown = sorted((layers or set()) - {layer.origin.number for layer in plan.layers})
    if unknown:
        numbers = [layer.origin.number for layer in plan.layers]
        raise InputError("layers", f"{unknown[0]}", f"layers with experts, {min(numbers)} to {max(numbers)}")
    files = plan.origin.files(hashed=hash_source)
    if (report := find_existing(target, plan.formats, plan.rest, files)) is not None:
        return Converted(target, True, report, 0.0, 0, len(plan.layers))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(str(target), "something that exists", "a new directory", "remove it or name another")
    journal = ConversionJournal(target, _journal_plan(plan))
    try:
        return _Conversion(plan, journal, layers, progress).run(files)
    finally:
        journal.close()


def _journal_plan(plan: ConversionPlan) -> dict[str, Any]:
    """The facts that a resumed conversion must share with the interrupted one."""
    stats = [(path.name, path.stat()) for path in plan.origin.paths]
    return {
        "conversion": os.urandom(16).hex(),
        "made_by": __version__,
        "layout": LAYOUT_VERSION,
        "formats": plan.formats,
        "rest": plan.rest,
        "source": str(plan.origin.path.absolute()),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
    }


class _Conversion:
    """One call of `convert`."""

    def __init__(
        self, plan: ConversionPlan, journal: ConversionJournal, layers: set[int] | None, progress: Progress | None
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._layers = layers
        self._progress = progress
        self._conversion: str = journal.plan["conversion"]
        self._bytes_done = self._bytes_read = 0
        self._pending_file: Future[None] | None = None

    def run(self, files: list[SourceFile]) -> Converted:
        start = time.perf_counter()
        plan, journal = self._plan, self._journal
        redone = journal.drop_damaged(plan.threads)
        kept = [layer for layer in plan.layers if layer.file in journal.shards]
        self._bytes_done = sum(layer.origin.bytes for layer in kept)
        coded = {linear.tensor.name for linear in plan.linears}
        numbers = [tensor for tensor in plan.origin.rest() if tensor.name not in coded]
        rest = split_into_shards(numbers, {"format": "pt", "conversion": self._conversion})
        linears = split_linears(plan.linears, self._conversion)
        self._check_disk_space(rest, linears)
        threads = torch.get_num_threads()
        workers = ThreadPoolExecutor(plan.threads, "kt-quant", initializer=use_one_thread)
        background = ThreadPoolExecutor(1, "kt-quant-files")
        pool = _core.Pool(threads=plan.threads, groups=1)
        try:
            for shard in rest:
                self._write_rest(shard, background)
            for file in linears:
                self._write_linears(file, background, pool)
            for layer in plan.layers:
                selected = self._layers is None or layer.origin.number in self._layers
                if selected and layer.file not in journal.shards:
                    self._convert_layer(layer, workers, background, pool)
                    plan.origin.release()
            self._wait_for_file()
        finally:
            workers.shutdown(cancel_futures=True)
            background.shutdown()
            torch.set_num_threads(threads)
        complete = all(layer.file in journal.shards for layer in plan.layers)
        report = build_report(self._conversion, plan.formats, journal.details)
        if complete:
            write_directory(plan.origin, journal, plan.formats, plan.rest, files, report)
        seconds = time.perf_counter() - start
        directory = journal.out if complete else journal.directory
        return Converted(directory, complete, report, seconds, self._bytes_read, len(kept), redone)

    def _check_disk_space(self, rest: list[RestShard], linears: list[LinearsFile]) -> None:
        layers = [layer for layer in self._plan.layers if layer.file not in self._journal.shards]
        missing = sum(layer.packed_bytes for layer in layers)
        missing += sum(shard.layout.size for shard in rest if shard.file not in self._journal.shards)
        missing += sum(file.layout().size for file in linears if file.file not in self._journal.shards)
        check_free_space(self._journal.out, missing)

    def _report(self, count: int, module: str) -> None:
        self._bytes_done += count
        self._bytes_read += count
        if self._progress is not None:
            self._progress(self._bytes_done, self._plan.source_bytes, module)

    def _write_rest(self, shard: RestShard, background: ThreadPoolExecutor) -> None:
        if shard.file in self._journal.shards:
            self._bytes_done += shard.bytes
            return
        shard.write(self._journal.directory, lambda count: self._report(count, "non-expert weights"))
        self._finish_in_background(background, shard.file, lambda: None, {})

    def _write_linears(self, file: LinearsFile, background: ThreadPoolExecutor, pool: _core.Pool) -> None:
        if file.file in self._journal.shards:
            self._bytes_done += file.bytes
            return
        file.write(self._journal.directory, pool, lambda count: self._report(count, "linear layers"))
        details = {"linears": [record.model_dump() for record in file.records], "quality": file.quality}
        self._finish_in_background(background, file.file, lambda: None, details)

    def _finish_in_background(
        self, background: ThreadPoolExecutor, name: str, finish: Callable[[], None], details: dict[str, Any]
    ) -> None:
        """Sync and hash the file and record it in the journal while the next one is written."""

        def finish_file() -> None:
            finish()
            self._journal.record(name, shard_record(self._journal.directory / name), details)

        self._wait_for_file()
        self._pending_file = background.submit(finish_file)

    def _wait_for_file(self) -> None:
        if self._pending_file is not None:
            self._pending_file.result()
            self._pending_file = None

    def _convert_layer(
        self, layer: LayerPlan, workers: ThreadPoolExecutor, background: ThreadPoolExecutor, pool: _core.Pool
    ) -> None:
        done = self._bytes_done, self._bytes_read
        try:
            self._write_layer(layer, workers, background, pool)
        except PatchOverflowError as error:
            log.warning("%s: %s is packed again as bf16, because %s", layer.origin.module, error.role, error)
            self._bytes_done, self._bytes_read = done
            self._convert_layer(without_patches(layer, error.role), workers, background, pool)

    def _write_layer(
        self, layer: LayerPlan, workers: ThreadPoolExecutor, background: ThreadPoolExecutor, pool: _core.Pool
    ) -> None:
        start = time.perf_counter()
        shape = layer.origin.contract.shape
        experts = min(shape.num_experts, max(1, STORE_BYTES // layer.expert_bytes))
        store = partial_store(layer.origin.contract, layer.formats, experts, pool)
        file = LayerFile(layer, self._journal.directory, self._conversion, store)
        squares = {role: [0.0, 0.0] for role in layer.formats}  # of the difference, of the source
        kept = dict.fromkeys(layer.formats, True)
        try:
            for expert, recoded, biases in self._recoded_experts(layer, workers):
                tensors: Any = biases | {role: result.matrix for role, result in recoded.items()}
                store.pack(**tensors, first_expert=expert % experts)  # roles are the names of pack's arguments
                for role, result in recoded.items():
                    squares[role][0] += result.moved
                    squares[role][1] += result.norm
                    kept[role] &= result.kept
                del recoded, tensors
                file.flush(expert)
                self._report(layer.origin.bytes // shape.num_experts, layer.origin.module)
        except BaseException:
            file.close()
            raise
        quality = {
            role: {
                "source": layer.origin.formats[role],
                "format": layer.formats[role],
                "kept": kept[role],
                "error": relative_error(*squares[role]),
            }
            for role in layer.formats
        }
        log.info("%s: %.1f s, %s", layer.origin.module, time.perf_counter() - start, quality)
        details = {"layer": file.manifest().model_dump(), "number": layer.origin.number, "quality": quality}
        self._finish_in_background(background, layer.file, file.finish, details)

    def _recoded_experts(
        self, layer: LayerPlan, workers: ThreadPoolExecutor
    ) -> Iterator[tuple[int, dict[str, Recoded], dict[str, Weight]]]:
        """(expert, matrices, biases) in order; the number of matrices in flight is bounded by the number of threads."""
        in_flight: deque[tuple[int, dict[str, Future[Recoded]], dict[str, Weight]]] = deque()

        def wait_for_oldest() -> tuple[int, dict[str, Recoded], dict[str, Weight]]:
            expert, futures, biases = in_flight.popleft()
            return expert, {role: future.result() for role, future in futures.items()}, biases

        for first, stacked in layer.origin.experts():
            for index in range(expert_count(stacked["down"])):
                weights = {role: experts_of(matrix, index, index + 1) for role, matrix in stacked.items()}
                name = f"{layer.origin.module}.{first + index}"
                futures = {
                    role: workers.submit(recode, weights.pop(role), layer.formats[role], f"{name}.{role}")
                    for role in layer.formats
                }
                in_flight.append((first + index, futures, weights))
                while len(in_flight) * len(futures) > self._plan.threads + MAX_QUEUED_MATRICES:
                    yield wait_for_oldest()
        while in_flight:
            yield wait_for_oldest()


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


def expert_count(matrix: Weight) -> int:
    return matrix.shape[0] if isinstance(matrix, Tensor) else matrix.experts


def use_one_thread() -> None:
    torch.set_num_threads(1)  # torch's own threads would oversubscribe the CPUs: the workers run in parallel
