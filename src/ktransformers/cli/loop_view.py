"""What `kt loop` shows: a sentence for each stage, one redrawn bar, what came out of it and how long it took.

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
from ktransformers.cli.train_view import DETAIL_WIDTH, live_detail
from ktransformers.evaluate.loop.child import command_line
from ktransformers.evaluate.loop.questions import AnswerPair
from ktransformers.evaluate.loop.report import answer_lines
from ktransformers.evaluate.loop.run import Listener
from ktransformers.evaluate.loop.stages import Stage
from ktransformers.ground.progress import ProgressEvent, rough

if TYPE_CHECKING:
    from rich.console import Console

INDENT = "  "
MAX_TITLE = 36  # characters of what is being done


class SilentStages(Listener):
    """For --json and --quiet."""

    answered = False  # whether answers were shown

    def show(self, line: str) -> None: ...
    def close(self) -> None: ...


class StageLines(SilentStages):
    """Without a terminal: lines. `verbose`: also commands and what they print."""

    def __init__(self, name: str, verbose: bool) -> None:
        self._name, self._verbose = name, verbose
        self._last, self._left = 0.0, TimeLeft()

    def show(self, line: str) -> None:
        print(line, flush=True)

    def on_skip(self, stage: Stage) -> None:
        if stage.title:
            self.show(f"{stage.title}: unchanged, done before")

    def on_start(self, stage: Stage, resuming: bool) -> None:
        self._last, self._left = time.monotonic(), TimeLeft()
        if stage.title:
            self.show(stage.title + (", from where it stopped" if resuming else ""))
        if self._verbose:
            self.show(f"{INDENT}$ {command_line(stage.arguments)}")

    def on_event(self, stage: Stage, event: ProgressEvent) -> None:
        self._left.report(event.done, event.total, event.remaining)
        if time.monotonic() - self._last >= PLAIN_SECONDS and event.total:
            self._last = time.monotonic()
            amount = format_amount(event.done, event.total, event.unit)
            loss = f"loss {event.values['loss']:.3g}" if "loss" in event.values else ""
            words = [f"{event.title} {amount}", *filter(None, (loss, self._left.text))]
            self.show(f"{INDENT}{', '.join(words)}")

    def on_line(self, stage: Stage, text: str) -> None:
        if self._verbose:
            self.show(f"{INDENT}| {text}")

    def on_end(self, stage: Stage, seconds: float, lines: Sequence[str]) -> None:
        for line in (*lines, *([f"{'time':<8} {rough(seconds)}"] if stage.title or self._verbose else [])):
            self.show(f"{INDENT}{line}")

    def on_answers(self, answers: Sequence[AnswerPair]) -> None:
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

    def on_start(self, stage: Stage, resuming: bool) -> None:
        super().on_start(stage, resuming)
        self._losses = []
        self._bar.reset(
            self._task, total=None, visible=True, description=f"{INDENT}Starting", amount="", detail="", left=self._left
        )

    def on_event(self, stage: Stage, event: ProgressEvent) -> None:
        is_main = event.remaining is not None or event.unit == "%"
        if event.total is not None and event.done >= event.total and not is_main:
            # What comes before the steps of training or the tasks has ended: a full bar would read as the end.
            event, self._left = ProgressEvent("Starting"), TimeLeft()
        self._left.report(event.done, event.total, event.remaining)
        if "loss" in event.values:
            self._losses.append(event.values["loss"])
        memory = f"{event.values['memory'] / 1e9:.1f} GB" if "memory" in event.values else ""
        self._bar.update(
            self._task,
            completed=event.done,
            total=event.total,
            description=f"{INDENT}{event.title[:MAX_TITLE]}",
            amount=format_amount(event.done, event.total, event.unit),
            detail=live_detail(self._losses, event.values.get("tokens_per_second"), memory),
            left=self._left,
        )

    def on_end(self, stage: Stage, seconds: float, lines: Sequence[str]) -> None:
        self._bar.update(self._task, visible=False)
        super().on_end(stage, seconds, lines)

    def close(self) -> None:
        self._bar.stop()


def choose_stages(name: str, verbose: bool, silent: bool) -> SilentStages:
    """`name` of the adapter, which stands at its answers."""
    if silent:
        return SilentStages()
    if not sys.stdout.isatty():
        return StageLines(name, verbose)
    from rich.console import Console

    return StageScreen(name, verbose, Console(highlight=False))
