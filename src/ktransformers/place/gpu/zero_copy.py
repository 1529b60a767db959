"""The CPU's results to the device, read by a kernel from pinned host memory instead of being copied.

The GPU's copy engine runs transfers in the order in which they were queued, whatever their streams: a result of 2 MB
would wait behind all experts that are being prefetched for the next layer, 20 ms of them. So a kernel reads the result
from pinned memory over the same link, at once. torch does not see that read, so the memory is held here until the
kernel has finished. Without CUDA or Triton it is an ordinary copy.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ktransformers.experts.transfer import as_pinned, start_host_to_device
from ktransformers.place.gpu.device_lora import dims_in_memory
from ktransformers.place.gpu.epilogue import kernels_for


class ZeroCopyReader:
    """Reads host tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in_use: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def pull(self, source: Tensor) -> Tensor:
        """A new tensor on the device with the strides of a dense `source`, ordered on the current stream."""
        kernels = kernels_for(self.device)
        if kernels is None:
            return start_host_to_device((source,), self.device).finish()[0]
        order = dims_in_memory(source)
        staged = as_pinned(source.detach().permute(order))
        out = torch.empty(staged.shape, dtype=staged.dtype, device=self.device)
        kernels.zero_copy(staged, out, False)
        self._hold(staged)
        return out.permute([order.index(dim) for dim in range(source.dim())])

    def fill(self, out: Tensor, source: Tensor) -> None:
        """out = source; of one shape and dtype, dense, `out` on the device."""
        kernels = kernels_for(self.device)
        if kernels is None:
            out.copy_(source)
            return
        staged = as_pinned(source)
        kernels.zero_copy(staged, out, False)
        self._hold(staged)

    def add(self, source: Tensor, out: Tensor) -> None:
        """out += source; of one shape, `out` on the device."""
        kernels = kernels_for(self.device)
        if kernels is None or not (source.is_contiguous() and out.is_contiguous()):
            out.add_(self.pull(source))
            return
        staged = as_pinned(source.detach())
        kernels.zero_copy(staged, out, True)
        self._hold(staged)

    def _hold(self, staged: Tensor) -> None:
        while self._in_use and self._in_use[0][0].query():  # type: ignore[no-untyped-call]
            self._in_use.popleft()
        self._in_use.append((torch.cuda.current_stream(self.device).record_event(), staged))
