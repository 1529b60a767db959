"""`kt quant`: any checkpoint into a packed directory, a layer at a time, in bounded memory and on all cores.

Threads recode one matrix of one expert each; hardly more of them are under way than there are threads. Experts are
packed, in their order, into a store of a few, whose bytes go to their place in the layer's file
(`quant/layer_file.py`). Meanwhile the last file is synced, hashed and entered into the journal."""

from __future__ import annotations

import hashlib
import math
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
from ktransformers.errors import InputError
from ktransformers.log import logger
from ktransformers.nn.store import LAYOUT_VERSION
from ktransformers.quant.directory import find_existing, write_directory
from ktransformers.quant.layer_file import LayerFile
from ktransformers.quant.plan import ConversionPlan, LayerPlan, partial_store
from ktransformers.quant.receipt import Receipt, build_receipt

STORE_BYTES = 256 << 20  # of the store that experts pass through
MAX_QUEUED_MATRICES = 6  # matrices that may wait for their turn, beside one for each thread
Progress = Callable[[int, int, str], None]  # bytes of the source done, in all, what is under way

log = logger(__name__)


@dataclass(frozen=True)
class Converted:
    directory: Path
    whole: bool  # False: some layers are still to be converted, and the directory is the unfinished one
    receipt: Receipt
    seconds: float
    source_bytes: int  # that were read now
    kept_layers: int = 0  # found finished
    redone: list[str] = field(default_factory=list)  # files that were entered and did not fit their checksum


