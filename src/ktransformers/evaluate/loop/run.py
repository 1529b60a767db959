"""Runs the stages of a loop or of a sweep: every stage whose inputs changed is run, the others are skipped.

The run's directory contains what is needed to repeat it: `loop.yaml` (all settings, resolved), `versions.json`,
`commands.sh`, a log and a record per stage, and the outputs. An unfinished stage resumes if its command supports that
and the inputs are the same; otherwise its outputs are removed and it starts over. Only outputs inside the run's
directory are removed. A failed proof is repeated in the next run; the evaluation takes place anyway.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import yaml

from ktransformers.evaluate.loop import child, questions, record
from ktransformers.evaluate.loop.estimate import stage_seconds, sweep_seconds, total_line
from ktransformers.evaluate.loop.questions import AnswerPair
from ktransformers.evaluate.loop.record import BEGUN, DONE, Hashes, StageRecord
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.evaluate.loop.stages import (
    BASE_NAME,
    SERVER,
    Stage,
    build_stages,
    questions_of,
    run_paths,
    serve_arguments,
)
from ktransformers.evaluate.loop.sweep import sweep_runs
from ktransformers.ground.files import write_text
from ktransformers.ground.progress import ProgressEvent

FAILED = "failed"  # a failed check; any other failure ends the loop
ANSWERS_FILE = "answers.json"  # to the loop's questions, of base and adapter


class Listener(Protocol):
    """Receives the progress of a loop. Events of a stage come from another thread."""

    def on_skip(self, stage: Stage, record: StageRecord) -> None: ...
    def on_start(self, stage: Stage, resuming: bool, expected: float | None) -> None: ...
    def on_event(self, stage: Stage, event: ProgressEvent) -> None: ...
    def on_line(self, stage: Stage, text: str) -> None: ...
    def on_end(self, stage: Stage, seconds: float, lines: Sequence[str]) -> None: ...
    def on_answers(self, answers: Sequence[AnswerPair]) -> None: ...


@dataclass(frozen=True)
class StageStatus:
    """What happened, or would happen, to a stage."""

    name: str
    status: str  # skipped, run, resumed, failed; in a preview also: would run
    seconds: float
    command: str


class Runner:
    def __init__(self, loop: Loop, listener: Listener) -> None:
        self.loop, self.paths, self._listener = loop, run_paths(loop), listener
        self.run = self.paths.run
        self.runs = sweep_runs(loop)  # of a sweep; those whose training has failed are removed
        self._records = self.run / "stages"
        self._seconds: dict[str, float] = {}  # of the stages that this loop has run
        self._pending: list[str] = []  # names of stages that have not begun, the server's start included
        self._hashes = Hashes(self.run / ".hashes.json")

    def run_stages(self) -> list[StageStatus]:
        stages = build_stages(self.loop, self.runs)
        for folder in (self.run, *(Path(run.run) for run in self.runs)):
            folder.mkdir(parents=True, exist_ok=True)
        steps: list[StageStatus] = []
        with child.locked(self.run) as lock, sigterm_as_interrupt(), ExitStack() as serving:
            self._write_settings(stages, lock)
            address: str | None = None
            self._pending = [stage.name for stage in stages]
            self._pending += ["serve"] if any(stage.needs_server for stage in stages) else []
            rest = list(stages)
            while rest:
                stage = rest.pop(0)
                self._pending.remove(stage.name)
                if stage.prepare is not None:
                    stage.prepare(False)
                previous, current = record.read_record(self._records, stage.name), self._current(stage)
                if previous is not None and self._is_done(stage, previous, current):
                    self._listener.on_skip(stage, previous)
                    steps.append(
                        StageStatus(stage.name, "skipped", previous.seconds, child.command_line(stage.arguments))
                    )
                elif stage.settle is not None and stage.settle(True) is not None:
                    self._clear(stage)
                    record.remove_record(self._records, stage.name)  # of a run whose results these are not
                    lines = stage.settle(False) or []
                    self._listener.on_end(stage, 0.0, [*lines, *self._time_lines(stage)])
                    steps.append(StageStatus(stage.name, "skipped", 0.0, child.command_line(stage.arguments)))
                else:
                    if stage.needs_server and address is None:
                        address, status = self._start_server(serving, previous, lock)
                        steps.append(status)
                    steps.append(self._execute(stage, previous, current, address, lock))
                    if steps[-1].status == FAILED and not stage.needs_server:
                        rest = self._without_run(stage, rest)
                if stage.needs_server and not any(later.needs_server for later in rest):
                    serving.close()
            self._hashes.save()
        return steps

    def preview(self) -> list[StageStatus]:
        """What `run_stages` would do. A stage after one that would run is assumed to run too."""
        steps, stale = [], False
        for stage in build_stages(self.loop, self.runs):
            previous = record.read_record(self._records, stage.name)
            stale = stale or (stage.prepare is not None and stage.prepare(True))
            done = previous is not None and self._is_done(stage, previous, self._current(stage))
            stale = stale or not (done or (stage.settle is not None and stage.settle(True) is not None))
            seconds = previous.seconds if previous is not None else 0.0
            steps.append(
                StageStatus(
                    stage.name, "would run" if stale else "skipped", seconds, child.command_line(stage.arguments)
                )
            )
        return steps

    def _without_run(self, failed: Stage, rest: list[Stage]) -> list[Stage]:
        """The stages that are left once the training of one run of a sweep has failed."""
        self.runs = tuple(run for run in self.runs if run.name != failed.run)
        if not self.runs:
            raise child.StageFailed(failed.name, 1, self.run / "logs" / f"{failed.name}.log")
        names = {stage.name for stage in rest}
        left = [stage for stage in build_stages(self.loop, self.runs) if stage.name in names]
        self._pending = [name for name in self._pending if name == "serve" or name in {stage.name for stage in left}]
        return left

    def _current(self, stage: Stage) -> StageRecord:
        paths = dict.fromkeys((*stage.inputs, *stage.extra_inputs()))
        inputs = {str(path): self._hashes.of(path) for path in paths}
        arguments = list(stage.arguments)
        return StageRecord(stage.name, BEGUN, arguments, inputs, record.fingerprint(arguments, inputs))

    def _is_done(self, stage: Stage, previous: StageRecord, current: StageRecord) -> bool:
        results = [*stage.outputs, *([stage.document] if stage.document else [])]
        return (
            previous.status == DONE and previous.fingerprint == current.fingerprint and all(map(Path.exists, results))
        )

    def _execute(
        self, stage: Stage, previous: StageRecord | None, current: StageRecord, address: str | None, lock: int
    ) -> StageStatus:
        port = int(address.rpartition(":")[2]) if stage.needs_server and address else None
        same = (
            previous is not None
            and previous.status == BEGUN
            and previous.words == current.words
            and previous.port == port
        )
        resuming = same and previous is not None and stage.can_resume is not None and stage.can_resume()
        resuming = resuming and previous is not None and _inputs_unchanged(stage, previous, current)
        if not resuming:
            self._clear(stage)
        self._listener.on_start(stage, resuming, self._estimates().get(stage.name))
        record.write_record(self._records, replace(current, port=port))
        started = time.perf_counter()
        arguments = [address if argument == SERVER and address else argument for argument in stage.arguments]
        log = self.run / "logs" / f"{stage.name}.log"
        on_line, on_event = partial(self._listener.on_line, stage), partial(self._listener.on_event, stage)
        code = child.run_command(arguments, log, lock, stage.document, on_line, on_event)
        if code > 0 and stage.is_check:
            seconds = round(time.perf_counter() - started, 1)
            self._listener.on_end(stage, seconds, [f"failed, and so will the loop; {log} says why"])
            return StageStatus(stage.name, FAILED, seconds, child.command_line(stage.arguments))
        if code != 0:
            raise child.StageFailed(stage.name, code, log)
        lines = stage.finish() if stage.finish is not None else []
        seconds = round(time.perf_counter() - started, 1)
        if previous is not None and resuming:
            seconds += previous.seconds
        final = self._current(stage)  # recomputed: some inputs are known only now
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        record.write_record(self._records, replace(final, status=DONE, seconds=seconds, port=port, ended=ended))
        self._hashes.save()
        self._seconds[stage.name] = seconds
        self._listener.on_end(stage, seconds, [*lines, *self._time_lines(stage)])
        return StageStatus(stage.name, "resumed" if resuming else "run", seconds, child.command_line(stage.arguments))

    def _clear(self, stage: Stage) -> None:
        inside = self.run.resolve()
        for path in (*stage.outputs, *([stage.document] if stage.document else [])):
            assert path.resolve().is_relative_to(inside), path
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _estimates(self) -> dict[str, float]:
        if self.runs:
            return sweep_seconds(self.runs, self.run, self._seconds)
        return stage_seconds(self.loop, self.run, self._seconds)

    def _time_lines(self, stage: Stage) -> list[str]:
        """After the plan and after the measured pace: how long the rest takes."""
        kind = stage.name.partition("-")[0]
        words = {"plan": "in all", "pace": "to go"}.get(kind)
        if any(name.startswith(f"{kind}-") for name in self._pending):  # of a sweep: after the last one
            return []
        line = total_line(self._estimates(), self._pending, words) if words else ""
        return [f"{'time':<8} {line}"] if line else []

    def _start_server(self, serving: ExitStack, previous: StageRecord | None, lock: int) -> tuple[str, StageStatus]:
        """Starts the server for all stages that need one, and asks it the questions; a sweep's are in its report."""
        port = child.free_port(None if previous is None else previous.port)
        arguments = tuple(serve_arguments(self.loop, self.paths, port, self.runs))
        stage, log = Stage("serve", arguments, "Starting the server"), self.run / "logs" / "serve.log"
        self._pending.remove(stage.name)
        self._listener.on_start(stage, False, self._estimates().get(stage.name))
        started = time.perf_counter()
        on_event = partial(self._listener.on_event, stage)
        address = serving.enter_context(child.server(arguments, port, log, lock, on_event))
        seconds = round(time.perf_counter() - started, 1)
        self._listener.on_end(stage, seconds, [])
        if not self.runs:
            adapter = f"{BASE_NAME}:{self.loop.name}"
            answers = questions.ask(address, BASE_NAME, adapter, questions_of(self.loop, self.paths))
            questions.write_answers(self.run / ANSWERS_FILE, answers)
            self._listener.on_answers(answers)
        return address, StageStatus(stage.name, "run", seconds, child.command_line(arguments))

    def _write_settings(self, stages: list[Stage], lock: int) -> None:
        resolved: dict[str, Any] = self.loop.model_dump(mode="json")
        write_text(self.run / "loop.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
        versions = self.run / "versions.json"
        child.run_command(["version", "--json"], self.run / "logs" / "version.log", lock, versions)
        lines = ["#!/bin/sh -e", "# What `kt loop` ran, stage by stage.", f"cd {shlex.quote(str(Path.cwd()))}"]
        for stage in stages:
            if stage.needs_server and not any(line.startswith(f"{SERVER}=") for line in lines):
                serve = child.command_line(serve_arguments(self.loop, self.paths, 30000, self.runs))
                lines += [
                    "unset API_KEY  # the commands below send none",
                    f"{serve} &",
                    'trap "kill $!" EXIT',
                    f"{SERVER}=http://127.0.0.1:30000",
                ]
                lines.append(f"until kt chat ${SERVER} </dev/null; do sleep 1; done")
            line = child.command_line(stage.arguments)
            lines.append(
                line.replace(f" {SERVER} ", f" ${SERVER} ") + (f" > {stage.document}" if stage.document else "")
            )
        write_text(self.run / "commands.sh", "\n".join(lines) + "\n")


def _inputs_unchanged(stage: Stage, previous: StageRecord, current: StageRecord) -> bool:
    """Compares the inputs known when the stage started; `extra_inputs` are known later."""
    paths = [str(path) for path in stage.inputs]
    return all(previous.inputs.get(path) == current.inputs.get(path) for path in paths)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C: the child is terminated and waited for."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
