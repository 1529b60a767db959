"""The experts of one layer from a safetensors checkpoint: checked against the headers, then read in chunks for packing.

A chunk of the per-expert layout is one expert, of the fused layout the whole layer. Both are views of mapped files, so
only the bytes being packed are read. Fused tensors have the layout of the model's own parameters (transposed or not,
interleaved or not); per-expert tensors are ordinary linear layers, output-major. Quantised matrices are `Encoded`,
always output-major and with gate and up separate. Numbers that are NaN or infinite are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import BLOCK, Encoded, format_with
from ktransformers.checkpoint.layout import ExpertTensors, parts
from ktransformers.checkpoint.matrix import ACTIVATIONS, FLOATS, QWEIGHTS, Matrix, recognise
from ktransformers.checkpoint.quantisation import NONE, Quantisation
from ktransformers.checkpoint.shards import Shards
from ktransformers.ground.errors import InputError

DTYPES = FLOATS


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool = True
    biased: bool = False
    transposed: bool = False  # of fused tensors: [E, H, 2I] and [E, I, H]

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of gate, up and down."""
        inner = (self.intermediate, self.hidden)
        first = {"gate": inner, "up": inner} if self.gated else {"up": inner}
        return first | {"down": (self.hidden, self.intermediate)}

    def single(self) -> dict[str, tuple[int, ...]]:
        """Role -> shape of one expert's own tensors."""
        shapes: dict[str, tuple[int, ...]] = dict(self.matrices())
        if self.biased:
            shapes |= {f"{role}_bias": (rows,) for role, (rows, _) in self.matrices().items()}
        return shapes

    def fused(self) -> dict[str, tuple[int, ...]]:
        """Role -> shape of the tensors that hold all experts."""
        experts, hidden = self.num_experts, self.hidden
        role, rows = ("gate_up", 2 * self.intermediate) if self.gated else ("up", self.intermediate)
        matrices = {role: (rows, hidden), "down": (hidden, self.intermediate)}
        order = -1 if self.transposed else 1
        shapes: dict[str, tuple[int, ...]] = {name: (experts, *shape[::order]) for name, shape in matrices.items()}
        if self.biased:
            shapes |= {f"{role}_bias": (experts, rows), "down_bias": (experts, hidden)}
        return shapes


@dataclass(frozen=True)
class ExpertChunk:
    """Tensors by role: of one expert, or of all from `first_expert` on. `fused`: in the layout of the model's
    parameters."""

    first_expert: int
    fused: bool
    tensors: dict[str, Tensor | Encoded]


Formats = dict[str, str]  # of gate, up and down; "bf16" for plain numbers of any float dtype


def check_experts(
    shards: Shards,
    tensors: ExpertTensors,
    shape: ExpertShape,
    quantisation: Quantisation = NONE,
    interleaved: bool = False,
) -> Formats:
    """Check that every tensor exists with its shape and dtype, and return the formats; an error names the tensor.

    `interleaved`: rows of gate and up alternate in fused tensors.
    """
    if tensors.fused and tensors.single:
        names = f"{next(iter(tensors.fused.values()))} and {next(iter(tensors.single[min(tensors.single)].values()))}"
        raise InputError(tensors.root, f"two layouts, {names}", "experts fused or one by one")
    if tensors.fused:
        return _check_fused(shards, tensors, shape, interleaved)
    beyond = sorted(set(tensors.single) - set(range(shape.num_experts)))
    if beyond:
        name = next(iter(tensors.single[beyond[0]].values()))
        raise InputError(name, f"expert {beyond[0]}", f"{shape.num_experts} experts, as config.json says")
    formats: Formats = {}
    for expert in range(shape.num_experts):
        for role, matrix in _single(shards, tensors, shape, expert, quantisation).items():
            if formats.setdefault(role, matrix.spec) != matrix.spec:
                name = next(iter(parts(tensors.single[expert])[role].values()))
                raise InputError(name, matrix.spec, f"{formats[role]}, as the experts before it")
    return formats


def read_experts(
    shards: Shards,
    tensors: ExpertTensors,
    shape: ExpertShape,
    quantisation: Quantisation = NONE,
    interleaved: bool = False,
    experts: Iterable[int] | None = None,
) -> Iterator[ExpertChunk]:
    """The layer in chunks, in the order of experts; release each before taking the next. Of these `experts` alone, if
    any are named, one by one; the bytes of the others are not read."""
    if tensors.fused:
        yield from _read_fused(shards, tensors, shape, interleaved, experts)
        return
    for expert in range(shape.num_experts) if experts is None else experts:
        names = tensors.single[expert]
        by_role: dict[str, Tensor | Encoded] = {
            role: _in_own_order(matrix.build(shards.read_finite))
            for role, matrix in _single(shards, tensors, shape, expert, quantisation).items()
        }
        by_role |= {role: shards.read_finite(names[role]) for role in shape.single() if role.endswith("_bias")}
        yield ExpertChunk(expert, False, by_role)


