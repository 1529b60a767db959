"""Experts divided over ranks in network namespaces of their own, on a link with a limited rate: bytes and seconds of an
exchange are what `plan/exchange.py` predicts. Needs root and iproute2; skipped where namespaces are not permitted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktransformers.plan.exchange import backward_row, forward_row, layer_exchange
from ktransformers.plan.hosts import FRAME_SHARE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RATE = 20e6  # bits per second: so low that the link, not the CPU, takes the time
ROWS, HIDDEN, TOP_K, EXPERTS = 512, 1024, 4, 16

RANK = """
import json, os, sys, time, torch
import torch.distributed as dist
from ktransformers.expert_partition import by_experts
from ktransformers.nn import ExpertStore
from ktransformers.nn.exchange import LayerExchange, apply_exchanged, new_expert_group
torch.set_num_threads(1)
rows, hidden_size, top_k, experts = map(int, sys.argv[1:5])
link = sys.argv[5]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shard = by_experts(1, experts, ranks).layer(0, rank)
store = ExpertStore(len(shard.experts), hidden_size, 64)
generator = torch.Generator().manual_seed(rank)
def matrix(*shape): return torch.randn(*shape, generator=generator).bfloat16() / 32
count = len(shard.experts)
store.pack(gate=matrix(count, 64, hidden_size), up=matrix(count, 64, hidden_size), down=matrix(count, hidden_size, 64))
layer = LayerExchange(store, shard, new_expert_group(ranks))
hidden = matrix(rows, hidden_size).requires_grad_()
weights, ids = torch.rand(rows, experts, generator=generator).topk(top_k)
weights = weights.requires_grad_()
def sent():
    return int(open(f"/sys/class/net/{link}/statistics/tx_bytes").read())
def step(backward):
    out = apply_exchanged(layer, hidden, ids, weights)
    if backward:
        out.backward(torch.ones_like(out))
results = {}
for name, backward in (("forward", False), ("training", True)):
    for _ in range(2):  # TCP finds the rate of the link
        step(backward)
    dist.barrier()
    begin, start = sent(), time.perf_counter()
    for _ in range(3):
        step(backward)
    dist.barrier()
    results[name] = {"bytes": (sent() - begin) / 3, "seconds": (time.perf_counter() - start) / 3}
print(json.dumps(results))
dist.destroy_process_group()
"""


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture(params=[2])
def namespaces(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Namespaces joined by a bridge in one more; what each sends is limited by a token bucket."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs root, ip and tc")
    names = [f"kt{os.getpid()}n{rank}" for rank in range(request.param)]
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
            ip("ip", "netns", "add", name)
            ip(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"port{rank}",
                "netns",
                bridge,
            )
            ip(*inside, "ip", "link", "set", f"port{rank}", "master", "br0", "up")
            own = ("ip", "netns", "exec", name)
            ip(*own, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip(*own, "ip", "link", "set", "eth0", "up")
            ip(*own, "ip", "link", "set", "lo", "up")
            limit = ("tbf", "rate", f"{RATE:.0f}bit", "burst", "32kb", "latency", "400ms")
            ip(*own, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_bytes_and_seconds_are_as_predicted(namespaces: list[str], tmp_path: Path) -> None:
    ranks = len(namespaces)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    arguments = [str(value) for value in (ROWS, HIDDEN, TOP_K, EXPERTS, "eth0")]
    variables = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29533", "WORLD_SIZE": str(ranks), "KT_THREADS": "1"}
    variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(script), *arguments],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(namespaces)
    ]
    outputs = [process.communicate(timeout=600) for process in started]
    assert all(process.returncode == 0 for process in started), outputs[0][1][-3000:]
    measured = [json.loads(out) for out, _ in outputs]
    counts = [EXPERTS // ranks] * ranks
    forward = layer_exchange(ROWS, forward_row(HIDDEN, TOP_K, 2), counts, TOP_K, 0).bytes
    backward = layer_exchange(ROWS, backward_row(HIDDEN, TOP_K, 2), counts, TOP_K, 0).bytes
    # The prediction leaves out the CPU's part and acknowledgements that queue behind rows of the other direction.
    for name, expected, tolerance in (("forward", forward, 0.25), ("training", forward + backward, 0.35)):
        for found in measured:  # what a rank sends of its rows is what it sends back of others', by symmetry
            assert found[name]["bytes"] == pytest.approx(expected, rel=0.10), (name, measured)
        slowest = max(found[name]["seconds"] for found in measured)
        assert slowest == pytest.approx(expected * 8 / (RATE * FRAME_SHARE), rel=tolerance), (name, measured)
