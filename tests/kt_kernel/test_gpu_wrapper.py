"""`KTMoEWrapper` on CUDA streams: outputs are those of the same wrapper on host tensors, eagerly and in CUDA graphs
that are captured once, at sizes announced or not, and replayed under changed routing, masks and inputs."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_kernel import KTMoEWrapper
from kt_kernel.kt_kernel_ext import CPUInfer
from tests.support.kt_layers import CLOSE, E, H, batch, error, layer, loaded, weights

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def on_gpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(GPU) for tensor in tensors)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4", "FP8"])
@pytest.mark.parametrize("tokens", [1, 7, 16, 50])
def test_a_stream_computes_what_the_host_computes(method: str, tokens: int) -> None:
    wrapper, given = loaded(method), batch(tokens)
    hidden, ids, scores = on_gpu(*given)
    ids = ids.to(torch.int32)
    wrapper.submit_forward(hidden, ids, scores, stream())
    ids.fill_(-1)  # in the order of the stream, as SGLang does
    out = wrapper.sync_forward(hidden, stream())
    assert out.device == hidden.device and out.dtype == hidden.dtype
    assert torch.equal(out.cpu(), wrapper.forward(*given, None))


def test_submitting_does_not_wait_for_the_stream() -> None:
    wrapper = loaded()
    hidden, ids, scores = on_gpu(*batch(4))
    wrapper.forward(hidden, ids, scores, stream())
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # about a second
    start = time.monotonic()
    out = wrapper.forward(hidden, ids, scores, stream())
    assert time.monotonic() - start < 0.3
    assert torch.equal(out.cpu(), wrapper.forward(*batch(4), None))


class Captured:
    """Layers in one CUDA graph, the output of each the input of the next."""

    def __init__(self, layers: list[Any], tokens: int, warm: bool) -> None:
        self.layers = layers
        self.hidden, self.ids, self.scores = on_gpu(*batch(tokens))
        self.ids = self.ids.to(torch.int32)
        if warm:
            self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()

    def run(self) -> Tensor:
        hidden, ids = self.hidden, self.ids.clone()
        for one in self.layers:
            one.submit_forward(hidden, ids, self.scores, stream())
            cpu = one.sync_forward(hidden, stream())
            hidden = hidden + cpu
        ids.fill_(-1)
        return hidden

    def replay(self, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        self.hidden.copy_(hidden)
        self.ids.copy_(ids)
        self.scores.copy_(scores)
        self.graph.replay()
        return self.out.cpu()


def expected(layers: list[Any], hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    for one in layers:
        hidden = hidden + one.forward(hidden, ids, scores, None)
    return hidden


@pytest.mark.parametrize("deferred", [0, 1])
def test_graphs_follow_routing_and_masks(deferred: int) -> None:
    layers = [
        loaded(layer_idx=index, seed=index, max_deferred_experts_per_token=deferred if index < 3 else 0)
        for index in range(4)
    ]
    first = layers[0].forward(*on_gpu(*batch(2)), stream())  # what is made once is made outside of a capture
    KTMoEWrapper.set_capture_batch_sizes([1, 4])
    # Sizes that were announced, and others; the last is larger than a chunk.
    graphs = {tokens: Captured(layers, tokens, warm=tokens in (1, 4)) for tokens in (1, 4, 11, 40)}
    for seed in range(2, 6):
        for tokens, graph in graphs.items():
            given = batch(tokens, seed=seed)
            want = expected(layers, *given)
            assert error(graph.replay(*given), want) < (CLOSE if deferred else 1e-6)
    for one in layers:
        one.gpu_experts_mask.copy_(torch.arange(E) % 3 == 0)
    for tokens, graph in graphs.items():
        given = batch(tokens, seed=9)
        assert error(graph.replay(*given), expected(layers, *given)) < (CLOSE if deferred else 1e-6)
    assert torch.equal(layers[0].forward(*on_gpu(*batch(2)), stream()).isnan(), first.isnan())


def test_many_sizes_between_replays_leave_graphs_alone() -> None:
    layers = [loaded(layer_idx=index, seed=index) for index in range(2)]
    graph = Captured(layers, 3, warm=True)
    for tokens in range(1, 31):
        given = batch(tokens, seed=tokens)
        want = expected(layers, *given)
        hidden, ids, scores = on_gpu(*given)
        for one in layers:
            hidden = hidden + one.forward(hidden, ids, scores, stream())
        assert torch.equal(hidden.cpu(), want)
        small = batch(3, seed=tokens + 100)
        assert torch.equal(graph.replay(*small), expected(layers, *small))
    assert all(len(one._batches) < 16 for one in layers), "sizes that no graph holds are dropped"


def test_streams_take_turns() -> None:
    wrapper, streams = loaded(), [torch.cuda.Stream() for _ in range(3)]
    results = []
    for turn in range(30):
        given = batch(5, seed=turn)
        hidden, ids, scores = on_gpu(*given)
        torch.cuda.synchronize()
        other = streams[turn % 3]
        out = wrapper.forward(hidden, ids, scores, other.cuda_stream)  # not the current one
        results.append((given, out, hidden))
    torch.cuda.synchronize()
    for given, out, _ in results:
        assert torch.equal(out.cpu(), wrapper.forward(*given, None))


def test_sft_and_native_names_construct_on_a_gpu_machine() -> None:
    wrapper = layer(gpu_experts_mask=torch.arange(E) < 2)
    assert wrapper.gpu_experts_mask.is_pinned()
    wrapper.load_weights_from_tensors(*weights(), torch.arange(E))
    hidden, ids, scores = on_gpu(*batch(3))
    out = wrapper.forward(hidden.half(), ids, scores, stream())
    assert out.dtype == torch.float16 and out.shape == (3, H)


def test_tasks_of_a_program_run_in_the_order_of_a_stream() -> None:
    """Through `CPUInfer`: C functions, here of the C library, on buffers; captured, they run again at every replay."""
    infer = CPUInfer(2)
    memset = ctypes.CDLL(None).memset
    seen: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda given: seen.append(given or 0))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None and memset is not None
    side = torch.cuda.Stream()
    for number in range(1, 4):
        infer.submit_with_cuda_stream(side.cuda_stream, (address, number))
    infer.sync_with_cuda_stream(side.cuda_stream)
    side.synchronize()
    infer.sync()
    assert seen == [1, 2, 3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        infer.submit_with_cuda_stream(stream(), (address, 7))
        infer.sync_with_cuda_stream(stream())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    infer.sync()
    assert seen == [1, 2, 3, 7, 7, 7]
