"""Runs one piece of code in several processes that find each other as torchrun's do, over 127.0.0.1."""

from __future__ import annotations

import socket

from tests.support.forked import Forked


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(code: str, count: int, *arguments: object, seconds: float = 300, **variables: str) -> list[str]:
    """What each rank printed; an error of any rank is an error of the test."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    where |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "KT_THREADS": "1", **variables}
    ranks = [Forked(code, *arguments, **where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    results = [rank.wait(seconds) for rank in ranks]
    failed = [
        f"rank {rank}, exit status {done.returncode}: {done.stdout[-1000:]} {done.stderr[-3000:]}"
        for rank, done in enumerate(results)
        if done.returncode != 0
    ]
    assert not failed, "\n".join(failed)
    return [done.stdout for done in results]
