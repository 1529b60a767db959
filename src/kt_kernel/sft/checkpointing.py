"""Gradient checkpointing of models with packed experts: the `context_fn` for `torch.utils.checkpoint`, and the policy.

Non-reentrant checkpointing is correct with or without this function: the expert operator is recomputed like any other,
and dropout draws its seed from torch's generator, whose state torch restores. With the function, a layer whose policy
is cpu=retain replays the outputs of its first pass instead of computing the experts again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from kt_kernel.sft.config import KTActivationPolicy
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.checkpointing import recompute_experts, save_expert_outputs
from ktransformers.experts.contract import expert_modules

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def get_activation_checkpoint_context_fn() -> Callable[[], Contexts]:
    """The `context_fn`: `checkpoint(block, x, use_reentrant=False, context_fn=get_activation_checkpoint_context_fn())`.
    Which layers retain their experts' outputs is set by `set_activation_policy`, which wrapping a model calls."""
    return save_expert_outputs


def set_activation_policy(model: nn.Module, policy: KTActivationPolicy) -> None:
    """Retain or recompute the outputs of all packed experts of the model in checkpointed blocks."""
    for module in expert_modules(model).values():
        if (kt := packed_experts(module)) is not None:
            recompute_experts(kt.store, policy.cpu == "recompute")
