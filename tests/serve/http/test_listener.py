"""Connections: answers are sent at once, there is a limit, and a client that leaves is not logged."""

from __future__ import annotations

import http.client
import json
import logging
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ktransformers.serve.launch import bind_socket

pytest.importorskip("uvicorn")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def serving(application: Any, **options: Any) -> Iterator[tuple[Any, str]]:
    """(uvicorn's server, its address), with the socket and the configuration of `kt serve`."""
    import uvicorn

    from ktransformers.serve.http.listener import make_config

    with bind_socket("127.0.0.1", 0) as listener:
        server = uvicorn.Server(make_config(application, lifespan="off", log_level="warning", **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        yield server, f"127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def get(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    connection.request("GET", "/")
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_answers_on_a_kept_alive_connection_wait_for_no_acknowledgement() -> None:
    with serving(answer_ok) as (server, address):
        client = http.client.HTTPConnection(address, timeout=60)
        assert get(client) == get(client) == (200, b"ok")
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getpeername() == client.sock.getsockname()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()


def test_connections_beyond_the_limit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    from ktransformers.serve.http.listener import ONCE_PER_MINUTE

    ONCE_PER_MINUTE._logged.clear()
    with serving(answer_ok, max_connections=3) as (server, address), caplog.at_level(logging.WARNING):
        idle = [http.client.HTTPConnection(address, timeout=60) for _ in range(3)]
        assert [get(connection)[0] for connection in idle] == [200, 200, 200]
        for _ in range(5):
            refused = http.client.HTTPConnection(address, timeout=60)
            status, body = get(refused)
            assert status == 503 and "too many connections" in json.loads(body)["error"]["message"]
        assert get(idle[0])[0] == 200
        idle.pop().close()
        wait_for(lambda: len(server.server_state.connections) == 2)
        idle.append(http.client.HTTPConnection(address, timeout=60))
        assert get(idle[2])[0] == 200
        for connection in idle:
            connection.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("ktransformers")] == [
        "refusing connections: 3 are open; `ulimit -n` limits them"
    ]


def test_limit_of_open_files_is_raised_and_leaves_some_for_others() -> None:
    program = (
        "import resource; from ktransformers.serve.http.listener import SPARE_FILES, connection_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1024))\n"
        "print(connection_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), SPARE_FILES)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    connections, soft, hard, spare = map(int, done.stdout.split())
    assert soft == hard == 1024 and 500 < connections < 1024 - spare
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1024


def test_events_for_a_client_that_has_left_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    left, ended = threading.Event(), threading.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        left.wait(60)  # on the event loop, which therefore cannot learn that the client has gone
        for _ in range(40):
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
        ended.set()

    with serving(stream) as (_, address), caplog.at_level(logging.WARNING):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        left.set()
        assert ended.wait(60)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_repeated_log_lines_are_one_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from ktransformers.serve.http import listener

    now = [1000.0]
    monkeypatch.setattr(listener.time, "monotonic", lambda: now[0])
    listener.ONCE_PER_MINUTE._logged.clear()
    log = logging.getLogger("asyncio")
    with caplog.at_level(logging.ERROR):
        for second in range(100):
            now[0] = 1000.0 + second
            log.error("socket.accept() out of system resource\nsocket: %d", second)
            log.error("something else")
    listener.ONCE_PER_MINUTE._logged.clear()
    assert [record.getMessage()[-2:] for record in caplog.records] == [" 0", "se", "60", "se"]
