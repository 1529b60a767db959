"""Folds an adapter into a checkpoint: one shard at a time, in it one expert or a few thousand rows at a time.

W + scaling * B A is computed in f32 and rounded once. The new model grows in a hidden directory beside its place;
shards that are finished stay there, so a run that was killed goes on where it stopped, and a run with another adapter
starts anew. Before the directory takes its name, rows of every changed tensor are read back and compared with the sum
in float64; `compare` may measure the whole model as well, and refuse it. How much of the delta survives the rounding is
reported: an adapter that is small against bf16's steps is partly lost in any merged model, and `--dtype float32` keeps
it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.content import SPELLED, open_content
from ktransformers.adapters.convert import read_adapter
from ktransformers.adapters.divergence import MAX_KL, Divergence, check_divergence
from ktransformers.adapters.fold import FLOATS, Fold, folds
from ktransformers.adapters.manifest import write_manifest
from ktransformers.adapters.write import (
    TensorSpec,
    WrittenTensor,
    check_apart,
    check_target,
    checked_squares,
    layout,
    raw_bytes,
    replace_directory,
    squares,
    write_at,
)
from ktransformers.checkpoint import Shards
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.errors import InputError
from ktransformers.files import write_json

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
TORCH = {spelled: dtype for dtype, spelled in SPELLED.items()}
ROWS = 4096  # of a matrix at a time
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
STEP = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-23}  # half the distance of neighbours, relative


@dataclass(frozen=True)
class MergeCheck:
    """What reading back has shown."""

    rows: int
    worst: float  # largest difference from the float64 sum, in halves of a rounding step
    kept: float  # share of the delta that rounding has left


@dataclass(frozen=True)
class Merge:
    out: str
    tensors: int
    changed: int
    shards: int
    resumed: int  # shards that an earlier run had finished
    check: MergeCheck
    divergence: Divergence | None = None  # from the base with the adapter, where that was measured
    skipped: str | None = None  # why it was not, although it was asked for

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Plan:
    shards: Shards
    folds: dict[str, Fold]
    dtypes: dict[str, str]  # of every tensor as it will be written

    def entries(self, file: Path) -> list[TensorSpec]:
        names = [name for name in self.shards.names if self.shards.file(name) == file]
        return [TensorSpec(name, self.shards.shape(name), TORCH[self.dtypes[name]]) for name in names]


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
    """`compare` gets the finished model before it has its name, and the bytes of the base."""
    model, out = Path(model), Path(out)
    if dtype != "keep" and dtype not in DTYPES:
        raise InputError(
            "dtype", repr(dtype), "bfloat16, float16, float32 or keep",
            "`kt merge --format` (merge_packed) writes experts in few bits",
        )  # fmt: skip
    check_apart([model, out])
    check_apart([Path(adapter), out])
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
    _copy_rest(model, partial, config, dtype, plan)
    check = _verify(plan, partial)
    _finish(plan, partial, files)
    plan.shards.release()
    found = skipped = None
    if compare is not None:
        try:
            found = compare(partial, sum(file.stat().st_size for file in files))
        except InputError as error:  # too large for this memory, without a tokenizer: rows were read back all the same
            skipped = str(error)
    if found is not None:
        try:
            check_divergence(found, max_kl)
        except InputError:
            shutil.rmtree(partial)
            raise
    replace_directory(partial, out)
    counts = (len(plan.shards.names), len(plan.folds), len(files), len(resumed))
    return Merge(str(out), *counts, check, found, skipped)


def _model_config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    if not file.is_file():
        raise InputError(str(model), "no config.json", "a local Hugging Face model directory")
    config: dict[str, Any] = json.loads(file.read_text())
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise InputError(
            str(file), f"a quantised model ({method})", "one in bf16, f16 or f32",
            "without --dtype it is merged into a packed directory of the same format",
        )  # fmt: skip
    return config


def _plan(model: Path, adapter: str | Path, dtype: str) -> _Plan:
    shards = Shards.of_directory(model)
    found = folds(read_adapter(adapter, model=str(model)), shards)
    if not found:
        raise InputError(str(adapter), "no deltas", "an adapter with LoRA in it")
    spelled = {name: shards.dtype(name) for name in shards.names}
    for name, word in spelled.items():
        if word not in TORCH:
            raise InputError(
                name, f"dtype {word}", ", ".join(TORCH), "without --dtype it is merged into a packed directory"
            )
    matrices = [word for name, word in spelled.items() if word in FLOATS and len(shards.shape(name)) > 1]
    main = Counter(matrices).most_common(1)[0][0]
    if dtype != "keep":  # a tensor in another dtype than most (a router in f32) is so on purpose
        spelled = {
            name: DTYPES[dtype] if word == main and len(shards.shape(name)) > 1 else word
            for name, word in spelled.items()
        }
    return _Plan(shards, found, spelled)


def _fingerprint(files: list[Path], adapter: str | Path, dtype: str) -> str:
    """Changes when any input does: sizes and times of the model's files, the adapter's bytes, the dtype."""
    digest = hashlib.sha256(dtype.encode())
    for file in files:
        about = file.stat()
        digest.update(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}\n".encode())
    content = open_content(adapter)
    config = content.directory / "adapter_config.json"
    for path in [*(content.directory / name for name in content.files), *([config] if config.is_file() else [])]:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _resume(partial: Path, fingerprint: str, files: list[str]) -> set[str]:
    """Shards that are finished already; what another run has left is removed."""
    journal = partial / "merge.json"
    if journal.is_file() and json.loads(journal.read_text()).get("fingerprint") == fingerprint:
        return {file for file in files if (partial / file).is_file() and (partial / f"{file}.records.json").is_file()}
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_json(journal, {"fingerprint": fingerprint})
    return set()


def _write_shard(plan: _Plan, file: Path, partial: Path) -> None:
    entries = plan.entries(file)
    offsets, header = layout(entries)
    temporary = partial / f".{file.name}.partial"
    records = []
    with temporary.open("wb") as stream:
        stream.write(header)
        stream.flush()
        for entry in entries:
            start = len(header) + offsets[entry.name]
            records.append(asdict(_write_tensor(plan, entry, file.name, stream.fileno(), start)))
        os.fsync(stream.fileno())
    write_json(partial / f"{file.name}.records.json", records)
    temporary.rename(partial / file.name)


def _write_tensor(plan: _Plan, entry: TensorSpec, file: str, descriptor: int, offset: int) -> WrittenTensor:
    digest, total = hashlib.sha256(), 0.0
    for piece in _pieces(plan, entry):
        data = raw_bytes(piece)
        write_at(descriptor, data, offset)
        offset += data.nbytes
        digest.update(data)
        total += checked_squares(entry.name, piece) if entry.name in plan.folds else squares(piece)
    return WrittenTensor(entry.name, file, entry.shape, SPELLED[entry.dtype], math.sqrt(total), digest.hexdigest())


def _pieces(plan: _Plan, entry: TensorSpec) -> Iterator[Tensor]:
    """The tensor as it will be, from its beginning to its end."""
    fold, weight = plan.folds.get(entry.name), plan.shards.read(entry.name)
    if weight.ndim == 0:
        yield weight.to(entry.dtype)
        return
    matrices = list(weight) if weight.ndim == 3 else [weight]
    for expert, matrix in enumerate(matrices):
        for first in range(0, len(matrix), ROWS):
            rows = slice(first, min(first + ROWS, len(matrix)))
            if fold is None:
                yield matrix[rows].to(entry.dtype)
            else:
                yield _folded(fold, matrix, expert, rows, torch.float32).to(entry.dtype)


def _folded(fold: Fold, matrix: Tensor, expert: int, rows: slice, dtype: torch.dtype) -> Tensor:
    delta = fold.delta(expert, rows, dtype)
    return delta if fold.replaces else matrix[rows].to(dtype) + delta


def _copy_rest(model: Path, partial: Path, config: dict[str, Any], dtype: str, plan: _Plan) -> None:
    """Everything but weights: configuration, tokenizer, templates. Copied, not linked: the two models part here."""
    for file in model.iterdir():
        if (
            file.is_file()
            and file.suffix not in WEIGHTS
            and not file.name.endswith((".index.json", "kt_manifest.json"))
        ):
            shutil.copyfile(file, partial / file.name)
    if dtype != "keep":
        word = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
        write_json(partial / "config.json", {**config, word: dtype})
    if (model / INDEX_FILE).is_file():
        index = json.loads((model / INDEX_FILE).read_text())
        sizes = (TensorSpec(n, plan.shards.shape(n), TORCH[plan.dtypes[n]]).size for n in plan.shards.names)
        index["metadata"] = {**index.get("metadata", {}), "total_size": sum(sizes)}
        write_json(partial / INDEX_FILE, index)


def _verify(plan: _Plan, partial: Path) -> MergeCheck:
    """Some rows of every changed tensor (of a few experts where they are stacked) against the sum in float64."""
    written = Shards.of_directory(partial)
    if set(written.names) != set(plan.shards.names):
        raise InputError(str(partial), "other tensors than the model has", "the same names", "start again")
    count, worst, along, whole = 0, 0.0, 0.0, 0.0
    for number, (name, fold) in enumerate(plan.folds.items()):
        old, new = plan.shards.read(name), written.read(name)
        experts = sorted({0, number % len(old), len(old) - 1}) if fold.stacked else [0]
        for expert in experts:
            before, after = (old[expert], new[expert]) if fold.stacked else (old, new)
            for first in sorted({0, (number * 37) % len(before), len(before) - 1}):
                rows = slice(first, first + 1)
                exact = _folded(fold, before, expert, rows, torch.float64)
                got = after[rows].double()
                step = STEP[plan.dtypes[name]]
                # f32 rounds at the size of the largest term, which the sum may be far below
                slack = 2.0**-20 * float(exact.abs().max().clamp_min(before[rows].double().abs().max()))
                off = float(((got - exact).abs() / (exact.abs() * step + slack + 1e-30)).max())
                if not off <= 1.0:
                    raise InputError(
                        f"{name}, row {first}", f"a merged row that is off by {off:.3g} rounding steps", "at most 1",
                        "the disk or the checkpoint changed while merging; start again",
                    )  # fmt: skip
                if not fold.replaces:
                    delta = exact - before[rows].double()
                    along += float(((got - before[rows].double()) * delta).sum())
                    whole += float(delta.square().sum())
                count, worst = count + 1, max(worst, off)
        if number % 256 == 0:
            written.release()
            plan.shards.release()
    return MergeCheck(count, worst, along / whole if whole else 1.0)


def _finish(plan: _Plan, partial: Path, files: list[Path]) -> None:
    records = []
    for file in files:
        notes = partial / f"{file.name}.records.json"
        records += [WrittenTensor(**{**one, "shape": tuple(one["shape"])}) for one in json.loads(notes.read_text())]
    if len(records) != len(plan.shards.names):
        raise InputError(str(partial), f"{len(records)} tensors written", f"{len(plan.shards.names)}", "start again")
    write_manifest(partial, records, dialect="model", tensor_count=len(records), changed=sorted(plan.folds))
    for file in files:
        (partial / f"{file.name}.records.json").unlink()
    (partial / "merge.json").unlink()
