"""A node of `kt serve` that has experts alone: it loads its part, connects to rank 0 and computes the rows that come.

It reads no other weight and serves no HTTP. It ends when rank 0 says so, when rank 0 refuses it, and with an error when
the connection breaks: Ray, or the launcher, starts it again, and rank 0 compares it anew and sends it the adapters that
are in use."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.adapters.pack import pack_expert_pairs
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.log import logger
from ktransformers.modeling.shard_stores import ShardLayer
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.wire import (
    DTYPES,
    HANDSHAKE_SECONDS,
    Connection,
    ConnectionLost,
    Header,
    Kind,
    Part,
    decode_pairs,
    read_tensor,
    tensor_bytes,
)

LOG = logger(__name__)
GONE_SECONDS = 600.0  # that a node waits for rank 0
RETRY_SECONDS = 1.0

Facts = Mapping[str, str]  # what has to be equal on all nodes, by name; and "rank"
Say = Callable[[str], None]


class Refused(InputError):
    """Rank 0 does not take this node."""

    def __init__(self, reason: str) -> None:
        super().__init__("expert node", "a refusal of rank 0", reason)


def connect(options: NodeOptions, facts: Facts, seconds: float = GONE_SECONDS) -> Connection:
    """A connection on which rank 0 has accepted this node; it is tried again until rank 0 is there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            sock = socket.create_connection((options.address, options.port), timeout=HANDSHAKE_SECONDS)
            connection = Connection(sock, options.seconds)
            connection.authenticate(options.token, listens=False)
            connection.send_bytes(json.dumps(dict(facts)).encode())
            reason = bytes(connection.receive_bytes(HANDSHAKE_SECONDS)).decode("utf-8", "replace")
        except AuthenticationError as error:
            raise Refused("the same KT_NODES_TOKEN on every node") from error
        except (OSError, ConnectionLost) as error:
            if time.monotonic() > deadline:
                given = f"no rank 0 at {options.address}:{options.port} ({error})"
                raise InputError("nodes-address", given, f"one within {seconds:g} s") from error
            time.sleep(RETRY_SECONDS)
            continue
        if not reason:
            return connection
        connection.close()
        raise Refused(reason)


class ExpertNode:
    """The experts of one node, and the adapters that rank 0 has loaded."""

    def __init__(self, layers: Sequence[ShardLayer]) -> None:
        self.layers = layers
        self.adapters: dict[int, _core.Adapter] = {}
        self.rows = 0  # computed so far

    def answer(self, connection: Connection, seconds: float | None = None) -> bool:
        """Receive one message and answer it; False: rank 0 has said goodbye."""
        header, payload = connection.receive(seconds)
        if header.kind == Kind.BYE:
            return False
        if header.kind == Kind.UNLOAD:
            self.adapters.pop(header.handle, None)
            return True
        try:
            reply, parts = self._handle(header, payload)
        except ConnectionLost:
            raise
        except Exception as error:  # of this message; the node goes on
            LOG.exception("%s of layer %d failed", Kind(header.kind).name, header.layer)
            text = f"{type(error).__name__}: {error}" if not isinstance(error, KTError) else str(error)
            reply, parts = Header(Kind.FAILED), [text.encode("utf-8", "replace")[:4096]]
        connection.send(reply, *parts)
        return True

    def _handle(self, header: Header, payload: memoryview) -> tuple[Header, list[Part]]:
        if header.kind not in (Kind.FORWARD, Kind.LOAD) or header.layer >= len(self.layers):
            raise ConnectionLost(f"a message of kind {header.kind} for layer {header.layer} of {len(self.layers)}")
        if header.kind == Kind.FORWARD:
            result = self.forward(header, payload)
            return Header(Kind.RESULT, header.dtype, rows=header.rows), [tensor_bytes(result)]
        layer = self.layers[header.layer]
        if layer.store is None:
            raise InputError("adapter", f"factors for {layer.name}", "a layer with experts here")
        pairs = decode_pairs(payload)
        self.adapters[header.handle] = pack_expert_pairs(f"adapter, {layer.name}", layer.store, pairs)
        return Header(Kind.DONE), []

    def forward(self, header: Header, payload: memoryview) -> Tensor:
        """Weighted sums of this node's experts, `[rows, H]`."""
        store = self.layers[header.layer].store
        if store is None or header.width != store.hidden_size:
            raise ConnectionLost(f"rows of {header.width} numbers for layer {header.layer}")
        rows, top_k = header.rows, header.top_k
        hidden, end = read_tensor(payload, 0, DTYPES[header.dtype], rows, header.width)
        weights, end = read_tensor(payload, end, torch.float32, rows, top_k)
        ids, end = read_tensor(payload, end, torch.int32, rows, top_k)
        self.rows += rows
        if not header.handle:
            return store.forward(hidden, ids, weights)
        handles, _ = read_tensor(payload, end, torch.int32, rows)
        known, index = torch.unique(handles, return_inverse=True)
        adapters = [self.adapters[handle] for handle in known.tolist() if handle]
        base = int(bool(len(known)) and int(known[0]) == 0)  # handle 0: no adapter; the smallest, so its index is 0
        return store.forward(hidden, ids, weights, adapter=(index - base).to(torch.int32), adapters=adapters)


def run_expert_node(options: NodeOptions, facts: Facts, load: Callable[[], Sequence[ShardLayer]], say: Say) -> None:
    """Serve rank 0 until it ends. Nothing is loaded before rank 0 has accepted this node."""
    connection = connect(options, facts)
    node = ExpertNode(load())
    stores = [layer.store for layer in node.layers if layer.store is not None]
    experts, size = sum(store.num_experts for store in stores), sum(store.packed_bytes for store in stores)
    say(f"expert node {options.rank}: {experts} experts in {len(stores)} layers, {size / 1e9:.2f} GB")
    with torch.inference_mode():
        connection.send(Header(Kind.READY))
        while node.answer(connection):
            pass
    say("rank 0 has ended")
