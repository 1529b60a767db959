"""`kt quant --layout kt-kernel`: the experts of a checkpoint as INT8 or INT4 in the files of kt-kernel's converter.

The result has the values that kt-kernel 0.7.2 computes itself, for the same number of NUMA parts: matrices are rounded
to bf16 (decoded first, if they are quantised), then quantised by rows (`checkpoint/kt_codes.py`). Experts that have
such values already keep them. The output is either merged safetensors, one shard for each layer and one for all other
tensors, or a tree of `.kt` files with experts alone. A thread quantises one matrix of one expert and writes its bytes;
a background thread finishes the layer before. Everything goes to `OUT.partial`, and an interrupted conversion resumes
by its journal.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ktransformers import __version__
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.kt_codes import check_size, tile_format
from ktransformers.checkpoint.kt_files import (
    KTHeader,
    KTManifestFile,
    build_manifest,
    merged_name,
    names_to_restore,
    write_manifest,
)
from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.checkpoint.rest import RestShard, tensor_bytes
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.checkpoint.tensorfile import plan_layout, read_layout
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json
from ktransformers.quant.conversion_run import (
    ConversionRun,
    Progress,
    check_free_space,
    check_layer_numbers,
    open_journal,
    seconds_on_one_thread,
)
from ktransformers.quant.kt_layers import (
    LayerWriter,
    MergedLayer,
    TreeLayer,
    drop_damaged_layers,
    layer_bytes,
    store_matrix,
)
from ktransformers.quant.origin import Origin, OriginLayer


@dataclass(frozen=True)
class KTPlan:
    origin: Origin
    bits: int
    parts: int  # NUMA parts
    merged: bool  # safetensors, or a tree of .kt files
    backward: bool  # the transposed matrices too
    threads: int
    rest: list[PlainTensor]  # what is written in addition to the experts: nothing in a tree

    @property
    def header(self) -> KTHeader:
        """For a conversion that has no id yet."""
        shape = self.origin.layers[0].contract.shape
        sizes = (shape.num_experts, shape.hidden, shape.intermediate)
        return KTHeader(self.bits, self.parts, *sizes, conversion="", made_by=f"ktransformers {__version__}")

    @property
    def layer_bytes(self) -> int:
        biased = self.origin.layers[0].contract.shape.biased
        return layer_bytes(self.header, self.backward, biased)

    @property
    def rest_bytes(self) -> int:
        return sum(tensor_bytes(tensor) for tensor in self.rest)

    @property
    def source_bytes(self) -> int:
        return self.rest_bytes + sum(layer.bytes for layer in self.origin.layers)

    @property
    def out_bytes(self) -> int:
        return self.rest_bytes + self.layer_bytes * len(self.origin.layers)

    def file(self, layer: OriginLayer) -> str:
        """The name of a layer's shard or folder."""
        if not self.merged:
            return f"_layer_{layer.number}"
        return self._shard(1 + self.origin.layers.index(layer))

    @property
    def rest_file(self) -> str:
        return self._shard(1 + len(self.origin.layers))

    def _shard(self, number: int) -> str:
        return f"model-{number:05}-of-{1 + len(self.origin.layers):05}.safetensors"


@dataclass(frozen=True)
class KTConverted:
    directory: Path
    whole: bool  # False: layers are missing, and `directory` is the unfinished `.partial` one
    seconds: float
    source_bytes: int  # read by this call
    kept_layers: int  # converted by an earlier call
    layer_seconds: dict[int, float]  # of the layers that this call converted
    redone: list[str] = field(default_factory=list)  # files in the journal with a wrong checksum, converted again


