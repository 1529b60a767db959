"""Conversion of one expert's matrix from its released format to another, and the error that it adds.

Encoded sources are decoded some rows at a time, so that a thread needs memory for the result and little else: there is
no float32 copy of a whole matrix. The error compares the numbers that are computed with, decoded and rounded to bf16,
with those of the source; an encoder sums it up on its way. A matrix that has the target format already is passed
through and has no error.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import LOSSLESS, Encoded, decode, format_of
from ktransformers.checkpoint.encoder import encode, encode_with_error
from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.ground.errors import InputError

Weight = Tensor | Encoded  # [E, N, K], plain or as released
MAX_CHUNK_NUMBERS = 1 << 18  # of a matrix at a time
ALIGNMENT = 128  # rows; blocks of fp8
KEEP = "keep"


@dataclass(frozen=True)
class Recoded:
    """One expert's matrix `[1, N, K]`, and the sums of squares of the error and of the source."""

    matrix: Weight
    kept: bool
    moved: float = 0.0
    norm: float = 0.0


def format_name(matrix: Weight) -> str:
    """Plain floats of any dtype are packed as bf16."""
    return matrix.format if isinstance(matrix, Encoded) else "bf16"


def check_target(name: str, word: str) -> None:
    """Refuse a format without an encoder before anything is read."""
    if word in (KEEP, "bf16"):
        return
    columns = max(256, format_of(word).multiple)
    try:
        encode(torch.zeros(1, columns), word)
    except InputError as error:
        raise InputError(name, word, "a format that can be written", str(error)) from error


