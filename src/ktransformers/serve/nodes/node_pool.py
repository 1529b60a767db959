"""Rank 0's side of the expert nodes: it accepts them, exchanges messages with them, and notices when one is gone.

A node is connected once it has loaded its experts and has every adapter that is in use. While one is missing, the
server refuses requests (`unavailable`) instead of waiting; nothing is computed without the missing experts, so no
answer is wrong. Who starts a lost node again is not decided here: one that connects anew takes the place of the one
before. Each node has a lock that is held from a message to its answer; an exchange takes the locks of its nodes in
order of their ranks, and all other callers hold one at a time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from typing import Protocol
from weakref import WeakValueDictionary

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.serve.nodes.expert_node import Facts
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.wire import HANDSHAKE_SECONDS, Connection, ConnectionLost, Header, Kind, Part
from ktransformers.serve.scheduler.engine import Unavailable

LOG = logger(__name__)
START_SECONDS = 300.0  # for all nodes to connect at start
ACCEPT_PAUSE = 0.1  # seconds after a connection could not be accepted


class NodeFailed(RuntimeError):
    """A node could not compute a message; its connection stays."""


class SharedAdapter(Protocol):
    """LoRA of one layer whose factors are on several nodes."""

    handle: int

    def message(self, rank: int) -> tuple[Header, bytes] | None:
        """What a node gets of it; None: nothing."""
        ...


@dataclass(eq=False)
class Node:
    rank: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    greeted: Connection | None = None  # that is loading its experts
    reason: str = "it has not connected yet"
    address: str = "not connected"
    ended: list[tuple[int, int]] = field(default_factory=list)  # bytes sent and received over earlier connections
    unloaded: list[int] = field(default_factory=list)  # handles that it may drop

    @property
    def loss(self) -> str:
        name = f"expert node {self.rank} ({self.address})"
        return f"{name} is gone: {self.reason}; requests are refused until it is back"


class NodePool:
    def __init__(self, options: NodeOptions, facts: Facts, log: Callable[[str], None]) -> None:
        """Binds the address; a port in use is an error at once."""
        self.options, self._facts, self._log = options, dict(facts), log
        self.nodes = {rank: Node(rank) for rank in range(1, options.ranks)}
        self._listener = bind_nodes(options)
        self.port = int(self._listener.getsockname()[1])
        self.exchanges = 0
        self._changed = threading.Condition()
        self._failures: list[str] = []  # of nodes at start
        self._adapters_lock = threading.Lock()  # a node that comes back gets the adapters that others have
        self._adapters = WeakValueDictionary[int, SharedAdapter]()  # by handle
        self._next_handle = 1
        self._closing, self._starting = False, True
        threading.Thread(target=self._accept, name="kt-nodes", daemon=True).start()

    # Start

    def wait_for_nodes(self, seconds: float = START_SECONDS) -> None:
        """Until every node has introduced itself with equal facts, before anything is loaded."""
        self._wait(lambda node: node.greeted is not None or node.connection is not None, seconds)

    def wait_until_ready(self) -> None:
        """Until every node has loaded its experts."""
        self._wait(lambda node: node.connection is not None, None)
        self._starting = False

    def _wait(self, done: Callable[[Node], bool], seconds: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._failures or all(map(done, self.nodes.values())), seconds):
                names = ", ".join(f"node {node.rank}" for node in self.nodes.values() if not done(node))
                given = f"no connection of {names} to {self.options.address}:{self.port} within {seconds:g} s"
                raise InputError("nodes", given, "all of them", "run the same command there")
            if self._failures:
                raise InputError("nodes", self._failures[0], "the same launch on every node")

    def report(self, rank: int, reason: str) -> None:
        """A node will not come: the server does not start, or says so while it refuses requests."""
        with self._changed:
            self.nodes[rank].reason = reason
            self._failures += [f"node {rank}, {reason}"] if self._starting else []
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection = Connection(self._listener.accept()[0], self.options.seconds)
            except OSError as error:  # a client that has left, no file that can be opened, or the end
                LOG.info("no connection was accepted: %s", error)
                time.sleep(ACCEPT_PAUSE)
                continue
            # Loading takes minutes, and a stranger must not hold the door.
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """One connection, from the handshake to a node that computes."""
        node = None
        try:
            connection.authenticate(self.options.token, listens=True)
            node = self._greet(connection, json.loads(connection.receive_bytes(HANDSHAKE_SECONDS)))
            if node is None:
                return
            header, _ = connection.receive(None)
            if header.kind != Kind.READY:
                raise ConnectionLost("something else than READY")
            self._join(node, connection)
        except Exception as error:  # of an adapter, too, or of a greeting that is no JSON
            connection.close()
            if node is not None and node.greeted is connection:
                node.greeted = None
                self.report(node.rank, f"{error} while it loaded")
            if not isinstance(error, ConnectionLost | AuthenticationError):
                self._log(f"rejected expert node {connection.peer}: {error}")
            LOG.info("a connection of %s ended", connection.peer, exc_info=error)

    def _greet(self, connection: Connection, facts: Mapping[str, str]) -> Node | None:
        """The node of these facts, or None after a refusal."""
        rank, own = facts.get("rank", ""), self._facts
        node = self.nodes.get(int(rank)) if rank.isdigit() else None
        differing = next((name for name, value in own.items() if name != "rank" and facts.get(name) != value), None)
        with self._changed:
            if differing is not None:
                reason = f"{differing} {own[differing]}, as on rank 0, not {facts.get(differing, 'none')}"
            elif node is None:
                reason = f"a rank from 1 to {self.options.ranks - 1}, not {rank or 'none'}"
            elif self._starting and (node.greeted or node.connection):
                reason = f"another rank than {rank}, which is connected already from {node.address}"
            else:
                node.greeted, node.address = connection, connection.peer
                connection.send_bytes(b"")
                self._changed.notify_all()
                return node
            line = f"node {rank or '?'} ({connection.peer})"
            self._failures += [f"{line} with other settings, where {reason} was expected"] if self._starting else []
            self._changed.notify_all()
        self._log(f"{line} was refused: expected {reason}")
        connection.send_bytes(f"{line}: {reason}".encode())
        connection.close()
        return None

    def _join(self, node: Node, connection: Connection) -> None:
        with self._adapters_lock:
            adapters = list(self._adapters.values())
            for adapter in adapters:
                self._load(node, connection, adapter)
            with node.lock:
                self.lose(node, "it has connected again")
                node.unloaded.clear()
                node.connection, node.greeted, node.reason = connection, None, ""
        again = f" again, with {len(adapters)} layers of adapters" if node.ended else ""
        self._log(f"expert node {node.rank} ({node.address}) is connected{again}")
        with self._changed:
            self._changed.notify_all()

    # Losses

    def unavailable(self) -> str:
        """Why requests cannot be answered now, in one line; empty: all nodes are here."""
        for node in self.nodes.values():
            if node.connection is not None and node.lock.acquire(blocking=False):  # else an exchange notices a loss
                try:
                    if node.connection is not None and node.connection.has_ended():
                        self.lose(node, "the connection was closed")
                finally:
                    node.lock.release()
            if node.connection is None:
                return node.loss
        return ""

    def connection_of(self, node: Node) -> Connection:
        if node.connection is None:
            raise Unavailable(node.loss)
        return node.connection

    def lose(self, node: Node, reason: str) -> Unavailable:
        """The node's lock is held."""
        connection, node.connection = node.connection, None
        if connection is not None:
            connection.close()
            node.ended.append((connection.sent, connection.received))
            node.reason = reason
            if not self._closing:
                self._log(node.loss)
        return Unavailable(node.loss)

    # Messages

    @contextmanager
    def exchange(self, ranks: Sequence[int]) -> Iterator[Exchange]:
        """Messages to these nodes and their answers. After an error, answers that are still to come are received and
        dropped: nodes that did not fail stay connected."""
        nodes = [self.nodes[rank] for rank in sorted(ranks)]
        with contextlib.ExitStack() as stack:
            for node in nodes:
                stack.enter_context(node.lock)
            exchange = Exchange(self)
            try:
                yield exchange
            except BaseException:
                for rank in list(exchange.pending):
                    with contextlib.suppress(Unavailable, NodeFailed):
                        exchange.receive(rank)
                raise
        self.exchanges += 1

    def new_handle(self) -> int:
        with self._adapters_lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            return handle

    def load_adapter(self, adapter: SharedAdapter) -> None:
        """Give every node its factors; `unload_adapter` follows when the adapter is let go of."""
        with self._adapters_lock:
            for node in self.nodes.values():
                with node.lock:
                    connection = self.connection_of(node)
                    try:
                        self._load(node, connection, adapter)
                    except ConnectionLost as error:
                        raise self.lose(node, str(error)) from error
            self._adapters[adapter.handle] = adapter

    def _load(self, node: Node, connection: Connection, adapter: SharedAdapter) -> None:
        message = adapter.message(node.rank)
        if message is None:
            return
        connection.send(*message)
        _result(node, *connection.receive(self.options.seconds))

    def unload_adapter(self, handle: int) -> None:
        """Called when an adapter is garbage, in any thread: nodes are told with the next rows."""
        for node in self.nodes.values():
            node.unloaded.append(handle)

    def close(self) -> None:
        """The server ends: nodes end too."""
        self._closing = True
        for node in self.nodes.values():
            if (connection := node.connection or node.greeted) is not None:
                with contextlib.suppress(ConnectionLost):
                    connection.send(Header(Kind.BYE))
                connection.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def counters(self) -> dict[str, int]:
        """For /metrics."""
        self.unavailable()
        connections = [node.connection for node in self.nodes.values() if node.connection is not None]
        ended = [counts for node in self.nodes.values() for counts in node.ended]
        return {
            "connected": len(connections),
            "sent": sum(connection.sent for connection in connections) + sum(sent for sent, _ in ended),
            "received": sum(connection.received for connection in connections) + sum(size for _, size in ended),
            "losses": len(ended),
            "exchanges": self.exchanges,
        }


