"""`kt loop`: a YAML file becomes a served, proven and evaluated adapter; stages whose inputs did not change are
skipped. `loop_view.py` shows it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.progress import is_quiet

if TYPE_CHECKING:
    from ktransformers.loop.settings import Loop


def loop(
    file: Annotated[Path, typer.Argument(help="A YAML file of a loop; docs/loop.md has its keys.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that win, as train.minutes=2.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the stages that would run, and their commands.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the command of each stage and what it prints.")
    ] = False,
) -> None:
    """Make or open a model, train it, ask it, prove it, evaluate base and adapter as they are served, and report."""
    from ktransformers.cli.loop_view import choose_stages
    from ktransformers.loop.report import answer_lines, detail_lines, make_report, terminal_lines
    from ktransformers.loop.run import Runner
    from ktransformers.loop.settings import read_loop

    settings = read_loop(file, words or [])
    if dry_run:
        _print_preview(settings, as_json)
        return
    began = time.perf_counter()
    stages = choose_stages(settings.name, verbose, silent=as_json or is_quiet())
    try:
        stages.on_begin(settings.run)
        steps = Runner(settings, stages).run_stages()
    except KeyboardInterrupt:
        stages.close()
        print(f"kt: stopped; the same command resumes in {settings.run}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        stages.close()
    report = make_report(settings, steps)
    if as_json:
        print(json.dumps(report.as_json() | {"seconds": round(time.perf_counter() - began, 1)}, indent=2))
    else:
        samples = [] if stages.answered or not report.answers else answer_lines(report.answers[0], report.name)
        print("\n".join([*samples, *terminal_lines(report), *(["", *detail_lines(report)] if verbose else [])]))
    if report.proven is False:
        print(f"kt: {report.proof}", file=sys.stderr)
        raise typer.Exit(1)


def _print_preview(settings: Loop, as_json: bool) -> None:
    from ktransformers.cli.loop_view import SilentStages
    from ktransformers.loop.run import Runner

    steps = Runner(settings, SilentStages()).preview()
    if as_json:
        print(json.dumps({"run": settings.run, "stages": [vars(step) for step in steps]}, indent=2))
        return
    for step in steps:
        print(f"{step.name:<10} {step.status:<10} {step.command}")
