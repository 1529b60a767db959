"""`kt serve --nodes N`: expert nodes as Ray actors, on a Ray of this machine alone, and on a cluster of three raylets
whose actors and raylets are killed under load. `make test-ray` runs the latter; KT_KILLS sets how often, and
KT_KILLS_RECORD names a file for what was counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.nodes.test_host_processes import PROMPTS, Load, ask, question
from tests.serve.test_launch import kt
from tests.support.ray_cluster import ENVIRONMENT, RAY_PROCESSES, actors, processes, raylets, require_nothing_left
from tests.support.serving import EngineHarness, make_service, run_app

pytest.importorskip("ray", reason="ray is not installed: pip install 'ktransformers[ray]'")
pytest.importorskip("fastapi")

ACTOR = "ExpertNodeActor"
TIMEOUT = 20  # --nodes-timeout


@contextmanager
def serving_over_nodes(count: int, model: Path, *words: str) -> Iterator[tuple[str, list[str]]]:
    """The address and the lines of `kt serve --nodes`, which ends by SIGTERM."""
    line = kt("serve", str(model), *words, "--nodes", str(count), "--nodes-timeout", str(TIMEOUT), "--port", "0")
    environment = os.environ | ENVIRONMENT | {"KT_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    served = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for text in process.stderr:
            lines.append(text.rstrip())
            if "is served at" in text:
                served.set()
        served.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        served.wait(400)
        address = next((text.rsplit(" ", 1)[1] for text in lines if "is served at" in text), None)
        assert address is not None, "\n".join(lines)
        yield address.removesuffix("/v1"), lines
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def questions() -> list[dict[str, Any]]:
    return [question(prompt, name) for prompt in PROMPTS[:3] for name in ("tiny", "tiny:one")]


def same_answers(url: str, expected: list[Any]) -> None:
    for body, one in zip(questions(), expected, strict=True):
        status, answer = ask(url, body)
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["text"] == one["text"]
        pairs = zip(choice["logprobs"]["token_logprobs"], one["logprobs"]["token_logprobs"], strict=True)
        assert all(abs(first - second) < 1e-5 for first, second in pairs)


@pytest.fixture
def expected(harness: EngineHarness, adapters: dict[str, Path]) -> list[Any]:
    """What one process answers."""
    from ktransformers.serve.http.api import create_app

    with run_app(create_app(make_service(harness, adapters))) as url:
        return [ask(url, body)[1]["choices"][0] for body in questions()]


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        assert error.code == 503 and "expert node " in json.loads(error.read())["reason"]
        return False


def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit, f"not within {limit:g} s"
        time.sleep(0.02)
    return time.monotonic() - started


def test_without_a_cluster_nodes_are_on_this_machine(
    model_directory: Path,
    adapters: dict[str, Path],
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path)[:60] if len(str(tmp_path)) < 60 else "/tmp/kt-ray-test")
    before, shared = set(processes(*RAY_PROCESSES)), set(os.listdir("/dev/shm"))
    words = ("--lora-paths", f"one={adapters['one']}", "--dtype", "float32")
    with serving_over_nodes(2, model_directory, *words) as (url, lines):
        same_answers(url, expected)
        assert len(set(actors(ACTOR)) - before) == 1
        assert any("2 layers of experts over 2 nodes" in line for line in lines), lines
    require_nothing_left(before, shared)


def test_a_cluster_with_too_few_machines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from ktransformers.ground.errors import InputError
    from ktransformers.ground.ray_cluster import RayCluster
    from ktransformers.serve.flags import parse
    from ktransformers.serve.nodes import ray_nodes
    from ktransformers.serve.nodes.options import read_nodes

    group = SimpleNamespace(wait=lambda _: False)
    ray = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "this"),
        nodes=lambda: [{"Alive": True}, {"Alive": False}],
        available_resources=lambda: {"CPU": 4.0},
        util=SimpleNamespace(placement_group=lambda *_, **__: group),
    )
    launch = parse(["m", "--nodes", "3"])
    options = read_nodes(launch, {})
    assert options is not None
    with pytest.raises(InputError, match=r"3 nodes, a Ray cluster of 1 machines.*3 machines.*5.0 GB"):
        ray_nodes.start_nodes(RayCluster(ray, "", False), print, launch, options, [0, 5 * 10**9, 10], print)


def seconds_of_a_start() -> float:
    """What the packages of a node take to be imported here, beside other work: recovery takes as long at least."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import ray, ktransformers.serve.nodes.group"], check=True)
    return time.monotonic() - started


@pytest.mark.ray
def test_nodes_that_are_killed_under_load(
    model_directory: Path, adapters: dict[str, Path], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kills, start = int(os.environ.get("KT_KILLS", "20")), seconds_of_a_start()
    refused, recovered = list[float](), dict[str, list[float]]({"actor": [], "raylet": []})
    words = ("--lora-paths", f"one={adapters['one']}", "--dtype", "float32")
    with raylets(3, monkeypatch) as cluster, serving_over_nodes(3, model_directory, *words) as (url, lines):
        assert len(actors(ACTOR)) == 2
        same_answers(url, expected)
        right = {(body["prompt"], body["model"]): one["text"] for body, one in zip(questions(), expected, strict=True)}
        load = Load(url, right)
        try:
            for kill in range(kills):
                served = load.counts["200"]
                seconds_until(lambda served=served: load.counts["200"] > served + 3, 120)  # type: ignore[misc]
                what = "raylet" if kill % 3 == 2 else "actor"
                (cluster.kill_raylet if what == "raylet" else lambda: cluster.kill_actor(ACTOR))()
                refused.append(seconds_until(lambda: not healthy(url), 60))
                if what == "raylet":
                    cluster.start_raylet()
                recovered[what].append(seconds_until(lambda: healthy(url), 300))
        finally:
            load.stop()
            record = {
                "kills": kills,
                "seconds_of_a_start": round(start, 1),
                "503_after": [round(seconds, 2) for seconds in refused],
                "recovered_after": {what: [round(one, 1) for one in each] for what, each in recovered.items()},
                "statuses": dict(load.counts),
                "slowest_seconds": round(load.slowest, 2),
                "wrong": load.wrong[:5],
                "lines": lines[-3:],
            }
            if path := os.environ.get("KT_KILLS_RECORD"):
                Path(path).write_text(json.dumps(record, indent=1) + "\n")
        same_answers(url, expected)
    assert not load.wrong and load.counts["200"] and load.counts["503"] and load.slowest < TIMEOUT, record
    assert max(refused) < 2, record
    assert max(recovered["actor"]) < 20 + start and max(recovered["raylet"], default=0) < 40 + start, record
