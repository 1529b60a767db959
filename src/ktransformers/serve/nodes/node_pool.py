"""Rank 0's side of the expert nodes: it accepts them, exchanges messages with them, notices when one is gone, and takes
a restarted one back.

A node is connected once it has loaded its experts and has every adapter that is in use. While one is missing, the
server refuses requests (`unavailable`) instead of waiting; nothing is computed without the missing experts, so no
answer is wrong. The thread `kt-nodes` accepts connections and pings idle nodes, so that a loss is noticed without
traffic. Each node has a lock that is held from a message to its answer; an exchange takes the locks of its nodes in
order of their ranks, and all other callers hold one at a time."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.serve.nodes.handshake import Facts, difference, receive_facts, refuse, welcome
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.wire import Connection, ConnectionLost, Header, Kind, NoAnswer
from ktransformers.serve.scheduler.engine import Unavailable

LOG = logger(__name__)
START_SECONDS = 300.0  # for all nodes to connect at start
PING_SECONDS = 2.0  # between two pings of an idle node

Parts = Sequence[memoryview | bytes]


class NodeFailed(RuntimeError):
    """A node could not compute a message; its connection stays."""


class SharedAdapter(Protocol):
    """LoRA of one layer whose factors are on several nodes."""

    handle: int

    def message(self, rank: int) -> tuple[Header, Parts] | None:
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
    sent: int = 0  # bytes over connections that have ended
    received: int = 0
    losses: int = 0
    unloaded: list[int] = field(default_factory=list)  # handles that it may drop

    @property
    def name(self) -> str:
        return f"expert node {self.rank} ({self.address})"

    @property
    def bytes(self) -> tuple[int, int]:
        connection = self.connection
        own = (0, 0) if connection is None else (connection.sent, connection.received)
        return self.sent + own[0], self.received + own[1]


class NodePool:
    def __init__(self, options: NodeOptions, facts: Facts, log: Callable[[str], None]) -> None:
        """Binds the address; a port in use is an error at once."""
        self.options, self._facts, self._log = options, dict(facts), log
        self.nodes = {rank: Node(rank) for rank in range(1, options.ranks)}
        self._listener = bind_nodes(options)
        self.port = int(self._listener.getsockname()[1])
        self._numbers = 0
        self.exchanges = 0
        self._changed = threading.Condition()
        self._refused: list[str] = []  # of nodes at start
        self._adapters_lock = threading.Lock()  # a node that comes back gets the adapters that others have
        self._adapters: dict[int, Callable[[], SharedAdapter | None]] = {}  # weak references by handle
        self._next_handle = 1
        self._closing = False
        self._starting = True
        self._thread = threading.Thread(target=self._serve, name="kt-nodes", daemon=True)
        self._thread.start()

    def wait_for_nodes(self, seconds: float = START_SECONDS) -> None:
        """Until every node has introduced itself with equal facts, before anything is loaded."""
        self._wait(lambda node: node.greeted is not None or node.connection is not None, seconds)

    def wait_until_ready(self) -> None:
        """Until every node has loaded its experts."""
        self._wait(lambda node: node.connection is not None, None)
        self._starting = False

    def _wait(self, done: Callable[[Node], bool], seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not all(done(node) for node in self.nodes.values()):
                if self._refused:
                    raise InputError("nodes", self._refused[0], "the same launch on every node")
                missing = [node for node in self.nodes.values() if not done(node)]
                lost = next((node for node in missing if node.losses), None)
                if lost is not None:
                    raise InputError("nodes", f"{lost.name}, which is gone: {lost.reason}", "nodes that stay")
                if deadline is not None and time.monotonic() > deadline:
                    names = ", ".join(f"node {node.rank}" for node in missing)
                    given = f"no connection of {names} to {self.options.address}:{self.port} within {seconds:g} s"
                    raise InputError("nodes", given, "all of them", "run the same command there")
                self._changed.wait(0.2)

    def unavailable(self) -> str:
        """Why requests cannot be answered now, in one line; empty: all nodes are here."""
        for node in self.nodes.values():
            if node.connection is None:
                return f"{node.name} is gone: {node.reason}; requests are refused until it is back"
        return ""

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
                        exchange.receive(rank, None)
                raise
        self.exchanges += 1

    def connection_of(self, node: Node) -> Connection:
        connection = node.connection
        if connection is None:
            raise Unavailable(f"{node.name} is gone: {node.reason}; requests are refused until it is back")
        return connection

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def lose(self, node: Node, reason: str) -> Unavailable:
        self._lose(node, reason)
        return Unavailable(f"{node.name} is gone: {reason}; requests are refused until it is back")

    def _lose(self, node: Node, reason: str) -> None:
        connection, node.connection = node.connection, None
        if connection is None:
            return
        connection.close()
        node.sent, node.received = node.sent + connection.sent, node.received + connection.received
        node.reason, node.losses = reason, node.losses + 1
        node.unloaded.clear()
        if not self._closing:
            self._log(f"{node.name} is gone: {reason}; requests are refused until it is back")
        with self._changed:
            self._changed.notify_all()

    # Adapters

    def new_handle(self) -> int:
        with self._adapters_lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            return handle

    def load_adapter(self, adapter: SharedAdapter, reference: Callable[[], SharedAdapter | None]) -> None:
        """Give every node its factors. `reference` is weak; `unload_adapter` follows when the adapter is let go of."""
        with self._adapters_lock:
            for node in self.nodes.values():
                with node.lock:
                    self._load(node, self.connection_of(node), adapter)
            self._adapters[adapter.handle] = reference

    def _load(self, node: Node, connection: Connection, adapter: SharedAdapter) -> None:
        message = adapter.message(node.rank)
        if message is not None:
            self._call(node, connection, *message)

    def unload_adapter(self, handle: int) -> None:
        """Called when an adapter is garbage, in any thread: nodes are told with the next ping or load."""
        self._adapters.pop(handle, None)
        for node in self.nodes.values():
            node.unloaded.append(handle)

    def _call(self, node: Node, connection: Connection, header: Header, parts: Parts = ()) -> None:
        """A message that is answered by DONE; the node's lock is held."""
        number = self.next_number()
        seconds = self.options.seconds
        try:
            connection.send(replace(header, number=number), *parts, seconds=seconds)
            answer, payload = connection.receive(seconds=seconds)
            if answer.number != number or answer.kind not in (Kind.DONE, Kind.FAILED):
                raise ConnectionLost("an answer to another message")
        except ConnectionLost as error:
            if node.connection is connection:
                raise self.lose(node, str(error)) from error
            raise
        if answer.kind == Kind.FAILED:
            raise NodeFailed(f"{node.name}: {bytes(payload).decode('utf-8', 'replace')}")

    # The thread that accepts and pings

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        pinged = time.monotonic()
        while not self._closing:
            if selector.select(timeout=0.2) and not self._closing:
                with contextlib.suppress(OSError):
                    sock, _ = self._listener.accept()
                    # Loading takes minutes, and a stranger must not hold the door.
                    threading.Thread(target=self._admit, args=(Connection(sock),), daemon=True).start()
            if time.monotonic() - pinged > PING_SECONDS:
                pinged = time.monotonic()
                for node in self.nodes.values():
                    self._ping(node)

    def _ping(self, node: Node) -> bool:
        """Whether the node has answered; False also if it is busy: an exchange notices a loss itself."""
        if node.connection is None or not node.lock.acquire(blocking=False):
            return False
        try:
            connection = node.connection
            if connection is None:
                return False
            with contextlib.suppress(Unavailable, NodeFailed):
                while node.unloaded:
                    self._call(node, connection, Header(Kind.UNLOAD, handle=node.unloaded.pop()))
                self._call(node, connection, Header(Kind.PING))
                return True
            return False
        finally:
            node.lock.release()

    def _is_connected(self, node: Node) -> bool:
        """Whether its connection still works; a restarted node may be back before the loss of the old connection was
        noticed."""
        deadline = time.monotonic() + self.options.seconds
        while node.connection is not None and not self._ping(node) and time.monotonic() < deadline:
            time.sleep(0.05)
        return node.connection is not None

    def _admit(self, connection: Connection) -> None:
        """One connection, from the handshake to a node that computes."""
        node = None
        try:
            facts, proof = receive_facts(connection, self.options.token)
            node = self._check(connection, facts)
            if node is None:
                return
            welcome(connection, proof)
            with self._changed:
                self._changed.notify_all()
            header, _ = connection.receive(seconds=None, limit=0)
            if header.kind != Kind.READY:
                raise ConnectionLost("something else than READY")
            self._join(node, connection)
        except ConnectionLost as error:
            connection.close()
            if node is not None and node.greeted is connection:
                node.greeted, node.reason, node.losses = None, f"{error} while it loaded", node.losses + 1
            LOG.info("a connection of %s ended: %s", connection.peer, error)
        except Exception as error:  # of an adapter, or of a greeting that is no JSON
            connection.close()
            if node is not None and node.greeted is connection:
                node.greeted, node.reason = None, str(error)
            self._log(f"rejected expert node {connection.peer}: {error}")
            LOG.info("rejected an expert node", exc_info=error)
        finally:
            with self._changed:
                self._changed.notify_all()

    def _check(self, connection: Connection, facts: Mapping[str, str]) -> Node | None:
        """The node of these facts, or None after a refusal."""
        rank = facts.get("rank", "")
        node = self.nodes.get(int(rank)) if rank.isdigit() else None
        reason = difference(self._facts, facts)
        if not reason and node is None:
            reason = f"a rank from 1 to {self.options.ranks - 1}, not {rank or 'none'}"
        if node is not None and not reason:
            taken = self._is_connected(node)
            with self._changed:
                if not taken and node.connection is None and node.greeted is None:
                    node.greeted, node.address = connection, connection.peer
                    return node
            reason = f"another rank than {rank}, which is connected already from {node.address}"
        line = f"node {rank or '?'} ({connection.peer})"
        with contextlib.suppress(ConnectionLost):
            refuse(connection, f"{line}: {reason}")
        if self._starting:
            self._refused.append(f"{line} with other settings, where {reason} was expected")
        self._log(f"{line} was refused: expected {reason}")
        return None

    def _join(self, node: Node, connection: Connection) -> None:
        with self._adapters_lock:
            adapters = [adapter for reference in list(self._adapters.values()) if (adapter := reference()) is not None]
            for adapter in adapters:
                self._load(node, connection, adapter)
            node.unloaded.clear()
            node.connection, node.greeted, node.reason = connection, None, ""
        again = f" again, with {len(adapters)} layers of adapters" if node.losses else ""
        self._log(f"{node.name} is connected{again}")

    def close(self) -> None:
        """The server ends: nodes end too."""
        self._closing = True
        for node in self.nodes.values():
            connection = node.connection or node.greeted
            if connection is not None:
                with contextlib.suppress(ConnectionLost):
                    connection.send(Header(Kind.BYE), seconds=1.0)
                connection.close()
        self._listener.close()

    def counters(self) -> dict[str, Any]:
        """For /metrics."""
        return {
            "connected": sum(node.connection is not None for node in self.nodes.values()),
            "sent": sum(node.bytes[0] for node in self.nodes.values()),
            "received": sum(node.bytes[1] for node in self.nodes.values()),
            "losses": sum(node.losses for node in self.nodes.values()),
            "exchanges": self.exchanges,
        }


