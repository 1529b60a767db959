"""The resident experts of a layer for a few tokens, selected on the device: `slot_of` int32 `[E]` holds the slot of
each resident, or -1, and expert ids are read in device memory. Shapes depend on the batch size alone, never on the
routing, so a CUDA graph can hold it.

On a GPU `resident_decode_triton.py` computes from packed bytes, with weights rounded to bf16. Where gate and up have
different formats they are first dequantised for the batch, one matrix per (token, slot), which takes so much memory
that there is a bound. On a CPU, for tests, torch computes the same from the same packed addresses: expert, block, pair
along K, half, output, element of the pair. Gate and up stay in float32 up to the activation, which is rounded to bf16;
outputs are weighted and summed in float32. The CPU rounds in the same places.

LoRA is added before these roundings: `adapters` int32 `[T]` is the index of each token's adapter in `LoraPointers`, or
-1. A's product is rounded to bf16, as on the CPU. A token without an adapter gets the same bits as in a batch without
LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers.experts.gate import ACTIVATIONS, Gate
from ktransformers.ground.packages import import_triton_module
from ktransformers.place.gpu.executor import LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.multi_lora import LoraPointers, Pairs
from ktransformers.quantized.gpu.dequantize import decode_plain
from ktransformers.quantized.gpu.layout import Geometry, PackedMatrix

TRITON = "ktransformers.place.gpu.resident_decode_triton"

DECODED_BYTES = 640 << 20  # of dequantised matrices at a time

Lora = tuple[Tensor, LoraPointers]  # adapters int32 [T], and the factors that they index


def runs_on(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and import_triton_module(TRITON) is not None)


def supports(geometry: Geometry, rows: int, device: torch.device) -> bool:
    """Whether residents of this geometry's formats can be computed here for `rows` (token, slot) pairs at once; 0 asks
    for the formats alone."""
    if not decodes_first(geometry, device):
        return True
    if rows * geometry.decoded_bytes > DECODED_BYTES:
        return False
    kernels = import_triton_module(TRITON) if device.type == "cuda" else None
    return kernels is None or all(
        kernels.dequantize_triton.supports(matrix) for matrix in (geometry.first, geometry.down)
    )


def decodes_first(geometry: Geometry, device: torch.device) -> bool:
    """Whether weights are dequantised into memory before they are multiplied."""
    kernels = import_triton_module(TRITON) if device.type == "cuda" else None
    matrices = geometry.first, geometry.down
    return not all(matrix.plain if kernels is None else kernels.reads_packed(matrix) for matrix in matrices)


def count(ids: Tensor, counts: Tensor) -> None:
    """Add the rows of each expert to `counts` int32 `[E]`; ids out of range are not counted."""
    if ids.is_cuda and (kernels := import_triton_module(TRITON)) is not None:
        kernels.count(ids, counts)
        return
    valid = ids[(ids >= 0) & (ids < counts.shape[0])]
    counts += torch.bincount(valid.reshape(-1), minlength=counts.shape[0]).to(counts.dtype)


@dataclass(frozen=True)
class DeviceRouting:
    """The routing of a few tokens and the layer's residents, all in device memory."""

    slot_of: Tensor  # int32 [E]: slot of each resident, or -1
    ids: Tensor  # [T, k], contiguous
    weights: Tensor  # [T, k], contiguous
    counts: Tensor  # int32 [E]: rows of each expert so far, to which those of this batch are added


