"""Calls from many threads, calls that run while others do something else, and a pool that sleeps when it may."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ktransformers import _core
from ktransformers.nn import ExpertStore, default_pool
from tests.support import reference
from tests.support.forked import python

from .conftest import Batch, error, make_batch, make_layer, make_store, tolerance


def run(store: ExpertStore, batch: Batch, way: str) -> torch.Tensor:
    x = (batch.hidden, batch.ids, batch.weights)
    if way == "forward":
        return store.forward(*x)
    call = store.prepare(*x)
    call.submit()
    return call.wait()


def test_a_thousand_calls_of_eight_threads() -> None:
    pool, other = _core.Pool(3), _core.Pool(2, 2)
    layers = [make_layer(4, 40, 30, seed=1), make_layer(6, 65, 20, gated=False, biases=True, seed=2)]
    stores = [make_store(layer, p) for layer in layers for p in (pool, other)]
    batches = [[make_batch(layer, n * 5, 2, seed=n) for n in range(12)] for layer in layers for _ in range(2)]
    wanted = [[run(store, batch, "forward") for batch in of] for store, of in zip(stores, batches, strict=True)]

    def calls(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(125):
            s, b = dice.randrange(len(stores)), dice.randrange(12)
            got = run(stores[s], batches[s][b], dice.choice(["forward", "submit"]))
            assert torch.equal(got, wanted[s][b])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(calls, range(8)))
    for layer, of, want in zip(layers, batches[::2], wanted[::2], strict=True):
        for batch, result in zip(of, want, strict=True):
            exact = reference.forward(layer, batch.hidden, batch.ids, batch.weights)
            assert error(result, exact) < tolerance(stores[0].isa)


def test_submit_reads_what_is_there_then(isa: str, pool: _core.Pool) -> None:
    """As a captured CUDA graph does: one call, its buffers filled anew each time."""
    layer = make_layer(4, 40, 30)
    store = make_store(layer, pool, isa)
    batch = make_batch(layer, 20, 2)
    out = torch.empty(20, 40)
    call = store.prepare(batch.hidden, batch.ids, batch.weights, out=out)
    assert call.done
    for seed in range(5):
        new = make_batch(layer, 20, 2, seed=seed)
        for mine, other in zip(
            (batch.hidden, batch.ids, batch.weights), (new.hidden, new.ids, new.weights), strict=True
        ):
            mine.copy_(other)
        call.submit()
        assert call.wait() is out
        assert call.done
        assert torch.equal(out, store.forward(new.hidden, new.ids, new.weights))


def test_submit_and_wait_in_different_threads(pool: _core.Pool) -> None:
    layer = make_layer(4, 40, 30)
    store, batch = make_store(layer, pool), make_batch(layer, 30, 2)
    want = run(store, batch, "forward")
    call = store.prepare(batch.hidden, batch.ids, batch.weights)
    for _ in range(50):
        call.out.fill_(float("nan"))
        submitter = threading.Thread(target=call.submit)
        submitter.start()
        submitter.join()
        waiters = [threading.Thread(target=call.wait) for _ in range(2)]
        for waiter in waiters:
            waiter.start()
        while not call.done:
            time.sleep(0)
        for waiter in waiters:
            waiter.join()
        assert torch.equal(call.out, want)


def test_host_callbacks(pool: _core.Pool) -> None:
    """The two C functions as a CUDA stream would call them: from a thread of its own, without the GIL."""
    layer = make_layer(4, 40, 30)
    store, batch = make_store(layer, pool), make_batch(layer, 30, 2)
    call = store.prepare(batch.hidden, batch.ids, batch.weights)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    addresses = _core.host_callbacks()
    submit, wait = callback(addresses["submit"]), callback(addresses["wait"])
    for _ in range(20):
        call.out.fill_(float("nan"))
        stream = threading.Thread(target=lambda: (submit(call.address), wait(call.address)))
        stream.start()
        stream.join()
        assert call.done
        assert torch.equal(call.out, run(store, batch, "forward"))


def test_error_in_a_host_callback_is_told_by_wait(pool: _core.Pool) -> None:
    layer = make_layer(4, 40, 30)
    store, batch = make_store(layer, pool), make_batch(layer, 3, 2)
    adapter = torch.full((3,), -1, dtype=torch.int32)
    call = store.prepare(batch.hidden, batch.ids, batch.weights, adapter=adapter)
    adapter[1] = 4
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_core.host_callbacks()["submit"])(call.address)
    with pytest.raises(RuntimeError, match=r"host callback: adapter: given 4 for token 1.*no adapter is loaded"):
        call.wait()
    call.wait()
    adapter[1] = -1
    call.submit()
    assert torch.equal(call.wait(), run(store, batch, "forward"))


def test_call_keeps_its_tensors_and_experts(pool: _core.Pool) -> None:
    layer = make_layer(4, 40, 30)
    store, batch = make_store(layer, pool), make_batch(layer, 30, 2)
    want = run(store, batch, "forward")
    call = store.prepare(batch.hidden.clone(), batch.ids.clone(), batch.weights.clone())
    del store
    gc.collect()
    call.submit()
    assert torch.equal(call.wait(), want)
    call.submit()
    del call  # under way: its end waits
    gc.collect()


def test_packing_is_refused_while_a_call_is_under_way(pool: _core.Pool) -> None:
    layer = make_layer(4, 40, 30)
    store, batch = make_store(layer, pool), make_batch(layer, 30, 2)
    call = store.prepare(batch.hidden, batch.ids, batch.weights)
    call.submit()
    with pytest.raises(RuntimeError, match="cannot be packed while 1 calls read them; wait"):
        store.pack(gate=layer.gate, up=layer.up, down=layer.down)
    call.wait()
    store.pack(gate=layer.gate, up=layer.up, down=layer.down)
    assert torch.equal(run(store, batch, "forward"), call.out)


def test_experts_packed_by_several_threads(pool: _core.Pool) -> None:
    layer = make_layer(16, 40, 30)
    store = ExpertStore(16, 40, 30, pool=pool)
    assert layer.gate is not None
    gate = layer.gate
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda e: store.pack(gate=gate[e], up=layer.up[e], down=layer.down[e], first_expert=e), range(16)
            )
        )
    batch = make_batch(layer, 30, 2)
    assert torch.equal(run(store, batch, "forward"), run(make_store(layer, pool), batch, "forward"))


def test_idle_costs_nothing() -> None:
    """In a process of its own: torch's threads and other tests' pools are not what is measured."""
    code = """
