"""Expert parallelism: the ranks of a group hold different experts of every layer, and rows travel to the ranks that
have their experts.

Each rank calls a layer with its own rows: hidden `[T, H]`, ids and weights `[T, k]`, T different on every rank and
possibly 0. A row goes once to every rank that holds at least one of its k experts, with the ids (places in that rank's
store, -1 for experts of other ranks) and weights of all its routes; that rank computes the weighted sum over its
experts, and the sums of all ranks are added where the row came from. Forward is three all-to-all exchanges (counts,
rows, sums) and backward two (gradients of the sums, then of rows and weights), in host memory over gloo. Rows travel in
the dtype of the hidden states and sums are added in float32 (float64 for float64), so in bf16 a token's result is
rounded once for each rank that contributes, where a single process rounds once. `plan/exchange.py` counts the bytes.

Forward and backward of a layer are one operator, so that every rank enters the exchanges in the same order whatever
rows it has: no exchange depends on data, and activation checkpointing either replays the operator's outputs (nothing
travels in a recomputation) or runs all of it again, on all ranks alike. Gradients of the expert LoRA stay on the rank
that holds the expert. The rows of all ranks contribute to them, and they are divided by the number of ranks: what is
differentiated is the mean of the ranks' losses, as by DDP for all other parameters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ktransformers.experts.checkpointing import compute_or_replay
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.lora import ExpertLora
from ktransformers.experts.lora_factors import (
    LoraFactors,
    empty_gradients,
    factors_of,
    match_factor_strides,
    packed_adapter,
)
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.store import Dropout, ExpertStore
from ktransformers.experts.transfer import to_device, to_host
from ktransformers.ground.errors import InputError

FIELD_ALIGNMENT = 8  # bytes; hidden states, weights and places of a row each begin at a multiple of it


@dataclass(frozen=True, eq=False)
class ExpertGroup:
    """The ranks that divide the experts of one model, and those that hold the same experts in other such groups."""

    members: Any  # process group of this rank's expert-parallel group, with a CPU backend
    replicas: Any | None  # process group of the ranks with the same experts; None: this rank is the only one
    rank: int  # in `members`
    ranks: int
    world: int  # ranks of all groups

    @property
    def is_first_group(self) -> bool:
        return dist.get_rank() < self.ranks


def new_expert_group(ranks: int) -> ExpertGroup:
    """Divide the world into groups of `ranks` consecutive ranks. A collective call of the whole world."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if ranks < 1 or world % ranks:
        raise InputError("kt_expert_parallel", f"{ranks} with {world} processes", "a divisor of their number")
    members = replicas = None
    for first in range(0, world, ranks):
        group = dist.new_group(list(range(first, first + ranks)), backend="gloo")
        members = group if first <= rank < first + ranks else members
    for place in range(ranks if world > ranks else 0):
        group = dist.new_group(list(range(place, world, ranks)), backend="gloo")
        replicas = group if rank % ranks == place else replicas
    return ExpertGroup(members, replicas, rank % ranks, ranks, world)


class LayerExchange:
    """One layer's experts and the group that holds them all; `store` is None on a rank without experts of the layer."""

    def __init__(self, store: ExpertStore | None, shard: LayerShard, group: ExpertGroup) -> None:
        self.store, self.shard, self.group = store, shard, group
        beyond = shard.ranks  # owner of ids that belong to no expert
        self._owners = torch.tensor([*shard.owners, beyond])
        self._positions = torch.tensor([*shard.positions, -1], dtype=torch.int32)
        self.handle = next(_next_handle)
        _layers[self.handle] = self

    def routes(self, ids: Tensor) -> Routes:
        experts = len(self.shard.owners)
        ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
        owners = self._owners[ids]  # [T, k]
        reached = torch.zeros(ids.shape[0], self.shard.ranks + 1, dtype=torch.bool)
        reached.scatter_(1, owners, True)
        rank, row = reached[:, : self.shard.ranks].T.nonzero(as_tuple=True)
        places = torch.where(owners[row] == rank[:, None], self._positions[ids[row]], -1)
        return Routes(row, places, reached[:, : self.shard.ranks].sum(0))


