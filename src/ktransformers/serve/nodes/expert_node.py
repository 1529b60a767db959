"""A node of `kt serve` that has experts alone: it loads its part, connects to rank 0 and computes the rows that come.

It reads no other weight and serves no HTTP. Its experts stay loaded when the connection to rank 0 breaks: it connects
again, with all facts compared anew, and gets the adapters that are in use then. It ends when rank 0 says so, when rank
0 refuses it, or when rank 0 has not been there for `GONE_SECONDS`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.adapters.pack import pack_expert_pairs
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.log import logger
from ktransformers.modeling.shard_stores import ShardLayer
from ktransformers.serve.nodes.adapter_wire import decode_pairs
from ktransformers.serve.nodes.handshake import HANDSHAKE_SECONDS, Facts, introduce
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.wire import Connection, ConnectionLost, Header, Kind, read_tensor, tensor_bytes

LOG = logger(__name__)
GONE_SECONDS = 600.0  # that a node waits for rank 0
RETRY_SECONDS = 1.0
# Without a message: rank 0 pings every few seconds, unless it waits for another node, which takes a timeout at most.
IDLE_SECONDS = 60.0

Say = Callable[[str], None]


def connect(options: NodeOptions, token: str, facts: Facts, seconds: float = GONE_SECONDS) -> Connection:
    """A connection on which rank 0 has accepted this node; it is tried again until rank 0 is there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            sock = socket.create_connection((options.address, options.port), timeout=HANDSHAKE_SECONDS)
            connection = Connection(sock)
            introduce(connection, token, facts)
            return connection
        except (OSError, ConnectionLost) as error:
            if time.monotonic() > deadline:
                given = f"no rank 0 at {options.address}:{options.port} ({error})"
                raise InputError("hosts-address", given, f"one within {seconds:g} s") from error
            time.sleep(RETRY_SECONDS)


class ExpertNode:
    """The experts of one node, and the adapters that one connection has loaded."""

    def __init__(self, layers: Sequence[ShardLayer]) -> None:
        self.layers = layers
        self.adapters: dict[int, _core.Adapter] = {}
        self.rows = 0  # computed so far

    def answer(self, connection: Connection, seconds: float) -> bool:
        """Receive one message and answer it; False: rank 0 has said goodbye."""
        header, payload = connection.receive(seconds=max(IDLE_SECONDS, 3 * seconds))
        if header.kind == Kind.BYE:
            return False
        try:
            reply, parts = self._handle(header, payload)
        except ConnectionLost:
            raise
        except Exception as error:  # of this message; the node goes on
            LOG.exception("message %s of layer %d failed", header.kind.name, header.layer)
            text = f"{type(error).__name__}: {error}" if not isinstance(error, KTError) else str(error)
            reply, parts = Header(Kind.FAILED, number=header.number), [text.encode("utf-8", "replace")[:4096]]
        connection.send(reply, *parts, seconds=seconds)
        return True

    def _handle(self, header: Header, payload: memoryview) -> tuple[Header, list[memoryview | bytes]]:
        if header.kind == Kind.FORWARD:
            result = self.forward(header, payload)
            return Header(Kind.RESULT, header.dtype, rows=header.rows, number=header.number), [tensor_bytes(result)]
        if header.kind == Kind.LOAD:
            what, pairs = decode_pairs(payload)
            store = self._layer(header).store
            if store is None:
                raise InputError(what, f"factors for layer {header.layer}", "a layer with experts here")
            self.adapters[header.handle] = pack_expert_pairs(what, store, pairs)
        elif header.kind == Kind.UNLOAD:
            self.adapters.pop(header.handle, None)
        elif header.kind != Kind.PING:
            raise ConnectionLost(f"a message of kind {header.kind.name}")
        return Header(Kind.DONE, number=header.number), []

    def _layer(self, header: Header) -> ShardLayer:
        if header.layer >= len(self.layers):
            raise ConnectionLost(f"layer {header.layer} of {len(self.layers)}")
        return self.layers[header.layer]

    def forward(self, header: Header, payload: memoryview) -> Tensor:
        """Weighted sums of this node's experts, `[rows, H]`."""
        store = self._layer(header).store
        if store is None or header.width != store.hidden_size:
            raise ConnectionLost(f"rows of {header.width} numbers for layer {header.layer}")
        rows, top_k = header.rows, header.top_k
        hidden, end = read_tensor(payload, 0, header.torch_dtype, rows, header.width)
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


def run_expert_node(
    options: NodeOptions,
    facts: Facts,
    load: Callable[[], Sequence[ShardLayer]],
    say: Say,
    seconds: float = GONE_SECONDS,
) -> None:
    """Serve rank 0 until it ends. Nothing is loaded before rank 0 has accepted this node."""
    connection = connect(options, options.token, facts, seconds)
    node = ExpertNode(load())
    stores = [layer.store for layer in node.layers if layer.store is not None]
    experts, size = sum(store.num_experts for store in stores), sum(store.packed_bytes for store in stores)
    say(f"expert node {options.rank}: {experts} experts in {len(stores)} layers, {size / 1e9:.2f} GB")
    with torch.inference_mode():
        while True:
            try:
                connection.send(Header(Kind.READY), seconds=options.seconds)
                while node.answer(connection, options.seconds):
                    pass
                say("rank 0 has ended")
                return
            except ConnectionLost as error:
                connection.close()
                say(f"rank 0 at {options.address}:{options.port} is gone: {error}; connecting again")
                node.adapters.clear()
                time.sleep(RETRY_SECONDS)
                connection = connect(options, options.token, facts, seconds)
