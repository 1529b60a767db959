"""A headless Chromium, driven over its DevTools protocol with the standard library only: open, evaluate, inspect.

The protocol is JSON over a WebSocket; this implements a handshake, masked text frames out and text frames in.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    def __init__(self, address: str) -> None:
        host, _, path = address.removeprefix("ws://").partition("/")
        name, _, port = host.partition(":")
        self._socket = socket.create_connection((name, int(port)), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._held = b""
        while b"\r\n\r\n" not in self._held:
            self._held += self._socket.recv(4096)
        self._held = self._held.partition(b"\r\n\r\n")[2]
        self._calls = 0
        self.errors: list[Any] = []
        self.requests: set[str] = set()
        for part in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{part}.enable")

    def _take(self, count: int) -> bytes:
        while len(self._held) < count:
            more = self._socket.recv(65536)
            assert more, "the browser has closed the connection"
            self._held += more
        actual, self._held = self._held[:count], self._held[count:]
        return actual

    def _read(self) -> Any:
        data, last = b"", False
        while not last:
            first, second = self._take(2)
            size = second & 127
            if size >= 126:
                size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
            data, last = data + self._take(size), bool(first & 128)
        return json.loads(data)

    def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        data, mask = json.dumps({"id": self._calls, "method": method, "params": parameters}).encode(), os.urandom(4)
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
        self._socket.sendall(b"\x81" + size + mask + bytes(one ^ mask[at % 4] for at, one in enumerate(data)))
        while (actual := self._read()).get("id") != self._calls:
            self._note(actual)
        assert "error" not in actual, actual
        return actual["result"]

    def _note(self, event: Any) -> None:
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(event["params"])
        elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"])
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.add(event["params"]["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of an expression."""
        actual = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in actual, actual
        return actual["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"not in {seconds} s: {script}"
            time.sleep(0.1)

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def _eventually(look: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while True:
        try:
            if actual := look():
                return actual
        except (OSError, ValueError):
            pass
        assert time.monotonic() < end, "the browser did not start"
        time.sleep(0.1)


@contextmanager
def browsing(url: str, profile: Path) -> Iterator[Page]:
    assert BINARY is not None
    words = [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    words += ["--remote-allow-origins=*", "--window-size=1280,800", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _eventually(lambda: (profile / "DevToolsActivePort").read_text().split()[0])

        def pages() -> list[str]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as reply:
                return [one["webSocketDebuggerUrl"] for one in json.loads(reply.read()) if one["type"] == "page"]

        page = Page(_eventually(pages)[0])
        page.call("Page.navigate", url=url)
        yield page
    finally:
        process.terminate()
        process.wait()
