"""A soak test on loopback: many clients, random cancels, adapters that are loaded and unloaded, malformed bodies.
KT_SOAK_SECONDS sets its length (`make soak`; default: a minute); KT_SOAK_RECORD names a file for the results.

Expected: no status but 200 and 4xx, every request answered, nothing left in the engine, flat memory, and the same
greedy completion at the end as at the beginning. Memory is the resident size of the process, and the bytes that
malloc has allocated: fragmentation of the heap grows only the first.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import platform
import random
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.serving import EngineHarness, make_service, run_app

CLIENTS = 32
STUCK = 600  # seconds: a request that takes longer is stuck, however busy the machine is with others
MODELS = ["tiny", "tiny:one", "tiny:attention", "tiny:guest", "guest"]
MALFORMED = [b"{", b"", b"[]", b"\xff\xfe", b'{"model": 3}', b'{"model": "tiny", "prompt": {"a": 1}}', b"[" * 5000]


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in "abcdefg"] + [("used", ctypes.c_size_t)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("free", "kept")]


def allocated() -> int:
    """Bytes that malloc has allocated; 0 without glibc."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _Heap
    return int(ask().used)


class Client(threading.Thread):
    def __init__(self, address: str, seed: int, end: float, seen: Counter[str], guest: Path) -> None:
        super().__init__(daemon=True)
        self.address, self.chance, self.end, self.seen, self.guest = address, random.Random(seed), end, seen, guest
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

    def request(self, path: str, body: bytes | None, leaves: bool = False) -> str:
        connection = http.client.HTTPConnection(self.address, timeout=STUCK)
        try:
            connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
            if leaves:
                time.sleep(self.chance.random() * 0.3)
                return "left"
            reply = connection.getresponse()
            text = reply.read()
            return "stream error" if b'data: {"error"' in text else str(reply.status)
        finally:
            connection.close()


@pytest.mark.soak
def test_soak(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app

    seconds = float(os.environ.get("KT_SOAK_SECONDS", "60"))
    service = make_service(
        harness, adapters, timeout=STUCK, max_running_requests=8, max_queued_requests=24, max_total_tokens=2048
    )
    seen: Counter[str] = Counter()
    with run_app(create_app(service)) as url:
        address = url.removeprefix("http://")

        def greedy() -> Any:
            connection = http.client.HTTPConnection(address, timeout=STUCK)
            body = {"model": "tiny:one", "prompt": "The sea", "max_tokens": 12, "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())["choices"][0]["text"]

        before = greedy()
        start = time.monotonic()
        clients = [Client(address, seed, start + seconds, seen, adapters["two"]) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        memory = samples(seconds)
        for client in clients:
            client.join(STUCK)
        assert not any(client.is_alive() for client in clients)
        end = time.monotonic() + 30
        while service.engine.busy and time.monotonic() < end:
            time.sleep(0.05)
        assert not service.engine.busy and not any(slot.busy for slot in service.engine.kv_cache.slots)
        same = greedy() == before
    memory.append((resident(), allocated()))
    record(
        {
            "command": f"KT_SOAK_SECONDS={seconds:.0f} make soak",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": seconds,
            "clients": CLIENTS,
            "requests": dict(sorted(seen.items())),
            "longest_request_s": round(max(client.longest for client in clients), 1),
            "engine": asdict(service.engine.counts),
            "resident_mib": [size >> 20 for size, _ in memory],
            "allocated_mib": [size >> 20 for _, size in memory],
            "same_greedy_answer": same,
        }
    )
    odd = {what: count for what, count in seen.items() if what not in {"200", "left", "400", "404", "429"}}
    assert not odd, odd
    assert seen["200"] > 0 and seen["left"] > 0 and seen["400"] > 0
    assert same
    for kind, limit in ((0, 64), (1, 16)):
        grown = memory[-1][kind] - memory[len(memory) // 2][kind]
        assert grown < limit * 2**20, f"{grown / 2**20:.0f} MiB more than halfway"


def samples(seconds: float) -> list[tuple[int, int]]:
    """Bytes resident and allocated, thirty samples in that many seconds."""
    actual = []
    for _ in range(30):
        time.sleep(seconds / 30)
        actual.append((resident(), allocated()))
    return actual


def record(found: dict[str, Any]) -> None:
    if os.environ.get("KT_SOAK_RECORD"):
        Path(os.environ["KT_SOAK_RECORD"]).write_text(json.dumps(found, indent=1) + "\n")
