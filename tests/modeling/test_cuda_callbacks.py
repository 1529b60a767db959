"""An expert call submitted and awaited by a CUDA stream: the two C callbacks as host functions, without the GIL."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ktransformers import _core
from ktransformers.nn import ExpertStore
from tests.support import reference

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 8, 256, 96, 33, 2


def test_cuda_stream_runs_an_expert_call() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=generator).bfloat16() / 16 for _ in range(2))
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator).bfloat16() / 10
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE)
    store.pack(gate=gate, up=up, down=down)

    on_host = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, pin_memory=True)
    result = torch.empty_like(on_host).pin_memory()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    call = store.prepare(on_host, ids, weights, out=result)

    driver = ctypes.CDLL("libcuda.so.1")
    callbacks = _core.host_callbacks()
    stream = torch.cuda.Stream()
    on_device = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    for seed in range(3):
        x = torch.randn(TOKENS, HIDDEN, generator=generator.manual_seed(seed)).bfloat16()
        with torch.cuda.stream(stream):
            on_device.copy_(x)
            on_host.copy_(on_device, non_blocking=True)
            for name in ("submit", "wait"):
                status = driver.cuLaunchHostFunc(
                    ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(callbacks[name]), ctypes.c_void_p(call.address)
                )
                assert status == 0
            on_device.copy_(result, non_blocking=True)
        stream.synchronize()
        expected = reference.forward(reference.ReferenceLayer(up, down, gate), x, ids, weights)
        error = (on_device.double().cpu() - expected).norm() / expected.norm()
        assert error < 6e-3
