"""The outermost layer of a request: its id, the rules of access, and every exception turned into one answer.

Which requests are answered at all is decided from their headers: the Host that they were sent to, the Origin of the
page that sent them, and the API key. A browser sends whatever page is open, with a name that resolves to this machine
if the page's author wishes so (DNS rebinding), and without asking first if the request looks like a form. So Host must
be an address or a name of this server, and a request that is not a GET must come from no page, from the server's own
page, or from an origin that `--cors-origins` names. Bodies must be `application/json` (`serve/http/body.py`), which a
form cannot send.

An error that a client can act on (`KTError`: of the request or of a file that it names) is a 4xx in the envelope of the
door that was asked. A client that has disconnected gets nothing. Anything else is a bug: it is logged once, with the
request's id, which every answer carries as x-request-id, and answered with 500.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect  # type: ignore[import-not-found,unused-ignore]

from ktransformers.ground.errors import KTError
from ktransformers.ground.log import logger
from ktransformers.serve.doors.registry import error_answer
from ktransformers.serve.http.error import UNAVAILABLE, ApiError
from ktransformers.serve.scheduler.engine import Unavailable

PATHS_WITHOUT_KEY = {"/", "/health"}
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
READING_METHODS = {"GET", "HEAD", "OPTIONS"}
ANY = "*"


@dataclass(frozen=True)
class AccessRules:
    api_key: str | None = None
    hosts: frozenset[str] = LOOPBACK  # `*`: any
    any_address: bool = False  # a Host that is an IP address is accepted: no name is involved that could be rebound
    origins: frozenset[str] = frozenset()  # of pages that may send requests; `*`: any

    def check(self, scope: Any) -> None:
        """Raises ApiError if a request with these headers is not answered."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        self._check_host(host)
        if scope["method"] not in READING_METHODS:
            self._check_origin(headers.get("origin"), host)
        self._check_key(scope["path"], headers)

    def _check_host(self, host: str) -> None:
        name = host_name(host)
        if ANY in self.hosts or name in self.hosts or (self.any_address and _is_address(name)):
            return
        message = f"Host: given {name!r}, expected the address that the server listens on; start it with"
        message += f" --allowed-hosts {name or 'NAME'} if clients have to reach it under this name"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or ANY in self.origins or origin.lower() in self.origins:
            return
        if origin.lower().partition("://")[2] == host.lower() != "":
            return
        message = f"Origin: given {origin!r}, expected the server's own page; start it with --cors-origins {origin}"
        raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, path: str, headers: Mapping[str, str]) -> None:
        if self.api_key is None or path in PATHS_WITHOUT_KEY:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(key.strip().encode("latin-1"), self.api_key.encode()) for key in given):
            message = "no valid API key was given; send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(401, message, code="invalid_api_key")


def rules_for(
    bound: str, *, api_key: str | None = None, allowed_hosts: Iterable[str] = (), origins: Iterable[str] = ()
) -> AccessRules:
    """The rules of a server that listens on `bound`. On every address of the machine (0.0.0.0, ::) any address and the
    machine's own names are accepted."""
    bound = bound.strip("[]").lower()
    everywhere = bound in ("", "0.0.0.0", "::")
    hosts = {host_name(name) for name in allowed_hosts}
    if everywhere:
        machine = socket.gethostname().lower()
        hosts |= LOOPBACK | {machine, machine.partition(".")[0], f"{machine}.local"}
    elif bound in LOOPBACK or _is_loopback(bound):
        hosts |= LOOPBACK | {bound}
    else:
        hosts.add(bound)
    return AccessRules(api_key, frozenset(hosts), everywhere, frozenset(name.rstrip("/").lower() for name in origins))


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.partition(":")[0] if host.count(":") == 1 else host).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


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
            await send_error(answer, scope["path"], send_with_id)


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


async def send_error(error: ApiError, path: str, send: Any) -> None:
    status, document = error_answer(path, error)
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in RETRY_STATUSES:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
