"""Copies to the host and back against `.cpu()` and `.to()`: equal bits, forward and backward, with copies in flight.
Tests that need no GPU also run without one, where copies are synchronous and the logic is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ktransformers.experts.backend import LocalExperts
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.transfer import copy_streams, start_device_to_host, start_host_to_device, to_device, to_host
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 8, 64, 32, 33, 2
HALF_A_SECOND = 10**9  # clock cycles of a GPU, more or less
Layer = Callable[[ExpertStore, Tensor, Tensor, Tensor], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")  # of CPUs that lack it
on_gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=on_gpu)])


@functools.cache
def store(seed: int) -> ExpertStore:
    generator = torch.Generator().manual_seed(seed)
    made = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE)
    gate, up_ = (torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5 for _ in range(2))
    made.pack(gate=gate, up=up_, down=torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 4)
    return made


def batch(device: str, dtype: torch.dtype, seed: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves; made on the CPU, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weights, ids = torch.rand(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return hidden, ids.to(device), weights.to(device, dtype).requires_grad_()


def plain(store: ExpertStore, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    on_host = [tensor.cpu().contiguous() for tensor in (hidden, ids, weights)]
    return apply_experts(LocalExperts(store), *on_host).to(hidden.device)


def ours(store: ExpertStore, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return to_device(apply_experts(LocalExperts(store), *to_host(hidden, ids, weights)), hidden.device)


def as_it_is(layer: Layer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return layer(store(0), hidden, ids, weights)


def strided(layer: Layer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    turned = [tensor.t().contiguous().t() for tensor in (hidden, ids, weights)]
    assert not turned[0].is_contiguous()
    return layer(store(0), *turned).t().contiguous().t()  # so is the gradient


def checkpointed(layer: Layer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return x + layer(store(0), x.sin(), ids, weights)

    for _ in range(3):
        hidden = checkpoint(block, hidden, use_reentrant=False)
    return hidden


def autocast(layer: Layer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    matrix = torch.eye(HIDDEN, device=hidden.device) * 3
    with torch.autocast(hidden.device.type, torch.bfloat16):
        between = torch.nn.functional.linear(hidden, matrix)
        assert between.dtype == torch.bfloat16
        return torch.nn.functional.linear(layer(store(0), between, ids, weights), matrix)


MODES = {mode.__name__: mode for mode in (as_it_is, strided, checkpointed, autocast)}


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_transfer_is_bit_exact(mode: str, dtype: torch.dtype, device: str) -> None:
    """Outputs, gradients accumulated over two passes, and outputs without gradients."""
    actual = []
    for layer in (plain, ours):
        hidden, ids, weights = batch(device, dtype)
        for _ in range(2):
            result = MODES[mode](layer, hidden, ids, weights)
            assert result.device == hidden.device
            (result.float() * torch.linspace(-1, 1, result.numel(), device=device).view(result.shape)).sum().backward()
        assert hidden.grad is not None and weights.grad is not None and hidden.grad.device == hidden.device
        with torch.no_grad():
            silent = MODES[mode](layer, hidden, ids, weights)
        with torch.inference_mode():
            inferred = MODES[mode](layer, hidden, ids, weights)
        assert not silent.requires_grad and torch.equal(silent, result) and torch.equal(inferred, result)
        actual.append((result, hidden.grad, weights.grad))
    assert actual[0][0].dtype == actual[1][0].dtype
    for expected, got in zip(*actual, strict=True):
        assert expected.isfinite().all() and expected.abs().max() > 0
        assert torch.equal(expected, got)


@devices
def test_gradients_are_copied_only_if_needed(device: str) -> None:
    hidden, ids, weights = batch(device, torch.float32)
    host, ids_host, _ = to_host(hidden, ids, weights)
    assert host.device.type == "cpu" and host.requires_grad and not ids_host.requires_grad
    assert torch.equal(host, hidden.cpu()) and torch.equal(ids_host, ids.cpu())
    for wanted in ((True, False), (False, True)):
        hidden.grad = weights.grad = None
        hidden.requires_grad_(wanted[0]), weights.requires_grad_(wanted[1])
        ours(store(0), hidden, ids, weights).sum().backward()
        assert (hidden.grad is not None, weights.grad is not None) == wanted
    hidden.requires_grad_(False), weights.requires_grad_(False)
    assert not ours(store(0), hidden, ids, weights).requires_grad
    # An output that nothing comes back from: the gradient of the routing weights alone.
    hidden.requires_grad_(), weights.requires_grad_()
    hidden.grad = weights.grad = None
    (to_host(hidden, ids, weights)[2] * 3).sum().backward()
    assert hidden.grad is None and torch.equal(weights.grad, torch.full_like(weights, 3))


def test_transfer_passes_gradcheck() -> None:
    hidden, ids, weights = batch("cpu", torch.float64, tokens=3)

    def product(hidden: Tensor, weights: Tensor) -> Tensor:
        rows, places, shares = to_host(hidden, ids, weights)
        return to_device(rows.gather(1, places) * shares, hidden.device)

    assert torch.autograd.gradcheck(product, (hidden, weights))


@devices
def test_empty_batch(device: str) -> None:
    hidden, ids, weights = batch(device, torch.float32, tokens=0)
    ours(store(0), hidden, ids, weights).sum().backward()
    assert hidden.grad.shape == (0, HIDDEN)


def test_tensors_on_two_devices_are_refused() -> None:
    hidden, ids, weights = batch("cpu", torch.float32)
    with pytest.raises(InputError, match="tensors on cpu and meta, expected all of a layer on one device"):
        to_host(hidden, ids.to("meta"), weights)


def chain(layer: Layer, device: str, trap: Callable[[Tensor], None], seed: int = 0, layers: int = 100) -> list[Tensor]:
    """Many layers one after the other, as a model has them; the numbers stay of size 1."""
    hidden, ids, weights = batch(device, torch.bfloat16, seed)
    x = hidden
    for index in range(layers):
        trap(x)
        x = x + layer(store(index % 4), x, ids.roll(index, 0), weights)
        x = x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
    x.float().sin().sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    return [x.detach(), hidden.grad, weights.grad]


def nothing(x: Tensor) -> None:
    pass


def lag_and_litter(x: Tensor) -> None:
    """The GPU falls behind, and memory that was let go of too early is overwritten: pinned, and of both streams."""
    torch.cuda._sleep(HALF_A_SECOND // 5000)
    torch.full(x.shape, torch.nan, dtype=x.dtype, pin_memory=True)
    torch.full_like(x, torch.nan)
    with torch.cuda.stream(copy_streams(x.device).to_device):
        torch.full_like(x, torch.nan)


@devices
def test_a_hundred_layers_in_flight(device: str) -> None:
    expected = chain(plain, device, nothing)
    assert all(tensor.isfinite().all() and tensor.abs().max() > 0 for tensor in expected)
    for trap in (nothing, lag_and_litter if device != "cpu" else nothing):
        for want, got in zip(expected, chain(ours, device, trap), strict=True):
            assert torch.equal(want, got)


@devices
def test_two_threads_on_one_device(device: str) -> None:
    """Each with layers of its own, on one device."""
    expected = [chain(plain, device, nothing, seed, 20) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        actual = list(threads.map(lambda seed: chain(ours, device, nothing, seed, 20), range(2)))
    for want, got in zip(expected, actual, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@on_gpu
def test_forward_on_another_stream_than_backward() -> None:
    """The GPU lags behind the host in both passes."""
    device = "cuda:0"
    expected = chain(plain, device, nothing, layers=10)
    hidden, ids, weights = batch(device, torch.bfloat16)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x = hidden
        for index in range(10):
            lag_and_litter(x)
            x = x + ours(store(index % 4), x, ids.roll(index, 0), weights)
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        loss = x.float().sin().sum()
        torch.cuda._sleep(HALF_A_SECOND // 10)
    torch.cuda.current_stream().wait_stream(other)
    loss.backward()
    for want, got in zip(expected, [x.detach(), hidden.grad, weights.grad], strict=True):
        assert torch.equal(want, got)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_layers_on_two_gpus() -> None:
    """Layers of one model alternate between two GPUs; each GPU has its own copy streams."""
    assert copy_streams(torch.device("cuda:0")) != copy_streams(torch.device("cuda:1"))
    actual = []
    for layer in (plain, ours):
        hidden, ids, weights = batch("cuda:0", torch.bfloat16)
        x = hidden
        for index in range(20):
            device = f"cuda:{index % 2}"
            x = x.to(device)
            x = x + layer(store(index % 4), x.sin(), ids.to(device), weights.to(device))
        x.float().sin().sum().backward()
        actual.append([x.detach(), hidden.grad, weights.grad])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


@on_gpu
def test_copies_wait_only_for_their_own_tensors() -> None:
    """Not the thread for what was queued after its tensors, nor for a result on its way up, nor a result for work that
    the current stream had before it."""
    device = torch.device("cuda:0")
    tensors = batch("cuda:0", torch.bfloat16)
    for _ in range(2):  # the second time kernels are loaded and memory is at hand: getting either may wait
        torch.cuda.synchronize()
        descent = start_device_to_host(tensors)
        torch.cuda._sleep(HALF_A_SECOND)
        later = torch.cuda.Event()
        later.record()
        hidden, _, _ = descent.finish()
        early = not later.query()
        ascent = start_host_to_device([hidden], device)
        copy_streams(device).to_device.synchronize()
        arrived = not later.query()
        result = ascent.finish()[0] + 1
        queued = not later.query()
        assert torch.equal(result.cpu(), tensors[0].detach().cpu() + 1)
        assert later.query()
    assert early and arrived and queued


@on_gpu
def test_pinned_memory_is_not_reused_before_its_copy_is_done() -> None:
    """A hundred results wait for a busy stream; their freed pinned copies are not reused."""
    device, count, shape = torch.device("cuda:0"), 100, (256, 64)
    side = copy_streams(device).to_device
    kept = [torch.empty(shape, pin_memory=True) for _ in range(3 * count)]  # more than will be needed, at hand
    with torch.cuda.stream(side):
        room = [torch.empty(shape, device=device) for _ in range(count)]
    del kept, room
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(HALF_A_SECOND)
    sent = [to_device(torch.full(shape, float(index)), device) for index in range(count)]
    for _ in range(count):
        torch.full(shape, torch.nan, pin_memory=True)
    assert not side.query()
    for index, tensor in enumerate(sent):
        assert (tensor == index).all()
