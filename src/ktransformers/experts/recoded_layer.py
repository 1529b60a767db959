"""An expert layer in another format than its files have: its matrices are encoded while it is loaded.

`kt quant` writes such a layer once and reports its error; here nothing is written, so every load encodes again. Experts
are encoded side by side in threads (the encoder runs without the GIL), a few at a time, so that memory holds the packed
layer and some matrices. The numbers are those of `kt quant` with the same format.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.checkpoint.recode import Weight, check_target, experts_of, recode, split
from ktransformers.checkpoint.sources import LayerSource
from ktransformers.experts.contract import Contract
from ktransformers.ground.errors import InputError

ExpertFormats = str | Mapping[str, str]  # one of all expert layers, or by the name of the module; "": of all others


def format_of_layer(formats: ExpertFormats | None, name: str) -> str | None:
    """The format that a layer is to have; None: that of its files."""
    return formats if formats is None or isinstance(formats, str) else formats.get(name, formats.get(""))


def check_formats(formats: ExpertFormats | None) -> None:
    """Refuse a format that cannot be written before anything is read."""
    for spec in {formats} if isinstance(formats, str) else set((formats or {}).values()):
        check_target("format of the experts", spec)


def check_packed(name: str, stored: Mapping[str, str], wanted: str | None) -> None:
    """Refuse packed experts in another format than is wanted: they are mapped, not read."""
    if wanted is not None and not _is_in(stored, wanted):
        given = f"{wanted}, where {name} is packed in {', '.join(sorted(set(stored.values())))}"
        raise InputError("format of the experts", given, "the format of the packed directory", "`kt quant` writes one")


def recoded_layer(name: str, layer: LayerSource, contract: Contract, wanted: str | None) -> LayerSource:
    """The layer with every matrix in `wanted`; the layer itself if that is None or the format of the files already, in
    groups of any size."""
    if wanted is None or _is_in(layer.formats, wanted):
        return layer

    def chunks(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
        return _recoded_chunks(name, layer, contract, wanted, experts)

    return replace(layer, formats=dict.fromkeys(layer.formats, wanted), chunks=chunks, expert=None)


def _is_in(formats: Mapping[str, str], wanted: str) -> bool:
    return {spec.partition(":")[0] for spec in formats.values()} == {wanted.partition(":")[0]}


def _recoded_chunks(
    name: str, layer: LayerSource, contract: Contract, wanted: str, only: Sequence[int] | None
) -> Iterator[ExpertChunk]:
    """One expert at a time, all or `only` these, in this order."""
    threads = len(os.sched_getaffinity(0))
    in_flight: deque[tuple[int, dict[str, Future[Weight]], dict[str, Weight]]] = deque()

    def oldest() -> ExpertChunk:
        expert, futures, biases = in_flight.popleft()
        return ExpertChunk(expert, False, biases | {role: future.result() for role, future in futures.items()})

    def encoded(weight: Weight, label: str) -> Weight:
        return recode(weight, wanted, label).matrix

    torch_threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(threads, "kt-encode", initializer=_use_one_thread)
    try:
        for chunk in layer.chunks(only):
            stacked = split(chunk, transposed=contract.shape.transposed, interleaved=contract.interleaved)
            down = stacked["down"]
            for index in range(down.experts if isinstance(down, Encoded) else down.shape[0]):
                weights = {role: experts_of(matrix, index, index + 1) for role, matrix in stacked.items()}
                expert = chunk.first_expert + index
                futures = {
                    role: workers.submit(encoded, weights.pop(role), f"{name}.{expert}.{role}")
                    for role in layer.formats
                }
                in_flight.append((expert, futures, weights))
                while len(in_flight) > threads:
                    yield oldest()
        while in_flight:
            yield oldest()
    finally:
        workers.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # the workers run side by side