def rows_of(matrix: Weight, first: int, last: int) -> Weight:
    """Some rows of all experts; `first` is a multiple of what shares a scale."""
    if isinstance(matrix, Tensor):
        return matrix[:, first:last]
    span = format_of(matrix.format).row_span
    scales, zeros = (
        None if part is None else part[:, first // span : -(-last // span)] for part in (matrix.scales, matrix.zeros)
    )
    return replace(matrix, qweight=matrix.qweight[:, first:last], scales=scales, zeros=zeros)


def experts_of(matrix: Weight, first: int, last: int) -> Weight:
    if isinstance(matrix, Tensor):
        return matrix[first:last]
    scales, outer, zeros = (
        None if part is None else part[first:last] for part in (matrix.scales, matrix.tensor_scale, matrix.zeros)
    )
    return replace(matrix, qweight=matrix.qweight[first:last], scales=scales, tensor_scale=outer, zeros=zeros)


def numbers(matrix: Weight) -> Tensor:
    """The numbers of a matrix in float32."""
    return matrix.float() if isinstance(matrix, Tensor) else decode(matrix)


def blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, MAX_CHUNK_NUMBERS // columns // ALIGNMENT) * ALIGNMENT
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def recode(source: Weight, target: str, name: str) -> Recoded:
    """`[1, N, K]` in the format `target`, or kept."""
    if target in (KEEP, format_name(source)) and (isinstance(source, Encoded) or source.dtype == torch.bfloat16):
        return Recoded(source, kept=True)
    columns = source.columns if isinstance(source, Encoded) else source.shape[2]
    rows = source.rows if isinstance(source, Encoded) else source.shape[1]
    target = "bf16" if target == KEEP else target
    if isinstance(source, Tensor) and source.dtype == torch.bfloat16 and format_of(target).element == LOSSLESS:
        return Recoded(encode(source, target), kept=True)
    try:
        if target == "bf16":
            return _to_bf16(source, rows, columns)
        return _encoded(source, target, rows, columns)
    except InputError as error:
        raise InputError(name, str(error), f"what can be written as {target}") from error


def _squares(tensor: Tensor) -> float:
    flat = tensor.reshape(-1)
    return float(flat.dot(flat))


def _to_bf16(source: Weight, rows: int, columns: int) -> Recoded:
    result = torch.empty(1, rows, columns, dtype=torch.bfloat16)
    moved = norm = 0.0
    for first, last in blocks(rows, columns):
        before = numbers(rows_of(source, first, last))
        result[:, first:last] = before
        moved += _squares(result[:, first:last].float().sub_(before))
        norm += _squares(before)
    return Recoded(result, False, moved, norm)


def _encoded(source: Weight, target: str, rows: int, columns: int) -> Recoded:
    if isinstance(source, Tensor) or format_of(target).tensor_scale:  # one scale for all rows: encoded together
        whole = encode_with_error(source if isinstance(source, Tensor) else decode(source), target)
        return Recoded(whole.matrix, False, whole.moved, whole.norm)
    parts = [
        encode_with_error(decode(rows_of(source, first, last)), target)  # type: ignore[arg-type]
        for first, last in blocks(rows, columns)
    ]
    qweight = torch.cat([part.matrix.qweight for part in parts], 1)
    scales = [part.matrix.scales for part in parts if part.matrix.scales is not None]
    matrix = Encoded(target, qweight, torch.cat(scales, 1) if scales else None, columns=columns)
    return Recoded(matrix, False, sum(part.moved for part in parts), sum(part.norm for part in parts))


def split(piece: ExpertChunk, *, transposed: bool, interleaved: bool) -> dict[str, Weight]:
    """gate, up and down `[E, N, K]`, and their biases `[E, N]`: views of whatever the piece has. Only plain floats are
    ever transposed or in one tensor for gate and up."""
    matrices: dict[str, Weight] = {}
    for role, given in piece.tensors.items():
        if isinstance(given, Encoded):
            matrices[role] = given
            continue
        bias = role.endswith("_bias")
        tensor = given.unsqueeze(0) if given.dim() == (1 if bias else 2) else given
        if piece.fused and transposed and not bias:
            tensor = tensor.transpose(1, 2)
        if not role.startswith("gate_up"):
            matrices[role] = tensor
            continue
        half = tensor.shape[1] // 2
        mixed = piece.fused and interleaved
        gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if mixed else (tensor[:, :half], tensor[:, half:])
        matrices |= {"gate_bias": gate, "up_bias": up} if bias else {"gate": gate, "up": up}
    return matrices


def single_experts(
    chunks: Iterable[ExpertChunk], *, transposed: bool, interleaved: bool
) -> Iterator[tuple[int, dict[str, Weight]]]:
    """(expert, role -> matrix `[1, N, K]` or bias `[1, N]`), views of the chunks."""
    for chunk in chunks:
        stacked = split(chunk, transposed=transposed, interleaved=interleaved)
        down = stacked["down"]
        for index in range(down.experts if isinstance(down, Encoded) else down.shape[0]):
            single = {role: experts_of(weight, index, index + 1) for role, weight in stacked.items()}
            yield chunk.first_expert + index, single


def recode_experts(
    name: str,
    experts: Iterable[tuple[int, dict[str, Weight]]],
    formats: Mapping[str, str],
    workers: Executor,
    max_in_flight: int,
) -> Iterator[tuple[int, dict[str, Recoded], dict[str, Weight]]]:
    """(expert, matrices in `formats`, biases) in order, with at most so many matrices in flight and one expert more."""
    in_flight: deque[tuple[int, dict[str, Future[Recoded]], dict[str, Weight]]] = deque()

    def wait_for_oldest() -> tuple[int, dict[str, Recoded], dict[str, Weight]]:
        expert, futures, biases = in_flight.popleft()
        return expert, {role: future.result() for role, future in futures.items()}, biases

    for expert, weights in experts:
        futures = {
            role: workers.submit(recode, weights.pop(role), spec, f"{name}.{expert}.{role}")
            for role, spec in formats.items()
        }
        in_flight.append((expert, futures, weights))
        while len(in_flight) * len(formats) > max_in_flight:
            yield wait_for_oldest()
    while in_flight:
        yield wait_for_oldest()


@contextmanager
def single_threaded_workers(threads: int, name: str) -> Iterator[Executor]:
    """Threads that compute with torch; its own threads would oversubscribe the CPUs, so that each has none."""
    torch_threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(threads, name, initializer=functools.partial(torch.set_num_threads, 1))
    try:
        yield workers
    finally:
        workers.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)
