"""What `kt train` shows: three lines of the plan, one redrawn line of progress on a terminal, plain lines elsewhere.

`TrainOutput` receives the run's events. Everything goes to the run's log (`running_log.txt`) and with `-v` to stderr:
the plan in full, notes, the details of each logging step. Of that a `Screen` shows what a person reads: `LiveLine` on a
terminal, `PlainLines` elsewhere, nothing with --json or --quiet.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.cli.progress import TimeLeft, format_amount, make_bar
from ktransformers.ground import log, progress
from ktransformers.ground.progress import ProgressEvent, clock

if TYPE_CHECKING:
    from ktransformers.plan import PlanComparison
    from ktransformers.train.callbacks import Progress, StepPosition
    from ktransformers.train.plan import TrainPlan

LOG_FILE = "running_log.txt"  # LLaMA-Factory's name for it
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 8
DETAIL_WIDTH = 42  # characters of loss, curve, tokens/s and memory
READING, LOADING, PACKING = "Reading the data", "Loading the model", "Packing experts"
REFERENCE, TRAINING, SAVING = "Reference answers", "Training", "Saving and checking the adapter"
DETAILS = ("eval_loss", "learning_rate", "grad_norm", "rewards/accuracies", "rewards/margins")

LOG = log.logger(__name__)


def plan_lines(plan: TrainPlan) -> list[str]:
    """The plan in full, as lines of names and values."""
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
        from ktransformers.cli.plan_text import plan_rows

        rows += plan_rows(plan.forecast)
    rows.append(("output", f"{settings.output_dir}; {plan.start}"))
    rows += [("key", f"{key}: {value}") for key, value in settings.trainer.items() if key != "output_dir"]
    rows += [("note", note) for note in plan.notes]
    lines = [f"{name:<10} {value}" for name, value in rows]
    if plan.data is not None:
        lines += ["first row, what is learned in « »:", plan.data.example]
    return lines


def summary_lines(plan: TrainPlan) -> list[str]:
    """Whether it fits, how long, how much memory; then what of the data or the machine changes the run."""
    rows = [*summary_of(plan).items(), *(("note", note) for note in important_notes(plan))]
    return [f"{name:<8} {value}" for name, value in rows]


def summary_of(plan: TrainPlan) -> dict[str, str]:
    steps = None if plan.data is None else plan.data.steps
    if plan.forecast is None:
        return {} if steps is None else {"steps": str(steps)}
    from ktransformers.cli.plan_text import summary_rows

    return dict(summary_rows(plan.forecast, steps))


def important_notes(plan: TrainPlan) -> list[str]:
    """Notes that say that the run is not what the recipe reads like; those on keys and batching are details."""
    from ktransformers.train.arguments import bf16_note

    details = {*plan.settings.notes, bf16_note(plan.settings), None if plan.grouping is None else plan.grouping.note}
    return [note for note in plan.notes if note not in details]


def format_number(value: float) -> str:
    return f"{value:.4g}"


def format_memory(progress: Progress) -> str:
    """Of the GPU if one is used, since it is the smaller."""
    if progress.gpu_memory:
        return f"{progress.gpu_memory / 1e9:.1f} GB GPU"
    return f"{progress.memory / 1e9:.1f} GB"


def detail_line(progress: Progress) -> str:
    """All numbers of a logging step, for the log and -v."""
    from ktransformers.train.callbacks import format_duration

    shown = [f"step {progress.step}/{progress.steps}", f"epoch {progress.epoch:.2f}"]
    names = ("loss", *DETAILS)
    shown += [f"{name} {format_number(progress.values[name])}" for name in names if name in progress.values]
    if progress.tokens_per_second is not None:
        shown.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.expert_share is not None:
        shown.append(f"{progress.expert_share:.0%} of the time in experts")
    if progress.roof_share is not None:
        shown.append(f"experts at {progress.roof_share:.0%} of this machine's peak")
    if progress.wait_share is not None:
        shown.append(f"threads waited for a core {progress.wait_share:.0%} of the time")
    shown.append(f"{progress.memory / 1e9:.1f} GB")
    if progress.gpu_memory:
        shown.append(f"{progress.gpu_memory / 1e9:.1f} GB GPU")
    shown.append(f"{format_duration(progress.remaining)} left")
    return "  ".join(shown)


def step_line(progress: Progress) -> str:
    """What a person reads of a logging step."""
    shown = [f"step {progress.step}/{progress.steps}"]
    names = ("loss", "eval_loss", "rewards/accuracies")
    shown += [f"{name} {format_number(progress.values[name])}" for name in names if name in progress.values]
    if progress.tokens_per_second is not None:
        shown.append(f"{progress.tokens_per_second:.0f} tokens/s")
    return "  ".join([*shown, format_memory(progress), f"{clock(progress.remaining)} left"])


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The curve in `width` characters, each the mean of its part of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def live_detail(losses: Sequence[float], rate: float | None, memory: str) -> str:
    """Loss, its curve, tokens/s and memory, as far as they are known."""
    parts = [f"loss {losses[-1]:#.3g} {sparkline(losses)}"] if losses else []
    parts += [f"{rate:.0f} tokens/s"] if rate is not None else []
    return "  ".join([*parts, *filter(None, [memory])])


class Screen:
    """Shows nothing: for --json, --quiet and the other processes of a distributed run."""

    def line(self, text: str) -> None: ...
    def activity(self, title: str, done: float = 0, total: float | None = None, unit: str = "") -> None: ...
    def position(self, position: StepPosition) -> None: ...
    def step(self, progress: Progress) -> None: ...
    def close(self) -> None: ...


class PlainLines(Screen):
    """Without a terminal: a line for each logging step."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def step(self, progress: Progress) -> None:
        print(step_line(progress), flush=True)


