"""A Ray cluster of several raylets on this machine's loopback address, and what of Ray runs here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything listens on 127.0.0.1, as Ray does on those systems
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",  # a lost raylet is noticed after the product of both
    "RAY_health_check_failure_threshold": "5",
}
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
RAY_PROCESSES = ("ray::", "raylet", "gcs_server", "ray/_private", "ray/dashboard")


def processes(*words: str) -> dict[int, str]:
    """Command lines with one of these words, by process id; this process is left out."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if line and parent and any(word in line for word in words):
            found[int(folder.name)] = line
    return found


def actors(name: str) -> list[int]:
    return [process for process, line in processes("ray::").items() if line.startswith(f"ray::{name}")]


class Raylets:
    """The head and other nodes of one cluster; a driver on this machine joins the head."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        for _ in range(nodes - 1):
            self.cluster.add_node(wait=False, **NODE)
        self.cluster.wait_for_nodes()

    def kill_actor(self, name: str) -> None:
        os.kill(actors(name)[0], signal.SIGKILL)

    def kill_raylet(self) -> None:
        """SIGKILL of one that is not the head, and of its agents."""
        self.cluster.remove_node(self.cluster.worker_nodes.copy().pop(), allow_graceful=False)

    def start_raylet(self) -> None:
        self.cluster.add_node(wait=False, **NODE)


@contextmanager
def raylets(nodes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Raylets]:
    """A cluster that RAY_ADDRESS names; nothing of it is left afterwards."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    before, shared = set(processes(*RAY_PROCESSES)), set(os.listdir("/dev/shm"))
    started = Raylets(nodes)
    monkeypatch.setenv("RAY_ADDRESS", started.cluster.address)
    try:
        yield started
    finally:
        started.cluster.shutdown()
        require_nothing_left(before, shared)


def require_nothing_left(before: set[int], shared: set[str], seconds: float = 30.0) -> None:
    """Processes of Ray and files in shared memory that were not there before end within seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        left = {process: line for process, line in processes(*RAY_PROCESSES).items() if process not in before}
        files = {name for name in os.listdir("/dev/shm") if name not in shared and "plasma" in name.lower()}
        if not left and not files:
            return
        time.sleep(0.2)
    raise AssertionError(f"left: {left} {files}")
