"""The table of an input embedding that stays in host memory while its model is on a GPU.

A step looks up one row a token, 14 KB of the 1.85 GB of DeepSeek-V3's table, so the table needs no GPU memory: it is
pinned, and a kernel reads the rows over the bus (`host_rows_triton.py`). Token ids are read on the device, nothing
waits for the host, and the kernel is part of captured CUDA graphs. `HostRows` stands behind a `QuantizedWeight`
(`quantized/weight.py`), which is a frozen parameter on the GPU to everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.ground.current_device import on_device
from ktransformers.ground.errors import KTError
from ktransformers.ground.packages import import_triton_module

if TYPE_CHECKING:
    from ktransformers.quantized.weight import QuantizedWeight

TRITON = "ktransformers.quantized.host_rows_triton"
CHECKED_ROWS = 8


@dataclass(eq=False)
class HostRows:
    """A dense weight in host memory behind a `QuantizedWeight`; `location` is the device on which the model
    computes."""

    rows: Tensor  # [N, K], pinned if there is a GPU
    location: torch.device = field(default_factory=lambda: torch.device("cpu"))
    order: None = None
    identity: object = field(default_factory=object)

    @property
    def bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def decoded(self, weight: QuantizedWeight, first: int, last: int) -> Tensor:
        rows = self.rows[first:last].to(weight.decoded_dtype)
        return rows.clone() if self.location.type == "cpu" else rows.to(self.location)

    def gathered(self, weight: QuantizedWeight, rows: Tensor) -> Tensor:
        if self.location.type == "cpu":
            return self.rows[rows]
        kernels = import_triton_module(TRITON)
        if kernels is None:
            return self.rows[rows.cpu()].to(self.location)
        out = torch.empty(rows.shape[0], self.rows.shape[1], dtype=self.rows.dtype, device=self.location)
        with on_device(self.location):
            kernels.gather(self.rows, rows, out)
        return out

    def multiply(self, weight: QuantizedWeight, x: Tensor) -> Tensor:
        return F.linear(x, self.decoded(weight, 0, self.rows.shape[0]).to(x.dtype))

    def multiply_transposed(self, weight: QuantizedWeight, grad: Tensor) -> Tensor:
        return grad @ self.decoded(weight, 0, self.rows.shape[0]).to(grad.dtype)

    def moved(self, device: torch.device) -> HostRows:
        """The same memory, for a model on another device."""
        return replace(self, location=device)

    def check(self, weight: QuantizedWeight) -> None:
        """Raise unless the device reads the rows that the host has."""
        count = self.rows.shape[0]
        numbers = torch.linspace(0, count - 1, min(count, CHECKED_ROWS)).long()
        if not torch.equal(self.gathered(weight, numbers.to(self.location)).cpu(), self.rows[numbers]):
            raise KTError(
                f"{self.location} does not read the rows of the embedding that host memory has; "
                "this is a defect of ktransformers or of the driver. --rest bf16 keeps the embedding on the GPU"
            )
