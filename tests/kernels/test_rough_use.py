"""What callers do that they should not: tensors that change under a call, another floating-point mode, huge numbers."""

from __future__ import annotations

import threading

import torch

from ktransformers.nn import ExpertStore

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 6, 48, 40, 2


def made_store(isa: str, scale: float = 0.2) -> ExpertStore:
    g = torch.Generator().manual_seed(3)
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, isa=isa)
    store.pack(
        gate=torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=g) * scale,
        up=torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=g) * scale,
        down=torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=g) * scale,
    )
    return store


def test_ids_that_change_under_a_call() -> None:
    store, stop = made_store("generic"), threading.Event()
    hidden, weights = torch.randn(400, HIDDEN), torch.rand(400, TOP_K)
    ids = torch.zeros(400, TOP_K, dtype=torch.int64)

    def rewrite() -> None:
        value = 0
        while not stop.is_set():
            ids.fill_(value % (EXPERTS + 2) - 1)
            value += 1

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(300):
            assert store.forward(hidden, ids, weights).shape == hidden.shape
    finally:
        stop.set()
        writer.join()


def test_bits_do_not_depend_on_flushed_denormals(isa: str) -> None:
    store = made_store(isa)
    g = torch.Generator().manual_seed(1)
    hidden = (torch.randn(64, HIDDEN, generator=g) * 2e-6).half()
    ids, weights = torch.randint(0, EXPERTS, (64, TOP_K), generator=g), torch.rand(64, TOP_K, generator=g)
    plain = store.forward(hidden, ids, weights, out=torch.empty(64, HIDDEN))
    assert torch.set_flush_denormal(True) in (True, False)
    try:
        found = [store.forward(hidden, ids, weights, out=torch.empty(64, HIDDEN)) for _ in range(20)]
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(plain, out) for out in found)


def test_a_gate_far_below_zero_is_zero(isa: str) -> None:
    store = ExpertStore(1, 1, 1, isa=isa)
    store.pack(gate=torch.full((1, 1, 1), -1.0), up=torch.ones(1, 1, 1), down=torch.ones(1, 1, 1))
    hidden = torch.tensor([[1e30], [90.0], [1e4]])
    out = store.forward(hidden, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert out.abs().max() < 1e-30
