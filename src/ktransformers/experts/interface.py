"""The experts implementation "kt" of stock transformers: its forward function, and the stores of its modules.

transformers calls `experts_forward(module, hidden, ids, weights)` for every layer whose config says "kt". The module's
`kt_store` holds its packed experts; a module that still has its own parameters is packed at its first call. Packed
parameters are frozen: the store is a copy, and no gradient reaches them. If the copy is to be the only one,
placeholders replace the matrices, because PEFT looks up its targets among a module's parameters. Hidden states on a GPU
are copied to the host and the output back (`experts/transfer.py`), unless the placement engine (`place/`) has taken
over the store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ktransformers import _core
from ktransformers.checkpoint import Encoded, ExpertChunk
from ktransformers.checkpoint.sources import LayerSource
from ktransformers.experts.contract import IMPLEMENTATION, Contract, expert_modules, new_store, read_contract
from ktransformers.experts.mixed_lora import MixedLora, current_mixed_lora
from ktransformers.experts.operator import apply_experts, placed_for
from ktransformers.experts.padding import mask_padding
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.peft_lora import read_lora
from ktransformers.experts.placeholder import frozen_placeholder
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.parallel.distributed import active_ddp, attach_to_ddp
from ktransformers.parallel.exchange import LayerExchange, apply_exchanged


class RemoteExperts(Protocol):
    """Computes a layer in inference with experts of several hosts (`serve/hosts`); the module's `kt_remote`."""

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor, mixed: MixedLora | None) -> Tensor: ...


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`[T, H]`, `[T, k]`, `[T, k]` -> `[T, H]` on the device and in the dtype of the hidden states."""
    store = module.kt_store if hasattr(module, "kt_store") else pack_module(module)
    remote: RemoteExperts | None = getattr(module, "kt_remote", None)
    if remote is not None:
        return remote.forward(hidden_states, mask_padding(top_k_index), top_k_weights, current_mixed_lora(module))
    exchange: LayerExchange | None = getattr(module, "kt_exchange", None)
    if exchange is None and hasattr(module, "kt_shard"):
        given = "a part of the experts, without the ranks that hold the others"
        raise InputError(
            type(module).__name__, given, "a connected group of ranks", "call connect (parallel/exchange.py)"
        )
    assert isinstance(module.kt_contract, Contract)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            given = f"requires_grad on {name}"
            raise InputError(type(module).__name__, given, "packed experts to be frozen", "train LoRA on them instead")
    top_k_index = mask_padding(top_k_index)
    lora = read_lora(module, module.kt_contract)
    if lora is not None and torch.is_grad_enabled() and (ddp := active_ddp()) is not None:
        attach_to_ddp(ddp)
    if exchange is not None:
        inputs = (hidden_states, top_k_index, top_k_weights)
        return apply_exchanged(exchange, *inputs, lora=lora, training=module.training)
    assert isinstance(store, ExpertStore)
    if (mixed := current_mixed_lora(module)) is not None:
        placed = placed_for(store, hidden_states.device)
        if placed is not None and mixed.factors:
            return placed.forward_mixed(hidden_states, top_k_index, top_k_weights, mixed)
        inputs = (hidden_states.cpu(), top_k_index.cpu(), top_k_weights.cpu())
        return store.forward(*inputs, adapter=mixed.rows, adapters=mixed.adapters).to(hidden_states.device)
    return apply_experts(store, hidden_states, top_k_index, top_k_weights, lora=lora, training=module.training)


def register() -> None:
    """Register "kt" with transformers; importing this module does it."""
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def pack_layer(
    contract: Contract,
    experts: LayerSource,
    *,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
    only: Sequence[int] | None = None,
) -> ExpertStore:
    """A store with the layer's experts, in the formats of its files. With `only` it holds these, in this order, and the
    bytes of the others are not read."""
    options: Any = {"pool": pool, "isa": isa, "precision": precision, "formats": experts.formats}
    if only is None:
        store = new_store(contract, **options)
        for chunk in experts.chunks():
            pack_chunk(store, contract, chunk)
        return store
    store = new_store(contract, **options, experts=len(only))
    for position, chunk in enumerate(experts.chunks(only)):
        pack_chunk(store, contract, replace(chunk, first_expert=position))
    return store


def pack_chunk(store: ExpertStore, contract: Contract, chunk: ExpertChunk) -> None:
    store.pack(
        **chunk.tensors,  # type: ignore[arg-type]  # roles are the names of pack's arguments
        transposed=chunk.fused and contract.shape.transposed,
        interleaved=chunk.fused and contract.interleaved,
        first_expert=chunk.first_expert,
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
    """Pack the module's own parameters into `module.kt_store`. With `free` they are removed, otherwise frozen."""
    contract = read_contract(name, module)
    store = new_store(contract, pool=pool, isa=isa, precision=precision)
    parameters = {role: module.get_parameter(parameter) for role, parameter in contract.parameters().items()}
    for expert in range(contract.shape.num_experts):
        tensors: dict[str, Tensor | Encoded] = {
            role: tensor[expert].detach().cpu() for role, tensor in parameters.items()
        }
        pack_chunk(store, contract, ExpertChunk(expert, True, tensors))
    if free:
        attach_store(module, contract, store, remove_parameters(module, contract))
    else:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        attach_store(module, contract, store, {})
    return store


def remove_parameters(module: nn.Module, contract: Contract) -> dict[str, torch.dtype]:
    """Remove the experts' parameters. Returns name -> dtype of the matrices, the argument of `attach_store`."""
    dtypes = {}
    for role, parameter in contract.parameters().items():
        if not role.endswith("_bias"):
            dtypes[parameter] = module.get_parameter(parameter).dtype
        delattr(module, parameter)
    return dtypes


def attach_store(
    module: nn.Module,
    contract: Contract,
    store: ExpertStore | None,
    removed: dict[str, torch.dtype],
    shard: LayerShard | None = None,
) -> None:
    """Give the module its packed experts, and placeholders for the matrices that `remove_parameters` removed. With a
    `shard` the store holds the shard's experts alone, and is None if there are none; placeholders have the shapes of
    all experts."""
    shapes = contract.shape.fused()
    for role, parameter in contract.parameters().items():
        if parameter in removed:
            module.register_parameter(parameter, frozen_placeholder(shapes[role], removed[parameter]))
    module.kt_store, module.kt_contract = store, contract  # type: ignore[assignment]
    if shard is not None:
        module.kt_shard = shard  # type: ignore[assignment]


def select_implementation(model: PreTrainedModel) -> None:
    """Dispatch every expert layer of the model to "kt"."""
    with contextlib.suppress(ValueError):  # transformers 5.6 and older accept only built-in names
        model.set_experts_implementation(IMPLEMENTATION)
    for module in expert_modules(model).values():
        config: Any = module.config
        config._experts_implementation_internal = IMPLEMENTATION


register()