class LiveLine(Screen):
    """On a terminal: one redrawn line. Titles of what comes before and after training have a bar too."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._bar, self._left = make_bar(self._console, DETAIL_WIDTH), TimeLeft()
        self._task = self._bar.add_task(READING, total=None, amount="", detail="", left=self._left)
        self._title, self._losses = READING, list[float]()
        self._last: Progress | None = None
        self._bar.start()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def activity(self, title: str, done: float = 0, total: float | None = None, unit: str = "") -> None:
        if title != self._title:
            self._title, self._left = title, TimeLeft()
            self._bar.reset(self._task, description=title, amount="", detail="", left=self._left)
        self._left.report(done, total)
        self._bar.update(self._task, completed=done, total=total, amount=format_amount(done, total, unit))

    def position(self, position: StepPosition) -> None:
        self.activity(TRAINING, position.step, position.steps)
        self._left.report(position.step, position.steps, position.remaining)
        if position.loss is not None:
            self._losses.append(position.loss)
        self._bar.update(self._task, detail=self._detail())

    def step(self, progress: Progress) -> None:
        self._last = progress
        if self._title == TRAINING:
            self._bar.update(self._task, detail=self._detail())

    def _detail(self) -> str:
        if self._last is None:
            return live_detail(self._losses, None, "")
        return live_detail(self._losses, self._last.tokens_per_second, format_memory(self._last))

    def close(self) -> None:
        self._bar.stop()


def choose_screen(silent: bool) -> Screen:
    return Screen() if silent else LiveLine() if sys.stdout.isatty() else PlainLines()


class TrainOutput:
    """The watcher of a run: details to the log, the rest to the screen, positions to a parent (KT_PROGRESS)."""

    def __init__(self, screen: Screen, file_log: log.FileLog | None) -> None:
        self._screen, self._file_log = screen, file_log
        self._output: Path | None = None
        self._values: dict[str, float] = {}

    def on_plan(self, plan: TrainPlan) -> None:
        self._output = Path(plan.settings.output_dir)
        for line in plan_lines(plan):
            LOG.info("%s", line)
        for line in summary_lines(plan):
            self._screen.line(line)
        self.draw(LOADING, 0, None)

    def _open_log(self) -> None:
        """Called when the run has begun: a run that does not fit leaves nothing in its directory."""
        if self._file_log is not None and self._output is not None:
            self._file_log.open(self._output / LOG_FILE)

    def draw(self, title: str, done: float, total: float | None, unit: str = "") -> None:
        self._screen.activity(title, done, total, unit)
        progress.send(ProgressEvent(title, done, total, unit))

    def on_load(self, done: int, layers: int) -> None:
        self._open_log()
        if done == layers:
            LOG.info("experts of %d layers packed", layers)
        self.draw(PACKING, done, layers)

    def on_reference(self, done: int, rows: int) -> None:
        if done == rows:
            LOG.info("reference: %d pairs computed once, and kept", rows)
        self.draw(REFERENCE, done, rows)

    def on_note(self, line: str) -> None:
        self._open_log()
        LOG.info("note: %s", line)

    def on_position(self, position: StepPosition) -> None:
        self._open_log()
        self._screen.position(position)
        values = self._values | ({} if position.loss is None else {"loss": position.loss})
        event = ProgressEvent(TRAINING, position.step, position.steps, remaining=position.remaining, values=values)
        progress.send(event)
        if position.step == position.steps:
            self.draw(SAVING, 0, None)

    def on_step(self, step: Progress) -> None:
        LOG.info("%s", detail_line(step))
        rate = {} if step.tokens_per_second is None else {"tokens_per_second": step.tokens_per_second}
        self._values = rate | {"memory": float(step.gpu_memory or step.memory)}
        self._screen.step(step)

    def log_comparison(self, comparison: Sequence[PlanComparison]) -> None:
        for line in comparison:
            LOG.info("%s", line)


@contextmanager
def logged_output(screen: Screen, writes_log: bool) -> Iterator[TrainOutput]:
    """The output of a run, with the lines and bars of other packages in it."""
    from ktransformers.cli.library_output import LIBRARIES, library_output

    with ExitStack() as stack:
        stack.enter_context(library_output(lambda *report: output.draw(*report)))
        file_log = log.FileLog(LIBRARIES) if writes_log else None
        if file_log is not None:
            stack.callback(file_log.close)
        output = TrainOutput(screen, file_log)
        yield output


def result_lines(output: Path, results: dict[str, Any], tensors: int) -> list[str]:
    losses = ", ".join(f"{name} {format_number(value)}" for name, value in results.items() if name.endswith("loss"))
    seconds = float(results.get("train_runtime", 0.0))
    rows = [("trained", f"{tensors} tensors in {progress.rough(seconds)}, {losses}")]
    rows += [("adapter", f"{output}, with details of the run in {LOG_FILE}"), ("next", f"kt serve {output}")]
    return [f"{name:<8} {value}" for name, value in rows]
