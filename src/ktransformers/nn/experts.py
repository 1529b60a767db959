"""Experts implementation "kt" of stock transformers: the function, and stores for the modules that it serves.

transformers calls `experts_forward(module, hidden, ids, weights)` for every layer whose config says "kt". The module's
`kt_store` holds its packed experts; a module that still has its own parameters is packed when first called. Packed
parameters are frozen: the store is a copy, and no gradient reaches them. Hidden states on a GPU come down, are computed
here and go up again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ktransformers import _core
from ktransformers.checkpoint import Piece
from ktransformers.nn.contract import Contract, expert_modules, read_contract
from ktransformers.nn.operator import apply_experts
from ktransformers.nn.store import ExpertStore

IMPLEMENTATION = "kt"


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`[T, H]`, `[T, k]`, `[T, k]` -> `[T, H]` on the device and in the dtype of the hidden states."""
    store = module.kt_store if hasattr(module, "kt_store") else pack_module(module)
    assert isinstance(store, ExpertStore)
    device = hidden_states.device
    if device.type == "cpu":
        return apply_experts(store, hidden_states, top_k_index, top_k_weights)
    return apply_experts(store, hidden_states.cpu(), top_k_index.cpu(), top_k_weights.cpu()).to(device)


def register() -> None:
    """Make "kt" known to transformers; importing this module has done it already."""
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def new_store(contract: Contract, *, pool: _core.Pool | None = None, isa: str | None = None) -> ExpertStore:
    """An empty store for experts of this kind."""
    shape, gate = contract.shape, contract.gate
    return ExpertStore(
        shape.num_experts,
        shape.hidden,
        shape.intermediate,
        gated=shape.gated,
        activation=gate.activation,
        limit=gate.limit,
        alpha=gate.alpha,
        pool=pool,
        isa=isa,
    )


def pack_piece(store: ExpertStore, contract: Contract, piece: Piece) -> None:
    store.pack(
        **piece.tensors,  # roles are the names of pack's arguments
        transposed=piece.fused and contract.shape.transposed,
        interleaved=piece.fused and contract.interleaved,
        first_expert=piece.first_expert,
    )


def pack_module(
    module: nn.Module,
    *,
    name: str = "",
    free: bool = False,
    pool: _core.Pool | None = None,
    isa: str | None = None,
) -> ExpertStore:
    """Pack the module's own parameters into `module.kt_store`; `free` removes them, otherwise they are frozen."""
    contract = read_contract(name, module)
    store = new_store(contract, pool=pool, isa=isa)
    parameters = {role: module.get_parameter(parameter) for role, parameter in contract.parameters().items()}
    for expert in range(contract.shape.num_experts):
        tensors = {role: tensor[expert].detach().cpu() for role, tensor in parameters.items()}
        pack_piece(store, contract, Piece(expert, True, tensors))
    for parameter in contract.parameters().values():
        if free:
            delattr(module, parameter)
        else:
            module.get_parameter(parameter).requires_grad_(False)
    module.kt_store = store  # type: ignore[assignment]
    return store


def select(model: PreTrainedModel) -> None:
    """Let every expert layer of the model be computed by "kt"."""
    with contextlib.suppress(ValueError):  # transformers 5.6 and older know their own names only
        model.set_experts_implementation(IMPLEMENTATION)
    for module in expert_modules(model).values():
        config: Any = module.config
        config._experts_implementation_internal = IMPLEMENTATION


register()
