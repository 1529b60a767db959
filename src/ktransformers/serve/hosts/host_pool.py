"""Rank 0's side of the expert hosts: it accepts them, exchanges messages with them, notices when one is gone, and takes
a restarted one back.

A host is connected once it has loaded its experts and has every adapter that is in use. While one is missing, the
server refuses requests (`unavailable`) instead of waiting; nothing is computed without the missing experts, so no
answer is wrong. The thread `kt-hosts` accepts connections and pings idle hosts, so that a loss is noticed without
traffic. Each host has a lock that is held from a message to its answer; an exchange takes the locks of its hosts in
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
from ktransformers.serve.hosts.handshake import Facts, difference, receive_facts, refuse, welcome
from ktransformers.serve.hosts.options import HostOptions
from ktransformers.serve.hosts.wire import Connection, ConnectionLost, Header, Kind, NoAnswer
from ktransformers.serve.scheduler.engine import Unavailable

LOG = logger(__name__)
START_SECONDS = 300.0  # for all hosts to connect at start
PING_SECONDS = 2.0  # between two pings of an idle host

Parts = Sequence[memoryview | bytes]


class HostFailed(RuntimeError):
    """A host could not compute a message; its connection stays."""


class SharedAdapter(Protocol):
    """LoRA of one layer whose factors are on several hosts."""

    handle: int

    def message(self, rank: int) -> tuple[Header, Parts] | None:
        """What a host gets of it; None: nothing."""
        ...


@dataclass(eq=False)
class Host:
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
        return f"expert host {self.rank} ({self.address})"

    @property
    def bytes(self) -> tuple[int, int]:
        connection = self.connection
        own = (0, 0) if connection is None else (connection.sent, connection.received)
        return self.sent + own[0], self.received + own[1]


class HostPool:
    def __init__(self, options: HostOptions, facts: Facts, log: Callable[[str], None]) -> None:
        """Binds the address; a port in use is an error at once."""
        self.options, self._facts, self._log = options, dict(facts), log
        self.hosts = {rank: Host(rank) for rank in range(1, options.ranks)}
        self._listener = bind_hosts(options)
        self.port = int(self._listener.getsockname()[1])
        self._numbers = 0
        self.exchanges = 0
        self._changed = threading.Condition()
        self._refused: list[str] = []  # of hosts at start
        self._adapters_lock = threading.Lock()  # a host that comes back gets the adapters that others have
        self._adapters: dict[int, Callable[[], SharedAdapter | None]] = {}  # weak references by handle
        self._next_handle = 1
        self._closing = False
        self._starting = True
        self._thread = threading.Thread(target=self._serve, name="kt-hosts", daemon=True)
        self._thread.start()

    def wait_for_hosts(self, seconds: float = START_SECONDS) -> None:
        """Until every host has introduced itself with equal facts, before anything is loaded."""
        self._wait(lambda host: host.greeted is not None or host.connection is not None, seconds)

    def wait_until_ready(self) -> None:
        """Until every host has loaded its experts."""
        self._wait(lambda host: host.connection is not None, None)
        self._starting = False

    def _wait(self, done: Callable[[Host], bool], seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not all(done(host) for host in self.hosts.values()):
                if self._refused:
                    raise InputError("hosts", self._refused[0], "the same launch on every host")
                missing = [host for host in self.hosts.values() if not done(host)]
                lost = next((host for host in missing if host.losses), None)
                if lost is not None:
                    raise InputError("hosts", f"{lost.name}, which is gone: {lost.reason}", "hosts that stay")
                if deadline is not None and time.monotonic() > deadline:
                    names = ", ".join(f"host {host.rank}" for host in missing)
                    where = f"{self.options.address}:{self.port}"
                    expected = f"a connection to {where} within {seconds:g} s"
                    raise InputError("hosts", f"nothing of {names}", expected, "start the same line there")
                self._changed.wait(0.2)

    def unavailable(self) -> str:
        """Why requests cannot be answered now, in one line; empty: all hosts are here."""
        for host in self.hosts.values():
            if host.connection is None:
                return f"{host.name} is gone: {host.reason}; requests are refused until it is back"
        return ""

    @contextmanager
    def exchange(self, ranks: Sequence[int]) -> Iterator[Exchange]:
        """Messages to these hosts and their answers. After an error, answers that are still to come are received and
        dropped: hosts that did not fail stay connected."""
        hosts = [self.hosts[rank] for rank in sorted(ranks)]
        with contextlib.ExitStack() as stack:
            for host in hosts:
                stack.enter_context(host.lock)
            exchange = Exchange(self)
            try:
                yield exchange
            except BaseException:
                for rank in list(exchange.pending):
                    with contextlib.suppress(Unavailable, HostFailed):
                        exchange.receive(rank, None)
                raise
        self.exchanges += 1

    def connection_of(self, host: Host) -> Connection:
        connection = host.connection
        if connection is None:
            raise Unavailable(f"{host.name} is gone: {host.reason}; requests are refused until it is back")
        return connection

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def lose(self, host: Host, reason: str) -> Unavailable:
        self._lose(host, reason)
        return Unavailable(f"{host.name} is gone: {reason}; requests are refused until it is back")

    def _lose(self, host: Host, reason: str) -> None:
        connection, host.connection = host.connection, None
        if connection is None:
            return
        connection.close()
        host.sent, host.received = host.sent + connection.sent, host.received + connection.received
        host.reason, host.losses = reason, host.losses + 1
        host.unloaded.clear()
        if not self._closing:
            self._log(f"{host.name} is gone: {reason}; requests are refused until it is back")
        with self._changed:
            self._changed.notify_all()

    # Adapters

    def new_handle(self) -> int:
        with self._adapters_lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            return handle

    def load_adapter(self, adapter: SharedAdapter, reference: Callable[[], SharedAdapter | None]) -> None:
        """Give every host its factors. `reference` is weak; `unload_adapter` follows when the adapter is let go of."""
        with self._adapters_lock:
            for host in self.hosts.values():
                with host.lock:
                    self._load(host, self.connection_of(host), adapter)
            self._adapters[adapter.handle] = reference

    def _load(self, host: Host, connection: Connection, adapter: SharedAdapter) -> None:
        message = adapter.message(host.rank)
        if message is not None:
            self._call(host, connection, *message)

    def unload_adapter(self, handle: int) -> None:
        """Called when an adapter is garbage, in any thread: hosts are told with the next ping or load."""
        self._adapters.pop(handle, None)
        for host in self.hosts.values():
            host.unloaded.append(handle)

    def _call(self, host: Host, connection: Connection, header: Header, parts: Parts = ()) -> None:
        """A message that is answered by DONE; the host's lock is held."""
        number = self.next_number()
        seconds = self.options.seconds
        try:
            connection.send(replace(header, number=number), *parts, seconds=seconds)
            answer, payload = connection.receive(seconds=seconds)
            if answer.number != number or answer.kind not in (Kind.DONE, Kind.FAILED):
                raise ConnectionLost("an answer to another message")
        except ConnectionLost as error:
            if host.connection is connection:
                raise self.lose(host, str(error)) from error
            raise
        if answer.kind == Kind.FAILED:
            raise HostFailed(f"{host.name}: {bytes(payload).decode('utf-8', 'replace')}")

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
                for host in self.hosts.values():
                    self._ping(host)

    def _ping(self, host: Host) -> bool:
        """Whether the host has answered; False also if it is busy: an exchange notices a loss itself."""
        if host.connection is None or not host.lock.acquire(blocking=False):
            return False
        try:
            connection = host.connection
            if connection is None:
                return False
            with contextlib.suppress(Unavailable, HostFailed):
                while host.unloaded:
                    self._call(host, connection, Header(Kind.UNLOAD, handle=host.unloaded.pop()))
                self._call(host, connection, Header(Kind.PING))
                return True
            return False
        finally:
            host.lock.release()

    def _is_connected(self, host: Host) -> bool:
        """Whether its connection still works; a restarted host may be back before the loss of the old connection was
        noticed."""
        deadline = time.monotonic() + self.options.seconds
        while host.connection is not None and not self._ping(host) and time.monotonic() < deadline:
            time.sleep(0.05)
        return host.connection is not None

    def _admit(self, connection: Connection) -> None:
        """One connection, from the handshake to a host that computes."""
        host = None
        try:
            facts, proof = receive_facts(connection, self.options.token)
            host = self._check(connection, facts)
            if host is None:
                return
            welcome(connection, proof)
            with self._changed:
                self._changed.notify_all()
            header, _ = connection.receive(seconds=None, limit=0)
            if header.kind != Kind.READY:
                raise ConnectionLost("something else than READY")
            self._join(host, connection)
        except ConnectionLost as error:
            connection.close()
            if host is not None and host.greeted is connection:
                host.greeted, host.reason, host.losses = None, f"{error} while it loaded", host.losses + 1
            LOG.info("a connection of %s ended: %s", connection.peer, error)
        except Exception as error:  # of an adapter, or of a greeting that is no JSON
            connection.close()
            if host is not None and host.greeted is connection:
                host.greeted, host.reason = None, str(error)
            self._log(f"a host at {connection.peer} was not taken: {error}")
            LOG.info("a host was not taken", exc_info=error)
        finally:
            with self._changed:
                self._changed.notify_all()

    def _check(self, connection: Connection, facts: Mapping[str, str]) -> Host | None:
        """The host of these facts, or None after a refusal."""
        rank = facts.get("rank", "")
        host = self.hosts.get(int(rank)) if rank.isdigit() else None
        reason = difference(self._facts, facts)
        if not reason and host is None:
            reason = f"a rank from 1 to {self.options.ranks - 1}, not {rank or 'none'}"
        if host is not None and not reason:
            taken = self._is_connected(host)
            with self._changed:
                if not taken and host.connection is None and host.greeted is None:
                    host.greeted, host.address = connection, connection.peer
                    return host
            reason = f"another rank than {rank}, which is connected already from {host.address}"
        line = f"host {rank or '?'} ({connection.peer})"
        with contextlib.suppress(ConnectionLost):
            refuse(connection, f"{line}: {reason}")
        if self._starting:
            self._refused.append(f"{line} with other settings, where {reason} was expected")
        self._log(f"{line} was refused: expected {reason}")
        return None

    def _join(self, host: Host, connection: Connection) -> None:
        with self._adapters_lock:
            adapters = [adapter for reference in list(self._adapters.values()) if (adapter := reference()) is not None]
            for adapter in adapters:
                self._load(host, connection, adapter)
            host.unloaded.clear()
            host.connection, host.greeted, host.reason = connection, None, ""
        again = f" again, with {len(adapters)} layers of adapters" if host.losses else ""
        self._log(f"{host.name} is connected{again}")

    def close(self) -> None:
        """The server ends: hosts end too."""
        self._closing = True
        for host in self.hosts.values():
            connection = host.connection or host.greeted
            if connection is not None:
                with contextlib.suppress(ConnectionLost):
                    connection.send(Header(Kind.BYE), seconds=1.0)
                connection.close()
        self._listener.close()

    def counters(self) -> dict[str, Any]:
        """For /metrics."""
        return {
            "connected": sum(host.connection is not None for host in self.hosts.values()),
            "sent": sum(host.bytes[0] for host in self.hosts.values()),
            "received": sum(host.bytes[1] for host in self.hosts.values()),
            "losses": sum(host.losses for host in self.hosts.values()),
            "exchanges": self.exchanges,
        }


