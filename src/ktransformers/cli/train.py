"""`kt train`: trains an adapter from a YAML file and `key=value` arguments.

ktransformers.train decides everything, `train_view.py` shows it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.options import NoVerify, show_log

if TYPE_CHECKING:
    from ktransformers.train.settings import TrainSettings

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also the plan in full and all numbers of a step.", callback=show_log)
]


def _print_plan(settings: TrainSettings, as_json: bool) -> None:
    from ktransformers.cli.library_output import library_output
    from ktransformers.cli.train_view import plan_lines, summary_of
    from ktransformers.train.plan import make_plan, plan_document

    with library_output():
        plan = make_plan(settings, predict=True).plan
    if as_json:
        print(json.dumps(plan_document(plan) | {"summary": summary_of(plan)}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(plan_lines(plan)))


def train(
    file: Annotated[Path, typer.Argument(help="A YAML file with LLaMA-Factory's keys.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that override the file's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, train nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run even if the plan says that it does not fit.")] = False,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Machines that train together, started by Ray.")
    ] = None,
    no_verify: NoVerify = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan, or the results, as one JSON document.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Fine-tune a model: LoRA by supervision or by preference."""
    from ktransformers.ground.openmp import limit_spinning
    from ktransformers.train.packages import require_packages
    from ktransformers.train.resolve import read_settings

    limit_spinning()
    settings = read_settings(file, words or [])
    require_packages(settings)
    if dry_run:
        _print_plan(settings, as_json)
        return
    if nodes is not None and nodes > 1:
        from ktransformers.cli.train_nodes import train_on_nodes
        from ktransformers.train.arguments import device_of

        output_dir, gpu = Path(settings.output_dir), device_of(settings).type == "cuda"
        train_on_nodes(train, file, words, False, force, None, no_verify, output=output_dir, nodes=nodes, gpu=gpu)
        return
    from ktransformers.cli.progress import is_quiet
    from ktransformers.cli.train_view import choose_screen, logged_output, result_lines
    from ktransformers.train import run
    from ktransformers.train.callbacks import Interrupted

    first = os.environ.get("RANK", "0") == "0"  # only one of several processes prints and writes the log
    screen = choose_screen(silent=as_json or is_quiet() or not first)
    with ExitStack() as stack:
        stack.callback(screen.close)
        output = stack.enter_context(logged_output(screen, first))
        try:
            result = run.train(settings, output, force=force)
        except Interrupted as error:
            screen.close()
            print(f"kt: {error}", file=sys.stderr)
            raise typer.Exit(143 if error.signal == "SIGTERM" else 130) from error
        output.log_comparison(result.comparison)
    if not first:
        return
    if as_json:
        comparison = {line.what: {"predicted": line.predicted, "measured": line.measured} for line in result.comparison}
        print(json.dumps({"output": str(result.output), "results": result.results, "compared": comparison}, indent=2))
    else:
        print("\n".join(result_lines(result.output, result.results, len(result.manifest["tensors"]))))


sft = typer.Typer(name="sft", help="Fine-tuning, under the name that kt-sft gave it.", no_args_is_help=True)
sft.command("train")(train)


@sft.callback()
def _sft() -> None:
    """A callback makes typer keep `train` as a subcommand."""
