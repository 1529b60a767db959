"""Results of the CPU read by the device equal a copy, whatever is queued before and reuses the memory afterwards."""

from __future__ import annotations

import pytest
import torch

from ktransformers.place.gpu.zero_copy import ZeroCopyReader

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pinned", [False, True])
def test_zero_copy_equals_a_copy(device: str, dtype: torch.dtype, pinned: bool) -> None:
    puller, on = ZeroCopyReader(torch.device(device)), torch.device(device)
    pinned = pinned and on.type == "cuda"
    torch.manual_seed(0)
    for shape in ((3, 5), (70, 129), (0, 4)):
        source = torch.randn(shape).to(dtype)
        source = source.pin_memory() if pinned else source
        assert torch.equal(puller.pull(source).cpu(), source)
        out = torch.randn(shape, device=on)
        wanted = out.cpu() + source.float()
        puller.add(source, out)
        assert torch.equal(out.cpu(), wanted)
        numbers = torch.randint(-(1 << 60), 1 << 60, shape)
        there = torch.empty_like(numbers, device=on)
        puller.fill(there, numbers)
        assert torch.equal(there.cpu(), numbers)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_are_preserved(device: str) -> None:
    puller, on = ZeroCopyReader(torch.device(device)), torch.device(device)
    torch.manual_seed(0)
    source = torch.randn(4, 6, 5).permute(2, 0, 1)
    found = puller.pull(source)
    assert torch.equal(found.cpu(), source)
    out = torch.zeros(5, 4, 6, device=on)
    puller.add(source, out)
    assert torch.equal(out.cpu(), source)
    turned = torch.zeros(6, 5, 4, device=on).permute(1, 2, 0)
    puller.add(source, turned)
    assert torch.equal(turned.cpu(), source)


@pytest.mark.gpu
def test_host_memory_is_held_until_it_is_read() -> None:
    """Pinned memory that was let go of is given out again; what it held must have been read by then."""
    device = torch.device("cuda:0")
    puller = ZeroCopyReader(device)
    found = []
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the kernels below run a tenth of a second from now
    for value in range(8):
        source = torch.full((1 << 16,), float(value), pin_memory=True)
        found.append(puller.pull(source))
        del source
    for value, tensor in enumerate(found):
        assert bool((tensor == value).all())
