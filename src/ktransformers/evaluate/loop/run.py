"""Runs the stages of a loop or of a sweep: every stage whose inputs changed is run, the others are skipped.

The run's directory contains what is needed to repeat it: `loop.yaml` (all settings, resolved), `versions.json`,
`commands.sh`, a log and a record per stage, and the outputs. An unfinished stage resumes if its command supports that
and the inputs are the same; otherwise its outputs are removed and it starts over. Only outputs inside the run's
directory are removed. A failed proof is repeated in the next run; the evaluation takes place anyway.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType

import yaml

from ktransformers.evaluate.loop import child, questions, record
from ktransformers.evaluate.loop.questions import AnswerPair
from ktransformers.evaluate.loop.record import BEGUN, DONE, Hashes, StageRecord
from ktransformers.evaluate.loop.settings import Loop
from ktransformers.evaluate.loop.stages import (
    BASE_NAME,
    SERVER,
    Stage,
    build_recipe,
    build_stages,
    questions_of,
    run_paths,
    serve_arguments,
)
from ktransformers.evaluate.loop.sweep import sweep_runs
from ktransformers.ground.files import write_json, write_text
from ktransformers.ground.progress import ProgressEvent

FAILED = "failed"  # a failed check; any other failure ends the loop
ANSWERS_FILE = "answers.json"  # to the loop's questions, of base and adapter


class Listener:
    """Receives the progress of a loop; this one ignores it. Events of a stage come from another thread."""

    def on_skip(self, stage: Stage) -> None: ...
    def on_start(self, stage: Stage, resuming: bool) -> None: ...
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


def _status(stage: Stage, status: str, seconds: float) -> StageStatus:
    return StageStatus(stage.name, status, seconds, child.command_line(stage.arguments))


class Runner:
    def __init__(self, loop: Loop, listener: Listener) -> None:
        self.loop, self.paths, self._listener = loop, run_paths(loop), listener
        self.run = self.paths.run
        self.runs = sweep_runs(loop)  # of a sweep; those whose training has failed are removed
        self._records = self.run / "stages"
        self._hashes = Hashes(self.run / ".hashes.json")

    def run_stages(self) -> list[StageStatus]:
        rest, steps = build_stages(self.loop, self.runs), list[StageStatus]()
        for folder in (self.run, *(Path(run.run) for run in self.runs)):
            folder.mkdir(parents=True, exist_ok=True)
        with child.locked(self.run) as lock, sigterm_as_interrupt(), ExitStack() as serving:
            self._write_settings(rest, lock)
            address: str | None = None
            while rest:
                stage = rest.pop(0)
                previous, current = record.read_record(self._records, stage.name), self._current(stage)
                if previous is not None and _is_done(stage, previous, current):
                    self._listener.on_skip(stage)
                    steps.append(_status(stage, "skipped", previous.seconds))
                else:
                    if stage.needs_server and address is None:
                        address, status = self._start_server(serving, previous, lock)
                        steps.append(status)
                    steps.append(self._execute(stage, previous, current, address, lock))
                    if steps[-1].status == FAILED and not stage.needs_server:
                        rest = self._without_run(stage, rest)
                if not any(later.needs_server for later in rest):
                    serving.close()
            self._hashes.save()
        return steps

    def preview(self) -> list[StageStatus]:
        """What `run_stages` would do. A stage after one that would run is assumed to run too."""
        steps, stale = [], False
        for stage in build_stages(self.loop, self.runs):
            previous = record.read_record(self._records, stage.name)
            stale = stale or previous is None or not _is_done(stage, previous, self._current(stage))
            seconds = previous.seconds if previous is not None else 0.0
            steps.append(_status(stage, "would run" if stale else "skipped", seconds))
        return steps

    def _without_run(self, failed: Stage, rest: list[Stage]) -> list[Stage]:
        """The stages that are left once the training of one run of a sweep has failed."""
        self.runs = tuple(run for run in self.runs if run.name != failed.run)
        if not self.runs:
            raise child.StageFailed(failed.name, 1, self.run / "logs" / f"{failed.name}.log")
        names = {stage.name for stage in rest}
        return [stage for stage in build_stages(self.loop, self.runs) if stage.name in names]

    def _recipes(self) -> dict[Path, str]:
        """The file of `kt train` for each run, with its text."""
        pairs = [(run, run_paths(run, self.paths)) for run in self.runs] or [(self.loop, self.paths)]
        return {
            paths.recipe: yaml.safe_dump(build_recipe(run, paths), sort_keys=False, allow_unicode=True)
            for run, paths in pairs
        }

    def _current(self, stage: Stage) -> StageRecord:
        recipes = self._recipes()  # by their text: a preview writes no file
        inputs = {
            str(path): hashlib.sha256(recipes[path].encode()).hexdigest() if path in recipes else self._hashes.of(path)
            for path in dict.fromkeys((*stage.inputs, *stage.extra_inputs()))
        }
        arguments = list(stage.arguments)
        return StageRecord(stage.name, BEGUN, arguments, inputs, record.fingerprint(arguments, inputs))

    def _execute(
        self, stage: Stage, previous: StageRecord | None, current: StageRecord, address: str | None, lock: int
    ) -> StageStatus:
        port = int(address.rpartition(":")[2]) if stage.needs_server and address else None
        before = 0.0  # seconds of the first part of a stage that resumes
        resuming = previous is not None and _can_resume(stage, previous, replace(current, port=port))
        if previous is not None and resuming:
            before = previous.seconds
        else:
            self._clear(stage)
        self._listener.on_start(stage, resuming)
        record.write_record(self._records, replace(current, port=port))
        started = time.perf_counter()
        arguments = [address if argument == SERVER and address else argument for argument in stage.arguments]
        log = self.run / "logs" / f"{stage.name}.log"
        on_line, on_event = partial(self._listener.on_line, stage), partial(self._listener.on_event, stage)
        code = child.run_command(arguments, log, lock, stage.document, on_line, on_event)
        seconds = before + round(time.perf_counter() - started, 1)
        if code > 0 and stage.is_check:
            self._listener.on_end(stage, seconds, [f"failed, and so will the loop; {log} says why"])
            return _status(stage, FAILED, seconds)
        if code != 0:
            raise child.StageFailed(stage.name, code, log)
        final = self._current(stage)  # recomputed: some inputs are known only now
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        record.write_record(self._records, replace(final, status=DONE, seconds=seconds, port=port, ended=ended))
        self._hashes.save()
        self._listener.on_end(stage, seconds, stage.summary())
        return _status(stage, "resumed" if resuming else "run", seconds)

    def _clear(self, stage: Stage) -> None:
        inside = self.run.resolve()
        for path in stage.results:
            assert path.resolve().is_relative_to(inside), path
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _start_server(self, serving: ExitStack, previous: StageRecord | None, lock: int) -> tuple[str, StageStatus]:
        """Starts the server for all stages that need one, and asks it the questions; a sweep's are in its report."""
        port = child.free_port(None if previous is None else previous.port)
        arguments = tuple(serve_arguments(self.loop, self.paths, port, self.runs))
        stage, log = Stage("serve", arguments, "Starting the server"), self.run / "logs" / "serve.log"
        self._listener.on_start(stage, False)
        started = time.perf_counter()
        on_event = partial(self._listener.on_event, stage)
        address = serving.enter_context(child.server(arguments, port, log, lock, on_event))
        seconds = round(time.perf_counter() - started, 1)
        self._listener.on_end(stage, seconds, [])
        if not self.runs:
            adapter = f"{BASE_NAME}:{self.loop.name}"
            answers = questions.ask(address, BASE_NAME, adapter, questions_of(self.loop, self.paths))
            write_json(self.run / ANSWERS_FILE, [asdict(pair) for pair in answers])
            self._listener.on_answers(answers)
        return address, _status(stage, "run", seconds)

    def _write_settings(self, stages: list[Stage], lock: int) -> None:
        resolved = self.loop.model_dump(mode="json")
        write_text(self.run / "loop.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
        for file, text in self._recipes().items():
            write_text(file, text)
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
                    f"until kt chat ${SERVER} </dev/null; do sleep 1; done",
                ]
            line = child.command_line(stage.arguments).replace(f" {SERVER} ", f" ${SERVER} ")
            lines.append(line + (f" > {stage.document}" if stage.document else ""))
        write_text(self.run / "commands.sh", "\n".join(lines) + "\n")


def _is_done(stage: Stage, previous: StageRecord, current: StageRecord) -> bool:
    same = previous.status == DONE and previous.fingerprint == current.fingerprint
    return same and all(map(Path.exists, stage.results))


def _can_resume(stage: Stage, previous: StageRecord, current: StageRecord) -> bool:
    """Compares the inputs known when the stage started; `extra_inputs` are known later."""
    same = (previous.status, previous.words, previous.port) == (BEGUN, current.words, current.port)
    paths = [str(path) for path in stage.inputs]
    same = same and all(previous.inputs.get(path) == current.inputs.get(path) for path in paths)
    return same and stage.can_resume()


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
