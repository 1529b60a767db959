"""Merges an adapter into a checkpoint, one shard at a time, within it one expert or a few thousand rows at a time.

W + scaling * B A is computed in f32 and rounded once. The new model is written to a hidden directory next to its
target; finished shards stay there, so a killed run resumes, and a run with another adapter starts over. Before the
directory is renamed, rows of every changed tensor are read back and compared with the sum in float64; `compare` may
measure the whole model and reject it. The share of the delta that survives rounding is reported: an adapter that is
small relative to bf16's steps is partly lost in any merged model, and `--dtype float32` keeps it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.adapter_template import write_adapter_template
from ktransformers.adapters.content import open_content
from ktransformers.adapters.convert import read_adapter
from ktransformers.adapters.divergence import MAX_KL, Divergence, check_divergence
from ktransformers.adapters.fold import FLOATS, Fold, plan_folds
from ktransformers.adapters.manifest import write_manifest
from ktransformers.adapters.write import (
    TensorSpec,
    WrittenTensor,
    adapter_layout,
    finite_sum_of_squares,
    sum_of_squares,
)
from ktransformers.checkpoint import Shards
from ktransformers.checkpoint.fresh_directory import check_disjoint, check_target, replace_directory
from ktransformers.checkpoint.matrix import DTYPES, SPELLED
from ktransformers.checkpoint.model_config import read_model_config
from ktransformers.checkpoint.rest import copy_small_files
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.checkpoint.tensorfile import TensorFile, byte_view
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, write_json

MERGE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
CHUNK_ROWS = 4096  # processed at a time
HALF_STEP = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-23}  # half the spacing of adjacent numbers, relative


@dataclass(frozen=True)
class MergeCheck:
    """Result of reading rows back."""

    rows: int
    worst: float  # largest difference from the float64 sum, in halves of a rounding step
    kept: float  # share of the delta that survives rounding


@dataclass(frozen=True)
class Merge:
    out: str
    tensors: int
    changed: int
    shards: int
    resumed: int  # shards that an earlier run had finished
    check: MergeCheck
    divergence: Divergence | None = None  # from the base with the adapter, if measured
    skipped: str | None = None  # why a requested measurement did not take place

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Plan:
    shards: Shards
    folds: dict[str, Fold]
    dtypes: dict[str, str]  # output dtype of every tensor

    def entries(self, file: Path) -> list[TensorSpec]:
        names = [name for name in self.shards.names if self.shards.file(name) == file]
        return [TensorSpec(name, self.shards.shape(name), DTYPES[self.dtypes[name]]) for name in names]


def merge(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, shards: None,
    compare: Callable[[Path, int], Divergence] | None = None,
    max_kl: float = MAX_KL,
) -> Merge:
    """`compare` receives the finished model before it is renamed, and the size of the base in bytes."""
    model, out = Path(model), Path(out)
    if dtype != "keep" and dtype not in MERGE_DTYPES:
        raise InputError(
            "dtype", repr(dtype), "bfloat16, float16, float32 or keep",
            "`kt merge --format` (merge_packed) writes quantized experts",
        )  # fmt: skip
    check_disjoint([model, out])
    check_disjoint([Path(adapter), out])
    check_target(out, overwrite)
    config = _model_config(model)
    plan = _plan(model, adapter, dtype)
    files = sorted({plan.shards.file(name) for name in plan.shards.names})
    partial = out.with_name(f".{out.name}.merge-partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    resumed = _resume(partial, _fingerprint(files, adapter, dtype), [file.name for file in files])
    for done, file in enumerate(files):
        if file.name not in resumed:
            _write_shard(plan, file, partial)
        plan.shards.release()
        progress(done + 1, len(files))
    _copy_other_files(model, partial, config, dtype, plan)
    write_adapter_template(adapter, partial)
    check = _verify(plan, partial)
    _finish(plan, partial, files)
    plan.shards.release()
    divergence = skipped = None
    if compare is not None:
        try:
            divergence = compare(partial, sum(file.stat().st_size for file in files))
        except InputError as error:  # too large for memory or no tokenizer; rows were still read back
            skipped = str(error)
    if divergence is not None:
        try:
            check_divergence(divergence, max_kl)
        except InputError:
            shutil.rmtree(partial)
            raise
    replace_directory(partial, out)
    counts = (len(plan.shards.names), len(plan.folds), len(files), len(resumed))
    return Merge(str(out), *counts, check, divergence, skipped)


def _model_config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    if not file.is_file():
        raise InputError(str(model), "no config.json", "a local Hugging Face model directory")
    config = read_model_config(model)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise InputError(
            str(file), f"a quantised model ({method})", "one in bf16, f16 or f32",
            "without --dtype it is merged into a packed directory of the same format",
        )  # fmt: skip
    return config


def _plan(model: Path, adapter: str | Path, dtype: str) -> _Plan:
    shards = Shards.of_directory(model)
    folds = plan_folds(read_adapter(adapter, model=str(model)), shards)
    if not folds:
        raise InputError(str(adapter), "no deltas", "an adapter with LoRA in it")
    dtype_names = {name: shards.dtype(name) for name in shards.names}
    for name, dtype_name in dtype_names.items():
        if dtype_name not in DTYPES:
            raise InputError(
                name, f"dtype {dtype_name}", ", ".join(DTYPES), "without --dtype it is merged into a packed directory"
            )
    matrices = [
        dtype_name for name, dtype_name in dtype_names.items() if dtype_name in FLOATS and len(shards.shape(name)) > 1
    ]
    main_dtype = Counter(matrices).most_common(1)[0][0]
    if dtype != "keep":  # a tensor whose dtype differs from most (a router in f32) keeps it
        dtype_names = {
            name: MERGE_DTYPES[dtype] if dtype_name == main_dtype and len(shards.shape(name)) > 1 else dtype_name
            for name, dtype_name in dtype_names.items()
        }
    return _Plan(shards, folds, dtype_names)


def _fingerprint(files: list[Path], adapter: str | Path, dtype: str) -> str:
    """Changes if any input does: sizes and times of the model's files, the adapter's bytes, the dtype."""
    digest = hashlib.sha256(dtype.encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    content = open_content(adapter)
    config = content.directory / "adapter_config.json"
    for path in [*(content.directory / name for name in content.files), *([config] if config.is_file() else [])]:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _resume(partial: Path, fingerprint: str, files: list[str]) -> set[str]:
    """Names of finished shards; what a different run left behind is removed."""
    journal = partial / "merge.json"
    if journal.is_file() and json.loads(journal.read_text()).get("fingerprint") == fingerprint:
        return {file for file in files if (partial / file).is_file() and (partial / f"{file}.records.json").is_file()}
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_json(journal, {"fingerprint": fingerprint})
    return set()


def _write_shard(plan: _Plan, file: Path, partial: Path) -> None:
    entries = plan.entries(file)
    target = TensorFile(partial / file.name, adapter_layout(entries))
    try:
        records = [asdict(_write_tensor(plan, entry, target)) for entry in entries]
        write_json(partial / f"{file.name}.records.json", records)
        target.finish()
    finally:
        target.close()


def _write_tensor(plan: _Plan, entry: TensorSpec, target: TensorFile) -> WrittenTensor:
    digest, total, offset = hashlib.sha256(), 0.0, 0
    for piece in _merged_chunks(plan, entry):
        piece = piece.contiguous()
        target.write(entry.name, piece, offset)
        offset += piece.nbytes
        digest.update(byte_view(piece))
        total += finite_sum_of_squares(entry.name, piece) if entry.name in plan.folds else sum_of_squares(piece)
    dtype, norm = SPELLED[entry.dtype], math.sqrt(total)
    return WrittenTensor(entry.name, target.path.name, entry.shape, dtype, norm, digest.hexdigest())


def _merged_chunks(plan: _Plan, entry: TensorSpec) -> Iterator[Tensor]:
    """The merged tensor in chunks, from first to last row."""
    fold, weight = plan.folds.get(entry.name), plan.shards.read(entry.name)
    if weight.ndim == 0:
        yield weight.to(entry.dtype)
        return
    matrices = list(weight) if weight.ndim == 3 else [weight]
    for expert, matrix in enumerate(matrices):
        for first in range(0, len(matrix), CHUNK_ROWS):
            rows = slice(first, min(first + CHUNK_ROWS, len(matrix)))
            if fold is None:
                yield matrix[rows].to(entry.dtype)
            else:
                yield _fold_rows(fold, matrix, expert, rows, torch.float32).to(entry.dtype)


def _fold_rows(fold: Fold, matrix: Tensor, expert: int, rows: slice, dtype: torch.dtype) -> Tensor:
    delta = fold.delta(expert, rows, dtype)
    return delta if fold.replaces else matrix[rows].to(dtype) + delta


def _copy_other_files(model: Path, partial: Path, config: dict[str, Any], dtype: str, plan: _Plan) -> None:
    """Everything but weights: configuration, tokenizer, templates. Not linked, so the models stay independent."""
    copy_small_files(model, partial)
    if dtype != "keep":
        config = {**config, "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype": dtype}
    write_json(partial / "config.json", config)
    if (model / INDEX_FILE).is_file():
        index = read_json_object(model / INDEX_FILE)
        sizes = (TensorSpec(n, plan.shards.shape(n), DTYPES[plan.dtypes[n]]).size for n in plan.shards.names)
        metadata = index.get("metadata")
        index["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": sum(sizes)}
        write_json(partial / INDEX_FILE, index)


def _verify(plan: _Plan, partial: Path) -> MergeCheck:
    """Compares sampled rows of every changed tensor (of a few experts if stacked) with the sum in float64."""
    written = Shards.of_directory(partial)
    if set(written.names) != set(plan.shards.names):
        raise InputError(str(partial), "other tensors than the model has", "the same names", "start again")
    count, worst, projected, delta_norm = 0, 0.0, 0.0, 0.0
    for number, (name, fold) in enumerate(plan.folds.items()):
        old, new = plan.shards.read(name), written.read(name)
        experts = sorted({0, number % len(old), len(old) - 1}) if fold.stacked else [0]
        for expert in experts:
            before, after = (old[expert], new[expert]) if fold.stacked else (old, new)
            for first in sorted({0, (number * 37) % len(before), len(before) - 1}):
                rows = slice(first, first + 1)
                exact = _fold_rows(fold, before, expert, rows, torch.float64)
                merged_rows = after[rows].double()
                step = HALF_STEP[plan.dtypes[name]]
                # f32 rounds relative to the largest term, which may be far above the sum
                slack = 2.0**-20 * float(exact.abs().max().clamp_min(before[rows].double().abs().max()))
                error = float(((merged_rows - exact).abs() / (exact.abs() * step + slack + 1e-30)).max())
                if not error <= 1.0:
                    raise InputError(
                        f"{name}, row {first}", f"a merged row that is off by {error:.3g} rounding steps", "at most 1",
                        "the disk or the checkpoint changed while merging; start again",
                    )  # fmt: skip
                if not fold.replaces:
                    delta = exact - before[rows].double()
                    projected += float(((merged_rows - before[rows].double()) * delta).sum())
                    delta_norm += float(delta.square().sum())
                count, worst = count + 1, max(worst, error)
        if number % 256 == 0:
            written.release()
            plan.shards.release()
    return MergeCheck(count, worst, projected / delta_norm if delta_norm else 1.0)


def _finish(plan: _Plan, partial: Path, files: list[Path]) -> None:
    records = []
    for file in files:
        records_file = partial / f"{file.name}.records.json"
        records += [
            WrittenTensor(**{**stored, "shape": tuple(stored["shape"])})
            for stored in json.loads(records_file.read_text())
        ]
    if len(records) != len(plan.shards.names):
        raise InputError(str(partial), f"{len(records)} tensors written", f"{len(plan.shards.names)}", "start again")
    write_manifest(partial, records, dialect="model", tensor_count=len(records), changed=sorted(plan.folds))
    for file in files:
        (partial / f"{file.name}.records.json").unlink()
    (partial / "merge.json").unlink()
