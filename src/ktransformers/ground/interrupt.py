"""Ctrl-C while a model is loaded.

Python raises KeyboardInterrupt between any two instructions. If these belong to a `__del__` or to a callback of the
garbage collector, the exception is printed and dropped, and the program goes on. `remembered_interrupt` raises it again
at the next call of the function that it yields, and at its end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered_interrupt() -> Iterator[Callable[[], None]]:
    """Signals are handled by the main thread: in others, and where Ctrl-C is ignored, nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: None
        return
    interrupted = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
