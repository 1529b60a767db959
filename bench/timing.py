"""Rounds of timed calls, CPU time of other processes, the machine's rates, and the output, for every bench.

The speed of a machine drifts within minutes, so nothing here keeps a number for later: what is compared is measured in
alternating rounds, and the yardsticks are taken again around each round. A bench prints a table while it runs
and ends with one JSON document on its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktransformers import _core

NOISY = 0.1  # share of all CPUs that others may take before a round is measured again
SLOW = 0.3  # seconds; calls that take longer are warmed up once and repeated less
SETTLE = 0.15  # seconds; worker threads of OpenMP and of kt-kernel spin for up to 50 ms after a call
READ_BYTES = 1 << 30  # in all, far beyond any cache


def _busy_seconds() -> float:
    """CPU time that this machine has spent on anything, stolen time included, idle and waiting not."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Watch:
    """Tells which share of all CPUs went to others than this process since it was made."""

    def __init__(self) -> None:
        self._busy, self._own, self._wall = _busy_seconds(), time.process_time(), time.perf_counter()

    def foreign(self) -> float:
        wall = time.perf_counter() - self._wall
        others = (_busy_seconds() - self._busy) - (time.process_time() - self._own)
        return max(0.0, others) / (wall * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Round:
    ms: list[float]  # one for each call
    foreign: float  # share of the CPUs that others took meanwhile


class Stopwatch:
    """Times call(0), call(1), ... in rounds. The count goes on from round to round."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call = call
        self._step = 0
        self._last = 0.0

    def once(self) -> float:
        start = time.perf_counter()
        self._call(self._step)
        self._last = time.perf_counter() - start
        self._step += 1
        return self._last

    def warm_up(self) -> None:
        """Twice at first, then once a round: the workers have slept, and the clocks may have dropped."""
        if self._step == 0:
            self.once()
        if self._last < SLOW:
            self.once()

    def _once_round(self, seconds: float) -> Round:
        self.warm_up()
        taken: list[float] = []
        watch, spent = Watch(), 0.0
        while spent < seconds or len(taken) < (2 if self._last < SLOW else 1):
            taken.append(self.once())
            spent += taken[-1]
        return Round([1e3 * value for value in taken], watch.foreign())

    def round(self, seconds: float) -> Round:
        """At least two calls (one where they are slow); measured again once where others disturbed it."""
        first = self._once_round(seconds)
        if first.foreign <= NOISY or sum(first.ms) > 2e3:
            return first
        time.sleep(SETTLE)
        return min(first, self._once_round(seconds), key=lambda taken: taken.foreign)


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


@dataclass(frozen=True)
class Reading:
    """What the machine could do at a moment."""

    tile: float  # flop/s of the bare multiply loop, K = 2048, panels in L2; of bytes where those are multiplied
    registers: float  # flop/s from registers alone
    read: float  # bytes/s from memory

    @staticmethod
    def mean(readings: Sequence[Reading]) -> Reading:
        return Reading(
            statistics.mean(reading.tile for reading in readings),
            statistics.mean(reading.registers for reading in readings),
            statistics.mean(reading.read for reading in readings),
        )

    def roof_seconds(self, operations: float, weight_bytes: float) -> float:
        return max(operations / self.tile, weight_bytes / self.read)


class Yardstick:
    """Takes readings for one variant, each rate with all threads or with half of them, whichever was faster at first.

    Guests hide which CPUs are siblings, and whether one or two threads a core are faster differs by rate.
    """

    def __init__(self, pool: _core.Pool, isa: str, seconds: float = 0.05, w8a8: bool = False) -> None:
        self._pool, self._isa, self._seconds = pool, isa, seconds
        self._product = "bytes" if w8a8 else "panels"
        self._rates = (self._tile, self._registers, self._read)
        counts = sorted({pool.threads, max(1, pool.threads // 2)})
        self._read(counts[0])  # the first one is slow: its pages are fresh
        self.threads = [max(counts, key=rate) for rate in self._rates]

    def _tile(self, threads: int) -> float:
        return self._pool.rate(self._product, self._seconds, threads=threads, isa=self._isa)

    def _registers(self, threads: int) -> float:
        return self._pool.rate("registers", self._seconds / 2, threads=threads, isa=self._isa)

    def _read(self, threads: int) -> float:
        """Memory is the machine's, whatever the variant."""
        return self._pool.rate("read", self._seconds, threads=threads, bytes=READ_BYTES // threads)

    def take(self) -> Reading:
        return Reading(*(rate(threads) for rate, threads in zip(self._rates, self.threads, strict=True)))


def describe_machine() -> dict[str, Any]:
    """Imported when it is called: interpreters of peers, which lack ktransformers, import this module too."""
    from ktransformers.plan import roofs

    return roofs.describe_machine()


class Table:
    """Prints rows as they come, right-aligned under their heads; the first column is left-aligned."""

    def __init__(self, heads: Sequence[str], widths: Sequence[int]) -> None:
        self._widths = [max(width, len(head)) for head, width in zip(heads, widths, strict=True)]
        self.row(heads)
        self.row(["-" * width for width in self._widths])

    def row(self, values: Sequence[str]) -> None:
        cells = [value.rjust(width) for value, width in zip(values, self._widths, strict=True)]
        cells[0] = values[0].ljust(self._widths[0])
        print("  ".join(cells).rstrip(), flush=True)


def tidy(document: dict[str, Any]) -> str:
    """One line of JSON with floats cut to six digits."""
    return json.dumps(json.loads(json.dumps(document), parse_float=lambda digits: float(f"{float(digits):.6g}")))


def save(document: dict[str, Any], path: Path) -> None:
    """Whole or not at all. Called after every cell, so that a run that is cut off leaves what it had. `FILE.json#RUN`
    is a run of a recorded document (bench/results/README.md), whose other runs and whose words stay."""
    file, run = split_run(path)
    text = tidy(document) + "\n"
    if run:
        recorded = json.loads(file.read_text())
        kept = {key: recorded["runs"].get(run, {}).get(key, "") for key in ("what", "command", "where")}
        recorded["runs"][run] = kept | {key: value for key, value in document.items() if key != "bench"}
        text = recorded_text(recorded)
    half = file.with_name(file.name + ".part")
    try:
        half.write_text(text)
        half.replace(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            half.unlink()


def split_run(path: Path) -> tuple[Path, str]:
    file, _, run = str(path).partition("#")
    return Path(file), run


def read_run(path: Path) -> dict[str, Any]:
    """A document that a bench wrote, or a run of a recorded one: `FILE.json#RUN`, `main` if none is named."""
    file, run = split_run(path)
    document: dict[str, Any] = json.loads(file.read_text())
    return dict(document["runs"][run or "main"]) if "bench" in document and "runs" in document else document


def recorded_text(document: dict[str, Any]) -> str:
    """JSON with a line for each key of a run and each row of its tables, so that a difference names what changed."""
    runs = []
    for name, run in document["runs"].items():
        items = []
        for key, value in run.items():
            rows = isinstance(value, list) and value and isinstance(value[0], (dict, list))
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n   ]" if rows else json.dumps(value)
            items.append(f"   {json.dumps(key)}: {text}")
        runs.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(items) + "\n  }")
    return f'{{\n "bench": {json.dumps(document["bench"])},\n "runs": {{\n' + ",\n".join(runs) + "\n }\n}\n"


def print_last_line(document: dict[str, Any]) -> None:
    print(tidy(document), flush=True)
