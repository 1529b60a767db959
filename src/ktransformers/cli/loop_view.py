"""What `kt loop` shows: a sentence for each stage, one redrawn bar with the time left, what came out of it.

On a terminal the bar stands below the sentence and disappears when the stage has ended; elsewhere a line says every
half minute how far it is. With -v also the command of each stage and every line that it prints, which are in the run's
logs in any case.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ktransformers.cli.progress import PLAIN_SECONDS, TimeLeft, format_amount, make_bar
from ktransformers.cli.train_view import DETAIL_WIDTH, sparkline
from ktransformers.ground.progress import rough

if TYPE_CHECKING:
    from rich.console import Console

    from ktransformers.evaluate.loop.questions import AnswerPair
    from ktransformers.evaluate.loop.record import StageRecord
    from ktransformers.evaluate.loop.stages import Stage
    from ktransformers.ground.progress import ProgressEvent

INDENT = "  "
MAX_TITLE = 36  # characters of what is being done


class SilentStages:
    """For --json and --quiet."""

    answered = False  # whether answers were shown

    def on_begin(self, run: str) -> None:
        pass

    def on_skip(self, stage: Stage, record: StageRecord) -> None:
        pass

    def on_start(self, stage: Stage, resuming: bool, expected: float | None) -> None:
        pass

    def on_event(self, stage: Stage, event: ProgressEvent) -> None:
        pass

    def on_line(self, stage: Stage, text: str) -> None:
        pass

    def on_end(self, stage: Stage, seconds: float, lines: Sequence[str]) -> None:
        pass

    def on_answers(self, answers: Sequence[AnswerPair]) -> None:
        pass

    def close(self) -> None:
        pass


class StageLines(SilentStages):
    """Without a terminal: lines. `verbose`: also commands and what they print."""

    def __init__(self, name: str, verbose: bool) -> None:
        self._name, self._verbose = name, verbose
        self._last, self._left = 0.0, TimeLeft()

    def show(self, line: str) -> None:
        print(line, flush=True)

    def on_begin(self, run: str) -> None:
        self.show(f"Everything goes to {run}. Ctrl-C stops; the same command goes on from there.")

    def on_skip(self, stage: Stage, record: StageRecord) -> None:
        if stage.title:
            self.show(f"{stage.title}: unchanged, done before")

    def on_start(self, stage: Stage, resuming: bool, expected: float | None) -> None:
        from ktransformers.evaluate.loop.child import command_line

        self._last, self._left = time.monotonic(), TimeLeft()
        if expected is not None:
            self._left.report(0, None, expected)
        if stage.title:
            self.show(stage.title + (", from where it stopped" if resuming else ""))
        if self._verbose:
            self.show(f"{INDENT}$ {command_line(stage.arguments)}")

    def on_event(self, stage: Stage, event: ProgressEvent) -> None:
        self.report_left(event)
        if time.monotonic() - self._last >= PLAIN_SECONDS and event.total:
            self._last = time.monotonic()
            amount = format_amount(event.done, event.total, event.unit)
            loss = f"loss {event.values['loss']:.3g}" if "loss" in event.values else ""
            words = [f"{event.title} {amount}", *filter(None, (loss, self._left.text))]
            self.show(f"{INDENT}{', '.join(words)}")

    def report_left(self, event: ProgressEvent) -> None:
        """A stage's main work says how long it takes. Loading before it does not, unless nothing else is known."""
        if event.total and (_is_main(event) or self._left.seconds is None):
            self._left.report(event.done, event.total, event.remaining)

    def on_line(self, stage: Stage, text: str) -> None:
        if self._verbose:
            self.show(f"{INDENT}| {text}")

    def on_end(self, stage: Stage, seconds: float, lines: Sequence[str]) -> None:
        for line in lines:
            self.show(f"{INDENT}{line}")
        if self._verbose:
            self.show(f"{INDENT}{stage.name} took {rough(seconds)}")

    def on_answers(self, answers: Sequence[AnswerPair]) -> None:
        from ktransformers.evaluate.loop.report import answer_lines

        self.answered = self.answered or bool(answers)
        for pair in answers:
            for line in answer_lines(pair, self._name):
                self.show(f"{INDENT}{line}")


class StageScreen(StageLines):
    """On a terminal: the same lines, with a bar below them."""

    def __init__(self, name: str, verbose: bool, console: Console) -> None:
        super().__init__(name, verbose)
        self._console, self._bar = console, make_bar(console, DETAIL_WIDTH)
        self._task = self._bar.add_task("", total=None, amount="", detail="", left=self._left, visible=False)
        self._losses: list[float] = []
        self._bar.start()

    def show(self, line: str) -> None:
        from rich.padding import Padding
        from rich.text import Text

        # Wrapped lines keep the indentation of their first one.
        indent = len(line) - len(line.lstrip())
        self._console.print(Padding(Text(line.lstrip()), (0, 0, 0, indent)))

    def on_start(self, stage: Stage, resuming: bool, expected: float | None) -> None:
        super().on_start(stage, resuming, expected)
        self._losses = []
        self._bar.reset(
            self._task, total=None, visible=True, description=f"{INDENT}Starting", amount="", detail="", left=self._left
        )

    def on_event(self, stage: Stage, event: ProgressEvent) -> None:
        self.report_left(event)
        if "loss" in event.values:
            self._losses.append(event.values["loss"])
        # What comes before the main work has ended: a full bar with the time left would read as a contradiction.
        is_over = event.total is not None and event.done >= event.total and not _is_main(event)
        self._bar.update(
            self._task,
            completed=event.done,
            total=None if is_over else event.total,
            description=f"{INDENT}{'Starting' if is_over else event.title[:MAX_TITLE]}",
            amount="" if is_over else format_amount(event.done, event.total, event.unit),
            detail=self._detail(event.values),
        )

    def _detail(self, values: dict[str, float]) -> str:
        parts = []
        if "loss" in values:
            parts.append(f"loss {values['loss']:#.3g} {sparkline(self._losses)}")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:.0f} tokens/s")
        if "memory" in values:
            parts.append(f"{values['memory'] / 1e9:.1f} GB")
        return "  ".join(parts)

    def on_end(self, stage: Stage, seconds: float, lines: Sequence[str]) -> None:
        self._bar.update(self._task, visible=False)
        super().on_end(stage, seconds, lines)

    def close(self) -> None:
        self._bar.stop()


def _is_main(event: ProgressEvent) -> bool:
    """Whether it is of the stage's main work: steps of training, which have an estimate of their own, or tasks."""
    return event.remaining is not None or event.unit == "%"


def choose_stages(name: str, verbose: bool, silent: bool) -> SilentStages:
    """`name` of the adapter, which stands at its answers."""
    if silent:
        return SilentStages()
    if not sys.stdout.isatty():
        return StageLines(name, verbose)
    from rich.console import Console

    return StageScreen(name, verbose, Console(highlight=False))
