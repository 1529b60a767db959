"""A loop from its settings to its report: every stage whose inputs changed is run, every other one is skipped.

The run's directory holds what is needed to repeat it: `loop.yaml` (all settings, resolved), `versions.json`,
`commands.sh`, a log and a record for each stage, and what the stages made. A stage that was begun and not finished goes
on where its command can do that and the inputs are the same; otherwise its outputs are removed and it begins anew. Only
outputs that lie in the run's directory are ever removed. A proof that fails is run again the next time; the judgement
is made all the same.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import yaml

from ktransformers.files import write_text
from ktransformers.loop import child, record
from ktransformers.loop.record import BEGUN, DONE, Hashes, StageRecord
from ktransformers.loop.settings import Loop
from ktransformers.loop.stages import SERVER, Stage, build_stages, run_paths, serve_arguments

FAILED = "failed"  # a verdict; anything else that fails ends the loop


class Listener(Protocol):
    def skipped(self, stage: Stage, record: StageRecord) -> None: ...
    def began(self, stage: Stage, going_on: bool) -> None: ...
    def line(self, stage: Stage, text: str) -> None: ...
    def ended(self, stage: Stage, seconds: float, said: str) -> None: ...


@dataclass(frozen=True)
class StageStatus:
    """What became, or would become, of a stage."""

    name: str
    status: str  # skipped, run, resumed, failed; of a look ahead also: would run
    seconds: float
    command: str


class Runner:
    def __init__(self, loop: Loop, listener: Listener) -> None:
        self.loop, self.places, self._listener = loop, run_paths(loop), listener
        self.run = self.places.run
        self._records = self.run / "stages"
        self._hashes = Hashes(self.run / ".hashes.json")

    def go(self) -> list[StageStatus]:
        stages = build_stages(self.loop)
        self.run.mkdir(parents=True, exist_ok=True)
        steps: list[StageStatus] = []
        with child.locked(self.run) as lock, sigterm_as_interrupt(), ExitStack() as serving:
            self._write_settings(stages, lock)
            address: str | None = None
            last = max((place for place, stage in enumerate(stages) if stage.served), default=-1)
            for place, stage in enumerate(stages):
                if stage.before is not None:
                    stage.before(False)
                known, current = record.read_record(self._records, stage.name), self._current(stage)
                if known is not None and self._is_done(stage, known, current):
                    self._listener.skipped(stage, known)
                    steps.append(StageStatus(stage.name, "skipped", known.seconds, child.command_line(stage.words)))
                else:
                    if stage.served and address is None:
                        began = time.perf_counter()
                        address = serving.enter_context(self._server(known, lock))
                        words = child.command_line(
                            serve_arguments(self.loop, self.places, int(address.rpartition(":")[2]))
                        )
                        steps.append(StageStatus("serve", "run", round(time.perf_counter() - began, 1), words))
                    steps.append(self._execute(stage, known, current, address, lock))
                if place == last:
                    serving.close()
            self._hashes.save()
        return steps

    def look(self) -> list[StageStatus]:
        """What `go` would do. A stage after one that would run would run too, unless that one changes nothing."""
        steps, stale = [], False
        for stage in build_stages(self.loop):
            known = record.read_record(self._records, stage.name)
            stale = stale or (stage.before is not None and stage.before(True))
            stale = stale or known is None or not self._is_done(stage, known, self._current(stage))
            seconds = known.seconds if known is not None else 0.0
            steps.append(
                StageStatus(stage.name, "would run" if stale else "skipped", seconds, child.command_line(stage.words))
            )
        return steps

    def _current(self, stage: Stage) -> StageRecord:
        paths = dict.fromkeys((*stage.inputs, *stage.named()))
        inputs = {str(path): self._hashes.of(path) for path in paths}
        words = list(stage.words)
        return StageRecord(stage.name, BEGUN, words, inputs, record.fingerprint(words, inputs))

    def _is_done(self, stage: Stage, known: StageRecord, current: StageRecord) -> bool:
        left = [*stage.outputs, *([stage.document] if stage.document else [])]
        return known.status == DONE and known.fingerprint == current.fingerprint and all(map(Path.exists, left))

    def _execute(
        self, stage: Stage, known: StageRecord | None, current: StageRecord, address: str | None, lock: int
    ) -> StageStatus:
        port = int(address.rpartition(":")[2]) if stage.served and address else None
        same = known is not None and known.status == BEGUN and known.words == current.words and known.port == port
        goes_on = same and known is not None and stage.resumes is not None and stage.resumes()
        goes_on = goes_on and known is not None and _inputs_unchanged(stage, known, current)
        if not goes_on:
            self._clear(stage)
        self._listener.began(stage, goes_on)
        record.write_record(self._records, replace(current, port=port))
        began = time.perf_counter()
        words = [address if word == SERVER and address else word for word in stage.words]
        log = self.run / "logs" / f"{stage.name}.log"
        shown = (lambda text: self._listener.line(stage, text)) if stage.shown else None
        code = child.run_command(words, log, lock, stage.document, shown)
        if code > 0 and stage.verdict:
            seconds = round(time.perf_counter() - began, 1)
            self._listener.ended(stage, seconds, f"failed, and so will the loop; {log} says why")
            return StageStatus(stage.name, FAILED, seconds, child.command_line(stage.words))
        if code != 0:
            raise child.StageFailed(stage.name, code, log)
        said = stage.after() if stage.after is not None else ""
        seconds = round(time.perf_counter() - began, 1)
        if known is not None and goes_on:
            seconds += known.seconds
        done = self._current(stage)  # again: some inputs are known only now
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        record.write_record(self._records, replace(done, status=DONE, seconds=seconds, port=port, ended=ended))
        self._hashes.save()
        self._listener.ended(stage, seconds, said)
        return StageStatus(stage.name, "resumed" if goes_on else "run", seconds, child.command_line(stage.words))

    def _clear(self, stage: Stage) -> None:
        inside = self.run.resolve()
        for path in (*stage.outputs, *([stage.document] if stage.document else [])):
            assert path.resolve().is_relative_to(inside), path
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @contextmanager
    def _server(self, known: StageRecord | None, lock: int) -> Iterator[str]:
        port = child.free_port(None if known is None else known.port)
        words = serve_arguments(self.loop, self.places, port)
        with child.server(words, port, self.run / "logs" / "serve.log", lock) as address:
            yield address

    def _write_settings(self, stages: list[Stage], lock: int) -> None:
        resolved: dict[str, Any] = self.loop.model_dump(mode="json")
        write_text(self.run / "loop.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
        versions = self.run / "versions.json"
        child.run_command(["version", "--json"], self.run / "logs" / "version.log", lock, versions, None)
        lines = ["#!/bin/sh -e", "# What `kt loop` ran, stage by stage.", f"cd {shlex.quote(str(Path.cwd()))}"]
        for stage in stages:
            if stage.served and not any(line.startswith(f"{SERVER}=") for line in lines):
                serve = child.command_line(serve_arguments(self.loop, self.places, 30000))
                lines += [f"{serve} &", 'trap "kill $!" EXIT', f"{SERVER}=http://127.0.0.1:30000"]
                lines.append(f"until kt chat ${SERVER} </dev/null; do sleep 1; done")
            line = child.command_line(stage.words)
            lines.append(
                line.replace(f" {SERVER} ", f" ${SERVER} ") + (f" > {stage.document}" if stage.document else "")
            )
        write_text(self.run / "commands.sh", "\n".join(lines) + "\n")


def _inputs_unchanged(stage: Stage, known: StageRecord, current: StageRecord) -> bool:
    """The inputs that were known when the stage began; those that it names itself came later."""
    firm = [str(path) for path in stage.inputs]
    return all(known.inputs.get(path) == current.inputs.get(path) for path in firm)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM as Ctrl-C: the child is asked to end, and waited for."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
