"""Layers of experts behind `kt_kernel.KTMoEWrapper` with random weights, batches for them, and a reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kt_kernel import KTMoEWrapper

E, K, H, INNER = 8, 3, 256, 256
CLOSE = 0.01  # relative: bf16 activations


def layer(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "layer_idx": 0,
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        "gpu_experts_mask": None,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "weight_path": "",
        "chunked_prefill_size": 16,
        "method": "BF16",
    }
    return KTMoEWrapper(**(given | changes))


def weights(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = ((E, INNER, H), (E, INNER, H), (E, H, INNER))
    gate, up, down = ((torch.randn(shape, generator=chance) / 16).bfloat16() for shape in shapes)
    return gate, up, down


def loaded(method: str = "BF16", seed: int = 0, **changes: Any) -> Any:
    wrapper = layer(method=method, **changes)
    wrapper.load_weights_from_tensors(*weights(seed), torch.arange(E))
    return wrapper


def batch(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=chance).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=chance)[:K] for _ in range(tokens)])
    return hidden, ids, torch.rand(tokens, K, generator=chance)


def reference(wrapper: Any, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """In float32, from the weights of the store."""
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for token in range(hidden.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if not 0 <= expert < E or wrapper.gpu_experts_mask[expert]:
                continue
            gate, up, down = (wrapper.moe.decode(role, expert).float() for role in ("gate", "up", "down"))
            x = hidden[token].float()
            out[token] += scores[token, slot] * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    return out


def error(given: Tensor, expected: Tensor) -> float:
    return float((given.float() - expected.float()).norm() / expected.float().norm())
