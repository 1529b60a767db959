"""Serving in llama-bench's words: `pp512` reads a prompt, `tg128` writes an answer, with several streams at once.

    python bench/serve.py --shape qwen3-30b --layers 8 --engine
    python bench/serve.py --shape tiny --peers transformers=/path/to/python llama=/path/to/python

The base, one adapter, and four adapters mixed in one batch, so that their cost stands beside it. `--engine` drives the
engine in this process, which needs neither FastAPI nor a port; without it every token comes over HTTP from a server on
loopback. Peers get the same directory, the same prompts' lengths and the same streams in an interpreter of their own:
transformers' continuous batching (what its `serve --continuous-batching` runs), and llama.cpp, in BF16 and Q4_K. Rates
are tokens/s of all streams together; prompts never repeat, so no computed prefix is found again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serve_model import ATTENTION, make_adapter, make_model
from shapes import SHAPES
from timing import Table, Watch, describe_machine, print_last_line, save

PEERS = {"transformers": "serve_transformers.py", "llama": "serve_llama.py"}
DEPTH = 16  # tokens before an answer
HEADS = ("contender", "adapters", "test", "streams", "t/s", "±", "experts", "x base", "foreign")
WIDTHS = (22, 8, 7, 7, 9, 7, 7, 6, 7)


@dataclass(frozen=True)
class Test:
    prompt: int  # tokens that are read
    new: int = 0  # tokens that are written; 0: reading is measured

    @property
    def name(self) -> str:
        return f"tg{self.new}" if self.new else f"pp{self.prompt}"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(ATTENTION), help="of the experts")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of ppN")
    parser.add_argument("--new", type=int, default=128, help="tokens of tgN")
    parser.add_argument("--streams", type=numbers, default=[1, 4, 8, 16], help="default 1,4,8,16")
    parser.add_argument("--adapters", type=numbers, default=[0, 1, 4], help="in a batch; default 0,1,4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--engine", action="store_true", help="in this process, without HTTP")
    parser.add_argument("--threads", type=int, default=0, help="of the experts; 0: as many as are fastest")
    parser.add_argument("--device", help="cpu or cuda: everything but the experts")
    parser.add_argument("--dtype", default="auto", help="of everything but the experts")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--peers-only", action="store_true", help="measure nothing of ours")
    parser.add_argument("--folder", type=Path, help="for the model and the adapters; kept. Default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)
    args.peers = dict(word.partition("=")[::2] for word in args.peers)
    for name, python in args.peers.items():
        if name not in PEERS or not python:
            parser.error(f"--peers: {name}={python}, expected NAME=PYTHON with a name of {', '.join(PEERS)}")
    if min([*args.streams, args.prompt, args.new, args.layers, args.repetitions]) < 1:
        parser.error("counts are at least 1")
    return args


class Contender(Protocol):
    def begin(self, prompts: list[list[int]], new: int, names: list[str | None]) -> list[list[float]]:
        """Answers of `new` tokens each to all prompts at once; when each token of each came, from the start on."""

    def expert_seconds(self) -> float:
        """Spent in experts since the last question."""


class ExpertClock:
    """Seconds in the experts' modules, on the thread that computes."""

    def __init__(self, model: Any) -> None:
        from ktransformers.nn.contract import expert_modules

        self._seconds, self._begun = 0.0, 0.0
        for module in expert_modules(model).values():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self._seconds += time.perf_counter() - self._begun

    def take(self) -> float:
        taken, self._seconds = self._seconds, 0.0
        return taken


