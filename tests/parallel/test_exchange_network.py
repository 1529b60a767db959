"""Experts divided over ranks in network namespaces of their own, on links with a limited rate: bytes and seconds of an
exchange are what `plan/exchange.py` predicts, with 2 and 4 ranks. Seconds are those of the bytes at the limited rate
and those of the same pass without the limit, which is what the CPUs need; other programs on the machine lengthen the
latter. Needs root and iproute2; skipped where namespaces are not permitted. KT_SCALING_RECORD names a file for what was
measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ktransformers.plan.exchange import backward_row, forward_row, layer_exchange
from ktransformers.plan.hosts import FRAME_SHARE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RATE = 20e6  # bits per second: so low that the link, not the CPU, takes the time
HIDDEN, TOP_K, EXPERTS = 1024, 4, 16

RANK = """
import json, os, statistics, subprocess, sys, time, torch
import torch.distributed as dist
from ktransformers.experts.partition import by_experts
from ktransformers.nn import ExpertStore
from ktransformers.parallel.exchange import ExchangedExperts, new_expert_group
from ktransformers.experts.operator import apply_experts
torch.set_num_threads(1)
rows, hidden_size, top_k, experts, rate = map(int, sys.argv[1:])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if ranks > 1:
    dist.init_process_group("gloo")
shard = by_experts(1, experts, ranks).layer(0, rank)
store = ExpertStore(len(shard.experts), hidden_size, 64)
generator = torch.Generator().manual_seed(rank)
def matrix(*shape): return torch.randn(*shape, generator=generator).bfloat16() / 32
count = len(shard.experts)
store.pack(gate=matrix(count, 64, hidden_size), up=matrix(count, 64, hidden_size), down=matrix(count, hidden_size, 64))
layer = ExchangedExperts(store, shard, new_expert_group(ranks)) if ranks > 1 else None
hidden = matrix(rows, hidden_size).requires_grad_()
weights, ids = torch.rand(rows, experts, generator=generator).topk(top_k)
weights = weights.requires_grad_()
def sent():
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read()) if ranks > 1 else 0
def limit(word):
    words = ["tc", "qdisc", word, "dev", "eth0", "root"]
    words += ["tbf", "rate", f"{rate}bit", "burst", "32kb", "latency", "400ms"] if word == "add" else []
    subprocess.run(words, check=True)
def wait():
    if ranks > 1:
        dist.barrier()
def step(backward):
    args = (hidden, ids, weights)
    out = apply_experts(LocalExperts(store) if layer is None else layer, *args)
    if backward:
        out.backward(torch.ones_like(out))
def measure(backward, passes):
    seconds, sizes = [], []
    for _ in range(passes):
        wait()
        begin, start = sent(), time.perf_counter()
        step(backward)
        wait()
        seconds.append(time.perf_counter() - start)
        sizes.append(sent() - begin)
    return statistics.median(seconds), statistics.mean(sizes)
results = {"forward": {"free": []}, "training": {"free": []}}
def measure_free():
    for name, result in results.items():
        measure(name == "training", 2)
        result["free"].append(measure(name == "training", 5)[0])
measure_free()
if ranks > 1:
    limit("add")
    for name, result in results.items():
        measure(name == "training", 2)  # TCP finds the rate of the link
        result["seconds"], result["bytes"] = measure(name == "training", 5)
    limit("del")
    measure_free()
print(json.dumps(results))
if ranks > 1:
    dist.destroy_process_group()
"""


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Namespaces joined by a bridge in one more."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs root, ip and tc")
    names = [f"kt{os.getpid()}n{rank}" for rank in range(count)]
    bridge = f"kt{os.getpid()}b"
    try:
        try:
            ip("ip", "netns", "add", bridge)
        except subprocess.CalledProcessError:
            pytest.skip("network namespaces are not permitted")
        inside = ("ip", "netns", "exec", bridge)
        ip(*inside, "ip", "link", "add", "br0", "type", "bridge")
        ip(*inside, "ip", "link", "set", "br0", "up")
        for rank, name in enumerate(names):
            peer = ("peer", "name", f"port{rank}", "netns", bridge)
            ip("ip", "netns", "add", name)
            ip("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            ip(*inside, "ip", "link", "set", f"port{rank}", "master", "br0", "up")
            own = ("ip", "netns", "exec", name)
            ip(*own, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip(*own, "ip", "link", "set", "eth0", "up")
            ip(*own, "ip", "link", "set", "lo", "up")
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run_in(names: list[str], rows: int, script: Path) -> list[dict[str, Any]]:
    """What each rank measured, one in each namespace."""
    script.write_text(RANK)
    arguments = [str(value) for value in (rows, HIDDEN, TOP_K, EXPERTS, int(RATE))]
    variables = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29533", "WORLD_SIZE": str(len(names)), "KT_THREADS": "1"}
    variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(script), *arguments],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    outputs = [process.communicate(timeout=600) for process in started]
    assert all(process.returncode == 0 for process in started), outputs[0][1][-3000:]
    return [json.loads(out) for out, _ in outputs]


def record(ranks: int, rows: int, table: dict[str, Any]) -> None:
    if path := os.environ.get("KT_SCALING_RECORD"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"ranks": ranks, "rows": rows, **table}) + "\n")


# 1024 rows over 1, 2 and 4 ranks (strong), and 512 rows of each rank (weak).
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1024), (1, 512), (2, 512), (4, 256), (4, 512)])
def test_bytes_and_seconds_are_as_predicted(ranks: int, rows: int, tmp_path: Path) -> None:
    with namespaces(ranks) as names:
        measured = run_in(names, rows, tmp_path / "rank.py")
    counts = [EXPERTS // ranks] * ranks
    forward = layer_exchange(rows, forward_row(HIDDEN, TOP_K, 2), counts, TOP_K, 0).bytes
    backward = layer_exchange(rows, backward_row(HIDDEN, TOP_K, 2), counts, TOP_K, 0).bytes
    table: dict[str, Any] = {}
    for name, size in (("forward", forward), ("training", forward + backward)):
        computing = max(sum(found[name]["free"]) / len(found[name]["free"]) for found in measured)
        table[name] = {"computing": computing, "link": size * 8 / (RATE * FRAME_SHARE), "predicted_bytes": size}
        if ranks > 1:  # what a rank sends of its rows is what it sends back of others', by symmetry
            table[name] |= {"bytes": [found[name]["bytes"] for found in measured]}
            table[name] |= {"seconds": max(found[name]["seconds"] for found in measured)}
    record(ranks, rows, table)
    for name, found in table.items():
        if ranks > 1:
            assert found["bytes"] == pytest.approx([found["predicted_bytes"]] * ranks, rel=0.10), (name, table)
            assert found["seconds"] == pytest.approx(found["link"] + found["computing"], rel=0.25), (name, table)
