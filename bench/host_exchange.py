"""One exchange of a layer of experts with a host on loopback, beside the same experts in one process: what a round trip
costs besides the link. `EXCHANGE_SECONDS` of `plan/hosts.py` is the difference for one row.

    python bench/host_exchange.py [--rows 1 16 256] [--hidden 7168]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from ktransformers.checkpoint import ExpertShape
from ktransformers.experts.contract import Contract
from ktransformers.experts.gate import Gate
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.partition import by_experts
from ktransformers.experts.store import ExpertStore
from ktransformers.modeling.shard_stores import ShardLayer
from ktransformers.serve.nodes.expert_node import run_expert_node
from ktransformers.serve.nodes.node_pool import NodePool
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.remote_layer import RemoteExperts

EXPERTS, INTERMEDIATE, TOP_K = 4, 32, 2  # so small that computing takes next to no time
FACTS = {"rank": "1"}


def make_store(experts: int, hidden: int) -> ExpertStore:
    store = ExpertStore(experts, hidden, INTERMEDIATE)
    gate, down = torch.randn(experts, INTERMEDIATE, hidden), torch.randn(experts, hidden, INTERMEDIATE)
    store.pack(gate=gate, up=gate, down=down)
    return store


def bind_half(last: bool) -> None:
    """Two processes of one machine as two machines: each has half of the CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    half = max(1, len(cpus) // 2)
    os.sched_setaffinity(0, cpus[-half:] if last else cpus[:half])


def run_host(port: int, hidden: int) -> None:
    bind_half(True)
    options = NodeOptions(1, 2, "127.0.0.1", port, "bench", 60.0)
    shard = by_experts(1, EXPERTS, 2).layer(0, 1)
    contract = Contract(ExpertShape(EXPERTS, hidden, INTERMEDIATE, True, False, False), False, Gate("silu", 0.0, 0.0))
    layer = ShardLayer("layer", contract, shard, make_store(len(shard.experts), hidden))
    run_expert_node(options, FACTS, lambda: [layer], lambda _: None)


def seconds_of(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and shortest: on a machine with other work, waking a process waits for a slice of theirs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times), min(times)


def measure(layer: RemoteExperts, whole: ExpertStore, rows: int, hidden: int, repeats: int) -> dict[str, float]:
    states = torch.randn(rows, hidden).bfloat16()
    ids = torch.tensor([[0, EXPERTS - 1]]).expand(rows, TOP_K).contiguous()  # one expert on each host
    weights = torch.rand(rows, TOP_K)
    with torch.inference_mode():
        for _ in range(5):
            apply_experts(layer, states, ids, weights)
        exchanged = seconds_of(lambda: apply_experts(layer, states, ids, weights), repeats)
        alone = seconds_of(lambda: whole.forward(states, ids, weights), repeats)
    columns = ("exchange_ms", "exchange_shortest_ms", "one_process_ms", "one_process_shortest_ms")
    return {"rows": rows} | {name: 1e3 * value for name, value in zip(columns, (*exchanged, *alone), strict=True)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args(words)
    host_context = multiprocessing.get_context("spawn")
    pool = NodePool(NodeOptions(0, 2, "127.0.0.1", 0, "bench", 60.0), {"rank": "0"}, lambda _: None)
    host = host_context.Process(target=run_host, args=(pool.port, options.hidden), daemon=True)
    host.start()
    bind_half(False)
    pool.wait_until_ready()
    shard = by_experts(1, EXPERTS, 2).layer(0, 0)
    layer = RemoteExperts(0, make_store(len(shard.experts), options.hidden), shard, pool)
    whole = make_store(EXPERTS, options.hidden)
    results = []
    print(f"{'rows':>6} {'exchange ms':>12} {'shortest':>9} {'one process ms':>15} {'shortest':>9}")
    for rows in options.rows:
        repeats = max(10, options.repeats // (1 + rows // 64))
        results.append(measure(layer, whole, rows, options.hidden, repeats))
        row = "{rows:>6} {exchange_ms:>12.3f} {exchange_shortest_ms:>9.3f} {one_process_ms:>15.3f}"
        print((row + " {one_process_shortest_ms:>9.3f}").format(**results[-1]))
    pool.close()
    host.join(10)
    print(json.dumps({"bench": "host_exchange", "hidden": options.hidden, "results": results}))


if __name__ == "__main__":
    main()
