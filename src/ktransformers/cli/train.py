"""`kt train`: trains an adapter from a YAML file and `key=value` arguments.

On a terminal a live table shows the run; elsewhere every logging step is one line, so that a log file stays readable.
ktransformers.train decides everything; this module prints it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.no_verify import NoVerify

if TYPE_CHECKING:
    from ktransformers.train.callbacks import Progress
    from ktransformers.train.plan import TrainPlan


def plan_lines(plan: TrainPlan) -> list[str]:
    """The plan as lines of names and values."""

    settings, rows = plan.settings, []
    rows.append(("model", plan.model or f"{settings.model.model_name_or_path} (not here yet)"))
    rows.append(("runs on", f"{plan.device}, experts on the CPU" + (f", {plan.dtype}" if plan.dtype else "")))
    rows += [("dataset", f"{part.name}: {part.rows} rows of {part.file}") for part in plan.datasets]
    if plan.data is not None:
        data = plan.data
        rows.append(("rows", f"{data.train_rows} to train, {data.evaluation_rows} to evaluate"))
        rows.append(("tokens", f"{data.tokens}, {data.learned_tokens} of them learned; longest {data.longest}"))
        rows.append(("sequences", f"{data.sequences}"))
        rows.append(("steps", f"{data.steps}, {data.steps_per_epoch} in an epoch"))
    if plan.targets is not None:
        ends = sorted({name.rpartition(".")[2] for name in (*plan.targets.modules, *plan.targets.parameters)})
        rows.append(("trained", f"{plan.trained_numbers} numbers in LoRA on {', '.join(ends)}"))
    if plan.forecast is not None:
        from ktransformers.cli.plan import plan_rows

        rows += plan_rows(plan.forecast)
    rows.append(("output", f"{settings.output_dir}; {plan.start}"))
    rows += [("key", f"{key}: {value}") for key, value in settings.trainer.items() if key != "output_dir"]
    rows += [("note", note) for note in plan.notes]
    lines = [f"{name:<10} {value}" for name, value in rows]
    if plan.data is not None:
        lines += ["first row, what is learned in « »:", plan.data.example]
    return lines


def format_number(value: float) -> str:
    return f"{value:.4g}"


def step_line(progress: Progress) -> str:
    from ktransformers.train.callbacks import format_duration

    shown = [f"step {progress.step}/{progress.steps}", f"epoch {progress.epoch:.2f}"]
    names = ("loss", "eval_loss", "learning_rate", "grad_norm", "rewards/accuracies", "rewards/margins")
    shown += [f"{name} {format_number(progress.values[name])}" for name in names if name in progress.values]
    if progress.tokens_per_second is not None:
        shown.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.expert_share is not None:
        shown.append(f"experts {progress.expert_share:.0%}")
    if progress.roof_share is not None:
        shown.append(f"{progress.roof_share:.0%} of the roof")
    shown.append(f"{progress.memory / 2**30:.1f} GB")
    if progress.gpu_memory:
        shown.append(f"{progress.gpu_memory / 2**30:.1f} GB GPU")
    shown.append(f"{format_duration(progress.remaining)} left")
    return "  ".join(shown)


class StepLines:
    """Prints one line for each event of the run."""

    def on_plan(self, plan: TrainPlan) -> None:
        for line in plan_lines(plan):
            print(line)

    def on_load(self, done: int, layers: int) -> None:
        if done == layers:
            print(f"experts of {layers} layers packed")

    def on_reference(self, done: int, rows: int) -> None:
        if done == rows:
            print(f"reference: {rows} pairs computed once, and kept")

    def on_note(self, line: str) -> None:
        print(f"note       {line}")

    def on_step(self, progress: Progress) -> None:
        print(step_line(progress), flush=True)

    def close(self) -> None:
        pass


class StepScreen(StepLines):
    """On a terminal: steps stay as lines, the current state is a live table."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._first: float | None = None

    def _show(self, content: Any) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(content)

    def on_load(self, done: int, layers: int) -> None:
        self._show(f"packing experts: layer {done} of {layers}")

    def on_reference(self, done: int, rows: int) -> None:
        self._show(f"reference: {done} of {rows} pairs")

    def on_note(self, line: str) -> None:
        self._console.print(f"note       {line}", markup=False, highlight=False)

    def on_step(self, progress: Progress) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        from ktransformers.train.callbacks import format_duration

        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{progress.step} of {progress.steps}, epoch {progress.epoch:.2f}")
        table.add_row("", ProgressBar(total=max(progress.steps, 1), completed=progress.step, width=40))
        loss = progress.values.get("loss")
        if loss is not None:
            self._first = loss if self._first is None else self._first
            table.add_row("loss", f"{format_number(loss)} (first {format_number(self._first)})")
        for name in ("eval_loss", "learning_rate", "grad_norm", "rewards/accuracies", "rewards/margins"):
            if name in progress.values:
                table.add_row(name, format_number(progress.values[name]))
        if progress.tokens_per_second is not None:
            table.add_row("speed", f"{progress.tokens_per_second:.0f} tokens/s")
        if progress.expert_share is not None:
            table.add_row("time", f"{progress.expert_share:.0%} in experts, the rest elsewhere")
        if progress.roof_share is not None:
            table.add_row("roof", f"{progress.roof_share:.0%} of what this machine's experts can do at best")
        gpu = f", {progress.gpu_memory / 2**30:.1f} GB GPU at most" if progress.gpu_memory else ""
        table.add_row("memory", f"{progress.memory / 2**30:.1f} GB{gpu}")
        table.add_row("time left", f"{format_duration(progress.remaining)}, {format_duration(progress.elapsed)} so far")
        self._console.print(step_line(progress), markup=False, highlight=False, soft_wrap=True)
        self._show(table)

    def close(self) -> None:
        self._live.stop()