@dataclass(frozen=True)
class Routes:
    """Where the rows of a batch go: `rows` are their indices, by rank of destination and then ascending; `places`
    `[n, k]` the experts' places in the destination's store, -1 for those of other ranks; `counts` `[ranks]`."""

    rows: Tensor
    places: Tensor
    counts: Tensor


_layers: weakref.WeakValueDictionary[int, LayerExchange] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


def connect(model: nn.Module, group: ExpertGroup) -> None:
    """Let the model's ranks compute each other's experts. A collective call of the group; every rank has loaded its
    part of the same partition."""
    modules = expert_modules(model)
    tables = []
    for name, module in modules.items():
        shard = getattr(module, "kt_shard", None)
        if not isinstance(shard, LayerShard) or (shard.rank, shard.ranks) != (group.rank, group.ranks):
            given = "all experts" if shard is None else f"the experts of rank {shard.rank} of {shard.ranks}"
            raise InputError(name, given, f"those of rank {group.rank} of {group.ranks}", "pass `shard` to load_model")
        tables.append(shard.owners)
    _require_equal(tables, group)
    for module in modules.values():
        layer: Any = module
        layer.kt_exchange = LayerExchange(layer.kt_store, layer.kt_shard, group)


def expert_group(model: nn.Module) -> ExpertGroup | None:
    """The group that divides the model's experts; None: this process holds them all."""
    for module in expert_modules(model).values():
        exchange = getattr(module, "kt_exchange", None)
        if exchange is not None:
            group: ExpertGroup = exchange.group
            return group
    return None


def any_rank(flag: bool, group: ExpertGroup | None) -> bool:
    """Whether the flag is set on any rank of the group. A collective call."""
    if group is None:
        return flag
    flags = torch.tensor([flag], dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group.members)
    return bool(flags)


def _require_equal(tables: list[tuple[int, ...]], group: ExpertGroup) -> None:
    digest = hashlib.sha256(json.dumps(tables).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8)
    others = [torch.empty_like(own) for _ in range(group.ranks)]
    dist.all_gather(others, own, group=group.members)
    different = [rank for rank, other in enumerate(others) if not torch.equal(other, own)]
    if different:
        given = f"another partition of the experts on rank {different[0]} than on rank {group.rank}"
        raise InputError("kt_expert_partition", given, "the same recipe and model on all ranks")


def _aligned(size: int) -> int:
    return -(-size // FIELD_ALIGNMENT) * FIELD_ALIGNMENT


def exchange(fields: Sequence[Tensor], send: list[int], receive: list[int], group: Any) -> list[Tensor]:
    """Rows of every field `[n, w]` to the ranks of the group: the first `send[0]` to rank 0, and so on; returns what
    came, by rank of origin. All fields of a row travel together, in one message per pair of ranks."""
    rows = [field.contiguous() for field in fields]
    sizes = [field.shape[1] * field.element_size() for field in rows]
    widths = [_aligned(size) for size in sizes]
    if sizes == widths and len(rows) == 1:
        packed = rows[0].view(torch.uint8)
    else:
        packed = torch.zeros(rows[0].shape[0], sum(widths), dtype=torch.uint8)
        for begin, size, field in zip(_begins(widths), sizes, rows, strict=True):
            packed[:, begin : begin + size] = field.view(torch.uint8)
    arrived = torch.empty(sum(receive), sum(widths), dtype=torch.uint8)
    _all_to_all(arrived, packed, send, receive, group)
    if sizes == widths and len(rows) == 1:
        return [arrived.view(rows[0].dtype)]
    return [  # copies: the fields are outputs of an operator, which must not share memory
        arrived[:, begin : begin + size].view(field.dtype).clone(memory_format=torch.contiguous_format)
        for begin, size, field in zip(_begins(widths), sizes, rows, strict=True)
    ]


def _all_to_all(arrived: Tensor, packed: Tensor, send: list[int], receive: list[int], group: Any) -> None:
    """Rows of `packed` by rank of destination into rows of `arrived` by rank of origin. Sends and receives of all pairs
    of ranks are in flight together: gloo's own all-to-all uses a link in one direction at a time (docs/log.md)."""
    own, transfers = dist.get_rank(group), []
    for rank, part in enumerate(torch.split(arrived, receive)):
        if rank != own and len(part):
            transfers.append(dist.irecv(part, group=group, group_src=rank))
    for rank, part in enumerate(torch.split(packed, send)):
        if rank == own:
            torch.split(arrived, receive)[own].copy_(part)
        elif len(part):
            transfers.append(dist.isend(part, group=group, group_dst=rank))
    for transfer in transfers:
        transfer.wait()  # type: ignore[union-attr]  # None on ranks outside of the group


def _begins(widths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(widths)][:-1]


def _exchange_counts(counts: Tensor, group: Any) -> Tensor:
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts, group=group)
    return arrived


