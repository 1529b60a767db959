"""Many streams and long prompts through HTTP on kept-alive connections: rates from 1 to 64 streams, gaps between tokens
of 8 streams while a long prompt comes, and gaps between forward passes.

    python bench/serve_streams.py --shape tiny --layers 8 --sources before=/path/to/src after=src --rounds 3

Every source is a `src` folder whose `kt serve` runs in its own process; rounds alternate between them, so that both
see the same machine, and cells are medians of the rounds. The client is one process with an event loop. `streams`: new
tokens/s of all streams together, from the moment when the last of them began. `long`: a prompt of `--prompt` tokens
alone, then beside 8 streams: its rate in both cases, the largest gap between two tokens of a stream, and the time to
the first token of a prompt of 200 tokens that is asked in the middle. `pause`: from the end of a forward pass to the
beginning of the next one, with one stream and with the largest number of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arguments import numbers
from serve_model import ATTENTION, make_model
from shapes import SHAPES
from timing import Table, Watch, describe_machine, print_last_line, save

from ktransformers.serve.speed import StreamingClient, decode_rate

SHORT = 200  # tokens of the prompt that is asked while a long one is computed
BESIDE = 8  # streams beside a long prompt
START_SECONDS = 180.0
HEADS = ("source", "cell", "value", "unit", "samples")
WIDTHS = (8, 34, 10, 9, 40)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=list(ATTENTION), help="of the experts")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sources", nargs="+", metavar="NAME=DIR", default=["here=src"])
    parser.add_argument("--streams", type=numbers, default=[1, 8, 16, 32, 33, 48, 64])
    parser.add_argument("--new", type=int, default=48, help="tokens of a stream")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="streams,long", help="of streams, long")
    parser.add_argument("--launch", default="", help="more words for `kt serve`")
    parser.add_argument("--folder", type=Path, help="for the model; kept. Default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every round")
    parser.add_argument("--serve", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def serve(file: Path, words: list[str]) -> None:
    """The server's process: `kt serve`, which on a signal writes the pauses between forward passes to a file."""
    from ktransformers.cli.main import main as kt
    from ktransformers.serve.scheduler.forward import Forward

    run, pauses, ended = Forward.run, list[float](), [0.0]

    def timed(self: Forward, chunks: Sequence[Any]) -> Any:
        if ended[0]:
            pauses.append(time.perf_counter() - ended[0])
        results = run(self, chunks)
        ended[0] = time.perf_counter()
        return results

    def write(*_: Any) -> None:
        file.with_suffix(".part").write_text(json.dumps(pauses))
        file.with_suffix(".part").rename(file)
        pauses.clear()
        ended[0] = 0.0

    Forward.run = timed  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, write)
    sys.argv = ["kt", "serve", *words]
    kt()
    sys.exit()


class Server:
    def __init__(self, name: str, source: Path, model: Path, launch: list[str], folder: Path) -> None:
        self.name, self._file = name, folder / f"{name}.pauses"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        words = [str(model), "--port", str(self.port), "--served-model-name", "base", *launch]
        environment = os.environ | {"PYTHONPATH": str(source.resolve())}
        command = [sys.executable, __file__, "--serve", str(self._file), "--", *words]
        self._log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"{self.name}: no server; see {self._log.name}")

    def pauses(self) -> list[float]:
        """Between forward passes since the last question."""
        self._file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 20
        while not self._file.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return list(json.loads(self._file.read_text()))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


