"""A layer whose experts are all resident, for a batch of any size, without the host waiting for expert ids: so that a
CUDA graph can hold a step with a prompt.

Few tokens are multiplied with packed experts (`resident_decode.py`). Here there are so many that every expert has rows:
the packed experts are decoded into bf16 buffers that all layers share, rows are sorted by expert on the device, and
grouped products multiply them (`grouped_mlp.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ktransformers.experts.backend import ExpertBatch
from ktransformers.place.gpu import grouped_mlp
from ktransformers.place.gpu.executor import LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.grouped_mlp import ALIGN, Decoded, GroupedRows
from ktransformers.place.gpu.resident_decode import DeviceRouting
from ktransformers.quantized.gpu.dequantize import decode

# Decoded matrices by name, number of experts, rows and columns.
Buffers = Callable[[str, int, int, int], Tensor]


def supports(layer: LayerOnDevice, batch: ExpertBatch) -> bool:
    geometry, device = layer.geometry, batch.hidden.device
    aligned = geometry.hidden % ALIGN == 0 == geometry.intermediate % ALIGN
    return aligned and batch.mixed is None and (device.type == "cpu" or grouped_mlp.is_capturable(device))


def forward(
    layer: LayerOnDevice, cache: ExpertCache, routing: DeviceRouting, hidden: Tensor, buffers: Buffers
) -> Tensor:
    """`[T, H]` in hidden's dtype."""
    geometry, (first_bias, down_bias) = layer.geometry, layer.biases
    first = buffers("first", geometry.experts, geometry.first.out_rows, geometry.hidden)
    down = buffers("down", geometry.experts, geometry.hidden, geometry.intermediate)
    slots = () if hidden.is_cuda else routing.slot_of.tolist()
    for packed, matrix, decoded in ((cache.first, geometry.first, first), (cache.down, geometry.down, down)):
        decode(packed, slots, routing.slot_of, matrix, decoded)
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    rows, weights = _sorted_rows(routing, geometry.experts), Decoded(first, down, first_bias, down_bias)
    routing.counts.add_(rows.ends.diff(prepend=torch.zeros_like(rows.ends[:1])))
    grouped_mlp.forward(hidden, rows, weights, layer.gate, out)
    return out.to(hidden.dtype)


def _sorted_rows(routing: DeviceRouting, experts: int) -> GroupedRows:
    """Rows in the order of their experts; those of padding tokens lie behind all others."""
    ids = routing.ids.reshape(-1)
    keys, order = torch.sort(torch.where((ids < 0) | (ids >= experts), experts, ids), stable=True)
    numbers = torch.arange(experts, device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    weights = routing.weights.reshape(-1).float()[order]
    return GroupedRows(order // routing.ids.shape[1], weights, ends, ends[-1:])
