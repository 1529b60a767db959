"""What a web page, a stranger or a broken client can send: hosts, origins, content types, keys, paths, slow headers."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.serve.flags import parse
from ktransformers.serve.http.boundary import AccessRules, rules_for
from ktransformers.serve.http.error import ApiError
from tests.support.serving import EngineHarness, RunningServer, run_app

BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 1}


def ask(
    url: str, path: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body) of a request with exactly these headers; `_` in names is `-`."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None:
        sent = {"Content-Type": "application/json"} | sent
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(scope="module")
def guarded(harness: EngineHarness, adapters: Any) -> Iterator[str]:
    """A server with a key, a name and an origin of another page."""
    from ktransformers.serve.http.api import create_app
    from tests.support.serving import make_service

    rules = rules_for("127.0.0.1", api_key="k", allowed_hosts=["box.lan"], origins=["https://page.example"])
    with run_app(create_app(make_service(harness, adapters), rules=rules)) as url:
        yield url


def test_every_answer_has_a_request_id(served: RunningServer) -> None:
    answers = [
        ask(served.url, "/health"),
        ask(served.url, "/v1/completions", BODY),
        ask(served.url, "/v1/completions", {**BODY, "stream": True}),
        ask(served.url, "/v1/completions", b"{"),
        ask(served.url, "/nothing"),
        ask(served.url, "/health", Host="elsewhere.example"),
    ]
    assert [status for status, _, _ in answers] == [200, 200, 200, 400, 404, 403]
    ids = [headers["x-request-id"] for _, headers, _ in answers]
    assert len(set(ids)) == len(ids) and all(one.startswith("req_") for one in ids)
    assert not any("access-control-allow-origin" in headers for _, headers, _ in answers)


def test_openai_client_shows_the_request_id(served: RunningServer) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="tiny", input="a")
    assert caught.value.request_id.startswith("req_")


def test_hosts(served: RunningServer, guarded: str) -> None:
    assert ask(served.url, "/health", Host="localhost:30000")[0] == 200
    status, _, body = ask(served.url, "/v1/models", Host="rebound.example:80")
    assert status == 403 and "--allowed-hosts" in error_of(body)["message"]
    assert ask(guarded, "/health", Host="box.lan:1234")[0] == 200
    assert ask(guarded, "/health", Host="lan")[0] == 403


@pytest.mark.parametrize(
    ("bound", "host", "answered"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "192.168.1.9", False),
        ("127.0.0.1", "", False),
        ("192.168.1.9", "192.168.1.9:30000", True),
        ("192.168.1.9", "evil.example", False),
        ("0.0.0.0", "192.168.1.9", True),
        ("0.0.0.0", socket.gethostname(), True),
        ("::", "[fe80::1]:30000", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", "127.0.0.1.evil.example", False),
    ],
)
def test_hosts_by_bound_address(bound: str, host: str, answered: bool) -> None:
    scope = {"method": "GET", "path": "/", "headers": [(b"host", host.encode())]}
    if answered:
        rules_for(bound).check(scope)
    else:
        with pytest.raises(ApiError, match="Host"):
            rules_for(bound).check(scope)
    rules_for(bound, allowed_hosts=["*"]).check(scope)


def test_pages_of_other_origins_cannot_send(served: RunningServer, guarded: str) -> None:
    own = served.url
    assert ask(served.url, "/v1/completions", BODY, Origin=own)[0] == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        for path in ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            status, _, body = ask(served.url, path, BODY, Origin=origin)
            assert status == 403 and error_of(body)["code"] == "origin_not_allowed"
    key = {"Authorization": "Bearer k", "Origin": "https://page.example"}
    status, headers, _ = ask(guarded, "/v1/completions", BODY, **key)
    assert status == 200 and headers["access-control-allow-origin"] == "https://page.example"
    preflight = {"Origin": "https://page.example", "Access_Control_Request_Method": "POST"}
    status, headers, _ = ask(guarded, "/v1/completions", method="OPTIONS", **preflight)
    assert status == 200 and headers["access-control-allow-origin"] == "https://page.example"
    _, headers, _ = ask(served.url, "/v1/completions", method="OPTIONS", **preflight)
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_bodies_that_a_form_can_send_are_refused(served: RunningServer, kind: str) -> None:
    for path in ("/v1/completions", "/v1/load_lora_adapter", "/unload_lora_adapter"):
        status, _, body = ask(served.url, path, BODY, Content_Type=kind)
        assert status == 415 and "application/json" in error_of(body)["message"]
    assert ask(served.url, "/v1/completions", BODY, Content_Type="application/json; charset=utf-8")[0] == 200


def test_key_guards_everything_but_health_and_page(guarded: str) -> None:
    for path in (
        "/openapi.json",
        "/metrics",
        "/v1/models",
        "/docs",
        "/redoc",
        "/training",
        "/training/runs",
        "/nothing",
        "/v1/embeddings",
    ):
        assert ask(guarded, path)[0] == 401, path
    assert ask(guarded, "/openapi.json", Authorization="Bearer k")[0] == 200
    assert ask(guarded, "/health")[0] == ask(guarded, "/")[0] == 200
    assert ask(guarded, "/v1/models", Authorization="Bearer \xe9")[0] == 401


def test_empty_key_is_an_error() -> None:
    for given in ("", "  "):
        with pytest.raises(InputError, match="api-key"):
            parse(["model", "--api-key", given])


def test_pages_of_documentation_that_load_scripts_do_not_exist(served: RunningServer) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert ask(served.url, path)[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/moderations"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("DELETE", "/v1/files/file-1"),
    ],
)
def test_paths_of_openai_that_do_not_exist_here(served: RunningServer, method: str, path: str) -> None:
    status, _, body = ask(served.url, path, None if method != "POST" else b"x", method, Content_Type="text/plain")
    error = error_of(body)
    assert status == 404 and error["code"] == "unknown_url" and error["type"] == "not_found_error"
    assert f"{method} {path} does not exist" in error["message"] and "/v1/chat/completions" in error["message"]


def test_refusals_name_the_flag_that_allows(served: RunningServer) -> None:
    status, _, body = ask(served.url, "/v1/chat/completions", b"{}", Host="host.docker.internal:30000")
    assert status == 403 and "--allowed-hosts host.docker.internal" in error_of(body)["message"]
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    status, _, body = ask(served.url, "/v1/chat/completions", None, "OPTIONS", **headers)
    assert status == 405 and "--cors-origins http://page.example" in error_of(body)["message"]
    assert "llama-server --embedding" in error_of(ask(served.url, "/v1/embeddings", b"{}")[2])["message"]


def test_preflight_of_an_allowed_page_takes_any_header(guarded: str) -> None:
    headers = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-api-key,x-stainless-lang",
        "Host": "127.0.0.1",
    }
    status, answer, _ = ask(guarded, "/v1/chat/completions", None, "OPTIONS", **headers)
    assert status == 200 and "x-stainless-lang" in answer["access-control-allow-headers"]


def test_a_key_in_either_header_and_errors_in_the_envelope_of_their_door(guarded: str) -> None:
    assert ask(guarded, "/v1/models", X_Api_Key="k")[0] == 200
    status, _, body = ask(guarded, "/v1/models", X_Api_Key="wrong")
    assert status == 401 and "x-api-key" in error_of(body)["message"]
    status, _, body = ask(guarded, "/api/chat", {"messages": []})
    assert status == 401 and set(json.loads(body)) == {"error"} and isinstance(json.loads(body)["error"], str)


def test_slow_headers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    from ktransformers.serve.http import listener

    monkeypatch.setattr(listener, "HEADER_SECONDS", 0.6)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            time.sleep(0)
            await send({"type": "http.response.body", "body": b"ok"})

    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(listener.make_config(application, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        address = bound.getsockname()
        with socket.create_connection(address, timeout=20) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
            assert b"200" in slow.recv(1000)
            started = time.monotonic()
            while time.monotonic() < started + 10:  # the second request arrives byte by byte and never ends
                try:
                    slow.sendall(b"G")
                    slow.settimeout(0.1)
                    if not slow.recv(100):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            assert 0.3 < time.monotonic() - started < 8
        with socket.create_connection(address, timeout=20) as silent:
            assert silent.recv(100) == b""
        for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n"):
            with socket.create_connection(address, timeout=20) as other:  # no HTTP
                other.sendall(garbage)
                head, _, body = b"".join(iter(lambda: other.recv(4096), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and b"\r\nx-request-id: req_" in head
            assert error_of(body)["code"] == "invalid_http"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def test_client_that_leaves_in_its_body_is_not_logged(served: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.WARNING), socket.create_connection((host, int(port))) as gone:
        gone.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"model"'
        )
        time.sleep(0.2)
    time.sleep(0.5)
    assert ask(served.url, "/health")[0] == 200
    assert not caplog.records


def test_bugs_are_logged_once_with_the_request_id(
    served: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug with a secret")

    monkeypatch.setattr(served.service, "generation_requests", broken)
    with caplog.at_level(logging.WARNING):
        status, headers, body = ask(served.url, "/v1/completions", BODY)
    assert status == 500 and headers["x-request-id"] in error_of(body)["message"] and b"secret" not in body
    assert len(caplog.records) == 1 and headers["x-request-id"] in caplog.text and "ZeroDivisionError" in caplog.text


def test_rules_without_a_key_answer_loopback_only() -> None:
    rules = AccessRules()
    rules.check({"method": "POST", "path": "/", "headers": [(b"host", b"127.0.0.1:1")]})
    with pytest.raises(ApiError):
        rules.check({"method": "GET", "path": "/", "headers": [(b"host", b"10.0.0.1")]})
