"""The experts of one layer from a checkpoint: first checked by the headers, then read in pieces that can be packed.

A piece of the per-expert layout is one expert, of the fused layout the whole layer; both are maps of the file, so no
more than what is being packed is touched at a time. Fused tensors lie as the model's own parameters do (transposed or
not, interleaved or not); per-expert ones are ordinary linear layers, output-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ktransformers.checkpoint.layout import ExpertTensors
from ktransformers.checkpoint.shards import Shards
from ktransformers.errors import InputError

DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool = True
    biased: bool = False
    transposed: bool = False  # of fused tensors: [E, H, 2I] and [E, I, H]

    def single(self) -> dict[str, tuple[int, ...]]:
        """Role -> shape of one expert's own tensors."""
        wide, narrow = self.intermediate, self.hidden
        inner = ("gate", "up") if self.gated else ("up",)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(inner, (wide, narrow))
        shapes["down"] = (narrow, wide)
        if self.biased:
            shapes |= {f"{role}_bias": (wide,) for role in inner} | {"down_bias": (narrow,)}
        return shapes

    def fused(self) -> dict[str, tuple[int, ...]]:
        """Role -> shape of the tensors that hold all experts."""
        experts, narrow = self.num_experts, self.hidden
        role, rows = ("gate_up", 2 * self.intermediate) if self.gated else ("up", self.intermediate)
        matrices = {role: (rows, narrow), "down": (narrow, self.intermediate)}
        turn = -1 if self.transposed else 1
        shapes: dict[str, tuple[int, ...]] = {name: (experts, *shape[::turn]) for name, shape in matrices.items()}
        if self.biased:
            shapes |= {f"{role}_bias": (experts, rows), "down_bias": (experts, narrow)}
        return shapes


@dataclass(frozen=True)
class Piece:
    """Tensors by role: of one expert, or of all from `first_expert` on where `fused`."""

    first_expert: int
    fused: bool
    tensors: dict[str, Tensor]


def check(shards: Shards, tensors: ExpertTensors, shape: ExpertShape) -> None:
    """Every tensor is there, has its shape and a dtype that can be packed; an error names the one that is not."""
    if tensors.fused and tensors.single:
        names = f"{next(iter(tensors.fused.values()))} and {next(iter(tensors.single[min(tensors.single)].values()))}"
        raise InputError(tensors.root, f"two layouts, {names}", "experts fused or one by one")
    if tensors.fused:
        _check_roles(shards, f"{tensors.root}.experts", tensors.fused, shape.fused())
        return
    beyond = sorted(set(tensors.single) - set(range(shape.num_experts)))
    if beyond:
        name = next(iter(tensors.single[beyond[0]].values()))
        raise InputError(name, f"expert {beyond[0]}", f"{shape.num_experts} experts, as config.json says")
    for expert in range(shape.num_experts):
        _check_roles(shards, f"{tensors.root}.experts.{expert}", tensors.single.get(expert, {}), shape.single())


def read(shards: Shards, tensors: ExpertTensors, shape: ExpertShape) -> Iterator[Piece]:
    """The layer in pieces, in the order of experts; drop each before taking the next."""
    if tensors.fused:
        yield Piece(0, True, {role: shards.read(tensors.fused[role]) for role in shape.fused()})
        return
    for expert in range(shape.num_experts):
        names = tensors.single[expert]
        yield Piece(expert, False, {role: shards.read(names[role]) for role in shape.single()})


def _check_roles(shards: Shards, place: str, names: Mapping[str, str], shapes: dict[str, tuple[int, ...]]) -> None:
    for role, shape in shapes.items():
        name = names.get(role)
        if name is None:
            raise InputError(f"{place}: {role}", "no such tensor in the checkpoint", f"one of shape {list(shape)}")
        if shards.shape(name) != shape:
            raise InputError(name, f"shape {list(shards.shape(name))}", f"{list(shape)}, as config.json says")
        if shards.dtype(name) not in DTYPES:
            raise InputError(
                name, f"dtype {shards.dtype(name)}", " or ".join(DTYPES), "quantised experts are not read yet"
            )
    for role in sorted(set(names) - set(shapes)):
        raise InputError(names[role], f"a tensor that these experts have no use for ({role})", ", ".join(shapes))