def plan_kt(
    origin: Origin, bits: int, parts: int, *, merged: bool = True, backward: bool = False, threads: int | None = None
) -> KTPlan:
    """Refuses a model that kt-kernel's files cannot hold."""
    if not 1 <= parts <= 64:
        raise InputError("threadpool-count", parts, "the number of NUMA parts, 1 to 64")
    first = origin.layers[0]
    for layer in origin.layers:
        shape = layer.contract.shape
        if not shape.gated or (shape.biased and not merged):
            given = "experts without a gate" if not shape.gated else "biases, and a tree of .kt files"
            expected = "experts with gates, and merged files for biases"
            raise InputError(layer.module, given, expected, "--layout packed")
        if shape.matrices() != first.contract.shape.matrices() or shape.num_experts != first.contract.shape.num_experts:
            raise InputError(layer.module, "experts of another shape", f"those of {first.module}", "--layout packed")
        if layer is not first and any(layer.number == other.number for other in origin.layers if other is not layer):
            given = f"two blocks of experts in layer {layer.number}"
            raise InputError(layer.module, given, "one for each layer", "--layout packed")
    for role, (rows, columns) in first.contract.shape.matrices().items():
        check_size(first.module, role, rows, columns, bits, parts)
    shape, gate = first.contract.shape, first.contract.gate
    if shape.biased or gate.activation != "silu" or gate.limit:
        found = f"{gate.activation} gates" + (f" with limit {gate.limit:g}" if gate.limit else "")
        biases = " and biases" if shape.biased else ""
        note = f"{found}{biases}: ktransformers computes them from these files, kt-kernel's own kernels may not"
        origin.notes.append(note)
    cores = len(os.sched_getaffinity(0))
    return KTPlan(origin, bits, parts, merged, backward, threads or cores, origin.rest() if merged else [])


def fitting_parts(origin: Origin, bits: int, parts: int) -> int:
    """As many NUMA parts as are asked for, or fewer that the tiles can hold. INT4 takes steps of 128 columns: 1,408 are
    11 of them, and two parts of 704 are not."""
    first = origin.layers[0]

    def fits(count: int) -> bool:
        try:
            for role, (rows, columns) in first.contract.shape.matrices().items():
                check_size(first.module, role, rows, columns, bits, count)
        except InputError:
            return False
        return True

    return next((count for count in range(parts, 0, -1) if fits(count)), parts)


def estimate_kt(plan: KTPlan) -> float:
    """Seconds, extrapolated from quantising one expert in one thread; disk time is not included."""
    layer = plan.origin.layers[0]
    _, matrices = next(layer.experts())

    def store_one() -> None:
        for role in layer.formats:
            store_matrix(matrices[role], role, 0, plan.header, lambda *_: None, plan.backward)

    return seconds_on_one_thread(store_one) * plan.header.experts * len(plan.origin.layers) / plan.threads


def convert_kt(
    plan: KTPlan,
    out: str | Path,
    *,
    layers: set[int] | None = None,
    resume_layer: int = 0,
    progress: Progress | None = None,
) -> KTConverted:
    """Write the directory `out`, or resume writing it. `layers` restricts this call to some layers; `resume_layer`
    asserts that those below it are done. The directory gets its name when all layers are converted."""
    check_layer_numbers(layers, [layer.number for layer in plan.origin.layers])
    facts = {"layout": tile_format(plan.bits).layout, "threadpool_count": plan.parts}
    facts |= {"merged": plan.merged, "backward": plan.backward}
    journal = open_journal(Path(out).absolute(), plan.origin.path, plan.origin.paths, **facts)
    try:
        return _KTConversion(plan, journal, progress).run(layers, resume_layer)
    finally:
        journal.close()