def _add_rows(rows: Tensor, index: Tensor, tokens: int) -> Tensor:
    """The sum of the rows of each token, in their dtype; added in float32 or better."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(tokens, rows.shape[1], dtype=wide)
    return total.index_add_(0, index, rows.to(wide)).to(rows.dtype)


@dataclass(frozen=True)
class _Lora:
    """What the operators get of the LoRA in addition to its tensors."""

    roles: str
    scales: tuple[float, float, float]
    dropout: Dropout

    def factors(self, tensors: Sequence[Tensor]) -> LoraFactors:
        return LoraFactors(tuple(self.roles.split()), tuple(tensors), self.scales)


def _forward(
    layer: LayerExchange,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    tensors: Sequence[Tensor],
    lora: _Lora,
    retain: bool,
    needs_grad: bool,
) -> tuple[Tensor, ...]:
    """The output; then for backward the arrived rows, places and weights, the counts `[2, ranks]` of rows sent and
    arrived, and gate and up of the arrived rows (empty without `retain`)."""
    group, routes = layer.group.members, layer.routes(ids)
    counts = torch.stack([routes.counts, _exchange_counts(routes.counts, group)])
    send, receive = counts.tolist()
    fields = (hidden[routes.rows], weights[routes.rows], routes.places)
    rows, row_weights, places = exchange(fields, send, receive, group)
    keep = torch.empty(0, dtype=torch.uint8)
    if layer.store is None:
        sums = torch.empty_like(rows)
    else:
        keep = layer.store.new_keep(*places.shape) if retain else keep
        adapters = [packed_adapter(layer.store, lora.factors(tensors))] if tensors else []
        sums = layer.store.forward(
            rows,
            places,
            row_weights,
            keep=keep if retain else None,
            adapters=adapters,
            dropout=lora.dropout,
            needs_grad=needs_grad,
        )
    (returned,) = exchange([sums], receive, send, group)
    return _add_rows(returned, routes.rows, hidden.shape[0]), rows, places, row_weights, counts, keep


@torch.library.custom_op("ktransformers::exchanged_experts", mutates_args=(), device_types="cpu")
def exchanged_experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    lora: Sequence[Tensor],
    layer: int,
    roles: str,
    scales: Sequence[float],
    retain: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    exchanged = _layers[layer]

    def compute() -> tuple[Tensor, ...]:
        options = _options(roles, scales, dropout, seed)
        return _forward(exchanged, hidden, ids, weights, lora, options, retain, needs_grad=True)

    out, rows, places, row_weights, counts, keep = compute_or_replay(compute, exchanged.store or exchanged)
    return out, rows, places, row_weights, counts, keep


def _options(roles: str, scales: Sequence[float], dropout: float, seed: int) -> _Lora:
    gate, up, down = scales
    return _Lora(roles, (gate, up, down), Dropout(dropout, seed))


@torch.library.custom_op("ktransformers::exchanged_experts_backward", mutates_args=(), device_types="cpu")
def exchanged_experts_backward(
    grad_out: Tensor,
    ids: Tensor,
    weights: Tensor,
    rows: Tensor,
    places: Tensor,
    row_weights: Tensor,
    counts: Tensor,
    keep: Tensor,
    lora: Sequence[Tensor],
    layer: int,
    roles: str,
    scales: Sequence[float],
    lora_needs_grad: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of hidden, of weights and, with `lora_needs_grad`, of the factors of this rank's experts, the last
    divided by the number of ranks."""
    exchanged, options = _layers[layer], _options(roles, scales, dropout, seed)
    store, group, routes = exchanged.store, exchanged.group.members, exchanged.routes(ids)
    send, receive = counts.tolist()
    (grad_sums,) = exchange([grad_out[routes.rows]], send, receive, group)
    factors = options.factors(lora)
    grads: list[Tensor] = []
    if store is None:
        grad_rows, grad_row_weights = torch.empty_like(rows), torch.empty_like(row_weights)
        grads = [torch.zeros_like(tensor) for tensor in lora] if lora_needs_grad else []
    else:
        targets = None
        if lora and lora_needs_grad:
            grads, views = empty_gradients(factors)
            targets = [views]
        grad_rows, grad_row_weights = store.backward(
            grad_sums,
            rows,
            places,
            row_weights,
            keep=keep if keep.numel() else None,
            adapters=[packed_adapter(store, factors)] if lora else [],
            factors=targets,
            dropout=options.dropout,
        )
        grads = (
            [grad.div_(exchanged.group.ranks) for grad in match_factor_strides(store, factors, grads)] if grads else []
        )
    fields = (grad_rows, grad_row_weights.to(weights.dtype))
    grad_hidden, grad_weights = exchange(fields, receive, send, group)
    tokens = ids.shape[0]
    return _add_rows(grad_hidden, routes.rows, tokens), _add_rows(grad_weights, routes.rows, tokens), grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, ids, weights, lora, layer, roles, scales, _, dropout, seed = inputs
    ctx.save_for_backward(ids, weights, *output[1:], *lora)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.options, ctx.dropping = (layer, roles, scales), (dropout, seed)
    ctx.factors, ctx.lora_needs_grad = len(lora), any(tensor.requires_grad for tensor in lora)