def forward(
    layer: LayerOnDevice,
    cache: ExpertCache,
    routing: DeviceRouting,
    hidden: Tensor,
    dtype: torch.dtype,
    lora: Lora | None = None,
) -> Tensor:
    """`[T, H]` in `dtype`: the weighted sum over the resident experts, in float32; `hidden` is contiguous `[T, H]` on
    the cache's device. If the dequantised matrices exceed DECODED_BYTES the tokens are computed in pieces."""
    geometry, (first_bias, down_bias) = layer.geometry, layer.biases
    slot_of, ids, weights = routing.slot_of, routing.ids, routing.weights
    max_tokens = max(1, DECODED_BYTES // (ids.shape[1] * geometry.decoded_bytes))
    if hidden.shape[0] > max_tokens and decodes_first(geometry, hidden.device):
        starts = range(0, hidden.shape[0], max_tokens)
        pieces = [slice(start, start + max_tokens) for start in starts]
        loras = [None if lora is None else (lora[0][piece], lora[1]) for piece in pieces]
        parts = [
            forward(
                layer, cache, replace(routing, ids=ids[piece], weights=weights[piece]), hidden[piece], dtype, part_lora
            )
            for piece, part_lora in zip(pieces, loras, strict=True)
        ]
        return torch.cat(parts)
    kernels = import_triton_module(TRITON) if hidden.is_cuda else None
    if kernels is None:
        count(ids, routing.counts)
        return _reference_forward(layer, cache, slot_of, hidden, ids, weights, lora).to(dtype)
    first_lora, down_lora = (
        (None, None) if lora is None else (lora[1].kernel_arguments(lora[0], name) for name in ("first", "down"))
    )
    gate = layer.gate if geometry.gated and kernels.fuses(layer.gate) else None
    groups = kernels.group_routes(ids, slot_of, routing.counts, geometry.first, geometry.down)
    counts = routing.counts if groups is None else None
    h: Tensor = kernels.first(
        hidden, ids, slot_of, cache.first, first_bias, geometry.first, gate, first_lora, counts, groups
    )
    if gate is None:
        h = _activate(h, layer.gate, geometry.gated)
    out: Tensor = kernels.down(h, ids, weights, slot_of, cache.down, down_bias, geometry.down, down_lora, dtype, groups)
    return out


def _activate(gate_up: Tensor, gate: Gate, gated: bool) -> Tensor:
    return (gate(*gate_up.chunk(2, dim=1)) if gated else ACTIVATIONS[gate.activation](gate_up)).to(torch.bfloat16)


def weight_offsets(matrix: PackedMatrix) -> Tensor:
    """int64 `[out_rows, columns]`: index of each weight among the bf16 numbers of its packed expert."""
    row, k = torch.arange(matrix.out_rows)[:, None], torch.arange(matrix.columns)[None]
    half = row // matrix.rows if matrix.paired else row // 16 % 2
    line = row % matrix.rows if matrix.paired else row
    block, pair = line // (16 if matrix.paired else 32), k // 2
    return block * (matrix.block_bytes // 2) + pair // 16 * 1024 + half * 512 + pair % 16 * 32 + line % 16 * 2 + k % 2


def _dequantised(packed: Tensor, matrix: PackedMatrix) -> Tensor:
    if matrix.plain:
        return packed.view(torch.bfloat16)[weight_offsets(matrix)]
    out = torch.empty(matrix.out_rows, matrix.columns, dtype=torch.bfloat16)
    decode_plain(packed, matrix, out)
    return out


def _lora_term(x: Tensor, pairs: Pairs, name: str, expert: int) -> Tensor | float:
    pair = pairs.get(name)
    if pair is None:
        return 0.0
    inner = (x.float() @ pair.a[expert].float().T).to(torch.bfloat16)
    return inner.float() @ pair.b[expert].float().T


def _reference_forward(
    layer: LayerOnDevice,
    cache: ExpertCache,
    slot_of: Tensor,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Lora | None,
) -> Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for token, choice in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, choice])
        slot = int(slot_of[expert]) if 0 <= expert < slot_of.shape[0] else -1
        if slot < 0:
            continue
        first, down = (
            _dequantised(packed[slot], matrix).float()
            for packed, matrix in ((cache.first, layer.geometry.first), (cache.down, layer.geometry.down))
        )
        first_bias, down_bias = (0.0 if bias is None else bias[expert] for bias in layer.biases)
        pairs: Pairs = {} if lora is None or lora[0][token] < 0 else lora[1].pairs[int(lora[0][token])]
        x = hidden[token].bfloat16()
        gate_up = x.float() @ first.T + first_bias + _lora_term(x, pairs, "first", expert)
        h = _activate(gate_up[None], layer.gate, layer.geometry.gated)[0]
        y = h.float() @ down.T + down_bias + _lora_term(h, pairs, "down", expert)
        out[token] += weights[token, choice].float() * y
    return out