class InProcess:
    """The engine, stepped by hand."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._clock = ExpertClock(service.engine.forward.model)

    def begin(self, prompts: list[list[int]], new: int, names: list[str | None]) -> list[list[float]]:
        from ktransformers.serve.sampling import Sampling
        from ktransformers.serve.sequence import Ask, Event, Sequence

        engine, registry = self._service.engine, self._service.registry
        times: list[list[float]] = [[] for _ in prompts]
        ended: list[Event] = []

        def ear(place: int) -> Callable[[Event], None]:
            def hear(event: Event) -> None:
                times[place].append(time.perf_counter() - begun)
                if event.finish is not None:
                    ended.append(event)

            return hear

        found = [registry.find(name or registry.served) for name in names]
        asks = [
            Ask(tuple(prompt), new, Sampling(temperature=0), adapter)
            for prompt, adapter in zip(prompts, found, strict=True)
        ]
        begun = time.perf_counter()
        engine.submit([Sequence(ask, self._service.tokenizer, ear(place)) for place, ask in enumerate(asks)])
        while len(ended) < len(prompts):
            engine.step()
        if any(event.error for event in ended):
            raise SystemExit(next(event.error for event in ended if event.error))
        return times

    def expert_seconds(self) -> float:
        return self._clock.take()


class OverHttp:
    """Streams from a server, a thread for each."""

    def __init__(self, url: str, served: str, model: Any) -> None:
        self._url, self._served = url, served
        self._clock = ExpertClock(model)

    def begin(self, prompts: list[list[int]], new: int, names: list[str | None]) -> list[list[float]]:
        import http.client

        times: list[list[float]] = [[] for _ in prompts]
        begun = time.perf_counter()

        def stream(place: int) -> None:
            connection = http.client.HTTPConnection(self._url.removeprefix("http://"), timeout=3600)
            body = {"model": names[place] or self._served, "prompt": prompts[place], "max_tokens": new}
            body |= {"temperature": 0, "stream": True, "ignore_eos": True, "logprobs": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            for line in reply:
                if line.startswith(b"data: {"):
                    times[place].append(time.perf_counter() - begun)
            connection.close()

        threads = [threading.Thread(target=stream, args=(place,)) for place in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(not told for told in times):
            raise SystemExit("the server did not answer a stream")
        return times

    def expert_seconds(self) -> float:
        return self._clock.take()


@contextmanager
def open_ours(args: argparse.Namespace, model: Path, adapters: dict[str, Path]) -> Iterator[Contender]:
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.launch import open_service
    from ktransformers.serve.target import Target

    room = max(args.prompt, DEPTH) + args.new + 2
    launch = Launch(
        str(model),
        lora_paths=tuple((name, str(folder)) for name, folder in adapters.items()),
        running=max(args.streams),
        queued=max(128, *args.streams),
        tokens=2 * max(args.streams) * (room + 64),
        context=room,
        threads=args.threads or None,
        device=args.device,
        dtype=args.dtype,
    )
    target = Target(model, name="base")
    if args.engine:
        yield InProcess(open_service(launch, target, lambda line: print(f"    {line}", flush=True)))
        return
    from ktransformers.serve.prove_server import in_process

    with in_process(launch, target, lambda line: print(f"    {line}", flush=True)) as (url, served):
        yield OverHttp(url, "base", served)


def rate(test: Test, times: list[list[float]]) -> tuple[float, float]:
    """(tokens/s of all streams, seconds that they took)."""
    if not test.new:
        taken = max(told[0] for told in times)
        return len(times) * test.prompt / taken, taken
    ready = max(told[0] for told in times)  # from here on every stream writes
    ends = [told[min(test.new, len(told) - 1)] for told in times]
    count = sum(ready < at <= end for told, end in zip(times, ends, strict=True) for at in told)
    return count / (max(ends) - ready), max(ends) - ready


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.draw = random.Random(0)
        shape = SHAPES[args.shape]
        self.document: dict[str, Any] = {
            "bench": "serve",
            "machine": describe_machine(),
            "model": {"shape": args.shape, "layers": args.layers, "vocabulary": ATTENTION[args.shape].vocabulary},
            "rank": args.rank,
            "engine": args.engine,
            "tests": {"prompt": args.prompt, "new": args.new},
            "expert_bytes": shape.layer_bytes * args.layers,
            "cells": [],
        }
        self.table = Table(HEADS, WIDTHS)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        top = ATTENTION[self.args.shape].vocabulary
        return [[self.draw.randrange(3, top) for _ in range(length)] for _ in range(count)]

    def tests(self) -> tuple[Test, Test]:
        return Test(self.args.prompt), Test(DEPTH, self.args.new)

    def ours(self, contender: Contender) -> None:
        kind = "kt engine" if self.args.engine else "kt http"
        for test in self.tests():
            for streams in self.args.streams:
                for count in self.args.adapters:
                    if count > max(1, streams):
                        continue
                    names = [f"base:a{place % count}" if count else None for place in range(streams)]
                    self.measure(kind, contender, test, streams, count, names)

    def measure(
        self, kind: str, contender: Contender, test: Test, streams: int, count: int, names: list[str | None]
    ) -> None:
        rates, shares, watch = [], [], Watch()
        for repetition in range(self.args.repetitions + 1):
            if repetition == 1:
                watch = Watch()
            contender.expert_seconds()
            begun = time.perf_counter()
            times = contender.begin(self.prompts(streams, test.prompt), test.new + 1, names)
            spent = time.perf_counter() - begun
            if repetition:  # the first one warms up
                rates.append(rate(test, times)[0])
                shares.append(contender.expert_seconds() / spent)
        self.add(kind, count, test.name, streams, rates, statistics.fmean(shares), watch.foreign())

    def add(
        self, kind: str, count: int, test: str, streams: int, rates: list[float], share: float | None, foreign: float
    ) -> None:
        mean = statistics.fmean(rates)
        same = [cell for cell in self.document["cells"] if (cell["test"], cell["streams"]) == (test, streams)]
        base = next((cell["tokens_per_second"] for cell in same if not cell["adapters"]), None)
        cell = {
            "contender": kind,
            "adapters": count,
            "test": test,
            "streams": streams,
            "tokens_per_second": mean,
            "deviation": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "samples": rates,
            "expert_share": share,
            "to_base": mean / base if base else 1.0,
            "foreign": foreign,
        }
        self.document["cells"].append(cell)
        self.table.row(
            (
                kind,
                str(count),
                test,
                str(streams),
                f"{mean:.2f}",
                f"{cell['deviation']:.2f}",
                "-" if share is None else f"{share:.0%}",
                f"{cell['to_base']:.2f}",
                f"{foreign:.0%}",
            )
        )
        if self.args.json:
            save(self.document, self.args.json)

    def peer(self, name: str, python: str, model: Path) -> None:
        """A program beside this one; every line that it prints is a cell."""
        words = [python, str(Path(__file__).resolve().parent / "peers" / PEERS[name]), str(model)]
        words += ["--prompt", str(self.args.prompt), "--new", str(self.args.new)]
        words += ["--streams", ",".join(map(str, self.args.streams)), "--repetitions", str(self.args.repetitions)]
        words += ["--device", self.args.device] if self.args.device else []
        words += ["--dtype", self.args.dtype] if self.args.dtype != "auto" else []
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                cell = json.loads(line)
                watched = cell.get("foreign", 0.0)
                self.add(cell["contender"], 0, cell["test"], cell["streams"], cell["samples"], None, watched)
        if process.returncode:
            self.document.setdefault("notes", []).append(f"{name}: ended with {process.returncode}")
            print(f"! {name}: ended with {process.returncode}", flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="kt-serve-") as temporary:
        folder = args.folder or Path(temporary)
        shape = SHAPES[args.shape]
        model = make_model(folder / f"{args.shape}-{args.layers}", shape, args.layers)
        bench = Bench(args)
        if not args.peers_only:
            wanted = range(max(args.adapters, default=0))
            adapters = {
                f"a{at}": make_adapter(folder / f"a{at}", model, shape, args.layers, args.rank, at) for at in wanted
            }
            with open_ours(args, model, adapters) as contender:
                bench.ours(contender)
        for name, python in args.peers.items():
            bench.peer(name, python, model)
    print_last_line(bench.document)
    return 1 if bench.document.get("notes") else 0


if __name__ == "__main__":
    sys.exit(main())
