"""Host memory that batches are copied into on their way to the experts, and results on their way back.

A batch of T tokens uses the first T rows of buffers that hold as many tokens as the largest batch: so the addresses of
a size never change, whether it was announced or not, and a captured CUDA graph may be replayed at any time. There are
two sets, for layers with even and odd numbers, because deferred experts of a layer still read their inputs while those
of the next layer arrive. Calls are ordered by the caller's stream. The memory is pinned where there is a CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

DEPTH = 2  # sets of buffers: even and odd layers
ID_BYTES, WEIGHT_BYTES = 8, 4  # of the widest dtypes


@dataclass(frozen=True)
class BufferKey:
    device: torch.device
    hidden: int
    top_k: int
    item_bytes: int = 2  # of a value of the hidden states
    deferred: bool = False  # with buffers for deferred experts


@dataclass(frozen=True)
class BatchBuffers:
    """Bytes for the largest batch, or views of them for one batch."""

    hidden: Tensor  # [T, H]
    ids: Tensor  # [T, k]
    weights: Tensor  # [T, k]
    out: Tensor  # [T, H]
    deferred_ids: Tensor  # [T, k]; empty unless experts are deferred
    deferred_out: Tensor  # [T, H]; likewise

    @classmethod
    def allocate(cls, key: BufferKey, capacity: int) -> BatchBuffers:
        row, ids, later = key.hidden * key.item_bytes, key.top_k * ID_BYTES, int(key.deferred)
        widths = (row, ids, key.top_k * WEIGHT_BYTES, row, later * ids, later * row)
        options: Any = {"dtype": torch.uint8, "device": "cpu", "pin_memory": key.device.type == "cuda"}
        return cls(*(torch.empty(capacity * width, **options) for width in widths))

    def views(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> BatchBuffers:
        """For a batch of this shape and these dtypes."""

        def rows(buffer: Tensor, like: Tensor) -> Tensor:
            used = buffer[: like.numel() * like.element_size()].view(like.dtype)
            return used.view(like.shape) if len(used) == like.numel() else used

        return BatchBuffers(
            rows(self.hidden, hidden),
            rows(self.ids, ids),
            rows(self.weights, weights),
            rows(self.out, hidden),
            rows(self.deferred_ids, ids),
            rows(self.deferred_out, hidden),
        )


class KExpertsCPUBuffer:
    """The buffers of this process, and the batch sizes that were announced for capture."""

    buffer_depth: ClassVar[int] = DEPTH
    capture_bs: ClassVar[list[int]] = []
    _sets: ClassVar[dict[BufferKey, list[BatchBuffers]]] = {}
    _replaced: ClassVar[list[list[BatchBuffers]]] = []  # smaller ones, to which captured graphs may still refer

    @classmethod
    def holds(cls, key: BufferKey, capacity: int) -> bool:
        return key in cls._sets and len(cls._sets[key][0].hidden) >= capacity * key.hidden * key.item_bytes

    @classmethod
    def reserve(cls, key: BufferKey, capacity: int) -> list[BatchBuffers]:
        """Both sets, for at least `capacity` tokens."""
        if not cls.holds(key, capacity):
            if smaller := cls._sets.get(key):
                cls._replaced.append(smaller)
            with torch.inference_mode(False):  # they are also written outside of inference mode
                cls._sets[key] = [BatchBuffers.allocate(key, capacity) for _ in range(DEPTH)]
        return cls._sets[key]

    @classmethod
    def get_buffer(cls, hidden_states: Tensor, num_experts_per_tok: int) -> tuple[list[Tensor], ...]:
        """kt-kernel's tuple of lists with one tensor for each set: hidden states, ids, deferred ids, weights and output
        in host memory, batch size, and an output on the device."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens = hidden.shape[0]
        ids = torch.empty(tokens, num_experts_per_tok, dtype=torch.int64, device="meta")
        weights = torch.empty(tokens, num_experts_per_tok, dtype=torch.float32, device="meta")
        key = BufferKey(hidden.device, hidden.shape[1], num_experts_per_tok, hidden.element_size(), deferred=True)
        both = [one.views(hidden, ids, weights) for one in cls.reserve(key, tokens)]
        for views in both:
            views.deferred_ids.fill_(-1)
        size = [torch.tensor([tokens], dtype=torch.int32, device="cpu") for _ in both]
        on_device = [torch.empty_like(hidden) for _ in both]
        names = ("hidden", "ids", "deferred_ids", "weights", "out")
        return (*([getattr(views, name) for views in both] for name in names), size, on_device)

    @classmethod
    def clear_cache(cls) -> None:
        """Free everything; no captured graph is replayed any more."""
        cls._sets.clear()
        cls._replaced.clear()
        cls.capture_bs = []
