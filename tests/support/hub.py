"""A hub on loopback with the part of Hugging Face's API that a download needs: the commit, the tree, and files by
range.

`cut` closes a connection after so many bytes of a body, `cuts` times.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS = (".safetensors", ".gguf", ".bin")


@dataclass
class Hub:
    files: dict[str, bytes]
    repo: str = "someone/tiny-moe"
    cut: int = 0  # bytes of a body after which a connection is closed
    cuts: int = 0  # connections that are
    ignores_ranges: bool = False
    lies: dict[str, bytes] = field(default_factory=dict)  # bodies that are not those of the hashes
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (file, Range) of every GET of a body
    sent: int = 0

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def tree(self) -> list[dict[str, Any]]:
        actual = []
        for name, body in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": blob}
            if name.endswith(LFS):
                sha256 = hashlib.sha256(body).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(body), "pointerSize": 100}
            actual.append(entry)
        return actual

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _json(self, value: object, status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_HEAD(self) -> None:
                self._file(body=False)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if re.match(rf"/api/models/{hub.repo}(/revision/\w+)?$", path):
                    self._json({"id": hub.repo, "sha": COMMIT, "siblings": []})
                elif re.match(rf"/api/models/{hub.repo}/tree/{COMMIT}", path):
                    self._json(hub.tree())
                elif path.startswith("/api/"):
                    self.send_error(404)
                else:
                    self._file(body=True)

            def _file(self, body: bool) -> None:
                actual = re.match(rf"/{hub.repo}/resolve/(\w+)/(.+)$", self.path.partition("?")[0])
                if not actual or actual[2] not in hub.files:
                    self.send_error(404)
                    return
                whole = hub.lies.get(actual[2], hub.files[actual[2]])
                asked = self.headers.get("Range")
                hub.asked += [(actual[2], asked)] if body else []
                start = int(asked.split("=")[1].split("-")[0]) if asked and not hub.ignores_ranges else 0
                data = whole[start:]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
                self.end_headers()
                if not body:
                    return
                if hub.cuts and hub.cut and len(data) > hub.cut:
                    hub.cuts -= 1
                    data = data[: hub.cut]
                    self.close_connection = True
                hub.sent += len(data)
                self.wfile.write(data)

        return Handler