import time, torch
from ktransformers import _core
from ktransformers.nn import ExpertStore
torch.set_num_threads(1)
pools = [_core.Pool(4), _core.Pool(2)]
stores = [ExpertStore(4, 64, 64, pool=pool) for pool in pools]
for store in stores:
    store.pack(gate=torch.ones(4, 64, 64), up=torch.ones(4, 64, 64), down=torch.ones(4, 64, 64))
    for _ in range(20):
        store.forward(torch.ones(8, 64), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
time.sleep(0.05)
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""
    done = python(code)
    assert done.stderr == "" and float(done.stdout) < 0.01


def test_child_after_fork_gets_a_pool_of_its_own() -> None:
    code = """
import os, torch
from ktransformers.nn import ExpertStore, default_pool
def store():
    s = ExpertStore(2, 16, 16)
    s.pack(gate=torch.ones(2, 16, 16), up=torch.ones(2, 16, 16), down=torch.ones(2, 16, 16))
    return s
x = torch.ones(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
parent = store()
want = parent.forward(*x)
child = os.fork()
if child == 0:
    try:
        parent.forward(*x)
    except RuntimeError as error:
        if "fork" in str(error) and torch.equal(store().forward(*x), want):
            os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(parent.forward(*x), want)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_default_pool_is_one() -> None:
    with ThreadPoolExecutor(4) as threads:
        pools = list(threads.map(lambda _: default_pool(), range(8)))
    assert all(pool is pools[0] for pool in pools)
    assert 1 <= pools[0].threads <= len(os.sched_getaffinity(0))


def test_rates(pool: _core.Pool) -> None:
    for what in ("registers", "panels", "read"):
        rates = [pool.rate(what, 0.01, threads, bytes=2**20) for threads in (0, 1, 2)]
        assert all(rate > 1e6 for rate in rates)
