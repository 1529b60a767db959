"""Ranks of one host: each computes the experts of its own rows with its part of the cores, or the first computes them
for all with all cores. Forward and backward of one layer; both ways alternate in the same processes.

    python bench/host_ranks.py [--ranks 2] [--rows 16 128 1024] [--experts 16]

The first rank gets the other ranks' rows through `parallel/exchange.py` over loopback, which costs more than shared
memory would; `received` is the time of the second way without that (the first rank computes the rows of all, which are
already there), so the truth for shared memory lies between the last two columns."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ktransformers import _core
from ktransformers.experts.backend import LocalExperts
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.rank_cores import rank_cpus
from ktransformers.parallel.exchange import ExchangedExperts, new_expert_group

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8  # of Qwen3-30B-A3B
WAYS = ("each", "first for all", "received")


def make_store(experts: int, threads: int, cpus: set[int]) -> ExpertStore:
    """With a pool of its own on these CPUs."""
    os.sched_setaffinity(0, cpus)
    store = ExpertStore(experts, HIDDEN, INTERMEDIATE, pool=_core.Pool(threads, 1))
    generator = torch.Generator().manual_seed(1)
    matrix = (torch.randn(experts, INTERMEDIATE, HIDDEN, generator=generator) / 32).bfloat16()
    store.pack(gate=matrix, up=matrix, down=matrix.transpose(1, 2).contiguous())
    return store


def batch(rows: int, experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).bfloat16().requires_grad_()
    weights, ids = torch.rand(rows, experts, generator=generator).topk(TOP_K)
    return hidden, ids, weights.requires_grad_()


def timed(work: Callable[[], Tensor | None]) -> float:
    """Until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    out = work()
    if out is not None:
        out.backward(torch.ones_like(out))
    dist.barrier()
    return time.perf_counter() - start


def run_rank(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    every = os.sched_getaffinity(0)
    own = rank_cpus(every, rank, ranks)
    dist.init_process_group("gloo")
    each = make_store(options.experts, len(own), own)
    all_cores = make_store(options.experts, len(every), every) if rank == 0 else None
    shard = LayerShard((0,) * options.experts, rank, ranks)
    exchange = ExchangedExperts(all_cores, shard, new_expert_group(ranks))
    for rows in options.rows:
        mine = batch(rows, options.experts, rank)
        together = batch(rows * ranks, options.experts, 9)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(options.repeats + 1):
            for way, cpus, work in (
                ("each", own, lambda mine=mine: apply_experts(LocalExperts(each), *mine)),
                ("first for all", every, lambda mine=mine: apply_experts(exchange, *mine)),
                (
                    "received",
                    every,
                    lambda rows=together: apply_experts(LocalExperts(all_cores), *rows) if all_cores else None,
                ),
            ):
                os.sched_setaffinity(0, cpus)
                taken = timed(work)
                if repeat:  # the first one warms up
                    seconds[way].append(taken)
        if rank == 0:
            shown = {
                way: [round(min(values) * 1e3, 2), round(median(values) * 1e3, 2)] for way, values in seconds.items()
            }
            print(json.dumps({"ranks": ranks, "rows": rows, "experts": options.experts, "ms [min, median]": shown}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, options.ranks, port, options)) for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert not any(process.exitcode for process in ranks), [process.exitcode for process in ranks]


if __name__ == "__main__":
    main()
