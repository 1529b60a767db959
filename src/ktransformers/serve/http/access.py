"""Which requests are answered at all, decided from their headers: the Host that they were sent to, the Origin of the
page that sent them, and the API key.

A browser sends whatever page is open, with a name that resolves to this machine if the page's author wishes so (DNS
rebinding), and without asking first if the request looks like a form. So Host must be an address or a name of this
server, and a request that is not a GET must come from no page, from the server's own page, or from an origin that
`--cors-origins` names. Bodies must be `application/json` (`serve/http/body.py`), which a form cannot send.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ktransformers.serve.http.error import ApiError

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
        self._check_key(scope["path"], headers.get("authorization", ""))

    def _check_host(self, host: str) -> None:
        name = host_name(host)
        if ANY in self.hosts or name in self.hosts or (self.any_address and _is_address(name)):
            return
        message = f"Host: given {name!r}, expected the address that the server listens on; --allowed-hosts adds names"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or ANY in self.origins or origin.lower() in self.origins:
            return
        if origin.lower().partition("://")[2] == host.lower() != "":
            return
        message = f"Origin: given {origin!r}, expected the server's own page; --cors-origins adds origins"
        raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, path: str, authorization: str) -> None:
        if self.api_key is None or path in PATHS_WITHOUT_KEY:
            return
        scheme, _, given = authorization.partition(" ")
        matches = hmac.compare_digest(given.strip().encode("latin-1"), self.api_key.encode())
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(401, "no valid API key was given; send `Authorization: Bearer KEY`", code="invalid_api_key")


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
