"""The clients of the soak test, in processes of their own: `python -m tests.support.soak_clients clients|poll ADDRESS
SECONDS GUEST`. `clients` sends requests and attacks from many threads; `poll` asks for /health and reads a stream. Both
print one JSON document.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.support.attacks import ATTACKS, Attack

CLIENTS = 32
ATTACK_SHARE = 0.25  # of all requests
STUCK = 600  # seconds: a request that takes longer is stuck, however busy the machine is with others
MODELS = ["tiny", "tiny:one", "tiny:attention", "tiny:guest", "guest"]
MALFORMED = [b"{", b"", b"[]", b"\xff\xfe", b'{"model": 3}', b'{"model": "tiny", "prompt": {"a": 1}}', b"[" * 5000]


class SoakClient(threading.Thread):
    def __init__(self, address: str, seed: int, end: float, guest: str, attacks: list[tuple[Attack, bytes]]) -> None:
        super().__init__(daemon=True)
        self.address, self.chance, self.end, self.guest = address, random.Random(seed), end, guest
        self.attacks, self.seen = attacks, Counter[str]()
        self.longest = 0.0  # seconds of one request

    def run(self) -> None:
        while time.monotonic() < self.end:
            start = time.monotonic()
            try:
                self.seen[self.one()] += 1
            except Exception as error:  # what a client cannot explain is a failure of the test
                self.seen[f"client: {type(error).__name__}: {error}"] += 1
            self.longest = max(self.longest, time.monotonic() - start)

    def one(self) -> str:
        if self.chance.random() < ATTACK_SHARE:
            return self.attack(*self.chance.choice(self.attacks))
        kind = self.chance.random()
        if kind < 0.08:
            return self.request("/v1/completions", self.chance.choice(MALFORMED))
        if kind < 0.12:
            body = {"lora_name": "guest", "lora_path": str(self.guest), "load_inplace": self.chance.random() < 0.5}
            return self.request("/v1/load_lora_adapter", json.dumps(body).encode())
        if kind < 0.15:
            return self.request("/v1/unload_lora_adapter", b'{"lora_name": "guest"}')
        if kind < 0.18:
            return self.request(self.chance.choice(["/metrics", "/v1/models", "/health"]), None)
        body = {
            "model": self.chance.choice(MODELS),
            "max_tokens": self.chance.choice([1, 4, 16, 40]),
            "temperature": self.chance.choice([0, 0.7]),
            "stream": self.chance.random() < 0.5,
            "n": self.chance.choice([1, 1, 2]),
        }
        leaves = self.chance.random() < 0.25
        if kind < 0.6:
            prompt_text = " ".join(self.chance.choices(["sea", "sky", "stone", "tree"], k=self.chance.randrange(1, 60)))
            messages = [{"role": "user", "content": prompt_text}]
            return self.request("/v1/chat/completions", json.dumps({**body, "messages": messages}).encode(), leaves)
        prompt = self.chance.choices(range(3, 6400), k=self.chance.randrange(1, 120))
        more = {"prompt": prompt, "echo": self.chance.random() < 0.2, "logprobs": 1}
        return self.request("/v1/completions", json.dumps({**body, **more}).encode(), leaves)

    def attack(self, attack: Attack, body: bytes) -> str:
        answer = self.request(attack.path, body, headers=attack.headers)
        expected = {*(str(status) for status in attack.statuses), "429"}
        return f"attack: {answer}" if answer in expected else f"attack {attack.name!r}: {answer}"

    def request(
        self, path: str, body: bytes | None, leaves: bool = False, headers: Mapping[str, str] | None = None
    ) -> str:
        connection = http.client.HTTPConnection(self.address, timeout=STUCK)
        try:
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request("GET" if body is None else "POST", path, body, sent)
            if leaves:
                time.sleep(self.chance.random() * 0.3)
                return "left"
            reply = connection.getresponse()
            text = reply.read()
            return "stream error" if b'data: {"error"' in text else str(reply.status)
        finally:
            connection.close()


def run_clients(address: str, seconds: float, guest: str) -> dict[str, Any]:
    attacks = [(attack, attack.make_body()) for attack in ATTACKS]
    end = time.monotonic() + seconds
    clients = [SoakClient(address, seed, end, guest, attacks) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(STUCK)
    seen: Counter[str] = sum((client.seen for client in clients), Counter())
    stuck = sum(client.is_alive() for client in clients)
    return {"requests": seen, "longest": max(client.longest for client in clients), "stuck": stuck}


def poll(address: str, seconds: float) -> dict[str, Any]:
    """Seconds that /health took, and seconds between two events of a stream."""
    end = time.monotonic() + seconds
    gaps: list[float] = []

    def read_streams() -> None:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True}
        while time.monotonic() < end:
            connection = http.client.HTTPConnection(address, timeout=STUCK)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply, last = connection.getresponse(), None
            if reply.status == 429:
                time.sleep(0.2)
            while (line := reply.readline()) and time.monotonic() < end:
                if not line.startswith(b"data:"):
                    continue
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
            connection.close()

    reader = threading.Thread(target=read_streams, daemon=True)
    reader.start()
    health: list[float] = []
    while time.monotonic() < end:
        started = time.monotonic()
        connection = http.client.HTTPConnection(address, timeout=STUCK)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        health.append(time.monotonic() - started)
        time.sleep(0.02)
    reader.join(STUCK)
    return {"health": summary(health), "stream": summary(gaps)}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = {f"p{share}": ordered[int(share / 100 * (len(ordered) - 1))] for share in (50, 99)}
    return {name: round(value, 4) for name, value in (at | {"max": ordered[-1]}).items()} | {"count": len(values)}


if __name__ == "__main__":
    _, what, server, length, guest_path = sys.argv
    found = run_clients(server, float(length), guest_path) if what == "clients" else poll(server, float(length))
    sys.stdout.write(json.dumps(found))