def _backward(ctx: Any, grad_out: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    ids, weights, rows, places, row_weights, counts, keep, *lora = ctx.saved_tensors
    inputs = (grad_out, ids, weights, rows, places, row_weights, counts, keep, lora)
    grad_hidden, grad_weights, grads = exchanged_experts_backward(
        *inputs, *ctx.options, ctx.lora_needs_grad, *ctx.dropping
    )
    return (grad_hidden, None, grad_weights, grads if ctx.lora_needs_grad else [None] * ctx.factors, *[None] * 6)


exchanged_experts.register_autograd(_backward, setup_context=_save)


def apply_exchanged(
    layer: LayerExchange,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    lora: ExpertLora | None = None,
    retain: bool = True,
    training: bool = False,
) -> Tensor:
    """`apply_experts` for experts that a group of ranks divides; all of its ranks call it, each with its own rows.

    Dropout of LoRA's inputs is a hash of seed, row and column of what arrived at the rank that computes: forward,
    backward and recomputation drop the same elements, another number of ranks drops others.
    """
    if hidden.device.type != "cpu":
        inputs = to_host(hidden, ids, weights)
        out = apply_exchanged(layer, *inputs, lora=lora, retain=retain, training=training)
        return to_device(out, hidden.device)
    factors = LoraFactors((), (), (1.0, 1.0, 1.0)) if lora is None else factors_of(lora)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, weights, *factors.tensors))
    rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    ids, weights = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
    roles = " ".join(factors.roles)
    if not needs_grad:
        options = _Lora(roles, factors.scales, Dropout())
        inputs = (rows.detach(), ids, weights.detach())
        out = _forward(layer, *inputs, factors.tensors, options, retain=False, needs_grad=training)[0]
        return out.view(hidden.shape)
    rate = 0.0 if lora is None else lora.dropout
    seed = int(torch.randint(2**62, ())) if rate else 0
    result: Tensor = exchanged_experts(
        rows, ids, weights, list(factors.tensors), layer.handle, roles, list(factors.scales), retain, rate, seed
    )[0]
    return result.view(hidden.shape)