def _single(
    shards: Shards, tensors: ExpertTensors, shape: ExpertShape, expert: int, quantisation: Quantisation
) -> dict[str, Matrix]:
    """One expert's matrices, not yet read; checks the biases too."""
    label, unused = f"{tensors.root}.experts.{expert}", parts(tensors.single.get(expert, {}))
    matrices = {}
    for role, (rows, columns) in shape.matrices().items():
        endings = dict(unused.pop(role, {}))
        bias = endings.pop("bias", None)
        if shape.biased:
            _check_bias(shards, f"{label}: {role}_bias", bias, (rows,))
        elif bias is not None:
            raise _unexpected(bias, f"{role}_bias", shape.single())
        if not any(ending in endings for ending in QWEIGHTS):
            raise InputError(f"{label}: {role}", "no such tensor in the checkpoint", f"one of shape {[rows, columns]}")
        refs = {key: shards.ref(name) for key, name in endings.items()}
        if quantisation.desc_act and "g_idx" in refs:
            raise _desc_act(refs["g_idx"].name)
        matrices[role] = recognise(refs, rows, columns, quantisation)
    for role, endings in unused.items():
        raise _unexpected(next(iter(endings.values())), role, shape.single())
    return matrices


def _in_own_order(matrix: Tensor | Encoded) -> Tensor | Encoded:
    if isinstance(matrix, Encoded) and matrix.order is not None:
        raise _desc_act(matrix.name.replace(".qweight", ".g_idx"))
    return matrix


def _desc_act(name: str) -> InputError:
    given = "columns in order of activation (desc_act)"
    return InputError(name, given, "experts with columns in their own order", "take another release of the model")


def _check_bias(shards: Shards, label: str, name: str | None, shape: tuple[int, ...]) -> None:
    if name is None:
        raise InputError(label, "no such tensor in the checkpoint", f"one of shape {list(shape)}")
    part = shards.ref(name)
    if part.shape != shape:
        raise InputError(name, f"shape {list(part.shape)}", f"{list(shape)}, as config.json says")
    if part.dtype not in DTYPES:
        raise InputError(name, f"dtype {part.dtype}", " or ".join(DTYPES))


def _unexpected(name: str, role: str, shapes: Mapping[str, object]) -> InputError:
    return InputError(name, f"a tensor that these experts have no use for ({role})", ", ".join(shapes))


def _check_fused(shards: Shards, tensors: ExpertTensors, shape: ExpertShape, interleaved: bool) -> Formats:
    label, by_role, shapes = f"{tensors.root}.experts", parts(tensors.fused), shape.fused()
    formats: Formats = {}
    for role, size in shapes.items():
        if role.endswith("_bias"):
            _check_bias(shards, f"{label}: {role}", tensors.fused.get(role), size)
            continue
        endings = {key: name for key, name in by_role.get(role, {}).items() if key not in ACTIVATIONS and key != "bias"}
        if not any(ending in endings for ending in QWEIGHTS):
            raise InputError(f"{label}: {role}", "no such tensor in the checkpoint", f"one of shape {list(size)}")
        spec = fused_spec(shards, endings, size, shape.transposed)
        if role == "gate_up":  # a scale block that has rows of gate and of up becomes one scale per row
            shared_blocks = spec == "fp8:128x128" and (interleaved or shape.intermediate % BLOCK)
            formats |= dict.fromkeys(("gate", "up"), "fp8:1x128" if shared_blocks else spec)
        else:
            formats[role] = spec
    for role in sorted(tensors.fused):
        matrix = "gate_up" if role.startswith("gate_up") else role.partition("_")[0]
        if matrix not in shapes or (role.endswith("_bias") and role not in shapes):
            raise _unexpected(tensors.fused[role], role, shapes)
    return formats


