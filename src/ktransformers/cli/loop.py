"""`kt loop`: a YAML file becomes a served, proven and evaluated adapter; stages whose inputs did not change are
skipped."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ktransformers.loop.record import StageRecord
    from ktransformers.loop.stages import Stage


class StageLines:
    """Prints one line for each stage, and the progress lines of the trainer."""

    def on_skip(self, stage: Stage, record: StageRecord) -> None:
        print(f"{stage.name:<10} unchanged, done {record.ended} in {record.seconds:.0f} s", flush=True)

    def on_start(self, stage: Stage, resuming: bool) -> None:
        from ktransformers.loop.child import command_line

        print(f"{stage.name:<10} {'resumes: ' if resuming else ''}{command_line(stage.arguments)}", flush=True)

    def on_line(self, stage: Stage, text: str) -> None:
        if text.startswith(("step ", "steps ", "note ", "trained ", "tokens ")):
            print(f"{'':<10} {text}", flush=True)

    def on_end(self, stage: Stage, seconds: float, note: str) -> None:
        print(f"{'':<10} {seconds:.0f} s{'; ' if note else ''}{note}", flush=True)


class SilentStages(StageLines):
    """For --json: prints nothing but the document."""

    def on_skip(self, stage: Stage, record: StageRecord) -> None:
        pass

    def on_start(self, stage: Stage, resuming: bool) -> None:
        pass

    def on_line(self, stage: Stage, text: str) -> None:
        pass

    def on_end(self, stage: Stage, seconds: float, note: str) -> None:
        pass


def loop(
    file: Annotated[Path, typer.Argument(help="A YAML file of a loop; docs/loop.md has its keys.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that win, as train.minutes=2.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the stages that would run, and their commands.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Make or open a model, evaluate it, train it, prove it, evaluate it as it is served, and report."""
    from ktransformers.loop.report import make_report, terminal_lines
    from ktransformers.loop.run import Runner
    from ktransformers.loop.settings import read_loop

    settings = read_loop(file, words or [])
    runner = Runner(settings, SilentStages() if as_json else StageLines())
    if dry_run:
        steps = runner.preview()
        if as_json:
            print(json.dumps({"run": settings.run, "stages": [vars(step) for step in steps]}, indent=2))
        for step in [] if as_json else steps:
            print(f"{step.name:<10} {step.status:<10} {step.command}")
        return
    began = time.perf_counter()
    try:
        steps = runner.run_stages()
    except KeyboardInterrupt:
        print(f"kt: stopped; the same command resumes in {settings.run}", file=sys.stderr)
        raise typer.Exit(130) from None
    report = make_report(settings, steps)
    if as_json:
        print(json.dumps(report.as_json() | {"seconds": round(time.perf_counter() - began, 1)}, indent=2))
    else:
        print("\n".join(terminal_lines(report)))
    if report.proven is False:
        print(f"kt: {report.proof}", file=sys.stderr)
        raise typer.Exit(1)
