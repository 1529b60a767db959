"""`KTMoEFunction`: the experts of an `AMXSFTMoEWrapper` in autograd, with kt-kernel's list of arguments.

Hidden states `[..., H]`, ids and routing weights `[..., K]`. Gradients of hidden states and routing weights are
returned; those of the LoRA tensors go into the wrapper's buffers. What backward needs are saved tensors of the
function, so torch's non-reentrant checkpointing drops them after the first pass and takes them from the recomputation.
With `cache_checkpoint_forward` the first pass leaves its output and these tensors with the wrapper, and a recomputation
with `reuse_cached_forward` takes them instead of computing the experts again. Every process computes its own tokens:
`all_qlens` is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kt_kernel.sft.base import FROZEN
from kt_kernel.sft.runtime import KTAMXNotAvailableError

ARGUMENTS = 16


class KTMoEFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        wrapper: Any,
        lora_ref: Tensor | None,  # a parameter that requires a gradient makes autograd call backward
        hidden_size: int,
        num_experts_per_tok: int,
        layer_idx: int,
        training: bool,
        train_lora: bool,
        all_qlens: list[int] | None,
        cache_checkpoint_forward: bool = False,
        reuse_cached_forward: bool = False,
        gate_proj: Tensor | None = None,
        up_proj: Tensor | None = None,
        down_proj: Tensor | None = None,
    ) -> Tensor:
        if any(matrix is not None for matrix in (gate_proj, up_proj, down_proj)):
            raise KTAMXNotAvailableError("KTMoEFunction", "base weights to train", "None", FROZEN)
        if reuse_cached_forward:
            wrapper.validate_checkpoint_output(hidden.bfloat16())
            out: Tensor = wrapper.get_checkpoint_output()
            wrapper.clear_checkpoint_output()
        else:
            out = wrapper.forward(hidden, topk_ids, topk_weights, training)
        if training:
            saved = wrapper.saved[-1] if cache_checkpoint_forward else wrapper.saved.pop()
            ctx.save_for_backward(saved.hidden, saved.ids, saved.weights, saved.keep)
            ctx.saved_forward = replace(saved, **dict.fromkeys(("hidden", "ids", "weights", "keep")))
            ctx.wrapper, ctx.weights_like = wrapper, (topk_weights.shape, topk_weights.dtype)
        if cache_checkpoint_forward:
            wrapper.cache_checkpoint_output(out)
        return out.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, ids, weights, keep = ctx.saved_tensors
        wrapper, (shape, dtype) = ctx.wrapper, ctx.weights_like
        wrapper.saved.append(replace(ctx.saved_forward, hidden=hidden, ids=ids, weights=weights, keep=keep))
        grad_hidden, grad_weights = wrapper.backward(grads[0])
        rest = (None,) * (ARGUMENTS - 3)
        return grad_hidden.to(grads[0].dtype), None, grad_weights.view(shape).to(dtype), *rest
