"""Linear layers of a decoder at the batch sizes of decoding, against memory bandwidth.

    python bench/linear.py                     # the layers of Qwen3-30B-A3B, 1 to 32 rows
    python bench/linear.py --rows 1 8 --layers q head --torch

Calls rotate over copies of a layer that are together far larger than any cache. `qkv` is three matrices
in one call. The share is that of the rate at which a bare loop reads memory, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from timing import READ_BYTES, Stopwatch, Table, describe_machine, print_last_line, save

HIDDEN, HEADS, GROUPS, VOCABULARY, EXPERTS = 2048, 4096, 512, 151936, 128
LAYERS = {
    "q": ([HEADS], HIDDEN),
    "k": ([GROUPS], HIDDEN),
    "qkv": ([HEADS, GROUPS, GROUPS], HIDDEN),
    "o": ([HIDDEN], HEADS),
    "router": ([EXPERTS], HIDDEN),
    "head": ([VOCABULARY], HIDDEN),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    arguments.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    arguments.add_argument("--threads", type=int, default=0, help="0: chosen")
    arguments.add_argument("--seconds", type=float, default=0.3, help="for each number")
    arguments.add_argument("--torch", action="store_true", help="torch's own product as well")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    args = arguments.parse_args()

    import torch

    from ktransformers import _core

    pool = _core.Pool(args.threads)
    read = max(pool.rate("read", 0.2, bytes=READ_BYTES // pool.threads) for _ in range(3))
    print(f"{pool.threads} threads, {_core.linear_rows()} rows at most, memory {read / 1e9:.0f} GB/s", flush=True)
    table = Table(["layer", "rows", "us", "GB/s", "share", "torch us"], [8, 4, 8, 6, 6, 8])
    cells = []
    for name in args.layers:
        outputs, columns = LAYERS[name]
        size = sum(outputs) * columns * 2
        copies = torch.empty(max(1, READ_BYTES // size), sum(outputs), columns, dtype=torch.bfloat16).normal_()
        for rows in args.rows:
            if rows > _core.linear_rows():
                continue
            x = torch.randn(rows, columns).bfloat16()
            outs = [torch.empty(rows, count, dtype=x.dtype) for count in outputs]

            def ours(step: int) -> None:
                pool.linear(x, list(torch.split(copies[step % len(copies)], outputs)), outs)  # noqa: B023

            def theirs(step: int) -> None:
                torch.nn.functional.linear(x, copies[step % len(copies)])  # noqa: B023

            us = 1e3 * statistics.median(Stopwatch(ours).round(args.seconds).ms)
            other = 1e3 * statistics.median(Stopwatch(theirs).round(args.seconds).ms) if args.torch else None
            rate = size / us * 1e6
            cells.append({"layer": name, "rows": rows, "us": us, "share": rate / read, "torch_us": other})
            words = [name, str(rows), f"{us:.1f}", f"{rate / 1e9:.1f}", f"{rate / read:.2f}"]
            table.row([*words, "" if other is None else f"{other:.1f}"])
    document = {"bench": "linear", "machine": describe_machine(), "threads": pool.threads, "read": read, "cells": cells}
    if args.json:
        save(document, args.json)
    print_last_line(document)


if __name__ == "__main__":
    main()