def fused_spec(shards: Shards, endings: Mapping[str, str], size: tuple[int, ...], transposed: bool) -> str:
    experts, rows, columns = (size[0], size[2], size[1]) if transposed else size
    if "blocks" in endings:
        blocks = shards.ref(endings["blocks"])
        if "scales" not in endings:
            raise InputError(blocks.name, "no scales with it", "blocks and their scales")
        scales = shards.ref(endings["scales"])
        if columns % 32 or (blocks.dtype, blocks.shape) != ("U8", (experts, rows, columns // 32, 16)):
            raise blocks.refuse(f"U8 [{experts}, {rows}, {columns // 32}, 16]: 32 columns of e2m1 in 16 bytes")
        if (scales.dtype, scales.shape) != ("U8", (experts, rows, columns // 32)):
            raise scales.refuse(f"U8 [{experts}, {rows}, {columns // 32}]")
        return format_with("e2m1", "e8m0")
    weight = shards.ref(endings["weight"])
    if weight.shape != size:
        raise InputError(weight.name, f"shape {list(weight.shape)}", f"{list(size)}, as config.json says")
    scale = next((shards.ref(endings[key]) for key in ("scale_inv", "scale") if key in endings), None)
    if weight.dtype in FLOATS:
        if scale is not None:
            raise _unexpected(scale.name, "scale", {"weight": 0})
        return "bf16"
    if weight.dtype != "F8_E4M3" or scale is None:
        raise InputError(weight.name, f"dtype {weight.dtype}", f"{' or '.join(FLOATS)}, or F8_E4M3 with scales")
    grid = (experts, *(math.ceil(length / BLOCK) for length in size[1:]))
    if scale.dtype not in FLOATS or scale.shape != grid:
        raise scale.refuse(f"floats {list(grid)}, one for each block of 128 x 128")
    return "fp8:128x128"


def _read_fused(
    shards: Shards, tensors: ExpertTensors, shape: ExpertShape, interleaved: bool, experts: Iterable[int] | None
) -> Iterator[ExpertChunk]:
    formats = _check_fused(shards, tensors, shape, interleaved)
    if set(formats.values()) == {"bf16"}:
        names = {role: tensors.fused[role] for role in shape.fused()}
        if experts is None:
            yield ExpertChunk(0, True, {role: shards.read_finite(name) for role, name in names.items()})
        for expert in experts or ():
            yield ExpertChunk(
                expert, True, {role: shards.read_finite_row(name, expert) for role, name in names.items()}
            )
        return
    for expert in range(shape.num_experts) if experts is None else experts:
        by_role: dict[str, Tensor | Encoded] = {}
        for role, endings in parts(tensors.fused).items():
            matrix = fused_matrix(shards, endings, expert, shape.transposed)
            bias = shards.read_finite_row(endings["bias"], expert) if "bias" in endings else None
            if role == "gate_up":
                by_role |= _split_matrix(matrix, formats["gate"], interleaved)
                if bias is not None:
                    gate_bias, up_bias = _split_rows(bias, interleaved)
                    by_role |= {"gate_bias": gate_bias.contiguous(), "up_bias": up_bias.contiguous()}
            else:
                by_role[role] = matrix
                if bias is not None:
                    by_role[f"{role}_bias"] = bias
        yield ExpertChunk(expert, False, by_role)


def fused_matrix(shards: Shards, endings: Mapping[str, str], expert: int, transposed: bool) -> Tensor | Encoded:
    """One expert, output-major."""
    if "blocks" in endings:
        name = endings["blocks"]
        qweight = shards.read(name)[expert].flatten(1)
        scales = shards.read_finite_row(endings["scales"], expert, e8m0=True)
        return Encoded(
            format_with("e2m1", "e8m0"), qweight[None], scales[None], columns=2 * qweight.shape[1], name=name
        )
    name = endings["weight"]
    weight = shards.read_finite_row(name, expert)
    if weight.is_floating_point() and weight.element_size() > 1:
        return weight.T if transposed else weight
    scales = shards.read_finite_row(endings.get("scale_inv") or endings["scale"], expert).float()
    qweight = weight.view(torch.uint8)
    qweight, scales = (qweight.T.contiguous(), scales.T.contiguous()) if transposed else (qweight, scales)
    return Encoded("fp8:128x128", qweight[None], scales[None], columns=qweight.shape[1], name=name)


def _split_rows(tensor: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up along the first dimension."""
    half = len(tensor) // 2
    return (tensor[0::2], tensor[1::2]) if interleaved else (tensor[:half], tensor[half:])


def _split_matrix(fused: Tensor | Encoded, spec: str, interleaved: bool) -> dict[str, Tensor | Encoded]:
    """Gate and up of their fused matrix; `spec` is the format that they get."""
    if isinstance(fused, Tensor):
        gate, up = _split_rows(fused, interleaved)
        return {"gate": gate, "up": up}
    assert fused.scales is not None
    qweight, scales = fused.qweight[0], fused.scales[0]
    if spec == "fp8:1x128":
        scales = scales.repeat_interleave(BLOCK, 0)[: len(qweight)]
    halves = zip(("gate", "up"), _split_rows(qweight, interleaved), _split_rows(scales, interleaved), strict=True)
    return {
        role: Encoded(spec, code[None], scale[None], columns=fused.columns, name=fused.name)
        for role, code, scale in halves
    }
