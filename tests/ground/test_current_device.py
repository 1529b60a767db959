"""Kernels are launched with the GPU of their tensors current; GPUs are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktransformers.ground.current_device import on_device
from ktransformers.quantized.gpu import dequantize, head_products
from ktransformers.quantized.gpu.head_products import HeadRows
from ktransformers.quantized.gpu.layout import PackedMatrix
from ktransformers.quantized.gpu.linear import GpuLinearWeight, packed_linear
from ktransformers.quantized.host_rows import HostRows

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stack of current GPUs, the first of them cuda:0."""
    stack = [0]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        stack.append(chosen.index)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: stack[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


class Kernels:
    """Of a Triton module; notes which GPU was current when each was launched."""

    MAX_COUNT = 1 << 20

    def __init__(self, current: list[int]) -> None:
        self._current, self.launched = current, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("configuration", "card_of", "supports"):
            return lambda *_: True
        return lambda *_, **__: self.launched.update({name: self._current[-1]})


def test_a_gpu_is_made_current_where_it_is_not(current: list[int]) -> None:
    for device, expected in (("cuda:1", 1), ("cuda:0", 0), ("cuda", 0), ("cpu", 0)):
        with on_device(torch.device(device)):
            assert current[-1] == expected
        assert current == [0]
    assert on_device(torch.device("cuda:0")) is on_device(torch.device("cpu")), "nothing is entered"


def device_codes(kernels: Kernels) -> GpuLinearWeight:
    codes = object.__new__(GpuLinearWeight)
    codes.packed: Any = SimpleNamespace(device=SECOND, is_cuda=True)
    codes.matrix, codes.layout = packed_linear(64, 64, "int8"), SimpleNamespace(parts_of=lambda packed: ())  # type: ignore[assignment]
    codes._kernels, codes._parts, codes._space = kernels, (), None
    codes._numbers = lambda rows: torch.empty(rows, 64)  # type: ignore[method-assign]
    return codes


def test_codes_launch_on_their_gpu(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(current)
    codes, x = device_codes(kernels), torch.ones(3, 64, dtype=torch.bfloat16)
    codes.multiply(x)
    assert kernels.launched == {"product": 1}
    for call in (lambda: codes.decoded(0, 32), lambda: codes.gathered(torch.zeros(2, dtype=torch.int64)),
                 lambda: codes.decoded_groups(0, 32, 64)):  # fmt: skip
        kernels.launched.clear()
        call()
        assert kernels.launched == {"decode": 1}
    monkeypatch.setattr(head_products, "import_triton_module", lambda name: kernels)
    head_products.multiply_heads(codes, x[None], HeadRows(0, 32, 64))
    assert kernels.launched == {"decode": 1, "multiply_heads": 1} and current == [0]


def test_experts_and_rows_of_the_embedding_are_read_on_their_gpu(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(current)
    packed: Any = SimpleNamespace(device=SECOND, is_cuda=True)
    monkeypatch.setattr(dequantize, "import_triton_module", lambda name: kernels)
    matrix: PackedMatrix = packed_linear(64, 64, "int8")
    dequantize.decode(packed, (0,), torch.zeros(1), matrix, torch.empty(1))
    assert kernels.launched == {"decode": 1}
    monkeypatch.setattr("ktransformers.quantized.host_rows.import_triton_module", lambda name: kernels)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    rows = HostRows(torch.zeros(4, 64), SECOND)
    weight: Any = None
    rows.gathered(weight, torch.zeros(2, dtype=torch.int64))
    assert kernels.launched == {"decode": 1, "gather": 1}
