"""The experts implementation "kt" of stock transformers: its forward function, and packing of its modules.

transformers calls `experts_forward(module, hidden, ids, weights)` for every layer whose config says "kt". A module with
packed experts has a `KtExperts`, `module.kt` (`experts/backend.py`); one that still has its own parameters is packed at
its first call. Packed parameters are frozen: the store is a copy, and no gradient reaches them. If the copy is to be
the only one, placeholders replace the matrices, because PEFT looks up its targets among a module's parameters.

A decode step that runs as a CUDA graph has a fixed number of rows, of which some are padding. Routers choose experts
for padding too, so its ids become -1 here, and every kernel skips -1. The ContextVar `_real_rows` carries the mask,
bool `[T]` on the device of the hidden states and in their order, and -1 on that device, from the code that runs the
model past the stock model. It is a tensor rather than a count, because a captured graph then serves any number of real
rows up to its size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ktransformers import _core
from ktransformers.checkpoint import Encoded, ExpertChunk
from ktransformers.checkpoint.sources import LayerSource
from ktransformers.experts.backend import KtExperts, packed_experts
from ktransformers.experts.contract import IMPLEMENTATION, Contract, expert_modules, new_store, read_contract
from ktransformers.experts.lora import current_mixed_lora
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.peft_lora import read_lora
from ktransformers.experts.placeholder import frozen_placeholder
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`[T, H]`, `[T, k]`, `[T, k]` -> `[T, H]` on the device and in the dtype of the hidden states."""
    kt, mixed = experts_of(module), current_mixed_lora(module)
    lora = read_lora(module, kt) if mixed is None else None
    backend, inputs = kt.backend_for(hidden_states.device, mixed), (hidden_states, mask_padding(top_k_index))
    return apply_experts(backend, *inputs, top_k_weights, lora=lora, mixed=mixed, training=module.training)


def experts_of(module: nn.Module) -> KtExperts:
    """`module.kt`; a module that still has its own parameters is packed."""
    kt = packed_experts(module) or pack_module(module)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            given = f"requires_grad on {name}"
            raise InputError(type(module).__name__, given, "packed experts to be frozen", "train LoRA on them instead")
    return kt


_real_rows: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("real_rows", default=None)


@contextmanager
def use_padding_mask(real_rows: Tensor) -> Iterator[None]:
    """While the model is called: rows with `real_rows[t]` False are padding."""
    nowhere = torch.full((), -1, device=real_rows.device)  # `where` would make a tensor of a number in every layer
    token = _real_rows.set((real_rows, nowhere))
    try:
        yield
    finally:
        _real_rows.reset(token)


def mask_padding(ids: Tensor) -> Tensor:
    """Expert ids `[T, k]` with -1 in padding rows; unchanged outside of `use_padding_mask`."""
    padding = _real_rows.get()
    return ids if padding is None else torch.where(padding[0][:, None], ids, padding[1])


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
) -> KtExperts:
    """Pack the module's own parameters. With `free` they are removed, otherwise frozen."""
    contract = read_contract(name, module)
    store = new_store(contract, pool=pool, isa=isa, precision=precision)
    parameters = {role: module.get_parameter(parameter) for role, parameter in contract.parameters().items()}
    for expert in range(contract.shape.num_experts):
        tensors: dict[str, Tensor | Encoded] = {
            role: tensor[expert].detach().cpu() for role, tensor in parameters.items()
        }
        pack_chunk(store, contract, ExpertChunk(expert, True, tensors))
    if free:
        return attach_store(module, contract, store, remove_parameters(module, contract))
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    return attach_store(module, contract, store, {})


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
) -> KtExperts:
    """Give the module its packed experts, `module.kt`, and placeholders for the matrices that `remove_parameters`
    removed. With a `shard` the store holds the shard's experts alone, and is None if there are none; placeholders have
    the shapes of all experts."""
    shapes = contract.shape.fused()
    for role, parameter in contract.parameters().items():
        if parameter in removed:
            module.register_parameter(parameter, frozen_placeholder(shapes[role], removed[parameter]))
    kt = KtExperts(contract, store, shard)
    module.kt = kt  # type: ignore[assignment]
    return kt


def select_implementation(model: PreTrainedModel) -> None:
    """Dispatch every expert layer of the model to "kt"."""
    with contextlib.suppress(ValueError):  # transformers 5.6 and older accept only built-in names
        model.set_experts_implementation(IMPLEMENTATION)
    for module in expert_modules(model).values():
        config: Any = module.config
        config._experts_implementation_internal = IMPLEMENTATION


register()
