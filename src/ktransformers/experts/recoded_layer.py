"""An expert layer in another format than its files have: its matrices are encoded while it is loaded.

`kt quant` writes such a layer once and reports its error; here nothing is written, so every load encodes again. Experts
are encoded side by side in threads (the encoder runs without the GIL), a few at a time, so that memory holds the packed
layer and some matrices. The numbers are those of `kt quant` with the same format.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.checkpoint.recode import check_target, recode_experts, single_experts, single_threaded_workers
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

    formats = dict.fromkeys(layer.formats, wanted)

    def chunks(experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]:
        """One expert at a time, all or these, in this order."""
        threads = len(os.sched_getaffinity(0))
        shape, interleaved = contract.shape, contract.interleaved
        single = single_experts(layer.chunks(experts), transposed=shape.transposed, interleaved=interleaved)
        with single_threaded_workers(threads, "kt-encode") as workers:
            for expert, recoded, biases in recode_experts(name, single, formats, workers, threads * len(formats)):
                yield ExpertChunk(expert, False, biases | {role: result.matrix for role, result in recoded.items()})

    return replace(layer, formats=formats, chunks=chunks, expert=None)


def _is_in(formats: Mapping[str, str], wanted: str) -> bool:
    return {spec.partition(":")[0] for spec in formats.values()} == {wanted.partition(":")[0]}
