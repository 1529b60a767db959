"""Ctrl-C that Python drops in a `__del__` ends the program all the same."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ktransformers.ground.interrupt import remembered_interrupt


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    """Python's own; programs that a shell starts in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedWhenDropped:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped_interrupt_is_raised_at_the_next_check() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), remembered_interrupt() as check:
        check()
        InterruptedWhenDropped()
        steps.append("went on")  # Python has dropped the exception
        check()
        steps.append("not reached")
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped_interrupt_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), remembered_interrupt():
        InterruptedWhenDropped()


def test_ordinary_interrupt_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), remembered_interrupt():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")


def test_other_handlers_and_threads_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with remembered_interrupt() as check:
        signal.raise_signal(signal.SIGINT)
        check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raised = []

    def run() -> None:
        with remembered_interrupt() as check:
            check()
            raised.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised == [signal.default_int_handler]
