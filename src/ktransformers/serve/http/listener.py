"""uvicorn's configuration, with a time limit for the headers of a request: a connection that sends none, or sends them
byte by byte, is closed. Between requests uvicorn's own keep-alive timeout applies. What is no HTTP never becomes a
request; it is answered here, in the form of all other errors.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn  # type: ignore[import-not-found,unused-ignore]
from uvicorn.protocols.http.auto import AutoHTTPProtocol  # type: ignore[import-not-found,unused-ignore]

from ktransformers.serve.http.boundary import new_request_id
from ktransformers.serve.http.error import ApiError

HEADER_SECONDS = 15.0


class HeaderTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type,unused-ignore]
    """The protocol that uvicorn chooses, whose connections are closed if headers take longer than HEADER_SECONDS."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
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
        body = json.dumps(ApiError(400, msg, code="invalid_http").to_json()).encode()
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
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


def make_config(app: Any, **options: Any) -> Any:
    """uvicorn.Config for an application that is served to others."""
    return uvicorn.Config(app, http=HeaderTimeoutProtocol, server_header=False, **options)
