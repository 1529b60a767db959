"""uvicorn's configuration, with limits for connections: of their number, and of the time that the headers of a request
may take. Between requests uvicorn's own keep-alive timeout applies. What is no HTTP never becomes a request; it is
answered here, in the form of all other errors.

Every connection is an open file, of which a process may have `ulimit -n`. That limit is raised as far as the system
allows; connections beyond what model files, worker processes and adapters leave are answered with 503 and closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import time
from typing import Any

import uvicorn  # type: ignore[import-not-found,unused-ignore]
from uvicorn.protocols.http.auto import AutoHTTPProtocol  # type: ignore[import-not-found,unused-ignore]

from ktransformers.ground.log import logger
from ktransformers.serve.http.boundary import new_request_id
from ktransformers.serve.http.error import ApiError

LOG = logger(__name__)
HEADER_SECONDS = 15.0
# Connections that may be accepted before the first of them can be refused: asyncio accepts as many at a time.
BACKLOG = 128
SPARE_FILES = 2 * BACKLOG
MIN_CONNECTIONS = 64
MAX_OPEN_FILES = 2**16
REPEAT_SECONDS = 60.0  # between two log lines that say the same


class OncePerMinute(logging.Filter):
    """Drops records whose message was logged less than REPEAT_SECONDS ago; asyncio logs every failed accept."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, message = time.monotonic(), str(record.msg)
        if now - self._logged.get(message, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._logged = {text: at for text, at in self._logged.items() if now - at < REPEAT_SECONDS} | {message: now}
        return True


ONCE_PER_MINUTE = OncePerMinute()
LOG.addFilter(ONCE_PER_MINUTE)
logging.getLogger("asyncio").addFilter(ONCE_PER_MINUTE)


def connection_limit() -> int:
    """Connections at a time, with as many open files as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(MIN_CONNECTIONS, files - len(os.listdir("/proc/self/fd")) - SPARE_FILES)


class OpenTransport:
    """A transport that drops what is written after the connection was lost: of a stream whose client has gone, several
    events may be ready before the protocol is told, and asyncio logs each write."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type,unused-ignore]
    """The protocol that uvicorn chooses. Connections beyond the limit are refused, and those whose headers take longer
    than HEADER_SECONDS are closed."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(OpenTransport(transport))
        if len(self.connections) >= self.limit_concurrency:
            LOG.warning("refusing connections: %d are open; `ulimit -n` limits them", len(self.connections) - 1)
            self._refuse("503 Service Unavailable", ApiError(503, "the server has too many connections"))
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request():
            self._cancel_timer()
        elif self._header_timer is None:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are no HTTP request."""
        self._refuse("400 Bad Request", ApiError(400, msg, code="invalid_http"))

    def _refuse(self, status: str, error: ApiError) -> None:
        body = json.dumps(error.to_json()).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close_if_idle)

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_if_idle(self) -> None:
        self._header_timer = None
        if not self._in_request() and not self.transport.is_closing():
            self.transport.close()


def make_config(app: Any, *, max_connections: int | None = None, **options: Any) -> Any:
    """uvicorn.Config for an application that is served to others."""
    limit = max_connections or connection_limit()
    return uvicorn.Config(
        app, http=LimitedProtocol, server_header=False, limit_concurrency=limit + 1, backlog=BACKLOG, **options
    )
