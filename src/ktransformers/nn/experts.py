"""Experts implementation "kt" of stock transformers: the function, and stores for the modules that it serves.

transformers calls `experts_forward(module, hidden, ids, weights)` for every layer whose config says "kt". The module's
`kt_store` holds its packed experts; a module that still has its own parameters is packed when first called. Packed
parameters are frozen: the store is a copy, and no gradient reaches them. Where the copy is to be the only one, ghosts
take the place of the matrices, so that PEFT finds them. Hidden states on a GPU come down, are computed here and go up
again (`nn/transfer.py`), or are left to the placement engine where a model was given one (`place/`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ktransformers import _core
from ktransformers.checkpoint import Encoded, ExpertChunk
from ktransformers.checkpoint.sources import LayerSource
from ktransformers.errors import InputError
from ktransformers.nn.contract import IMPLEMENTATION, Contract, expert_modules, read_contract
from ktransformers.nn.distributed import active_ddp, follow
from ktransformers.nn.mixed_lora import mixed_lora
from ktransformers.nn.operator import apply_experts, placed_for
from ktransformers.nn.padding import without_padding
from ktransformers.nn.peft_lora import read_lora
from ktransformers.nn.placeholder import frozen_ghost
from ktransformers.nn.store import ExpertStore


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`[T, H]`, `[T, k]`, `[T, k]` -> `[T, H]` on the device and in the dtype of the hidden states."""
    store = module.kt_store if hasattr(module, "kt_store") else pack_module(module)
    assert isinstance(store, ExpertStore) and isinstance(module.kt_contract, Contract)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            given = f"requires_grad on {name}"
            raise InputError(type(module).__name__, given, "packed experts to be frozen", "train LoRA on them instead")
    top_k_index = without_padding(top_k_index)
    lora = read_lora(module, module.kt_contract)
    if lora is not None and torch.is_grad_enabled() and (ddp := active_ddp()) is not None:
        follow(ddp)
    if (served := mixed_lora(module)) is not None:
        placed = placed_for(store, hidden_states.device)
        if placed is not None and served.factors:
            return placed.several(hidden_states, top_k_index, top_k_weights, served)
        inputs = (hidden_states.cpu(), top_k_index.cpu(), top_k_weights.cpu())
        return store.forward(*inputs, adapter=served.rows, adapters=served.adapters).to(hidden_states.device)
    return apply_experts(store, hidden_states, top_k_index, top_k_weights, lora=lora, training=module.training)


def register() -> None:
    """Make "kt" known to transformers; importing this module has done it already."""
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def new_store(
    contract: Contract,
    *,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
    formats: str | Mapping[str, str] = "bf16",
) -> ExpertStore:
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
        precision=precision,
        formats=formats,
    )


def pack_layer(
    contract: Contract,
    experts: LayerSource,
    *,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
) -> ExpertStore:
    """A store with the layer's experts in the formats that its files have."""
    store = new_store(contract, pool=pool, isa=isa, precision=precision, formats=experts.formats)
    for piece in experts.pieces():
        pack_piece(store, contract, piece)
    return store


def pack_piece(store: ExpertStore, contract: Contract, piece: ExpertChunk) -> None:
    store.pack(
        **piece.tensors,  # type: ignore[arg-type]  # roles are the names of pack's arguments
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
    precision: str = "bf16",
) -> ExpertStore:
    """Pack the module's own parameters into `module.kt_store`; `free` lets go of them, otherwise they are frozen."""
    contract = read_contract(name, module)
    store = new_store(contract, pool=pool, isa=isa, precision=precision)
    parameters = {role: module.get_parameter(parameter) for role, parameter in contract.parameters().items()}
    for expert in range(contract.shape.num_experts):
        tensors: dict[str, Tensor | Encoded] = {
            role: tensor[expert].detach().cpu() for role, tensor in parameters.items()
        }
        pack_piece(store, contract, ExpertChunk(expert, True, tensors))
    if free:
        settle(module, contract, store, strip(module, contract))
    else:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        settle(module, contract, store, {})
    return store


def strip(module: nn.Module, contract: Contract) -> dict[str, torch.dtype]:
    """Take the experts' parameters away; the dtypes of their matrices by name, for `settle`."""
    dtypes = {}
    for role, parameter in contract.parameters().items():
        if not role.endswith("_bias"):
            dtypes[parameter] = module.get_parameter(parameter).dtype
        delattr(module, parameter)
    return dtypes


def settle(module: nn.Module, contract: Contract, store: ExpertStore, ghosts: dict[str, torch.dtype]) -> None:
    """Give the module its packed experts, and ghosts in place of the matrices that were stripped."""
    shapes = contract.shape.fused()
    for role, parameter in contract.parameters().items():
        if parameter in ghosts:
            module.register_parameter(parameter, frozen_ghost(shapes[role], ghosts[parameter]))
    module.kt_store, module.kt_contract = store, contract  # type: ignore[assignment]


def select(model: PreTrainedModel) -> None:
    """Let every expert layer of the model be computed by "kt"."""
    with contextlib.suppress(ValueError):  # transformers 5.6 and older know their own names only
        model.set_experts_implementation(IMPLEMENTATION)
    for module in expert_modules(model).values():
        config: Any = module.config
        config._experts_implementation_internal = IMPLEMENTATION


register()