class _KTConversion:
    """One call of `convert_kt`."""

    def __init__(self, plan: KTPlan, journal: ConversionJournal, progress: Progress | None) -> None:
        self._plan = plan
        self._journal = journal
        self._header = replace(plan.header, conversion=journal.plan["conversion"])
        self._layer_seconds: dict[int, float] = {}
        self._redone = drop_damaged_layers(journal, plan.threads)
        self._kept = [layer for layer in plan.origin.layers if plan.file(layer) in journal.shards]
        kept_bytes = sum(layer.bytes for layer in self._kept)
        self._run = ConversionRun(journal, plan.threads, plan.source_bytes, progress, kept_bytes)

    def run(self, layers: set[int] | None, resume_layer: int) -> KTConverted:
        start = time.perf_counter()
        plan, journal = self._plan, self._journal
        missing = [layer.number for layer in plan.origin.layers if layer not in self._kept]
        if missing and min(missing) < resume_layer:
            given = f"{resume_layer}, and layer {min(missing)} is not in {journal.directory}"
            raise InputError("resume-layer", given, f"at most {min(missing)}", "leave it out: finished layers are kept")
        rest = self._rest_shard() if plan.merged else None
        rest_bytes = rest.layout.size if rest is not None and rest.file not in journal.shards else 0
        check_free_space(journal.out, len(missing) * plan.layer_bytes + rest_bytes)
        run = self._run
        with run.writing():
            for layer in plan.origin.layers:
                selected = layers is None or layer.number in layers
                if selected and plan.file(layer) not in journal.shards:
                    self._convert_layer(layer)
                    plan.origin.release()
            if rest is not None:
                run.write_rest(rest)
        complete = all(plan.file(layer) in journal.shards for layer in plan.origin.layers)
        if complete:
            self._write_directory()
        seconds = time.perf_counter() - start
        directory = journal.out if complete else journal.directory
        done = (seconds, run.bytes_read, len(self._kept), self._layer_seconds, self._redone)
        return KTConverted(directory, complete, *done)

    def _rest_shard(self) -> RestShard:
        """All other tensors, under kt-kernel's names."""
        tensors = sorted(self._plan.rest, key=lambda tensor: -tensor.dtype.itemsize)
        names = names_to_restore([tensor.name for tensor in tensors])
        renamed = [replace(tensor, name=merged_name(tensor.name)) for tensor in tensors]
        entries = [(tensor.name, SPELLED[tensor.dtype], tensor.shape) for tensor in renamed]
        return RestShard(
            self._plan.rest_file, renamed, plan_layout(entries, self._header.metadata() | {"kt_names": names})
        )

    def _writer(self, layer: OriginLayer) -> LayerWriter:
        if not self._plan.merged:
            return TreeLayer(self._journal.directory, layer.number, self._header)
        file = self._plan.file(layer)
        biased = layer.contract.shape.biased
        return MergedLayer(self._journal.directory, file, layer.number, self._header, self._plan.backward, biased)

    def _convert_layer(self, layer: OriginLayer) -> None:
        start = time.perf_counter()
        writer = self._writer(layer)
        try:
            self._store_experts(layer, writer)
        except BaseException:
            writer.close()
            raise
        self._layer_seconds[layer.number] = time.perf_counter() - start
        self._run.finish_in_background(self._plan.file(layer), writer.finish)

    def _store_experts(self, layer: OriginLayer, writer: LayerWriter) -> None:
        """The number of matrices in flight is bounded by the number of threads."""
        in_flight: deque[Future[None]] = deque()
        try:
            for expert, weights in layer.experts():
                for role, weight in weights.items():
                    if role.endswith("_bias"):
                        assert isinstance(writer, MergedLayer) and isinstance(weight, torch.Tensor)
                        writer.write_bias(role.removesuffix("_bias"), expert, weight)
                        continue
                    name = f"{layer.module}.{expert}.{role}"
                    arguments = (role, expert, self._header, writer.write, self._plan.backward, name)
                    in_flight.append(self._run.workers.submit(store_matrix, weight, *arguments))
                    if len(in_flight) > self._run.max_in_flight:
                        in_flight.popleft().result()
                self._run.report(layer.bytes // self._header.experts, layer.module)
            while in_flight:
                in_flight.popleft().result()
        except BaseException:
            for future in in_flight:
                future.cancel()
            wait(in_flight)  # the writer is not closed under a thread that writes
            raise

    def _write_directory(self) -> None:
        plan, journal = self._plan, self._journal
        directory = journal.directory
        if plan.merged:
            names = {name: file for file in sorted(journal.shards) for name in read_layout(directory / file).slots}
            plan.origin.write_small_files(directory)
            self._write_config(directory)
            write_json(directory / INDEX_FILE, {"metadata": {"total_size": 0}, "weight_map": names})
        else:
            layers = {
                layer.number: [
                    KTManifestFile.model_validate(entry) for entry in journal.details[plan.file(layer)]["files"]
                ]
                for layer in plan.origin.layers
            }
            write_manifest(directory, build_manifest(self._header, layers))
        journal.publish()

    def _write_config(self, directory: Path) -> None:
        """config.json as it is; without the source's quantisation, which no tensor here has any more."""
        file = self._plan.origin.directory / "config.json"
        if self._plan.origin.quantisation is None and file.is_file():
            shutil.copyfile(file, directory / "config.json")
            return
        config = dict(self._plan.origin.config)
        if "dtype" not in config and "torch_dtype" not in config:
            config["dtype"] = "bfloat16"
        write_json(directory / "config.json", config)
