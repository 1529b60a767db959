"""A long call of the core ends soon after a signal whose handler raises, and everything can be used afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ktransformers import _core
from ktransformers.nn import ExpertStore

E, H, T, K = 2, 512, 30000, 2
DELAY, LIMIT = 0.2, 1.0  # seconds


class StopTest(Exception):
    pass


@contextmanager
def alarm(handler: Callable[..., Any]) -> Iterator[None]:
    """Call the handler once, in DELAY; SIGALRM takes the same way to Python as SIGINT."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, DELAY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stop(*_: Any) -> None:
    raise StopTest


def assert_stops(call: Callable[[], Any]) -> None:
    start = time.monotonic()
    with alarm(stop), pytest.raises(StopTest):
        call()
    assert DELAY <= time.monotonic() - start < DELAY + LIMIT


@pytest.fixture(scope="module")
def store() -> ExpertStore:
    """On one thread and without vector instructions, so that the calls take seconds anywhere."""
    store = ExpertStore(E, H, H, pool=_core.Pool(threads=1, pin=False), isa="generic")
    weights = torch.randn(E, H, H, generator=torch.Generator().manual_seed(1)) / 20
    store.pack(gate=weights, up=weights, down=weights)
    return store


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(K).repeat(tokens, 1)
    return torch.ones(1, H).expand(tokens, H), ids, torch.ones(tokens, K)


def test_forward_and_backward_end_and_go_on(store: ExpertStore) -> None:
    few = batch(3)
    want = store.forward(*few)
    assert_stops(lambda: store.forward(*batch(T)))
    assert torch.equal(store.forward(*few), want)
    gradients = store.backward(want, *few)
    assert_stops(lambda: store.backward(torch.ones(T, H), *batch(T)))
    for got, expected in zip(store.backward(want, *few), gradients, strict=True):
        assert torch.equal(got, expected)


def test_lora_gradients_end(store: ExpertStore) -> None:
    adapter = store.new_adapter(64, 64, 64)
    a, b = torch.ones(E, 64, H), torch.ones(E, H, 64)
    adapter.pack(a, b, a, b, a, b)
    factors = [[torch.empty_like(a), torch.empty_like(b)] * 3]
    arguments: dict[str, Any] = {"adapters": [adapter], "factors": factors}
    assert_stops(lambda: store.backward(torch.ones(T, H), *batch(T), **arguments))


def test_waiting_ends_and_the_call_goes_on(store: ExpertStore) -> None:
    """The submitted call still runs; what drops it does not wait for its results."""
    call = store.prepare(*batch(T))
    call.submit()
    assert_stops(call.wait)
    assert not call.done
    start = time.monotonic()
    del call
    assert time.monotonic() - start < LIMIT
    store.forward(*batch(3))


def test_measuring_ends() -> None:
    pool = _core.Pool(threads=2, pin=False)
    assert_stops(lambda: pool.rate("registers", seconds=30))


def test_a_handler_that_does_not_raise_leaves_the_call_alone() -> None:
    pool, seen = _core.Pool(threads=1, pin=False), []
    with alarm(lambda *_: seen.append(time.monotonic())):
        start = time.monotonic()
        assert pool.rate("registers", seconds=0.8) > 0
    assert len(seen) == 1 and seen[0] - start < 0.7
    assert time.monotonic() - start > 0.7
