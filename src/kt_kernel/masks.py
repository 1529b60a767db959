"""Which experts are computed on the GPU, from counts of their use."""

from __future__ import annotations

import torch
from torch import Tensor


def generate_gpu_experts_masks(activation_freq: Tensor, num_gpu_experts: int) -> Tensor:
    """Bool `[layers, E]` in host memory, True for the `num_gpu_experts` most frequent experts of all layers together;
    `activation_freq` is a table of numbers `[layers, E]`. Layers may get unequal counts."""
    counts = activation_freq.detach().cpu().flatten()
    kept = min(max(int(num_gpu_experts), 0), counts.numel())
    masks = torch.zeros(counts.numel(), dtype=torch.bool, device="cpu")
    masks[torch.topk(counts, kept).indices] = True
    return masks.view(activation_freq.shape)
