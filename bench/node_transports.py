"""What carries a row of hidden states between two processes of one machine: the payload of one exchange of a layer of
experts (hidden states in bf16, routing weights and ids there, a partial sum back) over each transport, without experts.

    python bench/node_transports.py [--rows 1 16 256] [--hidden 7168] [--repeats 400]

`sockets` is the yardstick: `sendmsg` of a fixed header and the tensors' bytes, `recv_into` at the other end. Ray's
rows need the package ray and are left out without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOP_K = 8
HEADER = struct.Struct("<QQ48x")
Exchange = Callable[[], object]
Context = multiprocessing.get_context("spawn")


def payload(rows: int, hidden: int) -> list[Tensor]:
    return [
        torch.randn(rows, hidden).bfloat16(),
        torch.rand(rows, TOP_K),
        torch.randint(0, 8, (rows, TOP_K), dtype=torch.int32),
    ]


def raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def bind_half(last: bool) -> None:
    """Two processes of one machine as two machines: each has half of the CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    os.sched_setaffinity(0, cpus[-half:] if last else cpus[:half])


def fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def send_all(sock: socket.socket, parts: Sequence[memoryview | bytes]) -> None:
    views = [memoryview(part) for part in parts]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views:
            views[0] = views[0][sent:]


def echo_sockets(port: int, rows: int, hidden: int) -> None:
    bind_half(True)
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tensors = payload(rows, hidden)
    buffer = memoryview(bytearray(sum(tensor.nbytes for tensor in tensors)))
    header = memoryview(bytearray(HEADER.size))
    while True:
        try:
            fill(sock, header)
        except EOFError:
            return
        fill(sock, buffer)
        send_all(sock, [HEADER.pack(0, tensors[0].nbytes), raw(tensors[0])])


@contextmanager
def sockets(rows: int, hidden: int) -> Iterator[Exchange]:
    listener = socket.create_server(("127.0.0.1", 0))
    process = Context.Process(target=echo_sockets, args=(listener.getsockname()[1], rows, hidden), daemon=True)
    process.start()
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tensors, header = payload(rows, hidden), memoryview(bytearray(HEADER.size))
    result = torch.empty_like(tensors[0])

    def exchange() -> None:
        send_all(sock, [HEADER.pack(0, 1), *map(raw, tensors)])
        fill(sock, header)
        fill(sock, raw(result))

    yield exchange
    sock.close()
    process.join(10)


def without_delay(connection: Any) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def echo_connection(address: tuple[str, int], key: bytes, rows: int, hidden: int) -> None:
    bind_half(True)
    connection = Client(address, authkey=key)
    without_delay(connection)
    tensors = payload(rows, hidden)
    while True:
        try:
            connection.recv_bytes()
        except EOFError:
            return
        for tensor in tensors:
            connection.recv_bytes_into(raw(tensor))
        connection.send_bytes(HEADER.pack(0, 1))
        connection.send_bytes(raw(tensors[0]))


@contextmanager
def connections(rows: int, hidden: int) -> Iterator[Exchange]:
    """`multiprocessing.connection`: the header and each tensor are a message of bytes, stored where they belong."""
    key = secrets.token_bytes(16)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        process = Context.Process(target=echo_connection, args=(listener.address, key, rows, hidden), daemon=True)
        process.start()
        connection = listener.accept()
    without_delay(connection)
    tensors = payload(rows, hidden)
    result = torch.empty_like(tensors[0])

    def exchange() -> None:
        connection.send_bytes(HEADER.pack(0, 1))
        for tensor in tensors:
            connection.send_bytes(raw(tensor))
        connection.recv_bytes()
        connection.recv_bytes_into(raw(result))

    yield exchange
    connection.close()
    process.join(10)


def echo_joined(address: tuple[str, int], key: bytes, rows: int, hidden: int) -> None:
    bind_half(True)
    connection = Client(address, authkey=key)
    without_delay(connection)
    result = payload(rows, hidden)[0]
    while True:
        try:
            connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(b"".join([HEADER.pack(0, 1), raw(result)]))