class Exchange:
    """Rows sent to nodes and results to come, while the locks of these nodes are held."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self.pending: dict[int, float] = {}  # rank -> deadline of its answer

    def send(self, rank: int, header: Header, parts: Sequence[Part]) -> None:
        node, seconds = self._pool.nodes[rank], self._pool.options.seconds
        connection = self._pool.connection_of(node)
        try:
            while node.unloaded:
                connection.send(Header(Kind.UNLOAD, handle=node.unloaded.pop()))
            connection.send(header, *parts)
        except ConnectionLost as error:
            raise self._pool.lose(node, str(error)) from error
        self.pending[rank] = time.monotonic() + seconds

    def receive(self, rank: int) -> memoryview:
        """The result of a node."""
        node, deadline = self._pool.nodes[rank], self.pending.pop(rank)
        connection = self._pool.connection_of(node)
        try:
            answer = connection.receive(max(0.001, deadline - time.monotonic()))
        except ConnectionLost as error:
            raise self._pool.lose(node, str(error)) from error
        return _result(node, *answer)


def _result(node: Node, header: Header, payload: memoryview) -> memoryview:
    if header.kind == Kind.FAILED:
        text = bytes(payload).decode("utf-8", "replace")
        raise NodeFailed(f"expert node {node.rank} ({node.address}): {text}")
    return payload


def bind_nodes(options: NodeOptions) -> socket.socket:
    """The listening socket of rank 0."""
    try:
        family, _, _, _, address = socket.getaddrinfo(options.address, options.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=64)
    except (OSError, OverflowError) as error:
        given = f"{options.address}:{options.port} ({error})"
        raise InputError("nodes-address", given, "a free port of rank 0", "pass --nodes-address") from error