class Exchange:
    """Rows sent to hosts and results to come, while the locks of these hosts are held."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.pending: dict[int, tuple[int, float]] = {}  # rank -> number of the message, deadline

    def send(self, rank: int, header: Header, parts: Parts) -> None:
        host = self._pool.hosts[rank]
        connection, number = self._pool.connection_of(host), self._pool.next_number()
        seconds = self._pool.options.seconds
        self.pending[rank] = (number, time.monotonic() + seconds)
        try:
            connection.send(replace(header, number=number), *parts, seconds=seconds)
        except ConnectionLost as error:
            self.pending.pop(rank)
            raise self._pool.lose(host, str(error)) from error

    def receive(self, rank: int, into: Tensor | None) -> None:
        """The result of a host, stored in `into`; None: it is dropped."""
        host = self._pool.hosts[rank]
        connection = self._pool.connection_of(host)
        number, deadline = self.pending.pop(rank)
        try:
            header, payload = connection.receive(seconds=max(0.001, deadline - time.monotonic()), into=into)
            if header.number != number or header.kind not in (Kind.RESULT, Kind.FAILED):
                connection.close()
                raise ConnectionLost("an answer to another message")
        except NoAnswer as error:
            raise self._pool.lose(host, f"no answer within {self._pool.options.seconds:g} s") from error
        except ConnectionLost as error:
            raise self._pool.lose(host, str(error)) from error
        if header.kind == Kind.FAILED:
            raise HostFailed(f"{host.name}: {bytes(payload).decode('utf-8', 'replace')}")


def bind_hosts(options: HostOptions) -> socket.socket:
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
