"""A layer's residents for a few tokens, chosen on the device: `place` int32 `[E]` says in which slot an expert lies, or
-1, and the ids of the batch are read where they are. Shapes depend on the batch's alone, never on who was asked for, so
a CUDA graph can hold it.

On a GPU `gemv.py` computes from packed bf16, or from what the formats that Triton can decode are decoded into for this
batch, a matrix for each (token, slot): so much memory that there is a bound. Everywhere else, for tests, torch does,
with the same address of every bf16 weight: expert, block, pair along K, half, output, number of the pair. Gate and up
stay in float32 up to the activation, which is rounded to bf16; outputs are weighted and added in float32. That is how
the CPU rounds too.

LoRA joins the same sums before they are rounded: `adapters` int32 `[T]` says which of `LoraPointers`' a token wants, or
-1. What A makes of a row is rounded to bf16, as on the CPU. A token without one has the bits that it would have alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.nn.gate import Gate
from ktransformers.nn.reference import ACTIVATIONS
from ktransformers.place.gpu.dequantize import decode_plain
from ktransformers.place.gpu.epilogue import SILU
from ktransformers.place.gpu.executor import LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.layout import Geometry, PackedMatrix
from ktransformers.place.gpu.multi_lora import LoraPointers, Pairs
from ktransformers.triton_modules import import_triton_module

TRITON = "ktransformers.place.gpu.resident_decode_triton"

DECODED_BYTES = 640 << 20  # of matrices at a time

Lora = tuple[Tensor, LoraPointers]  # adapters int32 [T], and theirs


def runs_on(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and import_triton_module(TRITON) is not None)


def knows(geometry: Geometry, rows: int, device: torch.device) -> bool:
    """Whether residents of these formats are computed here for so many pairs of token and slot, all of them at once; 0
    asks for the formats alone."""
    if geometry.first.plain and geometry.down.plain:
        return True
    if rows * geometry.decoded_bytes > DECODED_BYTES:
        return False
    kernels = import_triton_module(TRITON) if device.type == "cuda" else None
    return kernels is None or all(
        kernels.dequantize_triton.supports(matrix) for matrix in (geometry.first, geometry.down)
    )


def count(ids: Tensor, counts: Tensor) -> None:
    """Adds the rows of each expert to int32 `[E]`; ids outside count nowhere."""
    if ids.is_cuda and (kernels := import_triton_module(TRITON)) is not None:
        kernels.count(ids, counts)
        return
    inside = ids[(ids >= 0) & (ids < counts.shape[0])]
    counts += torch.bincount(inside.reshape(-1), minlength=counts.shape[0]).to(counts.dtype)


def forward(
    layer: LayerOnDevice,
    room: ExpertCache,
    place: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Lora | None = None,
) -> Tensor:
    """float32 `[T, H]`, what the residents add; contiguous `[T, H]`, `[T, k]`, `[T, k]` on the device of the slots.
    Tokens whose decoded matrices would take more than the bound come some at a time."""
    geometry, (first_bias, down_bias) = layer.geometry, layer.biases
    plain = geometry.first.plain and geometry.down.plain
    most = max(1, DECODED_BYTES // (ids.shape[1] * geometry.decoded_bytes))
    if not plain and hidden.shape[0] > most:
        starts = range(0, hidden.shape[0], most)
        cuts = [slice(at, at + most) for at in starts]
        loras = [None if lora is None else (lora[0][cut], lora[1]) for cut in cuts]
        parts = [
            forward(layer, room, place, hidden[cut], ids[cut], weights[cut], mine)
            for cut, mine in zip(cuts, loras, strict=True)
        ]
        return torch.cat(parts)
    kernels = import_triton_module(TRITON) if hidden.is_cuda else None
    if kernels is None:
        return _plain(layer, room, place, hidden, ids, weights, lora)
    first_lora, down_lora = (None, None) if lora is None else (lora[1].told(lora[0], at) for at in ("first", "down"))
    fused = geometry.gated and layer.gate == SILU
    h: Tensor = kernels.first(hidden, ids, place, room.first, first_bias, geometry.first, fused, first_lora)
    if not fused:
        h = _activate(h, layer.gate, geometry.gated)
    found: Tensor = kernels.down(h, ids, weights, place, room.down, down_bias, geometry.down, down_lora)
    return found


def _activate(wide: Tensor, gate: Gate, gated: bool) -> Tensor:
    return (gate(*wide.chunk(2, dim=1)) if gated else ACTIVATIONS[gate.activation](wide)).to(torch.bfloat16)


def address(matrix: PackedMatrix) -> Tensor:
    """int64 `[out_rows, columns]`: where a weight lies among the bf16 numbers of its expert."""
    row, k = torch.arange(matrix.out_rows)[:, None], torch.arange(matrix.columns)[None]
    half = row // matrix.rows if matrix.paired else row // 16 % 2
    line = row % matrix.rows if matrix.paired else row
    block, pair = line // (16 if matrix.paired else 32), k // 2
    return block * (matrix.block_bytes // 2) + pair // 16 * 1024 + half * 512 + pair % 16 * 32 + line % 16 * 2 + k % 2


def _matrix(packed: Tensor, matrix: PackedMatrix) -> Tensor:
    if matrix.plain:
        return packed.view(torch.bfloat16)[address(matrix)]
    out = torch.empty(matrix.out_rows, matrix.columns, dtype=torch.bfloat16)
    decode_plain(packed, matrix, out)
    return out


def _term(x: Tensor, pairs: Pairs, name: str, expert: int) -> Tensor | float:
    pair = pairs.get(name)
    if pair is None:
        return 0.0
    inner = (x.float() @ pair.a[expert].float().T).to(torch.bfloat16)
    return inner.float() @ pair.b[expert].float().T


def _plain(
    layer: LayerOnDevice,
    room: ExpertCache,
    place: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Lora | None,
) -> Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for token, choice in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, choice])
        slot = int(place[expert]) if 0 <= expert < place.shape[0] else -1
        if slot < 0:
            continue
        first, down = (
            _matrix(packed[slot], matrix).float()
            for packed, matrix in ((room.first, layer.geometry.first), (room.down, layer.geometry.down))
        )
        first_bias, down_bias = (0.0 if bias is None else bias[expert] for bias in layer.biases)
        pairs: Pairs = {} if lora is None or lora[0][token] < 0 else lora[1].pairs[int(lora[0][token])]
        x = hidden[token].bfloat16()
        wide = x.float() @ first.T + first_bias + _term(x, pairs, "first", expert)
        h = _activate(wide[None], layer.gate, layer.geometry.gated)[0]
        y = h.float() @ down.T + down_bias + _term(h, pairs, "down", expert)
        out[token] += weights[token, choice].float() * y
    return out
