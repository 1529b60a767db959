"""The client of `kt chat` and `kt prove` before servers of another kind and servers that end: errors of one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ktransformers.ground.client import Client
from ktransformers.ground.errors import InputError, KTError

PAGE = b"<html>\n  <p>Error</p>\n</html>"
PART = b'data: {"choices": []}\n\n'


@contextmanager
def answering(status: int, body: bytes, promised: int | None = None) -> Iterator[str]:
    """A server that gives one answer to everything and closes; `promised`: the length that it announces."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(promised or len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("body", [PAGE, b"[]", b"{}", b'{"data": [1]}', b'{"data": []}', b"\xff"])
def test_server_of_another_kind(body: bytes) -> None:
    with (
        answering(200, body) as url,
        pytest.raises(InputError, match=r"(lists no models|answers no JSON), expected a server of the"),
    ):
        Client(url, None).models()


def test_page_of_an_error_is_one_line() -> None:
    with answering(404, PAGE) as url, pytest.raises(KTError) as error:
        Client(url, None).models()
    assert str(error.value) == f"{url}: the server answered 404: <html> <p>Error</p> </html>"


def test_connection_that_ends_during_an_answer() -> None:
    with answering(200, PART, promised=1000) as url, pytest.raises(KTError, match="ended during the answer"):
        list(Client(url, None).stream({}))
    with answering(200, PART + b"data: {not\n\n") as url, pytest.raises(KTError, match=r"not JSON: data: \{not"):
        list(Client(url, None).stream({}))