def train(
    file: Annotated[Path, typer.Argument(help="A YAML file with LLaMA-Factory's keys.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that override the file's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, train nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run even if the plan says that it does not fit.")] = False,
    no_verify: NoVerify = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan, or the results, as one JSON document.")
    ] = False,
) -> None:
    """Fine-tune a model: LoRA by supervision or by preference."""
    from ktransformers.openmp import limit_spinning
    from ktransformers.train.resolve import read_settings

    limit_spinning()
    settings = read_settings(file, words or [])
    if dry_run:
        from ktransformers.train.plan import make_plan, plan_document

        plan = make_plan(settings, predict=True).plan
        print(json.dumps(plan_document(plan), indent=2, ensure_ascii=False) if as_json else "\n".join(plan_lines(plan)))
        return
    from ktransformers.train import run
    from ktransformers.train.callbacks import Interrupted

    _disable_progress_bars()
    first = os.environ.get("RANK", "0") == "0"  # only one of several processes prints
    screen = SilentSteps() if as_json or not first else StepScreen() if sys.stdout.isatty() else StepLines()
    try:
        result = run.train(settings, screen, force=force)
    except Interrupted as error:
        screen.close()
        print(f"kt: {error}", file=sys.stderr)
        raise typer.Exit(143 if error.signal == "SIGTERM" else 130) from error
    finally:
        screen.close()
    if not first:
        return
    if as_json:
        comparison = {line.what: {"predicted": line.predicted, "measured": line.measured} for line in result.comparison}
        print(json.dumps({"output": str(result.output), "results": result.results, "compared": comparison}, indent=2))
    else:
        losses = ", ".join(
            f"{name} {format_number(value)}" for name, value in result.results.items() if name.endswith("loss")
        )
        print(f"{len(result.manifest['tensors'])} tensors trained, {losses}; the adapter is in {result.output}")
        for line in result.comparison:
            print(line)


class SilentSteps(StepLines):
    """For --json: prints nothing but the document."""

    def on_plan(self, plan: TrainPlan) -> None:
        pass

    def on_load(self, done: int, layers: int) -> None:
        pass

    def on_reference(self, done: int, rows: int) -> None:
        pass

    def on_note(self, line: str) -> None:
        pass

    def on_step(self, progress: Progress) -> None:
        pass


def _disable_progress_bars() -> None:
    """Turn off the progress bars of transformers and datasets."""
    import datasets  # type: ignore[import-untyped]
    import transformers

    bars: Any = transformers.logging
    bars.disable_progress_bar()
    datasets.disable_progress_bars()


sft = typer.Typer(name="sft", help="Fine-tuning, under the name that kt-sft gave it.", no_args_is_help=True)
sft.command("train")(train)


@sft.callback()
def _sft() -> None:
    """A callback makes typer keep `train` as a subcommand."""
