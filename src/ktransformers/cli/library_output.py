"""Lines and bars of transformers, TRL, PEFT, datasets and others, in the style of `kt` while a command runs.

Their warnings become one line on stderr, each once, in full in the run's log; those that say nothing about a run of
ours are in the log alone (NOISE). Bars of tqdm that transformers draws, of loaded weights for example, are drawn as
ours. The state of their loggers is restored afterwards, because a command may run inside of a larger program.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ktransformers.cli.progress import drawn_reports, log
from ktransformers.ground.log import StderrHandler
from ktransformers.ground.progress import DrawProgress, drawn_by

LIBRARIES = ("transformers", "trl", "peft", "accelerate", "datasets", "huggingface_hub", "py.warnings")
# Warnings that say nothing about a run of ours.
NOISE = (
    r"Token indices sequence length is longer",  # rows are cut, or counted, by `cutoff_len`
    r"per_device_train_batch_size of 1 with padding-free",  # a packed sequence is a batch
    r"use_cache=True` is incompatible with gradient checkpointing",
    r"tokenizer has new PAD/BOS/EOS tokens",  # the adapter is saved with its tokenizer
    r"(Deprecation|Future)Warning",
    r"No label_names provided for model class",
    r"Detected kernel version .* below the recommended minimum",
    r"_pattern keys did not match any targeted module.*(experts|gate_up_proj|down_proj)",  # parameters, not modules
)
# What `logging.captureWarnings` records: the file of a package, line, category, text.
PYTHON_WARNING = re.compile(r"(?:.*/site-packages/(?P<package>\w+)/)?.*?:\d+: \w+: (?P<text>.*)", re.DOTALL)


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else ""


class WarningLines(logging.Handler):
    """One line for each warning that matters, once: `kt: transformers: ...`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, name = record.getMessage(), record.name.partition(".")[0]
        if any(re.search(pattern, text) for pattern in NOISE):
            return
        if name == "py":
            parts = PYTHON_WARNING.fullmatch(text)
            name, text = (parts["package"] or "", parts["text"]) if parts else ("", text)
        line = first_line(text)
        if not line or line in self._shown:
            return
        self._shown.add(line)
        log(f"{name}: {line}" if name else line)


class TqdmProgress:
    """The part of tqdm's interface that transformers uses, reported to `draw`."""

    def __init__(self, draw: DrawProgress, iterable: Any = None, desc: str = "", total: int | None = None) -> None:
        self._draw, self._iterable, self._title, self._done = draw, iterable, desc or "Working", 0
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        self.total = total

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self._done += count
        self._draw(self._title, self._done, self.total, "")

    def __enter__(self) -> TqdmProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None  # set_postfix, refresh, close and the like draw nothing


@contextmanager
def _bars(draw: DrawProgress) -> Iterator[None]:
    import transformers

    shown: Any = transformers.logging
    were_on = shown.is_progress_bar_enabled()
    shown.disable_progress_bar()  # also those of huggingface_hub

    def make(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> TqdmProgress:
        iterable = args[0] if args else options.get("iterable")
        return TqdmProgress(draw, iterable, options.get("desc") or "", options.get("total"))

    set_hook = getattr(shown, "set_tqdm_hook", None)  # older versions draw none while bars are disabled
    previous = None if set_hook is None else set_hook(make)
    datasets = sys.modules.get("datasets")
    if datasets is not None:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if set_hook is not None:
            set_hook(previous)
        if were_on:
            shown.enable_progress_bar()
        if datasets is not None:
            datasets.enable_progress_bars()


@contextmanager
def _lines() -> Iterator[None]:
    handler, found = WarningLines(), [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger.handlers[:], logger.propagate) for logger in found]
    show_warning = warnings.showwarning
    logging.captureWarnings(True)
    for logger in found:
        logger.handlers, logger.propagate = [handler], False
    ours, shown = logging.getLogger("ktransformers"), StderrHandler(logging.WARNING)
    shown.setFormatter(logging.Formatter("kt: %(message)s"))
    if not ours.hasHandlers():  # without one logging prints warnings in a style of its own
        ours.addHandler(shown)
    try:
        yield
    finally:
        ours.removeHandler(shown)
        logging.captureWarnings(False)
        warnings.showwarning = show_warning
        for logger, (handlers, propagate) in zip(found, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def library_output(draw: DrawProgress | None = None) -> Iterator[None]:
    """`draw`: called with what they and our own packages report; without it each title is a bar of `cli.progress`."""
    import transformers  # noqa: F401  (its handlers are replaced below)

    with ExitStack() as stack:
        stack.enter_context(_lines())
        if draw is None:
            draw = stack.enter_context(drawn_reports())
        else:
            stack.enter_context(drawn_by(draw))
        stack.enter_context(_bars(draw))
        yield
