"""`kt serve` under torchrun, one launcher for each node as on several machines: equal answers, and a soak test in which
an expert node is killed and restarted under load. KT_SOAK_SECONDS sets its length, KT_SOAK_RECORD names a file for what
was counted."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.test_launch import KT, serving

PROMPTS = [f"The sea is {word}, and the ship" for word in ("wide", "deep", "cold", "old", "green", "still")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Node:
    """One node: torchrun and the process that it starts."""

    def __init__(self, rank: int, nodes: int, port: int, address: str, *words: str) -> None:
        launcher = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(rank)]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "1", "--no-python"]
        line = [sys.executable, *launcher, sys.executable, "-c", KT, "serve", *words]
        line += ["--nodes-address", address, "--nodes-timeout", "20", "--port", "0", "--dtype", "float32"]
        environment = os.environ | {"KT_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += [""]
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_for(self, words: str, seconds: float = 300) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            line = next((line for line in self.lines if words in line), None)
            if line is not None:
                return line
            assert not ended, "\n".join(self.lines)
            time.sleep(0.1)
        raise AssertionError("\n".join(self.lines))

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def kill(self) -> None:
        """The node is gone: launcher and worker."""
        for process in (*self.workers(), self.process.pid):
            os.kill(process, signal.SIGKILL)
        self.process.wait()


@contextmanager
def nodes(model: Path, count: int, *words: str) -> Iterator[tuple[str, dict[int, Node], Any]]:
    port, address = free_port(), f"127.0.0.1:{free_port()}"

    def start(rank: int) -> Node:
        return Node(rank, count, port, address, str(model), *(words if not rank else ()))

    started = {rank: start(rank) for rank in range(count)}
    try:
        line = started[0].wait_for("is served at")
        yield line.rsplit(" ", 1)[1].removesuffix("/v1"), started, start
    finally:
        for node in started.values():
            if node.process.poll() is None:
                node.kill()


def ask(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def question(prompt: str, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.mark.slow
def test_answers_under_torchrun_equal_those_of_one_process(model_directory: Path, adapters: dict[str, Path]) -> None:
    pytest.importorskip("fastapi")
    words = ("--lora-paths", f"one={adapters['one']}")
    asked = [question(prompt, name) for prompt in PROMPTS[:3] for name in ("tiny", "tiny:one")]
    with serving(str(model_directory), *words, "--dtype", "float32") as (url, _):
        expected = [ask(url, body)[1]["choices"][0] for body in asked]
    with nodes(model_directory, 3, *words) as (url, started, _):
        for body, one in zip(asked, expected, strict=True):
            status, answer = ask(url, body)
            choice = answer["choices"][0]
            assert status == 200 and choice["text"] == one["text"]
            pairs = zip(choice["logprobs"]["token_logprobs"], one["logprobs"]["token_logprobs"], strict=True)
            assert all(abs(first - second) < 1e-5 for first, second in pairs)
        started[0].wait_for("2 layers of experts over 3 nodes")
        (worker,) = started[0].workers()
        os.kill(worker, signal.SIGTERM)
        for rank in (1, 2):  # their launchers wait for that of rank 0, which has failed by its signal
            started[rank].wait_for("rank 0 has ended", 60)


class Load:
    """Clients that ask until `stop`, and count what came: every answer is right, every error clean."""

    def __init__(self, url: str, right: dict[tuple[str, str], str]) -> None:
        self.url, self.right = url, right
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self.stopping = False
        self.threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(4)]
        for thread in self.threads:
            thread.start()

    def _run(self, seed: int) -> None:
        chooser = random.Random(seed)
        while not self.stopping:
            prompt, name = chooser.choice(list(self.right))
            started = time.monotonic()
            try:
                status, answer = ask(self.url, question(prompt, name))
            except OSError as error:  # a reset, a request that hangs
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            self.slowest = max(self.slowest, time.monotonic() - started)
            self.counts[str(status)] += 1
            if status == 200 and answer["choices"][0]["text"] != self.right[prompt, name]:
                self.wrong.append(f"{prompt!r} to {name}: {answer['choices'][0]['text']!r}")
            elif status == 503:
                message = answer["error"]["message"]
                if answer["error"]["code"] != "node_unavailable" or not message.startswith("expert node "):
                    self.wrong.append(message)
                time.sleep(0.2)
            elif status != 200:
                self.wrong.append(f"{status}: {answer}")

    def stop(self) -> None:
        self.stopping = True
        for thread in self.threads:
            thread.join()


@pytest.mark.soak
def test_soak_with_a_node_that_is_killed_and_restarted(model_directory: Path, adapters: dict[str, Path]) -> None:
    pytest.importorskip("fastapi")
    seconds = float(os.environ.get("KT_SOAK_SECONDS", "60"))
    with nodes(model_directory, 3, "--lora-paths", f"one={adapters['one']}") as (url, started, start):
        pairs = [(prompt, name) for prompt in PROMPTS for name in ("tiny", "tiny:one")]
        right = {pair: ask(url, question(*pair))[1]["choices"][0]["text"] for pair in pairs}
        load, begun, kills = Load(url, right), time.monotonic(), 0
        chooser = random.Random(1)
        try:
            while time.monotonic() - begun < seconds:
                time.sleep(chooser.uniform(2, 6))
                started[1].kill()
                kills += 1
                time.sleep(chooser.uniform(0, 3))
                connected = sum("is connected again" in line for line in started[0].lines)
                started[1] = start(1)
                end = time.monotonic() + 300
                while sum("is connected again" in line for line in started[0].lines) == connected:
                    assert time.monotonic() < end, "\n".join(started[0].lines)
                    time.sleep(0.1)
                time.sleep(chooser.uniform(1, 4))
        finally:
            load.stop()
        after = {pair: ask(url, question(*pair))[1]["choices"][0]["text"] for pair in pairs}
        record = {
            "seconds": round(time.monotonic() - begun),
            "kills": kills,
            "statuses": dict(load.counts),
            "slowest_seconds": round(load.slowest, 2),
            "wrong": load.wrong[:5],
        }
        if path := os.environ.get("KT_SOAK_RECORD"):
            Path(path).write_text(json.dumps(record, indent=1) + "\n")
        assert not load.wrong and after == right and kills and load.counts["200"] and load.counts["503"], record
