"""One layer of experts whose stores are on several nodes: the `ExpertBackend` of rank 0.

A row goes to every node that has at least one of its experts, with ids in the order of that node's store (-1 for all
others). Rank 0 computes its own experts while the others compute; then partial sums are added in float32 in the order
of ranks, so that a token's result does not depend on which node answers first. A node without rows gets no message.
`SharedLora` is an adapter of one layer: rank 0's factors packed here, those of the others sent to them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.adapters import LoraPair
from ktransformers.adapters.pack import pack_expert_pairs
from ktransformers.experts.backend import CPU, ExpertBatch, ExpertGradients, Saved
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import experts_of
from ktransformers.experts.lora import MixedLora
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.parallel.exchange import RoutingTable
from ktransformers.serve.nodes.node_pool import NodePool
from ktransformers.serve.nodes.wire import (
    DTYPES,
    Header,
    Kind,
    Part,
    decode_pairs,
    encode_pairs,
    read_tensor,
    tensor_bytes,
)

ReadPairs = Callable[[], Mapping[str, LoraPair]]


class SharedLora:
    """LoRA of one layer's experts on all nodes. Factors of other nodes are not kept here: a node that comes back gets
    them from the adapter's files, which must not have changed."""

    def __init__(self, what: str, layer: RemoteExperts, pairs: Mapping[str, LoraPair], read: ReadPairs) -> None:
        self._what, self._layer, self._read = what, layer, read
        self._pairs: Mapping[str, LoraPair] | None = pairs  # until all nodes have theirs
        self._digest = self._hash(pairs)
        self.handle = layer.pool.new_handle()
        self.local: _core.Adapter | None = None
        if layer.store is not None:
            own = decode_pairs(memoryview(encode_pairs(pairs, layer.shard.experts)))
            self.local = pack_expert_pairs(what, layer.store, own)

    @property
    def packed_bytes(self) -> int:
        return 0 if self.local is None else self.local.packed_bytes

    def message(self, rank: int) -> tuple[Header, bytes] | None:
        experts = self._layer.shard.experts_of(rank)
        if not experts:
            return None
        pairs = self._pairs
        if pairs is None:
            pairs = self._read()
            if self._hash(pairs) != self._digest:
                given = "files that have changed since they were loaded"
                raise InputError(self._what, given, "those that other nodes have", "unload the adapter, or restore it")
        return Header(Kind.LOAD, layer=self._layer.number, handle=self.handle), encode_pairs(pairs, experts)

    def _hash(self, pairs: Mapping[str, LoraPair]) -> bytes:
        return hashlib.blake2b(encode_pairs(pairs, range(len(self._layer.shard.owners)))).digest()

    def sent(self) -> None:
        self._pairs = None


class RemoteExperts:
    """The `ExpertBackend` of a layer; it computes in inference only."""

    copies_gradients, device = False, CPU

    def __init__(self, number: int, store: ExpertStore | None, shard: LayerShard, pool: NodePool) -> None:
        self.number, self.store, self.shard, self.pool = number, store, shard, pool
        self._table = RoutingTable(shard)

    def infer(self, batch: ExpertBatch) -> Tensor:
        """Adapters of `batch.mixed` are `SharedLora`."""
        hidden, mixed = batch.hidden.detach(), batch.mixed
        if hidden.dtype not in DTYPES:
            raise InputError("hidden states", str(hidden.dtype), "one of " + ", ".join(map(str, DTYPES)))
        weights = batch.weights.detach().float()
        routed = self._table.routes(batch.ids).by_rank()
        remote = [rank for rank in routed if rank]
        total = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        with self.pool.exchange(remote) as exchange:
            for rank in remote:
                exchange.send(rank, *self._message(hidden, weights, *routed[rank], mixed))
            if 0 in routed:
                self._add_own(total, hidden, weights, *routed[0], mixed)
            for rank in remote:
                rows, _ = routed[rank]
                part, _ = read_tensor(exchange.receive(rank), 0, hidden.dtype, len(rows), hidden.shape[1])
                total.index_add_(0, rows, part.to(total.dtype))
        return total.to(hidden.dtype)

    def forward(self, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Saved]:
        raise InputError("experts", "a pass with gradients", "inference", "load the model without nodes to train it")

    def backward(self, batch: ExpertBatch, grad_out: Tensor, saved: Saved, factor_grads: bool) -> ExpertGradients:
        raise NotImplementedError("`forward` refuses gradients")

    def _message(
        self, hidden: Tensor, weights: Tensor, rows: Tensor, positions: Tensor, mixed: MixedLora | None
    ) -> tuple[Header, list[Part]]:
        parts = [hidden[rows], weights[rows], positions]
        if mixed is not None:
            handles = torch.tensor([*(_shared(adapter).handle for adapter in mixed.adapters), 0], dtype=torch.int32)
            parts.append(handles[mixed.rows.cpu().long()[rows]])  # -1: the last, no adapter
        count, top_k = positions.shape
        dtype = DTYPES.index(hidden.dtype)
        header = Header(Kind.FORWARD, dtype, self.number, count, top_k, hidden.shape[1], int(mixed is not None))
        return header, [tensor_bytes(part) for part in parts]

    def _add_own(
        self, total: Tensor, hidden: Tensor, weights: Tensor, rows: Tensor, positions: Tensor, mixed: MixedLora | None
    ) -> None:
        assert self.store is not None
        part = torch.empty(len(rows), hidden.shape[1], dtype=total.dtype)
        adapter, adapters = None, list[_core.Adapter]()
        if mixed is not None:
            adapter = mixed.rows.cpu()[rows]
            adapters = [local for entry in mixed.adapters if (local := _shared(entry).local) is not None]
        self.store.forward(hidden[rows], positions, weights[rows], adapter=adapter, adapters=adapters, out=part)
        total.index_add_(0, rows, part)

    def share_lora(self, what: str, pairs: Mapping[str, LoraPair], read: ReadPairs) -> SharedLora:
        """Pack rank 0's factors and send the others theirs; they are dropped there when the result is let go of."""
        experts = len(self.shard.owners)
        for role, pair in pairs.items():
            if pair.a.shape[0] != experts:
                raise InputError(f"{what}: {role}", f"{pair.a.shape[0]} experts", f"{experts}")
        lora = SharedLora(what, self, pairs, read)
        weakref.finalize(lora, self.pool.unload_adapter, lora.handle).atexit = False
        self.pool.load_adapter(lora)
        lora.sent()
        return lora


def _shared(adapter: object) -> SharedLora:
    assert isinstance(adapter, SharedLora)
    return adapter


def attach_nodes(model: nn.Module, pool: NodePool) -> int:
    """Let the model's experts be computed by rank 0 and its nodes; returns the number of layers."""
    layers = [experts_of(module) for module in expert_modules(model).values()]
    for number, kt in enumerate(layers):
        assert kt.shard is not None
        remote = RemoteExperts(number, kt.store, kt.shard, pool)
        kt.backend, kt.pack_lora = remote, remote.share_lora
    return len(layers)


def connect_group(model: nn.Module, pool: NodePool, log: Callable[[str], None]) -> None:
    """Let the model's experts be computed with the other nodes, once these have loaded theirs."""
    log("waiting for the expert nodes to load")
    pool.wait_until_ready()
    layers = attach_nodes(model, pool)
    log(f"{layers} layers of experts over {len(pool.nodes) + 1} nodes")
