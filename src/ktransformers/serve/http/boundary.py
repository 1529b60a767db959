"""The outermost layer of a request: its id, the rules of access, and every exception turned into one answer.

An error that a client can act on (`KTError`: of the request or of a file that it names) is a 4xx in OpenAI's envelope.
A client that has disconnected gets nothing. Anything else is a bug: it is logged once, with the request's id, which
every answer carries as x-request-id, and answered with 500.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from starlette.requests import ClientDisconnect  # type: ignore[import-not-found,unused-ignore]

from ktransformers.ground.errors import KTError
from ktransformers.ground.log import logger
from ktransformers.serve.http.access import AccessRules
from ktransformers.serve.http.error import UNAVAILABLE, ApiError
from ktransformers.serve.scheduler.engine import Unavailable

LOG = logger(__name__)
RETRY_STATUSES = (429, 503)


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class RequestBoundary:
    """ASGI middleware. It wraps only `send`, so streams are not buffered."""

    def __init__(self, app: Any, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope["request_id"] = request_id
        started = False

        async def send_with_id(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            self._rules.check(scope)
            await self._app(scope, receive, send_with_id)
            return
        except ClientDisconnect:
            return
        except Exception as error:
            answer = api_error(error, request_id)
        if not started:
            await send_error(answer, send_with_id)


def api_error(error: Exception, request_id: str) -> ApiError:
    """The answer to an exception; one that is no error of the input is logged here."""
    if isinstance(error, ApiError):
        # Its traceback refers to frames that refer to it, directly and through tasks, and to the body: a cycle that
        # would keep megabytes until the next full garbage collection.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    if isinstance(error, Unavailable):  # an adapter could not be loaded on every host
        return ApiError(503, str(error), code=UNAVAILABLE)
    if isinstance(error, KTError):
        return ApiError(400, str(error))
    LOG.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"{type(error).__name__}; the server's log has it under {request_id}", code="internal_error")


async def send_error(error: ApiError, send: Any) -> None:
    body = json.dumps(error.to_json(), ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in RETRY_STATUSES:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
