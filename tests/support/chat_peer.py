"""A server of the OpenAI API for tests of clients: it repeats what it is told to, token by token, and records bodies
and whether the client has left."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatPeer:
    """`answers`: texts in the order of requests, the last one again and again; a text of several pieces is a list."""

    def __init__(
        self, *answers: list[str], models: tuple[str, ...] = ("base", "base:neko"), pause: float = 0.0
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.loaded: list[dict[str, Any]] = []
        self.models, self.pause = ["base", "base:neko"], pause
        self.fields: dict[str, Any] = {}  # of each entry of /v1/models
        self.left = threading.Event()  # a client closed its stream
        self.sent = 0
        self._answers = list(answers)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _handler(peer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._json({"data": [{"id": name, **peer.fields} for name in peer.models]})

            def _json(self, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("load_lora_adapter"):
                    peer.loaded.append(body)
                    peer.models.append(f"{peer.models[0]}:{body['lora_name']}")
                    self._json({})
                    return
                peer.bodies.append(body)
                self.send_response(200)
                self.end_headers()
                pieces = peer._answers[min(len(peer.bodies), len(peer._answers)) - 1]
                try:
                    for piece in pieces:
                        self._part({"choices": [{"delta": {"content": piece}}]})
                        peer.sent += 1
                        time.sleep(peer.pause)
                    self._part({"choices": [], "usage": {"completion_tokens": len(pieces)}})
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    peer.left.set()

            def _part(self, part: Any) -> None:
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
                self.wfile.flush()

        return Handler

    def __enter__(self) -> ChatPeer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
