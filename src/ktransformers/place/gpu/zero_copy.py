"""The CPU's results to the device, past the copies that are queued.

The GPU's copy engine takes transfers in the order in which they were queued, whatever their streams: a result of 2 MB
would wait behind all the experts that are being fetched for the next layer, 20 ms of them. So a kernel reads it from
pinned host memory over the same link, at once. torch does not know of that, so the memory is held here until the kernel
is through. Without CUDA or Triton it is an ordinary copy.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ktransformers.nn.transfer import as_pinned, start_host_to_device
from ktransformers.place.gpu.device_lora import dims_in_memory
from ktransformers.place.gpu.epilogue import kernels_for


class ZeroCopyReader:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def pull(self, source: Tensor) -> Tensor:
        """A new tensor on the device with the strides of a dense `source`, in the order of the current stream."""
        kernels = kernels_for(self.device)
        if kernels is None:
            return start_host_to_device((source,), self.device).finish()[0]
        order = dims_in_memory(source)
        staged = as_pinned(source.detach().permute(order))
        out = torch.empty(staged.shape, dtype=staged.dtype, device=self.device)
        kernels.pull(staged, out, False)
        self._hold(staged)
        return out.permute([order.index(dim) for dim in range(source.dim())])

    def fill(self, out: Tensor, source: Tensor) -> None:
        """out = source; of one shape and dtype, dense, `out` on the device."""
        kernels = kernels_for(self.device)
        if kernels is None:
            out.copy_(source)
            return
        staged = as_pinned(source)
        kernels.pull(staged, out, False)
        self._hold(staged)

    def add(self, source: Tensor, out: Tensor) -> None:
        """out += source; of one shape, `out` on the device."""
        kernels = kernels_for(self.device)
        if kernels is None or not (source.is_contiguous() and out.is_contiguous()):
            out.add_(self.pull(source))
            return
        staged = as_pinned(source.detach())
        kernels.pull(staged, out, True)
        self._hold(staged)

    def _hold(self, staged: Tensor) -> None:
        while self._held and self._held[0][0].query():  # type: ignore[no-untyped-call]
            self._held.popleft()
        self._held.append((torch.cuda.current_stream(self.device).record_event(), staged))
