"""One run of `kt bench`: the model is opened or made, planned, served by a `kt serve` of its own on 127.0.0.1 and
measured by a client (`serve/speed.py`); the result is a record (`cli/bench_record.py`).

Random models are packed directories of the released shapes (`quant/random_model.py`); one that has no room as a whole,
on disk or in memory, is linked. Cells whose KV cache does not fit are not measured and say how many bytes are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.cli import bench_record
from ktransformers.cli.library_output import library_output
from ktransformers.cli.progress import drawn_reports, log
from ktransformers.ground import env, system
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.files import path_exists

if TYPE_CHECKING:
    from ktransformers.plan import Candidate
    from ktransformers.plan.roofs import Roofs
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.speed import SpeedCell, SpeedSample, StreamingClient

# The share of free memory and of the disk that a whole random model may take.
MEMORY_SHARE = 0.8
# What `kt quant` writes for the formats in which experts are released.
WRITTEN = {"fp8": "fp8:128x128", "int4": "int4", "gptq": "int4", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
SAMPLE_SECONDS = 0.02  # between two readings of the server's memory
Print = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    model: str
    cells: list[SpeedCell]
    repetitions: int = 3
    layers: int | None = None
    format: str | None = None
    linked: bool | None = None
    gpu_memory: str | None = None
    words: tuple[str, ...] = ()  # further options of `kt serve`


@dataclass(frozen=True)
class Opened:
    """The model that is served."""

    directory: Path
    # What the record says of the model.
    facts: dict[str, Any]
    note: str  # the line under the table


def run(request: Request, folder: Path | None, show: Print | None) -> dict[str, Any]:
    """Rows are printed by `show` as they are measured."""
    from ktransformers.serve.flags import parse

    parse([request.model, *request.words])  # a wrong option is an error before weights are made
    if request.gpu_memory is not None:
        # This process plans with the limit, and the server inherits it.
        os.environ[env.GPU_MEMORY] = request.gpu_memory
    with contextlib.ExitStack() as stack:
        stack.enter_context(library_output())
        temporary = tempfile.TemporaryDirectory(prefix="kt-bench-") if folder is None else None
        kept = folder or Path(stack.enter_context(temporary))  # type: ignore[arg-type]
        kept.mkdir(parents=True, exist_ok=True)
        opened = _open(request, kept)
        return _Run(request, opened, kept.absolute(), show).record()


def _open(request: Request, folder: Path) -> Opened:
    """A model of this machine; otherwise one of random weights."""
    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.modeling.spec import locate_model
    from ktransformers.plan import open_shape

    made = request.layers is not None or request.format is not None or request.linked is not None
    if path_exists(resolve_model(request.model)):
        if made:
            given = f"{request.model}, which is on this machine, with --layers, --format or --linked"
            raise InputError("MODEL", given, "a name of `kt model known` that is not", "leave these options out")
        directory = locate_model(request.model)
        shape = open_shape(str(directory))
        facts = {"name": directory.name, "random": False, "layers": shape.layers, "of_layers": shape.layers}
        return Opened(directory, facts | {"format": shape.stored, "linked": 0}, "")
    return _make(request, folder)


def _make(request: Request, folder: Path) -> Opened:
    from ktransformers.plan.model_shape import known_shape
    from ktransformers.quant.plan import parse_formats
    from ktransformers.quant.random_model import cut_config, distinct_layers, plan_random, write_random

    short, document, stored = known_shape(request.model)
    spec = request.format or WRITTEN.get(stored, "bf16")
    config, total = cut_config(document["config"], request.layers)
    layers = request.layers or total
    name = f"{short}-{layers}-{spec.replace(':', '-')}"
    plan = plan_random(config, folder / f"{name}-shape", parse_formats(spec))
    free = min(system.memory().available, shutil.disk_usage(folder).free)
    linked = plan.out_bytes > MEMORY_SHARE * free if request.linked is None else request.linked
    distinct = distinct_layers(plan) if linked else len(plan.layers)
    with drawn_reports():
        made = write_random(plan, folder / (f"{name}-linked-{distinct}" if linked else name), distinct)
    facts = {"name": short, "random": True, "layers": layers, "of_layers": total, "format": spec}
    note = f"random weights of {short}'s shapes"
    note += f", the first {layers} of {total} layers" if layers < total else ""
    if made.distinct < made.layers:
        note += f"; linked: {made.layers} layers of experts map {made.distinct} distinct ones, routers differ"
    return Opened(made.directory, facts | {"linked": made.distinct if made.distinct < made.layers else 0}, note)


class _Run:
    def __init__(self, request: Request, opened: Opened, folder: Path, show: Print | None) -> None:
        from ktransformers.plan import open_shape
        from ktransformers.plan.calibrate import this_machine
        from ktransformers.plan.roofs import measure_roofs

        self._request, self._opened, self._folder, self._show = request, opened, folder, show
        self._shape = open_shape(str(opened.directory))
        self.roofs: Roofs = measure_roofs()
        self._machine = this_machine()
        self._cells, self._refused, self._launch, self._plan, self._chunk = self._fit()

    def _words(self, cells: list[SpeedCell]) -> list[str]:
        """The launch line of a server for these cells."""
        streams = str(max(cell.streams for cell in cells))
        longest = max(cell.prompt + cell.new + 2 for cell in cells)
        words = ["--served-model-name", "bench", "--max-running-requests", streams, "--max-queued-requests", streams]
        words += ["--max-total-tokens", str(max(cell.tokens for cell in cells)), "--context-length", str(longest)]
        # Prefixes stay in the cache itself: the plan does not count a host tier.
        return [str(self._opened.directory), *words, "--kv-host-gb", "0", "--force", *self._request.words]

    def _fit(self) -> tuple[list[SpeedCell], list[dict[str, Any]], Launch, Candidate, int]:
        """The cells that fit, and what the others lack; the largest cache is left out first."""
        from ktransformers.serve.flags import parse
        from ktransformers.serve.forecast import chunk_size, plan_server
        from ktransformers.serve.target import resolve_target

        cells, refused = list(self._request.cells), list[dict[str, Any]]()
        while cells:
            launch = parse(self._words(cells))
            plan = plan_server(launch, resolve_target(launch.target), lambda _: None, lambda _: None)
            if plan is None:
                raise InputError("MODEL", f"{self._request.model}, which the planner cannot read", "a known family")
            if plan.best is not None:
                return cells, refused, launch, self._narrowed(plan.best, cells), chunk_size(launch, plan)
            largest = max(cells, key=lambda cell: cell.tokens)
            cells.remove(largest)
            refused.append({**asdict(largest), "lacking": plan.nearest.lacking})
        missing = ", ".join(f"{size / 1e9:.1f} GB of {place}" for place, size in refused[-1]["lacking"].items())
        raise InputError(self._request.model, f"{missing} missing", "a cell that fits", "smaller --prompts or --layers")

    def _narrowed(self, plan: Candidate, cells: list[SpeedCell]) -> Candidate:
        """A pass has no more tokens than all prompts of a cell together, whatever the server allows."""
        from ktransformers.plan import Serving
        from ktransformers.plan.planner import evaluate

        assert isinstance(plan.work, Serving)
        prompt = min(plan.work.prompt, max(cell.streams * cell.prompt for cell in cells))
        return evaluate(self._shape, replace(plan.work, prompt=prompt), plan.choice, self._machine)

    def record(self) -> dict[str, Any]:
        from ktransformers.evaluate.loop import child
        from ktransformers.plan.workload import expert_bytes

        shape, choice = self._shape, self._plan.choice
        size = round(shape.expert_layers * shape.experts * expert_bytes(shape, choice))
        facts = self._opened.facts | {"type": bench_record.model_type(self._opened.directory)}
        facts |= {"params": shape.numbers, "expert_bytes": size}
        facts |= {"dense": choice.linear_format or "dense", "cache": "fp8" if self._launch.fp8_cache else "auto"}
        record = bench_record.begin(facts, self._flags(), self.roofs, self._refused)
        self._say(bench_record.heading())
        file = self._folder / "server.log"
        file.unlink(missing_ok=True)
        port, before = child.free_port(None), gpu_used()
        words = ["serve", *self._words(self._cells), "--host", "127.0.0.1", "--port", str(port)]
        with child.locked(self._folder) as lock, child.server(words, port, file, lock):
            peak, end = asyncio.run(self._measure(port, record))
            used = [after - earlier for after, earlier in zip(gpu_used(), before, strict=True)]
        record["memory"] = self._memory(file.read_text(), peak, end, used)
        for line in bench_record.footer(record, self._opened.note):
            self._say(line)
        return record

    def _flags(self) -> list[str]:
        gpu = [] if self._request.gpu_memory is None else ["--gpu-memory", self._request.gpu_memory]
        return [*gpu, *self._request.words]

    async def _measure(self, port: int, record: dict[str, Any]) -> tuple[int, int]:
        """Fills the rows; returns the server's anonymous memory at its peak and at the end."""
        from ktransformers.serve.running import running_servers
        from ktransformers.serve.speed import StreamingClient

        client = StreamingClient(port, "bench", self._shape.vocabulary)
        process = next(server.pid for server in running_servers() if server.port == port)
        meter = asyncio.create_task(_peak_memory(process))
        for cell in self._cells:
            log(f"prompts of {cell.prompt} tokens, {cell.streams} at a time")
            row = self._row(cell, await self._samples(client, cell))
            record["rows"].append(row)
            for line in bench_record.table_lines(record, row):
                self._say(line)
        meter.cancel()
        return await meter, system.resident_bytes("RssAnon", process)

    async def _samples(self, client: StreamingClient, cell: SpeedCell) -> list[SpeedSample]:
        try:
            return await client.measure(cell, self._request.repetitions)
        except OSError as error:
            raise KTError(f"the server is gone ({error}); {self._folder / 'server.log'} has the reason") from error

    def _row(self, cell: SpeedCell, samples: list[SpeedSample]) -> dict[str, Any]:
        shape, plan = self._shape, self._plan
        prompt = self.roofs.prompt_seconds(shape, plan, cell.streams * cell.prompt, self._chunk)
        decode = self.roofs.decode_seconds(shape, plan, self._machine, cell.prompt + cell.new // 2, cell.streams)
        names = ("prompt_rate", "first_token", "decode_rate")
        row: dict[str, Any] = asdict(cell) | {name: [getattr(one, name) for one in samples] for name in names}
        return row | {"prompt_roof": cell.streams * cell.prompt / prompt, "decode_roof": cell.streams / decode}

    def _memory(self, log_text: str, peak: int, end: int, gpu: list[int]) -> dict[str, Any]:
        """Pinned memory is what the server's own account at its end has over the kernel's."""
        from ktransformers.plan.meter import AT_END, read_comparison

        comparison, planned = read_comparison(log_text, AT_END), self._plan.memory
        pinned = 0 if comparison is None else max(0, round(comparison.measured * 1e9) - end)
        pinned = pinned if gpu else 0
        tables = [{name: size for name, size in table.items() if name != "scores"} for table in planned.gpus]
        host = {"predicted": planned.host_bytes - planned.host.get("scores", 0), "used": peak + pinned}
        gpus = [{"predicted": sum(one.values()), "used": used} for one, used in zip(tables, gpu, strict=False)]
        return {"host": host | {"mapped": planned.mapped}, "gpus": gpus}

    def _say(self, line: str) -> None:
        if self._show is not None:
            self._show(line)


async def _peak_memory(process: int) -> int:
    """Sampled until the task is cancelled."""
    peak = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, system.resident_bytes("RssAnon", process))
            await asyncio.sleep(SAMPLE_SECONDS)
    return peak


def gpu_used() -> list[int]:
    """Bytes in use on each GPU by all processes; none without `nvidia-smi`."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [int(line) << 20 for line in done.stdout.split()]
