"""SFT wrappers of kt_kernel with random experts and LoRA, and their float32 reference with autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kt_kernel.sft.base import LORA_NAMES
from tests.support.kt_layers import INNER, E, H, layer, weights

RANK, ALPHA = 8, 16.0
CLOSE = 6e-3  # relative, bf16 activations; kt-kernel's own measured 3 to 5e-3


@dataclass(frozen=True)
class SftLayer:
    """A wrapper, its LoRA tensors and its gradient buffers by name."""

    wrapper: Any
    lora: dict[str, Tensor]
    grads: dict[str, Tensor]


def sft_wrapper(method: str = "AMXBF16_SFT", **changes: Any) -> Any:
    return layer(**({"mode": "sft", "method": method, "lora_rank": RANK, "lora_alpha": ALPHA} | changes))


def lora_tensors(seed: int = 5) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    first = [(E, RANK, H), (E, INNER, RANK)]
    shapes = [*first, *first, (E, RANK, INNER), (E, H, RANK)]
    return {
        name: (torch.randn(shape, generator=chance) * 0.1).bfloat16()
        for name, shape in zip(LORA_NAMES, shapes, strict=True)
    }


def sft_layer(method: str = "AMXBF16_SFT", **changes: Any) -> SftLayer:
    wrapper = sft_wrapper(method, **changes)
    wrapper.load_weights_from_tensors(*weights(), torch.arange(E))
    lora = lora_tensors()
    grads = {name: torch.full_like(tensor, 7.0) for name, tensor in lora.items()}
    wrapper.init_lora_weights(*lora.values(), *grads.values())
    return SftLayer(wrapper, lora, grads)


def reference_pass(
    layer: SftLayer, hidden: Tensor, ids: Tensor, scores: Tensor, grad_out: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients in float32: of "hidden", "weights" and the six LoRA tensors, from the store's weights."""
    wrapper = layer.wrapper
    inputs = {"hidden": hidden, "weights": scores, **layer.lora}
    leaves = {name: tensor.detach().float().requires_grad_() for name, tensor in inputs.items()}
    x, scale = leaves["hidden"], wrapper.lora_alpha / wrapper.lora_rank
    out = torch.zeros(hidden.shape, dtype=torch.float32)

    def product(role: str, expert: int, rows: Tensor) -> Tensor:
        base = wrapper.store.decode(role, expert).float()
        low = rows @ leaves[f"{role}_lora_a"][expert].T
        return rows @ base.T + scale * low @ leaves[f"{role}_lora_b"][expert].T

    for expert in range(wrapper.num_gpu_experts, E):
        token, slot = torch.where(ids == expert)
        rows = x[token]
        inner = torch.nn.functional.silu(product("gate", expert, rows)) * product("up", expert, rows)
        out = out.index_add(0, token, product("down", expert, inner) * leaves["weights"][token, slot, None])
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.float())
    return out.detach(), dict(zip(leaves, grads, strict=True))