class Client(StreamingClient):
    """With the measurements of this bench."""

    async def rate(self, streams: int, new: int) -> float:
        """New tokens/s of all streams."""
        return decode_rate(await self.ask_all([self.draw(16) for _ in range(streams)], new + 1))

    async def alone(self, prompt: int) -> float:
        """Tokens/s of a prompt."""
        begun = time.perf_counter()
        first = await self.ask_all([self.draw(prompt)], 1)
        return prompt / (first[0][0] - begun)

    async def beside(self, prompt: int) -> dict[str, float]:
        """A prompt beside streams."""
        times: list[list[float]] = [[] for _ in range(BESIDE)]
        streams = [asyncio.create_task(self.ask(self.draw(16), 1 << 14, one)) for one in times]
        while any(len(one) < 40 for one in times):
            await asyncio.sleep(0.01)
        before = statistics.median(b - a for one in times for a, b in itertools.pairwise(one))
        first: list[float] = []
        short: list[float] = []
        begun = time.perf_counter()
        long = asyncio.create_task(self.ask(self.draw(prompt), 1, first))
        await asyncio.sleep(1.0)
        asked, inside = time.perf_counter(), not first
        await self.ask(self.draw(SHORT), 1, short)
        await long
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        spans = [(a, b) for one in times for a, b in itertools.pairwise(one) if b > begun and a < first[0]]
        gaps = sorted(b - a for a, b in spans)
        return {
            "rate": prompt / (first[0] - begun),
            "gap": gaps[-1],
            "median_gap": statistics.median(gaps),
            "step": before,
            "short": short[0] - asked if inside else 0.0,
        }


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def measure(args: argparse.Namespace, server: Server) -> dict[str, tuple[float, str]]:
    """Cells of one round: name -> (value, unit)."""
    client, cells = Client(server.port, "base", ATTENTION[args.shape].vocabulary), dict[str, tuple[float, str]]()
    parts = args.only.split(",")
    await client.rate(2, 8)
    for streams in args.streams if "streams" in parts else ():
        server.pauses()
        cells[f"streams {streams}"] = await client.rate(streams, args.new), "t/s"
        if streams in (min(args.streams), max(args.streams)):
            pauses = server.pauses()
            cells[f"pause median, {streams} streams"] = 1e3 * share(pauses, 0.5), "ms"
            cells[f"pause p99, {streams} streams"] = 1e3 * share(pauses, 0.99), "ms"
    if "long" in parts:
        cells["long alone"] = await client.alone(args.prompt), "t/s"
        beside = await client.beside(args.prompt)
        cells[f"long beside {BESIDE}"] = beside["rate"], "t/s"
        cells["long beside over alone"] = beside["rate"] / cells["long alone"][0], "x"
        cells["largest gap"] = 1e3 * beside["gap"], "ms"
        cells["median gap"] = 1e3 * beside["median_gap"], "ms"
        cells["gap without a prompt"] = 1e3 * beside["step"], "ms"
        cells[f"first token of {SHORT} tokens"] = 1e3 * beside["short"], "ms"
    return cells


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.serve:
        serve(args.serve, args.words)
    document: dict[str, Any] = {
        "bench": "serve-streams",
        "machine": describe_machine(),
        "model": {"shape": args.shape, "layers": args.layers},
        "prompt": args.prompt,
        "launch": args.launch,
        "cells": [],
    }
    samples: dict[tuple[str, str], list[float]] = {}
    units: dict[str, str] = {}
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="kt-streams-") as temporary, ExitStack() as stack:
        folder = args.folder or Path(temporary)
        model = make_model(folder / f"{args.shape}-{args.layers}", SHAPES[args.shape], args.layers)
        servers = []
        for name, source in (word.split("=", 1) for word in args.sources):
            servers.append(Server(name, Path(source), model, args.launch.split(), Path(temporary)))
            stack.callback(servers[-1].close)
            servers[-1].wait()
        for turn in range(args.rounds):
            for server in servers:
                for cell, (value, unit) in asyncio.run(measure(args, server)).items():
                    samples.setdefault((server.name, cell), []).append(value)
                    units[cell] = unit
                print(f"    round {turn + 1} of {args.rounds}, {server.name}", flush=True)
            document["cells"] = [
                {
                    "source": name,
                    "cell": cell,
                    "unit": units[cell],
                    "median": statistics.median(taken),
                    "samples": taken,
                }
                for (name, cell), taken in samples.items()
            ]
            document["foreign"] = watch.foreign()
            if args.json:
                save(document, args.json)
    table = Table(HEADS, WIDTHS)
    for entry in document["cells"]:
        text = " ".join(f"{value:.1f}" for value in entry["samples"])
        table.row((entry["source"], entry["cell"], f"{entry['median']:.2f}", entry["unit"], text))
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
