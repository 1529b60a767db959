"""Training steps with experts on both sides: step times by the share of experts that is streamed, and where one layer's
time goes.

    python bench/train_split.py --format bf16 --tokens 512,2048 --shares 0.5/0.65,0.6/0.75 --json split.json

One model (`e2e_models.py`, variant `kt`), whose steps have new random tokens every time, so that the division made from
the last batch meets another routing. Rows: `stream`; `stream whole`, whose layers are decoded at once, so that passes
are captured; `synchronous`, `split` whose host waits for ids and for the CPU; `ahead`, divided by the cost model before
the ids are known; then `ahead` with fixed shares of the experts that had
tokens, forward/backward. Configurations take turns, round by round, because a host's speed drifts.

The trace of a step is by events on the device and clocks on the host, on one time line: when the host enters a layer,
when the device reaches it, when the CPU begins and ends, when the device has done its own share, when copies for the
layer begin and end. `alone` repeats the CPU's share of that layer after the step, without copies beside it: the
difference is contention for DRAM.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import numbers, words
from e2e_models import recipes
from e2e_trainer import Trainer
from timing import Table, describe_machine, print_last_line, save

from ktransformers.nn.store import ExpertStore
from ktransformers.place.dispatch import Dispatcher, PlacedLayer
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.executor import GpuExecutor
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.plan.memory import ENGINE_LIMITS
from ktransformers.plan.split import Split

WARM_STEPS = 5  # graphs are captured in the third


@dataclass
class Trace:
    """Moments of one step: (name, layer, direction, host seconds or a device event)."""

    rows: list[tuple[str, int, str, float | torch.cuda.Event]] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    origin: torch.cuda.Event | None = None
    begun: float = 0.0

    def start(self) -> None:
        torch.cuda.synchronize()
        self.origin = _timed_event()
        torch.cuda.synchronize()
        self.begun = time.perf_counter()

    def add(self, name: str, layer: int, direction: str, moment: float | torch.cuda.Event) -> None:
        self.rows.append((name, layer, direction, moment))

    def milliseconds(self) -> list[tuple[str, int, str, float]]:
        torch.cuda.synchronize()
        assert self.origin is not None
        return [
            (name, layer, direction, 1e3 * (at - self.begun) if isinstance(at, float) else self.origin.elapsed_time(at))
            for name, layer, direction, at in self.rows
        ]


def _timed_event(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream())
    return event


def instrument(trace: Trace) -> Callable[[], None]:
    """Record a step; the function that takes everything off again."""
    saved = [
        (ExpertEngine, "forward"), (ExpertEngine, "backward"), (GpuExecutor, "forward"), (GpuExecutor, "backward"),
        (ExpertStore, "forward"), (ExpertStore, "backward"), (ExpertCache, "fetch"),
    ]  # fmt: skip
    originals = [(owner, name, getattr(owner, name)) for owner, name in saved]

    def engine(inner: Any, name: str) -> Any:
        def call(self: ExpertEngine, layer: PlacedLayer, *args: Any, **kwargs: Any) -> Any:
            index = layer.packed.index
            trace.add("host enters", index, name, time.perf_counter())
            trace.add("GPU reaches the layer", index, name, _timed_event())
            result = inner(self, layer, *args, **kwargs)
            trace.add("result is complete", index, name, _timed_event())
            trace.add("host leaves", index, name, time.perf_counter())
            return result

        return call

    def executor(inner: Any, name: str) -> Any:
        def call(self: GpuExecutor, layer: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(self, layer, *args, **kwargs)
            trace.add("GPU's share is done", layer.index, name, _timed_event())
            return result

        return call

    def store(inner: Any, name: str) -> Any:
        def call(self: ExpertStore, *args: Any, **kwargs: Any) -> Any:
            trace.calls.append((name, (self, *args), kwargs))
            trace.add("CPU begins", -1, name, time.perf_counter())
            result = inner(self, *args, **kwargs)
            trace.add("CPU ends", -1, name, time.perf_counter())
            return result

        return call

    def fetch(inner: Any, name: str) -> Any:
        def call(self: ExpertCache, layer: int, *args: Any, **kwargs: Any) -> Any:
            before, copied = _timed_event(self._stream), self.copied_bytes
            result = inner(self, layer, *args, **kwargs)
            if self.copied_bytes > copied:
                trace.add(f"copies begin ({(self.copied_bytes - copied) / 1e6:.0f} MB)", layer, name, before)
                trace.add("copies end", layer, name, _timed_event(self._stream))
            return result

        return call

    wrap = {ExpertEngine: engine, GpuExecutor: executor, ExpertStore: store, ExpertCache: fetch}
    for owner, name, inner in originals:
        setattr(owner, name, wrap[owner](inner, name))

    def remove() -> None:
        for owner, name, inner in originals:
            setattr(owner, name, inner)

    return remove


def fixed_shares(forward: float, backward: float) -> Callable[..., Split]:
    """`Dispatcher.split_ahead` with so many of the experts that had tokens, the busiest, on the GPU."""

    def divide(self: Dispatcher, layer: PlacedLayer, tokens: int, pass_name: str) -> Split:
        counts = self.expected_counts(layer, tokens, pass_name)
        active = int((counts > 0).sum())
        number = round((backward if pass_name == "backward" else forward) * active)
        order = sorted(range(len(counts)), key=lambda expert: -int(counts[expert]))
        return Split((), tuple(order[:number]), tuple(sorted(order[number:])), 0.0)

    return divide


class Configuration:
    """A way to divide; `apply` puts it in force."""

    def __init__(
        self,
        name: str,
        policy: str,
        divide: Callable[..., Split] | None = None,
        *,
        wait: bool = False,
        whole: bool = True,
    ) -> None:
        self.name, self.policy, self.divide, self.wait, self.whole = name, policy, divide, wait, whole
        self.seconds: list[float] = []

    def apply(self, trainer: Trainer) -> None:
        engine = trainer.model.placement.engines[0]
        engine.dispatcher.forced = self.policy
        limits = ENGINE_LIMITS
        engine.executor.whole_layer_bytes = limits.split_layer_bytes if self.whole else limits.whole_layer_bytes
        Dispatcher.split_ahead = self.divide or ORIGINAL[0]  # type: ignore[method-assign]
        Dispatcher._is_captured = (lambda *_: False) if self.wait else ORIGINAL[1]  # type: ignore[method-assign]


ORIGINAL = Dispatcher.split_ahead, Dispatcher._is_captured


def step(trainer: Trainer, tokens: int) -> float:
    batches = trainer.batches(tokens, 1)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    trainer.step(batches)
    return time.perf_counter() - begun


def traced(trainer: Trainer, tokens: int, layer: int) -> dict[str, Any]:
    """One step of the configuration in force, as a document; prints this layer of it."""
    trace = Trace()
    remove = instrument(trace)
    trace.start()
    begun = time.perf_counter()
    trainer.step(trainer.batches(tokens, 1))
    whole = time.perf_counter() - begun
    remove()
    rows = sorted(trace.milliseconds(), key=lambda row: row[3])
    alone = []
    for name, args, kwargs in trace.calls[:8] + trace.calls[-4:]:
        begun = time.perf_counter()
        getattr(ExpertStore, name)(*args, **kwargs)
        alone.append((name, 1e3 * (time.perf_counter() - begun)))
    beside = [(n, e - b) for (_, _, n, b), (_, _, _, e) in _pairs(rows, "CPU begins", "CPU ends")]
    print(f"    step {1e3 * whole:.0f} ms; the CPU computes {sum(t for _, t in beside):.0f} ms in {len(beside)} calls")
    for direction in ("forward", "backward"):
        during = [t for n, t in beside if n == direction]
        repeated = [t for n, t in alone if n == direction]
        if during and repeated:
            words = f"beside copies {statistics.median(during):.1f}, alone {statistics.median(repeated):.1f}"
            print(f"    CPU, {direction}, ms: {words}")
        _print_layer(rows, layer, direction)
    return {"whole_ms": 1e3 * whole, "rows": rows, "alone": alone}


def _pairs(rows: list[Any], first: str, last: str) -> list[tuple[Any, Any]]:
    begins = [row for row in rows if row[0] == first]
    ends = [row for row in rows if row[0] == last]
    return list(zip(begins, ends, strict=False))


def _print_layer(rows: list[Any], layer: int, direction: str) -> None:
    spans = [row for row in rows if row[1] == layer and row[2] == direction]
    if not spans:
        return
    begin = min(at for name, _, _, at in spans if name == "host enters")
    end = max(at for *_, at in spans)
    following = layer + 1 if direction == "forward" else layer - 1
    inside = [row for row in rows if begin - 30 <= row[3] <= end + 1 and _concerns(row, layer, following, direction)]
    moments = ", ".join(
        f"{name}{'' if at_layer in (layer, -1) else ' (next)'} {at - begin:.1f}" for name, at_layer, _, at in inside
    )
    print(f"    layer {layer}, {direction}, ms after the host enters: {moments}", flush=True)


def _concerns(row: Any, layer: int, following: int, direction: str) -> bool:
    name, of, way, _ = row
    if way == "fetch":
        return of in (layer, following)
    return (
        of == -1
        or (of == layer and way == direction)
        or (of == following and name == "host enters" and way == direction)
    )


def configurations(args: argparse.Namespace) -> list[Configuration]:
    listed = [
        Configuration("stream", "stream", whole=False),
        Configuration("stream whole", "stream"),
        Configuration("synchronous", "split", wait=True, whole=False),
        Configuration("ahead", "split"),
    ]
    for pair in args.shares:
        forward, backward = (float(word) for word in pair.split("/"))
        listed.append(Configuration(pair, "split", fixed_shares(forward, backward)))
    return [one for one in listed if not args.only or one.name in args.only]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b", choices=list(recipes()))
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--tokens", type=numbers, default=[512, 2048])
    parser.add_argument("--shares", type=words, default=[], help="forward/backward, for example 0.6/0.75")
    parser.add_argument("--only", type=words, default=[], help="names of configurations")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a configuration in a round")
    parser.add_argument("--trace", type=words, default=["stream", "ahead"], help="configurations")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    document: dict[str, Any] = {"bench": "train_split", "machine": describe_machine(), "cells": []}
    begun = time.perf_counter()
    trainer = Trainer("kt", recipes()[args.model], "retain", args.format)
    trainer.place("split")
    costs = trainer.model.placement.engines[0].dispatcher.costs
    print(f"built in {time.perf_counter() - begun:.0f} s; {costs.get('forward')}", flush=True)
    document["costs"] = {name: vars(one) for name, one in costs.items()}
    table = Table(
        ["format", "tokens", "configuration", "s/step", "fastest", "stream /", "GPU GiB"], [8, 6, 14, 8, 8, 8, 8]
    )
    for tokens in args.tokens:
        listed = configurations(args)
        for round_number in range(args.rounds):
            for one in listed:
                one.apply(trainer)
                torch.cuda.reset_peak_memory_stats()
                for _ in range(WARM_STEPS if not round_number else 1):
                    step(trainer, tokens)
                one.seconds += [step(trainer, tokens) for _ in range(args.steps)]
                peak = torch.cuda.max_memory_allocated() / 2**30
                if round_number == args.rounds - 1:
                    median = statistics.median(one.seconds)
                    ratio = statistics.median(listed[0].seconds) / median
                    layers = trainer.model.placement.engines[0].layers
                    middle = len(layers) // 2
                    sizes = {name: len(part.streamed) for name, part in layers[middle].last_split.items()}
                    cell = {"tokens": tokens, "name": one.name, "seconds": one.seconds, "gpu_gib": peak, "sizes": sizes}
                    document["cells"].append(cell)
                    row = [args.format, str(tokens), one.name, f"{median:.3f}", f"{min(one.seconds):.3f}"]
                    table.row([*row, f"{ratio:.2f}", f"{peak:.2f}"])
                    if one.name in args.trace:
                        print(f"    streamed experts of layer {middle}: {sizes}")
                        cell["trace"] = traced(trainer, tokens, middle)
        if args.json:
            save(document, args.json)
    print_last_line({key: value for key, value in document.items() if key != "cells"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
