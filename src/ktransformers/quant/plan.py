"""The plan of a conversion to a packed directory, from headers alone: format and size of every layer, and a time
estimate.

Each matrix of a layer has a format of its own. `keep` takes the format of the source; plain floats are packed as bf16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers import _core
from ktransformers.checkpoint.encoded import format_of
from ktransformers.checkpoint.recode import KEEP, check_target, recode
from ktransformers.checkpoint.rest import tensor_bytes
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.experts.contract import new_store
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.ground.pool import default_pool
from ktransformers.quant.conversion_run import seconds_on_one_thread
from ktransformers.quant.origin import Origin, OriginLayer
from ktransformers.quantized.weight import is_quantized, quantizable_names, rest_format


@dataclass(frozen=True)
class LayerPlan:
    origin: OriginLayer
    file: str
    formats: dict[str, str]  # gate, up, down -> format in the packed file
    expert_bytes: int  # packed size of one expert

    @property
    def packed_bytes(self) -> int:
        return self.expert_bytes * self.origin.contract.shape.num_experts


@dataclass(frozen=True)
class LinearPlan:
    """A dense (non-expert) weight that is written quantized."""

    tensor: PlainTensor
    format: str
    bytes: int


@dataclass(frozen=True)
class ConversionPlan:
    origin: Origin
    formats: dict[str, str]  # gate, up, down -> requested format or keep
    layers: list[LayerPlan]
    rest_bytes: int  # of the other tensors, dense
    threads: int
    rest: str = "bf16"  # requested for dense linear layers
    linears: tuple[LinearPlan, ...] = ()

    @property
    def source_bytes(self) -> int:
        return self.rest_bytes + sum(layer.origin.bytes for layer in self.layers)

    @property
    def out_bytes(self) -> int:
        return self.rest_out_bytes + sum(layer.packed_bytes for layer in self.layers)

    @property
    def rest_out_bytes(self) -> int:
        return self.rest_bytes - sum(tensor_bytes(linear.tensor) - linear.bytes for linear in self.linears)


def parse_formats(word: str, group: int | None = None, down: str | None = None) -> dict[str, str]:
    """gate, up, down -> format, from `int4`, `int4:64`, `int8`, `keep` and so on; `group` is the group size of int4."""
    if group is not None and "int4" not in (word, down):
        raise InputError("group", f"{group} with {word}", "it with int4")
    size = 32 if group is None else group
    inner, outer = (f"int4:{size}" if spec == "int4" else spec for spec in (word, down or word))
    check_target("format", inner)
    check_target("down-format", outer)
    return {"gate": inner, "up": inner, "down": outer}


def make_plan(
    path: str | Path,
    formats: dict[str, str],
    threads: int | None = None,
    experts: str | Path | None = None,
    rest: str = "bf16",
) -> ConversionPlan:
    if rest not in AS_RELEASED:
        rest_format(rest)
    return plan_conversion(Origin(path, experts), formats, threads, rest)


def plan_conversion(
    origin: Origin, requested: dict[str, str], threads: int | None = None, rest: str = "bf16"
) -> ConversionPlan:
    """The plan for a checkpoint, or for one with a merged adapter (`adapters/origin.py`)."""
    sizes: dict[tuple[object, ...], int] = {}
    layers: list[LayerPlan] = []
    for layer in origin.layers:
        formats = {
            role: source if requested[role] == KEEP else requested[role] for role, source in layer.formats.items()
        }
        check_columns(layer, formats)
        key = (layer.contract.shape, *formats.values())
        if key not in sizes:
            sizes[key] = packed_expert_size(layer, formats)
        earlier = sum(plan.origin.number == layer.number for plan in layers)  # a layer may have two blocks of experts
        file = f"packed-{layer.number:05}{f'-{earlier}' if earlier else ''}.safetensors"
        layers.append(LayerPlan(layer, file, formats, sizes[key]))
    rest_bytes = sum(tensor_bytes(tensor) for tensor in origin.rest())
    threads = threads or len(os.sched_getaffinity(0))
    return ConversionPlan(origin, requested, layers, rest_bytes, threads, rest, tuple(_plan_linears(origin, rest)))


def _plan_linears(origin: Origin, rest: str) -> Iterator[LinearPlan]:
    """With `keep` every matrix that the files have quantized, embeddings among them; with a format the linear layers
    that loading would encode, where the file has them under the model's names."""
    if rest == "bf16":
        return
    names = set() if rest == KEEP else quantizable_names(origin.meta_model())
    for tensor in origin.rest():
        if rest == KEEP and not is_quantized(tensor):
            continue
        if rest != KEEP and (tensor.name not in names or tensor.shape[1] % format_of(rest).multiple):
            continue
        spec = tensor.format if rest == KEEP else rest
        rows, columns = tensor.shape
        yield LinearPlan(tensor, spec, _core.CodedLinear(default_pool(), rows, columns, spec).packed_bytes)


def check_columns(layer: OriginLayer, formats: dict[str, str]) -> None:
    for role, (_, columns) in layer.contract.shape.matrices().items():
        multiple = 1 if formats[role] == "bf16" else format_of(formats[role]).multiple
        if columns % multiple:
            given = f"{columns} columns"
            raise InputError(f"{layer.module}: {role}", given, f"a multiple of {multiple} for {formats[role]}")


def packed_expert_size(layer: OriginLayer, formats: dict[str, str]) -> int:
    return new_store(layer.contract, formats=formats, experts=1).packed_bytes


def without_patches(layer: LayerPlan, role: str) -> LayerPlan:
    """The layer with bf16 for a matrix that has too many values to patch in bf16:12. Gate and up lie in one block, so
    that both are bf16 or neither is."""
    roles = ("down",) if role == "down" else ("gate", "up")
    formats = {name: "bf16" if name in roles else format for name, format in layer.formats.items()}
    return replace(layer, formats=formats, expert_bytes=packed_expert_size(layer.origin, formats))


def estimate(plan: ConversionPlan) -> float:
    """Seconds, extrapolated from recoding one expert in one thread; disk time is not included."""
    layer = plan.layers[0]
    _, matrices = next(layer.origin.experts())

    def recode_one() -> None:
        for role, format in layer.formats.items():
            recode(matrices[role], format, role)

    experts = sum(layer.origin.contract.shape.num_experts for layer in plan.layers)
    return seconds_on_one_thread(recode_one) * experts / plan.threads