def convert(
    plan: ConversionPlan,
    out: str | Path,
    *,
    layers: set[int] | None = None,
    hash_source: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the packed directory `out`, or go on with it. With `layers` only these are converted now; the directory
    appears when all are there."""
    target = Path(out).absolute()
    unknown = sorted((layers or set()) - {layer.origin.number for layer in plan.layers})
    if unknown:
        numbers = [layer.origin.number for layer in plan.layers]
        raise InputError("layers", f"{unknown[0]}", f"layers with experts, {min(numbers)} to {max(numbers)}")
    files = plan.origin.files(hashed=hash_source)
    if (made := find_existing(target, plan.asked, files)) is not None:
        return Converted(target, True, made, 0.0, 0, len(plan.layers))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(str(target), "something that exists", "a new directory", "remove it or name another")
    journal = ConversionJournal(target, _plan_words(plan))
    try:
        return _Run(plan, journal, layers, progress).run(files)
    finally:
        journal.close()


def _plan_words(plan: ConversionPlan) -> dict[str, Any]:
    """What a resumed conversion must have in common with the one that was interrupted."""
    stats = [(path.name, path.stat()) for path in plan.origin.paths]
    return {
        "conversion": os.urandom(16).hex(),
        "made_by": __version__,
        "layout": LAYOUT_VERSION,
        "formats": plan.asked,
        "source": str(plan.origin.path.absolute()),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
    }


class _Run:
    """One call of `convert`."""

    def __init__(
        self, plan: ConversionPlan, journal: ConversionJournal, layers: set[int] | None, progress: Progress | None
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._chosen = layers
        self._progress = progress
        self._conversion: str = journal.plan["conversion"]
        self._done = self._read = 0
        self._last: Future[None] | None = None

    def run(self, files: list[SourceFile]) -> Converted:
        start = time.perf_counter()
        plan, journal = self._plan, self._journal
        redone = journal.recheck(plan.threads)
        kept = [layer for layer in plan.layers if layer.file in journal.shards]
        self._done = sum(layer.origin.bytes for layer in kept)
        rest = split_into_shards(plan.origin.rest(), {"format": "pt", "conversion": self._conversion})
        self._check_room(rest)
        threads = torch.get_num_threads()
        work = ThreadPoolExecutor(plan.threads, "kt-quant", initializer=_one_thread)
        background = ThreadPoolExecutor(1, "kt-quant-files")
        pool = _core.Pool(threads=plan.threads, groups=1)
        try:
            for shard in rest:
                self._rest(shard, background)
            for layer in plan.layers:
                chosen = self._chosen is None or layer.origin.number in self._chosen
                if chosen and layer.file not in journal.shards:
                    self._layer(layer, work, background, pool)
                    plan.origin.release()
            self._settle()
        finally:
            work.shutdown(cancel_futures=True)
            background.shutdown()
            torch.set_num_threads(threads)
        whole = all(layer.file in journal.shards for layer in plan.layers)
        receipt = build_receipt(self._conversion, plan.asked, journal.about)
        if whole:
            write_directory(plan.origin, journal, plan.asked, files, receipt)
        seconds = time.perf_counter() - start
        directory = journal.out if whole else journal.directory
        return Converted(directory, whole, receipt, seconds, self._read, len(kept), redone)

    def _check_room(self, rest: list[RestShard]) -> None:
        layers = [layer for layer in self._plan.layers if layer.file not in self._journal.shards]
        missing = sum(layer.packed_bytes for layer in layers)
        missing += sum(shard.layout.size for shard in rest if shard.file not in self._journal.shards)
        free = shutil.disk_usage(self._journal.directory).free
        if missing > free:
            raise InputError(
                str(self._journal.out), f"{free / 1e9:.1f} GB free on its disk", f"{missing / 1e9:.1f} GB to be written"
            )

    def _tell(self, count: int, word: str) -> None:
        self._done += count
        self._read += count
        if self._progress is not None:
            self._progress(self._done, self._plan.source_bytes, word)

    def _rest(self, shard: RestShard, background: ThreadPoolExecutor) -> None:
        if shard.file in self._journal.shards:
            self._done += shard.bytes
            return
        shard.write(self._journal.directory, lambda count: self._tell(count, "what is not experts"))
        self._hand_over(background, shard.file, lambda: None, {})

    def _hand_over(
        self, background: ThreadPoolExecutor, name: str, close: Callable[[], None], about: dict[str, Any]
    ) -> None:
        """Sync, hash and enter the file while the next one is made."""

        def enter() -> None:
            close()
            file = self._journal.directory / name
            header = read_layout(file).header
            record = ShardRecord(
                bytes=file.stat().st_size, header_sha256=hashlib.sha256(header).hexdigest(), sha256=sha256(file)
            )
            self._journal.enter(name, record, about)

        self._settle()
        self._last = background.submit(enter)

    def _settle(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None

    def _layer(
        self, layer: LayerPlan, work: ThreadPoolExecutor, background: ThreadPoolExecutor, pool: _core.Pool
    ) -> None:
        start = time.perf_counter()
        shape = layer.origin.contract.shape
        experts = min(shape.num_experts, max(1, STORE_BYTES // layer.expert_bytes))
        store = partial_store(layer.origin.contract, layer.formats, experts, pool)
        writing = LayerFile(layer, self._journal.directory, self._conversion, store)
        sums = {role: [0.0, 0.0] for role in layer.formats}
        kept = dict.fromkeys(layer.formats, True)
        try:
            for expert, recoded, biases in self._recoded(layer, work):
                own: Any = biases | {role: found.matrix for role, found in recoded.items()}
                store.pack(**own, first_expert=expert % experts)  # roles are the names of pack's arguments
                for role, found in recoded.items():
                    sums[role][0] += found.moved
                    sums[role][1] += found.norm
                    kept[role] &= found.kept
                del recoded, own
                writing.flush(expert)
                self._tell(layer.origin.bytes // shape.num_experts, layer.origin.module)
        except BaseException:
            writing.close()
            raise
        quality = {
            role: {
                "source": layer.origin.formats[role],
                "format": layer.formats[role],
                "kept": kept[role],
                "error": math.sqrt(sums[role][0] / sums[role][1]) if sums[role][1] else 0.0,
            }
            for role in layer.formats
        }
        log.info("%s: %.1f s, %s", layer.origin.module, time.perf_counter() - start, quality)
        about = {"layer": writing.manifest().model_dump(), "number": layer.origin.number, "quality": quality}
        self._hand_over(background, layer.file, writing.finish, about)

    def _recoded(
        self, layer: LayerPlan, work: ThreadPoolExecutor
    ) -> Iterator[tuple[int, dict[str, Recoded], dict[str, Weight]]]:
        """(expert, matrices, biases) in order; what is under way is bounded by the number of threads."""
        under_way: deque[tuple[int, dict[str, Future[Recoded]], dict[str, Weight]]] = deque()

        def oldest() -> tuple[int, dict[str, Recoded], dict[str, Weight]]:
            expert, futures, biases = under_way.popleft()
            return expert, {role: future.result() for role, future in futures.items()}, biases

        for first, roles in layer.origin.experts():
            for place in range(_experts(roles["down"])):
                own = {role: experts_of(matrix, place, place + 1) for role, matrix in roles.items()}
                name = f"{layer.origin.module}.{first + place}"
                futures = {
                    role: work.submit(recode, own.pop(role), layer.formats[role], f"{name}.{role}")
                    for role in layer.formats
                }
                under_way.append((first + place, futures, own))
                while len(under_way) * len(futures) > self._plan.threads + MAX_QUEUED_MATRICES:
                    yield oldest()
        while under_way:
            yield oldest()


def _experts(matrix: Weight) -> int:
    return matrix.shape[0] if isinstance(matrix, Tensor) else matrix.experts


def _one_thread() -> None:
    torch.set_num_threads(1)  # of this worker: the workers are the threads
