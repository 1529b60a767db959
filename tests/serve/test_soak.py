"""A soak test on loopback: many clients, random cancels, adapters that are loaded and unloaded, malformed bodies, and
every attack of tests/support/attacks.py. KT_SOAK_SECONDS sets its length (`make soak`; default: a minute);
KT_SOAK_RECORD names a file for the results.

Expected: no status but 200 and 4xx, every request answered, /health and the next event of a stream within a quarter of
a second at the 99th percentile and never later than a second, nothing left in the engine, flat memory, and the same
greedy completion at the end as at the beginning. The clients are processes of their own, so that only the server's GIL
and loop are measured. Memory is the resident size of the server and the bytes that malloc has allocated: fragmentation
of the heap grows only the first.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground import system
from tests.support.memory import allocated, resident
from tests.support.serving import EngineHarness, make_service, run_app
from tests.support.soak_clients import CLIENTS, STUCK

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "200",
    "left",
    "400",
    "404",
    "429",
    *(f"attack: {status}" for status in (200, 400, 403, 404, 413, 415, 429)),
}
MAX_P99, MAX_EVER = 0.25, 1.0  # seconds until /health answers and between two events of a stream
MAX_GROWTH = 0.05  # of memory, from the first sixth of the run to its end


@pytest.mark.soak
def test_soak(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app

    seconds = float(os.environ.get("KT_SOAK_SECONDS", "60"))
    service = make_service(
        harness,
        adapters,
        timeout=STUCK,
        workers=2,
        max_running_requests=8,
        max_queued_requests=24,
        max_total_tokens=2048,
    )
    with system.frozen_gc(), run_app(create_app(service)) as url:  # as `kt serve` does
        address = url.removeprefix("http://")

        def greedy() -> Any:
            connection = http.client.HTTPConnection(address, timeout=STUCK)
            body = {"model": "tiny:one", "prompt": "The sea", "max_tokens": 12, "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())["choices"][0]["text"]

        before = greedy()
        processes = {what: start_clients(what, address, seconds, adapters["two"]) for what in ("clients", "poll")}
        memory = samples(seconds)
        clients, polled = (json.loads(processes[what].communicate(timeout=STUCK)[0]) for what in ("clients", "poll"))
        seen = clients["requests"]
        assert not clients["stuck"]
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
            "longest_request_s": round(clients["longest"], 1),
            "health_s": polled["health"],
            "stream_s": polled["stream"],
            "engine": asdict(service.engine.counts),
            "resident_mib": [size >> 20 for size, _ in memory],
            "allocated_mib": [size >> 20 for _, size in memory],
            "same_greedy_answer": same,
        }
    )
    odd = {what: count for what, count in seen.items() if what not in EXPECTED}
    assert not odd, odd
    assert seen["200"] > 0 and seen["left"] > 0 and seen["400"] > 0 and seen["attack: 400"] > 0
    assert same
    for what in ("health", "stream"):
        assert polled[what]["p99"] < MAX_P99 and polled[what]["max"] < MAX_EVER, polled
    for kind, slack in ((0, 32), (1, 8)):
        first, last = memory[len(memory) // 6][kind], memory[-1][kind]
        assert last < first * (1 + MAX_GROWTH) + slack * 2**20, f"{first / 2**20:.0f} MiB grew to {last / 2**20:.0f}"


def start_clients(what: str, address: str, seconds: float, guest: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.soak_clients", what, address, str(seconds), str(guest)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


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
