"""Arguments of the peers of `serve.py`, and how they measure and print a cell.

A cell is one test with some streams: one short call to warm up, then calls until `--seconds` have passed or there are
`--repetitions`. Each is printed as one JSON line; a line with `about` says what the peer is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import Watch

DEPTH = 16  # tokens before an answer
WARM = 8  # tokens that are written before any are counted
LONGEST = 3  # times `--seconds`: a call that would take longer generates fewer tokens, at the same rate


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 16])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    return parser.parse_args()


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int, int, int]]:
    """(test, prompt, new tokens or 0 where reading is measured, streams); what takes longest comes last."""
    for streams in args.streams:
        yield f"tg{args.new}", DEPTH, args.new, streams
        yield f"pp{args.prompt}", args.prompt, 0, streams


def measure(
    args: argparse.Namespace, call: Callable[[int, int, int], float], prompt: int, new: int, streams: int
) -> dict[str, Any]:
    """`call(prompt, new, streams)` gives tokens/s; the samples and the share of the CPUs that others took."""
    warm = call(prompt, min(new, WARM), streams if new else 1)
    if new:
        new = max(WARM, min(new, int(LONGEST * args.seconds * warm / streams)))
    samples: list[float] = []
    watch, first = Watch(), time.perf_counter()
    while not samples or (len(samples) < args.repetitions and time.perf_counter() - first < args.seconds):
        samples.append(call(prompt, new, streams))
    return {"samples": samples, "foreign": watch.foreign()} | ({"new": new} if new else {})


def tell(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)