@contextmanager
def joined_connections(rows: int, hidden: int) -> Iterator[Exchange]:
    """`multiprocessing.connection`: one message of bytes for the header and all tensors, copied into it."""
    key = secrets.token_bytes(16)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        process = Context.Process(target=echo_joined, args=(listener.address, key, rows, hidden), daemon=True)
        process.start()
        connection = listener.accept()
    without_delay(connection)
    tensors = payload(rows, hidden)

    def exchange() -> None:
        connection.send_bytes(b"".join([HEADER.pack(0, 1), *map(raw, tensors)]))
        connection.recv_bytes()

    yield exchange
    connection.close()
    process.join(10)


def join_group(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def echo_gloo(port: int, rows: int, hidden: int, count: int) -> None:
    bind_half(True)
    join_group(1, port)
    tensors, header = payload(rows, hidden), torch.zeros(8, dtype=torch.int64)
    for _ in range(count):
        dist.recv(header, 0)
        for tensor in tensors:
            dist.recv(tensor, 0)
        dist.send(tensors[0], 0)
    dist.destroy_process_group()


@contextmanager
def gloo(rows: int, hidden: int, count: int) -> Iterator[Exchange]:
    """Point-to-point operations of a torch.distributed group; the receiver needs the shape before the rows."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    process = Context.Process(target=echo_gloo, args=(store.port, rows, hidden, count), daemon=True)
    process.start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    tensors, header = payload(rows, hidden), torch.zeros(8, dtype=torch.int64)
    result = torch.empty_like(tensors[0])

    def exchange() -> None:
        dist.send(header, 1)
        for tensor in tensors:
            dist.send(tensor, 1)
        dist.recv(result, 1)

    yield exchange
    process.join(10)
    dist.destroy_process_group()


class EchoActor:
    """The other end under Ray."""

    def rows(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0]


@contextmanager
def ray_calls(rows: int, hidden: int) -> Iterator[Exchange]:
    """A method call of an actor for every exchange."""
    import ray

    actor, tensors = ray.remote(EchoActor).remote(), payload(rows, hidden)
    yield lambda: ray.get(actor.rows.remote(tensors))
    ray.kill(actor)


@contextmanager
def ray_graph(rows: int, hidden: int) -> Iterator[Exchange]:
    """A compiled graph of one actor: mutable objects in shared memory, no call through a raylet."""
    import ray
    from ray.dag import InputNode

    actor, tensors = ray.remote(EchoActor).remote(), payload(rows, hidden)
    with InputNode() as given:
        graph = actor.rows.bind(given).experimental_compile()
    yield lambda: ray.get(graph.execute(tensors))
    graph.teardown()
    ray.kill(actor)


def measure(name: str, exchange: Exchange, rows: int, warm: int, repeats: int) -> dict[str, Any]:
    """Median and shortest: on a machine with other work, waking a process waits for a slice of theirs."""
    times = []
    for _ in range(warm + repeats):
        started = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - started)
    measured = times[warm:]
    return {"transport": name, "rows": rows, "ms": 1e3 * median(measured), "shortest_ms": 1e3 * min(measured)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    with_ray = importlib.util.find_spec("ray") is not None
    if with_ray:
        import ray

        ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, _node_ip_address="127.0.0.1")
    bind_half(False)
    warm, results = 10, []
    print(f"{'transport':<26} {'rows':>5} {'ms':>8} {'shortest':>9} {'to sockets':>11}")
    for rows in options.rows:
        repeats = max(20, options.repeats // (1 + rows // 64))
        transports: dict[str, Any] = {
            "sockets": sockets(rows, options.hidden),
            "multiprocessing.connection": connections(rows, options.hidden),
            "the same, joined": joined_connections(rows, options.hidden),
            "gloo": gloo(rows, options.hidden, warm + repeats),
        }
        if with_ray:
            transports |= {"ray compiled graph": ray_graph(rows, options.hidden)}
            transports |= {"ray actor call": ray_calls(rows, options.hidden)}
        yardstick = 0.0
        for name, transport in transports.items():
            try:
                with transport as exchange:
                    result = measure(name, exchange, rows, warm, repeats)
            except Exception as error:
                print(f"{name:<26} {rows:>5} {type(error).__name__}")
                continue
            yardstick = yardstick or result["shortest_ms"]
            results.append(result | {"ratio": result["shortest_ms"] / yardstick})
            print("{transport:<26} {rows:>5} {ms:>8.3f} {shortest_ms:>9.3f} {ratio:>10.2f}x".format(**results[-1]))
    print(json.dumps({"bench": "node_transports", "hidden": options.hidden, "results": results}))


if __name__ == "__main__":
    main()
