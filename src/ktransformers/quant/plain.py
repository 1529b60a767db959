"""`kt quant --format bf16 --plain`: writes an ordinary Hugging Face checkpoint in bf16 from a quantised one.

Stock transformers, and every program that reads its files, opens the result. A safetensors release keeps its names,
and every quantised matrix becomes `NAME.weight`; GGUF experts get the names of the model's own release. Tensors are
read, dequantised and written one at a time, and the source is unmapped after every shard, so memory stays below one
shard of the result and the bytes that it was made from. Numbers are those that the encoded bytes stand for, rounded
once to bf16. Plain f16 becomes bf16. Plain f32 stays (a router's, a norm's), unless most matrices are f32.

An interrupted conversion continues by its journal (`checkpoint/journal.py`); the directory gets its name at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.checkpoint.gguf_directory import is_gguf_directory, is_gguf_file
from ktransformers.checkpoint.journal import ConversionJournal
from ktransformers.checkpoint.layout import MIXTRAL_MATRICES, PROJECTIONS
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.recode import Weight, recode
from ktransformers.checkpoint.rest import RestShard, copy_small_files, split_into_shards, tensor_bytes
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.checkpoint.sources.safetensors import SafetensorsSource
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json
from ktransformers.modeling.prepare import VISION_WRAPPERS, read_config, split_quantisation, to_stock_config
from ktransformers.modeling.pretrained import require_json
from ktransformers.quant.conversion_run import Progress, check_free_space, open_journal, shard_record
from ktransformers.quant.origin import Origin, OriginLayer

MIXTRAL_BLOCK = (".mlp.", ".block_sparse_moe.")  # in the module's name, in the release
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PlainSource:
    """A checkpoint whose tensors are all read unquantised."""

    config: dict[str, Any]  # of stock transformers, without a quantisation
    paths: list[Path]
    tensors: list[PlainTensor]
    write_small_files: Callable[[Path], object]
    release: Callable[[], None]
    notes: Sequence[str] = ()  # what the result will lack


@dataclass(frozen=True)
class PlainPlan:
    path: Path
    source: PlainSource
    shards: list[RestShard]

    @property
    def out_bytes(self) -> int:
        return sum(shard.layout.size for shard in self.shards)

    @property
    def source_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.source.paths)


@dataclass(frozen=True)
class PlainCheckpoint:
    directory: Path
    tensors: int
    bytes: int
    shards: int
    kept_shards: int  # written by an earlier call
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"directory": str(self.directory), "seconds": round(self.seconds, 2)}


def release_source(path: Path) -> PlainSource:
    """A directory of safetensors, of experts or dense."""
    config, quantisation = split_quantisation(read_config(path))
    # A wrapped text model has other names of tensors than the text model alone, so its configuration stays.
    stock = config if config.get("model_type") in VISION_WRAPPERS else to_stock_config(config)
    weights = SafetensorsSource(path, (), accept(str(path / "config.json"), quantisation))
    require_json(path)
    copy = functools.partial(copy_small_files, path)
    return PlainSource(stock, weights.files, weights.all_plain(), copy, weights.release)


def gguf_source(path: Path) -> PlainSource:
    """A GGUF file, or a directory of one."""
    origin = Origin(path)
    tensors = origin.rest() + [tensor for layer in origin.layers for tensor in expert_tensors(layer)]
    if origin.config.get("model_type") == "mixtral":
        tensors = [dataclasses.replace(tensor, name=mixtral_name(tensor.name)) for tensor in tensors]
    return PlainSource(origin.config, origin.paths, tensors, origin.write_small_files, origin.release, origin.notes)


def mixtral_name(name: str) -> str:
    """`...block_sparse_moe.experts.0.w1.weight`, as Mixtral is released."""
    name = name.replace(*MIXTRAL_BLOCK)
    for role, word in PROJECTIONS.items():
        name = name.replace(f".{word}.weight", f".{MIXTRAL_MATRICES[role]}.weight") if ".experts." in name else name
    return name


class ExpertReader:
    """The experts of one layer in bf16, one at a time in the order of the file; an earlier one starts again."""

    def __init__(self, layer: OriginLayer) -> None:
        self._layer = layer
        self._experts: Iterator[tuple[int, dict[str, Weight]]] = iter(())
        self._current: tuple[int, dict[str, Weight]] = (-1, {})
        self._started = False

    def read(self, expert: int) -> dict[str, Weight]:
        """Role -> matrix `[1, N, K]` or bias `[1, N]`."""
        if not self._started or expert < self._current[0]:
            self._experts, self._current, self._started = self._layer.experts(), (-1, {}), True
        while self._current[0] < expert:
            self._current = next(self._experts)
        return self._current[1]

    def matrix(self, expert: int, role: str) -> Tensor:
        matrix = recode(self.read(expert)[role], "bf16", f"{self._layer.module}.{expert}.{role}").matrix
        assert isinstance(matrix, Tensor)
        return matrix[0]

    def close(self) -> None:
        """Views of the file would keep it mapped."""
        self._experts, self._current, self._started = iter(()), (-1, {}), False


def expert_tensors(layer: OriginLayer) -> list[PlainTensor]:
    """One tensor for each matrix of each expert, or, if the model's parameters are transposed or biased (gpt-oss),
    the parameters themselves."""
    shape, reader = layer.contract.shape, ExpertReader(layer)
    if shape.transposed or shape.biased or layer.contract.interleaved:
        return _parameters(layer, reader)
    last = (shape.num_experts - 1, list(shape.matrices())[-1])

    def tensor(expert: int, role: str, size: tuple[int, int]) -> PlainTensor:
        def read() -> Tensor:
            matrix = reader.matrix(expert, role)
            if (expert, role) == last:
                reader.close()
            return matrix

        return PlainTensor(f"{layer.module}.{expert}.{PROJECTIONS[role]}.weight", torch.bfloat16, size, read)

    return [
        tensor(expert, role, size) for expert in range(shape.num_experts) for role, size in shape.matrices().items()
    ]


def _parameters(layer: OriginLayer, reader: ExpertReader) -> list[PlainTensor]:
    contract = layer.contract
    sizes = contract.shape.fused()

    def one(expert: int, role: str) -> Tensor:
        if role.endswith("_bias"):
            bias = reader.read(expert)[role]
            assert isinstance(bias, Tensor)
            return bias[0].to(torch.bfloat16)
        return reader.matrix(expert, role)

    def fused(expert: int, role: str) -> Tensor:
        if not role.startswith("gate_up"):
            return one(expert, role)
        halves = [one(expert, role.replace("gate_up", half)) for half in ("gate", "up")]
        return torch.stack(halves, 1).flatten(0, 1) if contract.interleaved else torch.cat(halves)

    def read(role: str) -> Tensor:
        result = torch.empty(sizes[role], dtype=torch.bfloat16)
        for expert in range(contract.shape.num_experts):
            part = fused(expert, role)
            result[expert] = part.T if contract.shape.transposed and part.dim() == 2 else part
        reader.close()
        return result

    return [
        PlainTensor(f"{layer.module}.{name}", torch.bfloat16, sizes[role], functools.partial(read, role))
        for role, name in contract.parameters().items()
    ]


def open_plain_source(path: Path) -> PlainSource:
    if is_packed(path):
        raise InputError(str(path), "a packed directory", "the checkpoint that it was made from")
    return gguf_source(path) if is_gguf_file(path) or is_gguf_directory(path) else release_source(path)


def in_bf16(tensors: list[PlainTensor]) -> list[PlainTensor]:
    """f16 becomes bf16, and so do matrices in f32 if most matrices are."""
    matrices = Counter(tensor.dtype for tensor in tensors if len(tensor.shape) > 1 and tensor.dtype in FLOATS)
    mostly_f32 = bool(matrices) and matrices.most_common(1)[0][0] == torch.float32

    def rounded(tensor: PlainTensor) -> PlainTensor:
        return dataclasses.replace(tensor, dtype=torch.bfloat16, read=lambda: tensor.read().to(torch.bfloat16))

    return [
        rounded(tensor)
        if tensor.dtype == torch.float16 or (mostly_f32 and tensor.dtype == torch.float32 and len(tensor.shape) > 1)
        else tensor
        for tensor in tensors
    ]


def plan_plain(path: str | Path) -> PlainPlan:
    """Reads the headers of every file; what cannot be read is refused here."""
    path = Path(path)
    source = open_plain_source(path)
    tensors = in_bf16(source.tensors)
    for tensor in tensors:
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            raise InputError(tensor.name, f"{tensor.dtype} without a scale", "a matrix that can be dequantised")
    return PlainPlan(path, source, split_into_shards(tensors, {"format": "pt"}))


def check_plain_target(path: Path, out: Path) -> None:
    """Refuse a directory that exists, and one inside of the source."""
    if out.exists() or out.is_symlink():
        raise InputError(str(out), "something that exists", "a new directory", "remove it or name another")
    if path.resolve() in (out.resolve(), *out.resolve().parents):
        raise InputError(str(out), "a directory in the source", "one elsewhere")


def write_plain(plan: PlainPlan, out: str | Path, progress: Progress | None = None) -> PlainCheckpoint:
    """Write the directory `out`, or continue an interrupted call; progress is in bytes of the result."""
    start, target = time.perf_counter(), Path(out).absolute()
    check_plain_target(plan.path, target)
    partial = target.with_name(f"{target.name}.partial")
    finished = [shard for shard in plan.shards if (partial / shard.file).is_file()]
    check_free_space(target, plan.out_bytes - sum(shard.layout.size for shard in finished))
    sizes = [[shard.file, shard.layout.size] for shard in plan.shards]
    journal = open_journal(target, plan.path, plan.source.paths, layout="plain", shards=sizes)
    try:
        journal.drop_damaged()
        kept = set(journal.shards)
        _write_shards(plan, journal, progress)
        plan.source.write_small_files(journal.directory)
        write_json(journal.directory / "config.json", bf16_config(plan.source.config))
        write_json(journal.directory / INDEX_FILE, _index(plan))
        journal.publish()
    finally:
        journal.close()
        plan.source.release()
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    seconds = time.perf_counter() - start
    return PlainCheckpoint(target, tensors, plan.out_bytes, len(plan.shards), len(kept), seconds)


def _write_shards(plan: PlainPlan, journal: ConversionJournal, progress: Progress | None) -> None:
    done, total = 0, sum(shard.bytes for shard in plan.shards)
    for shard in plan.shards:

        def report(count: int, file: str = shard.file) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total, file)

        if shard.file in journal.shards:
            report(shard.bytes)
            continue
        shard.write(journal.directory, report)
        journal.record(shard.file, shard_record(journal.directory / shard.file), {})
        plan.source.release()


def bf16_config(config: dict[str, Any]) -> dict[str, Any]:
    """With bfloat16 for the dtype, in nested configurations that have one too."""
    result = dict(config)
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config") and ("dtype" in value or "torch_dtype" in value):
            result[key] = bf16_config(value)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return result | {key: "bfloat16"}


def _index(plan: PlainPlan) -> dict[str, Any]:
    names = {tensor.name: shard.file for shard in plan.shards for tensor in shard.tensors}
    size = sum(tensor_bytes(tensor) for shard in plan.shards for tensor in shard.tensors)
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
