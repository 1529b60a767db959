"""Reading the body of a request: JSON by its content type, complete within a time, and within two limits of bytes, of
one body and of all bodies in memory at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ktransformers.serve.http.error import ApiError

BODY_SECONDS = 120.0  # until a body is complete
MAX_BODIES_BYTES = 2**28  # of all requests that are being received or prepared
DISCARDED_BODIES = 4  # times the limit that is read and discarded, so that a client can read why it was refused


class BodyReader:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes_in_memory = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Any) -> AsyncIterator[bytearray]:
        """The body, which counts as in memory until the block ends."""
        check_content_type(request.headers.get("content-type", ""))
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    await self._receive(request, body)
            except TimeoutError as error:
                message = f"the body was not complete within {BODY_SECONDS:g} seconds"
                raise ApiError(408, message, code="request_timeout") from error
            yield body
        finally:
            self._bytes_in_memory -= len(body)

    async def _receive(self, request: Any, body: bytearray) -> None:
        received = 0
        async for part in request.stream():
            received += len(part)
            if received > self._max_bytes:
                self._bytes_in_memory -= len(body)
                body.clear()
                if received > DISCARDED_BODIES * self._max_bytes:
                    break
                continue
            if self._bytes_in_memory + len(part) > MAX_BODIES_BYTES:
                raise ApiError(429, "the server is full: it is receiving too many large requests", code="queue_full")
            self._bytes_in_memory += len(part)
            body += part
        if received > self._max_bytes:
            message = f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)"
            raise ApiError(413, message, code="body_too_large")


def check_content_type(given: str) -> None:
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"Content-Type: given {kind or 'none'!r}, expected application/json"
        raise ApiError(415, message, code="unsupported_media_type")
