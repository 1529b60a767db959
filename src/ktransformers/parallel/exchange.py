"""Expert parallelism: the ranks of a group hold different experts of every layer, and rows travel to the ranks that
have their experts.

Each rank calls a layer with its own rows: hidden `[T, H]`, ids and weights `[T, k]`, T different on every rank and
possibly 0. A row goes once to every rank that holds at least one of its k experts, with the ids (positions in that
rank's store, -1 for experts of other ranks) and weights of all its routes; that rank computes the weighted sum over its
experts, and the sums of all ranks are added where the row came from. Forward is three all-to-all exchanges (counts,
rows, sums) and backward two (gradients of the sums, then of rows and weights), in host memory over gloo. Rows travel in
the dtype of the hidden states and sums are added in float32 (float64 for float64), so in bf16 a token's result is
rounded once for each rank that contributes, where a single process rounds once. `plan/exchange.py` counts the bytes.

Forward and backward of a layer are one operator (`experts/operator.py`), so that every rank enters the exchanges in the
same order whatever rows it has: no exchange depends on data, and activation checkpointing either replays the operator's
outputs (nothing travels in a recomputation) or runs all of it again, on all ranks alike. Gradients of the expert LoRA
stay on the rank that holds the expert. The rows of all ranks contribute to them, and they are divided by the number of
ranks: what is differentiated is the mean of the ranks' losses, as by DDP for all other parameters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ktransformers.experts.backend import CPU, ExpertBatch, ExpertGradients, LocalExperts, Saved, packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError

FIELD_ALIGNMENT = 8  # bytes; hidden states, weights and positions of a row each begin at a multiple of it


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


class RoutingTable:
    """Which rank has which expert of a layer, for the rows of a batch."""

    def __init__(self, shard: LayerShard) -> None:
        self.ranks = shard.ranks
        beyond = shard.ranks  # owner of ids that belong to no expert
        self._owners = torch.tensor([*shard.owners, beyond])
        self._positions = torch.tensor([*shard.positions, -1], dtype=torch.int32)

    def routes(self, ids: Tensor) -> Routes:
        experts = len(self._owners) - 1
        ids = torch.where((ids < 0) | (ids >= experts), experts, ids).long()
        owners = self._owners[ids]  # [T, k]
        reached = torch.zeros(ids.shape[0], self.ranks + 1, dtype=torch.bool)
        reached.scatter_(1, owners, True)
        rank, row = reached[:, : self.ranks].T.nonzero(as_tuple=True)
        positions = torch.where(owners[row] == rank[:, None], self._positions[ids[row]], -1)
        return Routes(row, positions, reached[:, : self.ranks].sum(0))


@dataclass(frozen=True)
class Routes:
    """Where the rows of a batch go: `rows` are their indices, by rank of destination and then ascending; `positions`
    int32 `[n, k]` the experts' positions in the destination's store, -1 for those of other ranks; `counts` `[ranks]`
    the number of rows for each rank."""

    rows: Tensor
    positions: Tensor
    counts: Tensor

    def by_rank(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Rows and positions for each rank that gets any, ascending."""
        counts = self.counts.tolist()
        parts = zip(torch.split(self.rows, counts), torch.split(self.positions, counts), strict=True)
        return {rank: part for rank, part in enumerate(parts) if counts[rank]}


def connect(model: nn.Module, group: ExpertGroup) -> None:
    """Let the model's ranks compute each other's experts. A collective call of the group; every rank has loaded its
    part of the same partition."""
    modules = expert_modules(model)
    tables = []
    for name, module in modules.items():
        kt = packed_experts(module)
        shard = None if kt is None else kt.shard
        if shard is None or (shard.rank, shard.ranks) != (group.rank, group.ranks):
            given = "all experts" if shard is None else f"the experts of rank {shard.rank} of {shard.ranks}"
            raise InputError(name, given, f"those of rank {group.rank} of {group.ranks}", "pass `shard` to load_model")
        tables.append(shard.owners)
    _require_equal(tables, group)
    for kt in filter(None, map(packed_experts, modules.values())):
        assert kt.shard is not None
        kt.backend = ExchangedExperts(kt.store, kt.shard, group)
        kt.group = group


def expert_group(model: nn.Module) -> ExpertGroup | None:
    """The group that divides the model's experts; None: this process holds them all."""
    for module in expert_modules(model).values():
        kt = packed_experts(module)
        if kt is not None and kt.group is not None:
            group: ExpertGroup = kt.group
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


