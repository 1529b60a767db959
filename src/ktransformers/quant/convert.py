"""`kt quant`: converts a checkpoint into a packed directory, layer by layer, in bounded memory and on all cores.

Every thread of a pool recodes one matrix of one expert; the number of matrices in flight is bounded. Experts are packed
in order into a store of a few experts, whose bytes are then written to their offset in the layer's file
(`quant/layer_file.py`). A background thread syncs and hashes the previous file and records it in the journal, from
which an interrupted conversion resumes.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktransformers import _core
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.packed import ShardRecord, SourceFile
from ktransformers.checkpoint.recode import recode_experts
from ktransformers.checkpoint.rest import RestShard, split_into_shards
from ktransformers.experts.contract import new_store
from ktransformers.experts.store import LAYOUT_VERSION, PatchOverflowError
from ktransformers.ground.log import logger
from ktransformers.quant.conversion_run import (
    ConversionRun,
    Progress,
    check_free_space,
    check_layer_numbers,
    open_journal,
    shard_record,
)
from ktransformers.quant.directory import find_existing, write_directory
from ktransformers.quant.layer_file import LayerFile
from ktransformers.quant.linears_file import LinearsFile, split_linears
from ktransformers.quant.plan import ConversionPlan, LayerPlan, without_patches
from ktransformers.quant.report import QuantizationReport, build_report, quality_row

STORE_BYTES = 256 << 20  # packed size of the staging store

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
    check_layer_numbers(layers, [layer.origin.number for layer in plan.layers])
    files = plan.origin.files(hashed=hash_source)
    if (report := find_existing(target, plan.formats, plan.rest, files)) is not None:
        return Converted(target, True, report, 0.0, 0, len(plan.layers))
    facts: dict[str, Any] = {"layout": LAYOUT_VERSION, "formats": plan.formats, "rest": plan.rest}
    journal = open_journal(target, plan.origin.path, plan.origin.paths, **facts)
    try:
        return _Conversion(plan, journal, layers, progress).run(files)
    finally:
        journal.close()


class _Conversion:
    """One call of `convert`."""

    def __init__(
        self, plan: ConversionPlan, journal: ConversionJournal, layers: set[int] | None, progress: Progress | None
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._layers = layers
        self._conversion: str = journal.plan["conversion"]
        self._redone = journal.drop_damaged(plan.threads)
        self._kept = [layer for layer in plan.layers if layer.file in journal.shards]
        kept_bytes = sum(layer.origin.bytes for layer in self._kept)
        self._run = ConversionRun(journal, plan.threads, plan.source_bytes, progress, kept_bytes)

    def run(self, files: list[SourceFile]) -> Converted:
        start = time.perf_counter()
        plan, journal = self._plan, self._journal
        quantized = {linear.tensor.name for linear in plan.linears}
        dense = [tensor for tensor in plan.origin.rest() if tensor.name not in quantized]
        rest = split_into_shards(dense, {"format": "pt", "conversion": self._conversion})
        linears = split_linears(plan.linears, self._conversion)
        self._check_disk_space(rest, linears)
        pool = _core.Pool(threads=plan.threads, groups=1)
        run = self._run
        with run.writing():
            for shard in rest:
                run.write_rest(shard)
            for file in linears:
                run.write(file.file, file.bytes, functools.partial(self._write_linears, file, pool))
            for layer in plan.layers:
                selected = self._layers is None or layer.origin.number in self._layers
                if selected and layer.file not in journal.shards:
                    self._convert_layer(layer, pool)
                    plan.origin.release()
        complete = all(layer.file in journal.shards for layer in plan.layers)
        report = build_report(self._conversion, plan.formats, journal.details)
        if complete:
            write_directory(plan.origin, journal, plan.formats, plan.rest, files, report)
        seconds = time.perf_counter() - start
        directory = journal.out if complete else journal.directory
        return Converted(directory, complete, report, seconds, run.bytes_read, len(self._kept), self._redone)

    def _check_disk_space(self, rest: list[RestShard], linears: list[LinearsFile]) -> None:
        sizes = {layer.file: layer.packed_bytes for layer in self._plan.layers}
        sizes |= {shard.file: shard.layout.size for shard in rest}
        sizes |= {file.file: file.layout().size for file in linears}
        check_free_space(
            self._journal.out, sum(size for file, size in sizes.items() if file not in self._journal.shards)
        )

    def _write_linears(self, file: LinearsFile, pool: _core.Pool) -> dict[str, Any]:
        file.write(self._journal.directory, pool, lambda count: self._run.report(count, "linear layers"))
        return {"linears": [record.model_dump() for record in file.records], "quality": file.quality}

    def _convert_layer(self, layer: LayerPlan, pool: _core.Pool) -> None:
        before = self._run.bytes_read
        try:
            self._write_layer(layer, pool)
        except PatchOverflowError as error:
            log.warning("%s: %s is packed again as bf16, because %s", layer.origin.module, error.role, error)
            self._run.take_back(before)
            self._convert_layer(without_patches(layer, error.role), pool)

    def _write_layer(self, layer: LayerPlan, pool: _core.Pool) -> None:
        start = time.perf_counter()
        shape = layer.origin.contract.shape
        experts = min(shape.num_experts, max(1, STORE_BYTES // layer.expert_bytes))
        store = new_store(layer.origin.contract, formats=layer.formats, experts=experts, pool=pool)
        file = LayerFile(layer, self._journal.directory, self._conversion, store)
        squares = {role: [0.0, 0.0] for role in layer.formats}  # of the difference, of the source
        kept = dict.fromkeys(layer.formats, True)
        experts_in_order = recode_experts(
            layer.origin.module, layer.origin.experts(), layer.formats, self._run.workers, self._run.max_in_flight
        )
        try:
            for expert, recoded, biases in experts_in_order:
                tensors: Any = biases | {role: result.matrix for role, result in recoded.items()}
                store.pack(**tensors, first_expert=expert % experts)  # roles are the names of pack's arguments
                for role, result in recoded.items():
                    squares[role][0] += result.moved
                    squares[role][1] += result.norm
                    kept[role] &= result.kept
                del recoded, tensors
                file.flush(expert)
                self._run.report(layer.origin.bytes // shape.num_experts, layer.origin.module)
        except BaseException:
            file.close()
            raise
        quality = {
            role: quality_row(layer.origin.formats[role], layer.formats[role], kept[role], *squares[role])
            for role in layer.formats
        }
        log.info("%s: %.1f s, %s", layer.origin.module, time.perf_counter() - start, quality)
        details = {"layer": file.manifest().model_dump(), "number": layer.origin.number, "quality": quality}

        def finish() -> tuple[ShardRecord, dict[str, Any]]:
            file.finish()
            return shard_record(self._journal.directory / layer.file), details

        self._run.finish_in_background(layer.file, finish)
