"""What worker processes add to a short request before it reaches the engine: kinds of requests, prepared here or there.

    python bench/request_path.py --tokenizer DIR --workers 2 --json request-path.json

Preparing is parsing the JSON of a body, checking it, rendering the chat template and tokenising
(`serve/http/prepare.py`). It is timed in this process, which is what a server without workers would do on its event
loop, and through `PreparePool`, one request after another and several at a time; rounds alternate, and the best counts,
because other work on the machine only adds. Columns: microseconds of a request in this process and through a worker,
the difference, both in requests/s with `--parallel` clients, and for how long a request occupies the event loop in
either case, which is what other streams wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    from ktransformers.serve.http.prepare_pool import PreparePool

TOKENIZER = Path(__file__).resolve().parents[1] / "tests" / "data" / "minimind_6400"
HEADS = ("request", "bytes", "tokens", "here us", "worker us", "more us", "here /s", "workers /s", "loop us", "loop us")
TEXT = "Write down the weather of every evening: wind, clouds, and how far one could see. "
KINDS = {
    "completion, 20 tokens": ("completion", {"prompt": TEXT}),
    "chat, one message": ("chat", {"messages": [{"role": "user", "content": TEXT}]}),
    "chat, nine messages": (
        "chat",
        {"messages": [{"role": ("user", "assistant")[at % 2], "content": TEXT * 4} for at in range(9)]},
    ),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a directory with a tokenizer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=8, help="clients of the rates")
    parser.add_argument("--requests", type=int, default=40, help="of one round")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


async def through_pool(pool: PreparePool, kind: str, body: bytes, requests: int, parallel: int) -> tuple[float, float]:
    """(seconds of a request as its client sees it, the median; seconds of all)."""
    times: list[float] = []

    async def client(count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            await pool.prepare(kind, body, {})
            times.append(time.perf_counter() - start)

    begun = time.perf_counter()
    await asyncio.gather(*(client(requests // parallel) for _ in range(parallel)))
    return statistics.median(times), time.perf_counter() - begun


async def measure(pool: PreparePool, preparer: Any, kind: str, body: bytes, args: argparse.Namespace) -> dict[str, Any]:
    here, alone, together, loop = [], [], [], []
    prepared = preparer.prepare(kind, body, {})
    await through_pool(pool, kind, body, args.requests, args.parallel)  # every worker has seen the template
    for _ in range(args.rounds):
        times = []
        for _ in range(args.requests):
            start = time.perf_counter()
            preparer.prepare(kind, body, {})
            times.append(time.perf_counter() - start)
        here.append(statistics.median(times))
        busy = time.thread_time()
        seconds, _ = await through_pool(pool, kind, body, args.requests, 1)
        loop.append((time.thread_time() - busy) / args.requests)
        alone.append(seconds)
        count = args.requests // args.parallel * args.parallel
        together.append(count / (await through_pool(pool, kind, body, count, args.parallel))[1])
    return {
        "bytes": len(body),
        "tokens": len(prepared.prompts[0].tokens),
        "here_s": min(here),
        "worker_s": min(alone),
        "here_rate": 1 / min(here),
        "workers_rate": max(together),
        "loop_s": min(loop),  # of this thread, for one request through a worker
    }


async def run(args: argparse.Namespace, document: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    from ktransformers.serve.http.grammar_source import GrammarCompiler
    from ktransformers.serve.http.prepare import PrepareSettings, RequestPreparer
    from ktransformers.serve.http.prepare_pool import PreparePool

    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer)
    settings = PrepareSettings(len(tokenizer), 8192)
    preparer = RequestPreparer(tokenizer, settings)
    pool = PreparePool(tokenizer, settings, GrammarCompiler(tokenizer, settings.vocabulary), workers=args.workers)
    table = Table(HEADS, [22, 6, 6, 7, 9, 7, 7, 10, 7, 7])
    async with pool.running():
        for name, (kind, fields) in KINDS.items():
            body = json.dumps({"model": "x", "max_tokens": 16, **fields}).encode()
            cell = {"request": name, **await measure(pool, preparer, kind, body, args)}
            document["cells"].append(cell)
            times = [cell["here_s"], cell["worker_s"], cell["worker_s"] - cell["here_s"]]
            rates = [f"{cell['here_rate']:.0f}", f"{cell['workers_rate']:.0f}"]
            loops = [cell["here_s"], cell["loop_s"]]
            shown = [f"{1e6 * seconds:.0f}" for seconds in times]
            shown += [*rates, *(f"{1e6 * seconds:.0f}" for seconds in loops)]
            table.row([name, str(cell["bytes"]), str(cell["tokens"]), *shown])
            if args.json:
                save(document, args.json)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    document: dict[str, Any] = {"bench": "request_path", "machine": describe_machine(), "workers": args.workers}
    document |= {"parallel": args.parallel, "cells": []}
    asyncio.run(run(args, document))
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
