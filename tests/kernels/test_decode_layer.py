"""Decoder layers for new tokens in one job: what they refuse, whose arithmetic they have, and mapped weights that are
lost or damaged. `tests/serve/attention/test_decode_layer.py` has their numbers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.ground.errors import DamagedFileError

from .test_w8a8_codes import matrix_of

E, HIDDEN, SIZE, ROWS = 4, 64, 16, 2


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def new_pool(threads: int = 2) -> _core.Pool:
    return _core.Pool(threads=threads, groups=1, spin_us=0, pin=False)


def new_experts(pool: _core.Pool) -> _core.Experts:
    experts = _core.Experts(pool, E, HIDDEN, HIDDEN)
    experts.pack(0, *(numbers(E, HIDDEN, HIDDEN) / 8 for _ in range(3)))
    return experts


def set_experts(layer: _core.DecodeLayer, experts: _core.Experts) -> None:
    layer.set_experts(numbers(HIDDEN), 1e-6, numbers(E, HIDDEN).bfloat16(), None, experts, 2, True)


def set_attention(layer: _core.DecodeLayer, query: Any = None) -> None:
    weights = [numbers(HIDDEN, HIDDEN).bfloat16() / 8 for _ in range(4)]
    if query is not None:
        weights[0] = query
    layer.set_attention(numbers(HIDDEN), None, None, [1e-6] * 3, weights, [None] * 4, None, SIZE, 0.25)


def new_layer(pool: _core.Pool, experts: _core.Experts | None = None) -> _core.DecodeLayer:
    layer = _core.DecodeLayer(pool, HIDDEN)
    set_attention(layer)
    set_experts(layer, experts or new_experts(pool))
    return layer


def new_cache() -> tuple[Tensor, Tensor]:
    return torch.zeros(ROWS, 4, 64, SIZE), torch.zeros(ROWS, 4, 64, SIZE)


def first_tokens() -> _core.StepSequences:
    rows = torch.arange(ROWS, dtype=torch.int32)
    return _core.StepSequences(rows, torch.zeros_like(rows), rows[:, None])


def decode(layers: list[_core.DecodeLayer], x: Tensor) -> Tensor:
    out, rotary, count = torch.empty_like(x), torch.ones(ROWS, SIZE), len(layers)
    caches = [new_cache() for _ in layers]
    _core.decode_layers(layers, x, out, rotary, rotary, caches, [0] * count, first_tokens(), [False] * count)
    return out


def test_experts_of_another_pool_are_refused() -> None:
    """Their workspace has slices for other threads."""
    layer = _core.DecodeLayer(new_pool(3), HIDDEN)
    with pytest.raises(ValueError, match=r"experts: given experts of another pool, expected .* pool; make both with"):
        set_experts(layer, new_experts(new_pool(1)))
    with pytest.raises(RuntimeError, match="no experts"):
        layer.route(numbers(ROWS, HIDDEN), torch.empty(ROWS, HIDDEN))


def test_weights_of_another_pool_are_multiplied() -> None:
    """By threads that outnumber their own, and without their groups."""
    matrix, results = matrix_of("int8", 1, HIDDEN, HIDDEN), []
    for threads, groups, layer_threads in ((1, 1, 1), (1, 1, 4), (4, 2, 3)):
        linear = _core.CodedLinear(_core.Pool(threads=threads, groups=groups, pin=False), HIDDEN, HIDDEN, "int8")
        linear.pack(matrix.packable)
        pool = new_pool(layer_threads)
        layer = _core.DecodeLayer(pool, HIDDEN)
        set_attention(layer, linear)
        set_experts(layer, new_experts(pool))
        results.append(decode([layer], numbers(ROWS, HIDDEN)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_lost_pages_of_a_mapped_weight_are_an_error(tmp_path: Path) -> None:
    pool, matrix = new_pool(), matrix_of("int8", 1, HIDDEN, HIDDEN)
    linears = [_core.CodedLinear(pool, HIDDEN, HIDDEN, "int8") for _ in range(2)]
    linears[0].pack(matrix.packable)
    file = tmp_path / "weights"
    file.write_bytes(linears[0].memory().tobytes())
    linears[1].adopt(_core.map_file(str(file)))
    layer = _core.DecodeLayer(pool, HIDDEN)
    set_attention(layer, linears[1])
    set_experts(layer, new_experts(pool))
    x, rotary = numbers(ROWS, HIDDEN), torch.ones(ROWS, SIZE)
    decode([layer], x)
    os.truncate(file, 0)
    with pytest.raises(DamagedFileError, match=str(file)):
        layer.attend(x, torch.empty_like(x), rotary, rotary, new_cache(), first_tokens())
    with pytest.raises(DamagedFileError, match=str(file)):
        decode([layer], x)


@pytest.mark.parametrize("damaged", [False, True])
def test_adopted_experts_are_verified_by_the_step_that_reads_them(damaged: bool) -> None:
    pool = new_pool()
    source = new_experts(pool)
    memory = {name: torch.tensor(data) for name, data in source.memory().items()}
    checksums = torch.tensor(source.checksums())
    if damaged:
        memory["down"][:: len(memory["down"]) // E] ^= 1
    experts, want = _core.Experts(pool, E, HIDDEN, HIDDEN), decode([new_layer(pool)], numbers(ROWS, HIDDEN))
    experts.adopt(**memory, checksums=checksums, source="a file, layer 3")
    layer = _core.DecodeLayer(pool, HIDDEN)
    set_attention(layer)
    set_experts(layer, experts)
    for _ in range(2):
        if damaged:
            with pytest.raises(DamagedFileError, match="a file, layer 3, expert"):
                decode([layer], numbers(ROWS, HIDDEN))
        else:
            assert torch.equal(decode([layer], numbers(ROWS, HIDDEN)), want)
    experts.adopt(**memory)  # no call reads them any more


def test_calls_with_the_same_layers_in_another_order_go_on() -> None:
    pool, x = new_pool(1), numbers(ROWS, HIDDEN)
    experts = new_experts(pool)
    layers = [new_layer(pool, experts) for _ in range(32)]

    def call(order: list[_core.DecodeLayer]) -> None:
        for _ in range(100):
            decode(order, x)

    threads = [threading.Thread(target=call, args=(order,), daemon=True) for order in (layers, layers[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "two calls wait for each other"


@pytest.mark.parametrize("threads", [1, 3])
def test_numbers_do_not_depend_on_the_arithmetic_of_the_caller(threads: int) -> None:
    """Products flush nothing, and so does what lies between them, whichever thread computes it."""
    layers, x = [new_layer(new_pool(threads))], numbers(ROWS, HIDDEN) * 1e-39
    want = decode(layers, x)
    assert not torch.equal(want, torch.zeros_like(want))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes nothing")
    try:
        for _ in range(5):
            actual = decode(layers, x)
            assert actual.view(torch.int32).equal(want.view(torch.int32))
    finally:
        torch.set_flush_denormal(False)
