"""`kt loop`: a YAML file becomes a served, proven and evaluated adapter; stages whose inputs did not change are
skipped. With `--sweep` every combination of values is one run, and one report compares them. `loop_view.py` shows both.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.progress import is_quiet

if TYPE_CHECKING:
    from ktransformers.evaluate.loop.report import LoopReport
    from ktransformers.evaluate.loop.run import StageStatus
    from ktransformers.evaluate.loop.settings import Loop
    from ktransformers.evaluate.loop.sweep_report import SweepReport


def loop(
    file: Annotated[Path, typer.Argument(help="A YAML file of a loop; docs/loop.md has its keys.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that win, as eval.limit=8.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,VALUE",
            help="Train every combination: --sweep rank=8,16 lr=1e-4,5e-5. Keys of kt train, or their short names.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the stages that would run, and their commands.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the command of each stage and what it prints.")
    ] = False,
) -> None:
    """Train, serve, prove and evaluate by one YAML file."""
    from ktransformers.cli.loop_view import choose_stages
    from ktransformers.evaluate.loop.run import Runner
    from ktransformers.evaluate.loop.settings import read_loop

    settings = read_loop(*_split_words([str(file), *(words or [])], sweep or []))
    if settings.sweep:
        _check_recipes(settings)
    if dry_run:
        _print_preview(settings, as_json)
        return
    began = time.perf_counter()
    stages = choose_stages(settings.name, verbose, silent=as_json or is_quiet())
    try:
        for note in settings.notes:
            stages.show(f"note: {note}")
        stages.show(f"Everything goes to {settings.run}. Ctrl-C stops; the same command goes on from there.")
        steps = Runner(settings, stages).run_stages()
    except KeyboardInterrupt:
        stages.close()
        print(f"kt: stopped; the same command resumes in {settings.run}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        stages.close()
    report, lines = _report(settings, steps, stages.answered, verbose)
    if as_json:
        print(json.dumps(asdict(report) | {"seconds": round(time.perf_counter() - began, 1)}, indent=2))
    else:
        print("\n".join(lines))
    for failure in report.failures:
        print(f"kt: {failure}", file=sys.stderr)
    if report.failures:
        raise typer.Exit(1)


def _split_words(words: list[str], sweep: list[str]) -> tuple[Path, list[str], dict[str, list[Any]]]:
    """The file, the keys that win, and the axes of a sweep. The shell's words after `--sweep rank=8,16` are axes too,
    unless they begin with a key of the file, and the file may stand after them."""
    from ktransformers.evaluate.loop.settings import Loop
    from ktransformers.evaluate.loop.sweep import read_axes

    file = next((word for word in words if not sweep or "=" not in word or Path(word).is_file()), words[0])
    rest = list(words)
    rest.remove(file)
    axes = [word for word in rest if sweep and re.split(r"[.=]", word, maxsplit=1)[0] not in Loop.model_fields]
    return Path(file), [word for word in rest if word not in axes], read_axes([*sweep, *axes])


def _check_recipes(settings: Loop) -> None:
    """A name or a value that `kt train` does not take ends the command before any stage of the sweep runs."""
    from ktransformers.evaluate.loop.stages import build_recipe, run_paths
    from ktransformers.evaluate.loop.sweep import sweep_runs
    from ktransformers.ground.packages import require_extra

    require_extra("kt loop", "train")
    from ktransformers.train.packages import require_packages
    from ktransformers.train.resolve import read_settings

    for run in sweep_runs(settings):
        require_packages(read_settings(build_recipe(run, run_paths(run, run_paths(settings)))))


def _report(
    settings: Loop, steps: list[StageStatus], answered: bool, verbose: bool
) -> tuple[LoopReport | SweepReport, list[str]]:
    """The report, and its lines for the terminal."""
    from ktransformers.evaluate.loop import report, sweep_report

    if settings.sweep:
        swept = sweep_report.make_sweep_report(settings, steps)
        return swept, sweep_report.terminal_lines(swept)
    made = report.make_report(settings, steps)
    samples = [] if answered or not made.answers else report.answer_lines(made.answers[0], made.name)
    details = ["", *report.summary_lines(made)] if verbose else []
    return made, [*samples, *report.terminal_lines(made), *details]


def _print_preview(settings: Loop, as_json: bool) -> None:
    from ktransformers.cli.loop_view import SilentStages
    from ktransformers.evaluate.loop.run import Runner

    steps = Runner(settings, SilentStages()).preview()
    if as_json:
        print(json.dumps({"run": settings.run, "stages": [vars(step) for step in steps]}, indent=2))
        return
    width = max(10, *(len(step.name) for step in steps))
    for step in steps:
        print(f"{step.name:<{width}} {step.status:<10} {step.command}")