class Exchange:
    """Rows sent to nodes and results to come, while the locks of these nodes are held."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self.pending: dict[int, tuple[int, float]] = {}  # rank -> number of the message, deadline

    def send(self, rank: int, header: Header, parts: Parts) -> None:
        node = self._pool.nodes[rank]
        connection, number = self._pool.connection_of(node), self._pool.next_number()
        seconds = self._pool.options.seconds
        self.pending[rank] = (number, time.monotonic() + seconds)
        try:
            connection.send(replace(header, number=number), *parts, seconds=seconds)
        except ConnectionLost as error:
            self.pending.pop(rank)
            raise self._pool.lose(node, str(error)) from error

    def receive(self, rank: int, into: Tensor | None) -> None:
        """The result of a node, stored in `into`; None: it is dropped."""
        node = self._pool.nodes[rank]
        connection = self._pool.connection_of(node)
        number, deadline = self.pending.pop(rank)
        try:
            header, payload = connection.receive(seconds=max(0.001, deadline - time.monotonic()), into=into)
            if header.number != number or header.kind not in (Kind.RESULT, Kind.FAILED):
                connection.close()
                raise ConnectionLost("an answer to another message")
        except NoAnswer as error:
            raise self._pool.lose(node, f"no answer within {self._pool.options.seconds:g} s") from error
        except ConnectionLost as error:
            raise self._pool.lose(node, str(error)) from error
        if header.kind == Kind.FAILED:
            raise NodeFailed(f"{node.name}: {bytes(payload).decode('utf-8', 'replace')}")


def bind_nodes(options: NodeOptions) -> socket.socket:
    """The listening socket of rank 0."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(options.address, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except (OSError, OverflowError) as error:
        given = f"{options.address}:{options.port} ({error})"
        raise InputError("hosts-address", given, "a free port of rank 0", "pass --hosts-address") from error
    return listener
