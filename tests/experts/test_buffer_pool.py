"""The host buffer pool: freed memory is reused, and the pool holds at most the bytes that were in use at one time."""

from __future__ import annotations

import gc

import torch

from ktransformers import _core
from ktransformers.experts import buffer_pool

MB = 1 << 20


def test_freed_buffers_are_reused() -> None:
    first = buffer_pool.empty((8 * MB,), torch.uint8)
    place = first.data_ptr()
    view = first.view(torch.bfloat16)[:10].zero_()
    del first
    second = buffer_pool.empty((8 * MB,), torch.uint8)
    assert second.data_ptr() != place, "a view still holds it"
    del view
    gc.collect()
    third = buffer_pool.empty((7 * MB, 1), torch.uint8)
    assert third.data_ptr() == place, "what is free and large enough is taken"


def test_pool_holds_at_most_the_bytes_that_were_in_use() -> None:
    gc.collect()
    before = _core.pooled_bytes()
    for size in range(2, 60, 2):  # one at a time, each larger than the last
        buffer_pool.empty((size * MB,), torch.uint8)
    gc.collect()
    assert _core.pooled_bytes() <= max(before, 60 * MB)
    several = [buffer_pool.empty((4 * MB, 5), torch.float32) for _ in range(3)]
    assert _core.pooled_bytes() >= 240 * MB
    several.clear()
    assert all(buffer_pool.empty((4 * MB, 5), torch.float32).shape == (4 * MB, 5) for _ in range(3))


def test_small_tensors_bypass_the_pool() -> None:
    before = _core.pooled_bytes()
    tensor = buffer_pool.empty((3, 5), torch.float64)
    assert (tensor.shape, tensor.dtype) == ((3, 5), torch.float64)
    assert _core.pooled_bytes() == before


def test_pooled_tensor_can_be_a_gradient() -> None:
    weight = torch.zeros(MB, requires_grad=True)
    weight.grad = buffer_pool.empty((MB,), torch.float32).fill_(2.0)
    torch.optim.SGD([weight], lr=0.5).step()
    assert weight.detach().eq(-1.0).all()