def exchange(fields: Sequence[Tensor], send: list[int], receive: list[int], group: Any) -> list[Tensor]:
    """Rows of every field `[n, w]` to the ranks of the group: the first `send[0]` to rank 0, and so on; returns what
    came, by rank of origin. All fields of a row travel together, in one message per pair of ranks."""
    rows = [field.contiguous() for field in fields]
    sizes = [field.shape[1] * field.element_size() for field in rows]
    widths = [-(-size // FIELD_ALIGNMENT) * FIELD_ALIGNMENT for size in sizes]
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


def _add_rows(rows: Tensor, index: Tensor, tokens: int) -> Tensor:
    """The sum of the rows of each token, in their dtype; added in float32 or better."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(tokens, rows.shape[1], dtype=wide)
    return total.index_add_(0, index, rows.to(wide)).to(rows.dtype)


class ExchangedExperts:
    """One layer's experts and the group that holds them all; `store` is None on a rank without experts of the layer.

    All ranks of the group call it, each with its own rows. Dropout of LoRA's inputs is a hash of seed, row and column
    of what arrived at the rank that computes: forward, backward and recomputation drop the same elements, another
    number of ranks drops others.
    """

    copies_gradients, device = False, CPU

    def __init__(self, store: ExpertStore | None, shard: LayerShard, group: ExpertGroup) -> None:
        self.store, self.shard, self.group = store, shard, group
        self._local = None if store is None else LocalExperts(store)
        self._table = RoutingTable(shard)

    def infer(self, batch: ExpertBatch) -> Tensor:
        routes, counts, arrived = self._dispatch(batch)
        sums = torch.empty_like(arrived.hidden) if self._local is None else self._local.infer(arrived)
        return self._combine(sums, routes, counts, len(batch.ids))

    def forward(self, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Saved]:
        """Saves the arrived rows, positions and weights, the counts `[2, ranks]` of rows sent and arrived, and gate and
        up of the arrived rows (empty without `retain`)."""
        routes, counts, arrived = self._dispatch(batch)
        sums, keep = torch.empty_like(arrived.hidden), torch.empty(0, dtype=torch.uint8)
        if self._local is not None:
            sums, (keep,) = self._local.forward(arrived, retain)
        out = self._combine(sums, routes, counts, len(batch.ids))
        return out, (arrived.hidden, arrived.ids, arrived.weights, counts, keep)

    def backward(self, batch: ExpertBatch, grad_out: Tensor, saved: Saved, factor_grads: bool) -> ExpertGradients:
        """Gradients of this rank's factors are divided by the number of ranks."""
        rows, positions, row_weights, counts, keep = saved
        routes, members, tokens = self._table.routes(batch.ids), self.group.members, batch.ids.shape[0]
        send, receive = counts.tolist()
        (grad_sums,) = exchange([grad_out[routes.rows]], send, receive, members)
        arrived = replace(batch, hidden=rows, ids=positions, weights=row_weights)
        if self._local is None:
            tensors = batch.lora.tensors if factor_grads and batch.lora is not None else ()
            zeros = [torch.zeros_like(tensor) for tensor in tensors]
            grads = ExpertGradients(torch.empty_like(rows), torch.empty_like(row_weights), zeros)
        else:
            grads = self._local.backward(arrived, grad_sums, (keep,), factor_grads)
            for grad in grads.factors:
                grad.div_(self.group.ranks)
        returned = exchange((grads.hidden, grads.weights), receive, send, members)
        grad_hidden, grad_weights = (_add_rows(grad, routes.rows, tokens) for grad in returned)
        return ExpertGradients(grad_hidden, grad_weights, grads.factors)

    def _dispatch(self, batch: ExpertBatch) -> tuple[Routes, Tensor, ExpertBatch]:
        """Send the batch's rows to the ranks that have their experts; the batch of the rows that arrived here."""
        routes = self._table.routes(batch.ids)
        arrived = torch.empty_like(routes.counts)
        dist.all_to_all_single(arrived, routes.counts, group=self.group.members)
        counts = torch.stack([routes.counts, arrived])
        send, receive = counts.tolist()
        fields = (batch.hidden[routes.rows], batch.weights[routes.rows], routes.positions)
        rows, weights, positions = exchange(fields, send, receive, self.group.members)
        return routes, counts, replace(batch, hidden=rows, ids=positions, weights=weights)

    def _combine(self, sums: Tensor, routes: Routes, counts: Tensor, tokens: int) -> Tensor:
        """Send the sums of the arrived rows back, and add what comes for each row of the batch."""
        send, receive = counts.tolist()
        (returned,) = exchange([sums], receive, send, self.group.members)
        return _add_rows(returned, routes.rows, tokens)
