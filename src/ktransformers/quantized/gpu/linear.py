"""A packed weight `[N, K]` of a linear layer in GPU memory: products, and dequantized rows.

On a GPU with Triton the weight lies in words of 32 bits (`words.py`), and as many rows of x as
`linear_triton.configuration` has tiles for (64, 128 on capability 9) are multiplied with these words, so only packed
bytes are read. More rows, formats without such a layout (theirs is the CPU's) and other dtypes than bf16 dequantize
PANEL values of the weight at a time for torch's product. Both multiply the same bf16 values. Nothing waits for the
host, and what is allocated has a size that the shapes determine, so calls can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.ground.current_device import on_device
from ktransformers.ground.errors import KTError
from ktransformers.ground.packages import import_triton_module
from ktransformers.quantized.gpu.dequantize import TRITON as DECODERS
from ktransformers.quantized.gpu.dequantize import decode
from ktransformers.quantized.gpu.layout import TILE_N, PackedMatrix, format_of
from ktransformers.quantized.gpu.words import WordLayout, from_words, to_words, word_layout

TRITON = "ktransformers.quantized.gpu.linear_triton"
# Values of a weight that are dequantized at a time: 256 MiB in bf16.
PANEL = 1 << 27
BLOCK_ROWS = 2 * TILE_N
CHECKED_ROWS = 256  # of a weight, when its products are checked
CHECKED_BATCHES = (1, 16, 32, 64, 128)  # rows of x: each has another tile or kernel
TOLERANCE = 1e-2  # of float32 products in tf32 and results in bf16
GATHERED = 256  # rows that are looked up at a time


def packed_linear(rows: int, columns: int, spec: str) -> PackedMatrix:
    """The layout of a linear layer's weight."""
    form = format_of(spec)
    return PackedMatrix(rows, columns, (form, form), paired=False)


class GpuLinearWeight:
    """One packed weight on a device: uint8 `[bytes]`, as `_core.CodedLinear.memory()` has them, or the int32
    words of `layout`."""

    def __init__(self, packed: Tensor, matrix: PackedMatrix, layout: WordLayout | None = None) -> None:
        self.packed, self.matrix, self.layout = packed, matrix, layout
        self._kernels: Any = None
        if layout is None:
            self._first = torch.zeros(1, dtype=torch.int32, device=packed.device)  # the decoders' only slot
        else:
            self._kernels = import_triton_module(TRITON)
            self._parts = layout.parts_of(packed)
            self._space = self._kernels.workspace(layout, packed.device)

    @classmethod
    def of(cls, packed: Tensor, matrix: PackedMatrix) -> GpuLinearWeight:
        """From bytes in the CPU's layout, converted where the device has a product with words."""
        layout = word_layout(matrix) if packed.is_cuda and import_triton_module(TRITON) is not None else None
        words = None if layout is None else to_words(packed, layout)
        return cls(packed, matrix) if words is None else cls(words, matrix, layout)

    @property
    def bytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()

    def packed_on_host(self) -> Tensor:
        """uint8 in the CPU's layout."""
        packed = self.packed if self.layout is None else from_words(self.packed, self.layout)
        return packed.cpu()

    def moved(self, device: torch.device) -> GpuLinearWeight:
        """To another GPU."""
        return GpuLinearWeight(self.packed.to(device), self.matrix, self.layout)

    def check(self) -> bool:
        """Compare products with the packed weight with those of the dequantized weight on this device, and raise if
        they differ. Returns False where there is nothing to compare: the weight is dequantized first, or its rows are
        zero."""
        if self._kernels is None:
            return False
        generator = torch.Generator().manual_seed(0)
        height = min(self.matrix.rows, CHECKED_ROWS)
        decoded = self.decoded(0, height).float()
        if not decoded.any():
            return False
        for rows in CHECKED_BATCHES:
            x = torch.randn(rows, self.matrix.columns, generator=generator).bfloat16().to(self.packed.device)
            expected = x.float() @ decoded.T
            difference = float((self.multiply(x)[:, :height].float() - expected).norm() / expected.norm())
            if not difference < TOLERANCE:
                raise KTError(
                    f"products with the packed {self.matrix.formats[0].spec} weight `[{self.matrix.rows}, "
                    f"{self.matrix.columns}]` on {self.packed.device} differ by {difference:.2g} from those of "
                    "the dequantized one; this is a defect of ktransformers or of Triton. --rest bf16 keeps it dense"
                )
        return True

    @property
    def _decodes_by_distance(self) -> bool:
        kernels = import_triton_module(DECODERS) if self.packed.is_cuda else None
        return kernels is not None and self.matrix.block_bytes % BLOCK_ROWS == 0 and kernels.supports(self.matrix)

    @property
    def reads_packed(self) -> bool:
        """Whether few rows are multiplied without dequantizing."""
        return self._kernels is not None

    def multiply(self, x: Tensor) -> Tensor:
        """x `[rows, K]` -> `[rows, N]` in its dtype."""
        config = self._configuration(x)
        if config is not None:
            with on_device(self.packed.device):
                out: Tensor = self._kernels.product(x.contiguous(), self._parts, self.layout, self._space, config)
            return out
        parts = [F.linear(x, panel.to(x.dtype)) for _, panel in self.panels()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _configuration(self, x: Tensor) -> Any:
        """Tiles of the product with packed words. None if the weight is dequantized first."""
        if self._kernels is None or not x.shape[0] or x.dtype != torch.bfloat16:
            return None
        return self._kernels.configuration(x.shape[0], self.layout, self._kernels.card_of(x.device))

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        """grad `[rows, N]` -> `[rows, K]`, the gradient of x."""
        total: Tensor | None = None
        for first, panel in self.panels():
            part = grad[:, first : first + panel.shape[0]] @ panel.to(grad.dtype)
            if panel.shape[0] == self.matrix.rows:
                return part
            total = part.float() if total is None else total.add_(part)
        assert total is not None
        return total.to(grad.dtype)

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows by index, int64 `[n]` -> bf16 `[n, K]`. In the CPU's layout the blocks of 32 rows around them are
        dequantized."""
        if self._kernels is not None:
            out = self._numbers(rows.shape[0])
            with on_device(self.packed.device):
                self._kernels.decode(self._parts, self.layout, out, numbers=rows)
            return out
        parts = [self._gathered(chosen) for chosen in torch.split(rows, GATHERED)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gathered(self, rows: Tensor) -> Tensor:
        count, block = rows.shape[0], replace(self.matrix, rows=BLOCK_ROWS)
        blocks = self.packed.view(-1, self.matrix.block_bytes)[rows // BLOCK_ROWS]
        out = torch.empty(count, BLOCK_ROWS, block.columns, dtype=torch.bfloat16, device=rows.device)
        numbers = torch.arange(count, dtype=torch.int32, device=rows.device)
        decode(blocks, range(count), numbers, block, out)
        return out[numbers, rows % BLOCK_ROWS]

    def panels(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, bf16 rows), PANEL values at a time."""
        height = max(1, PANEL // (BLOCK_ROWS * self.matrix.columns)) * BLOCK_ROWS
        for first in range(0, self.matrix.rows, height):
            yield first, self.decoded(first, min(first + height, self.matrix.rows))

    def decoded_groups(self, first: int, rows: int, step: int) -> Tensor:
        """bf16 `[N / step, rows, K]`: rows first .. first + rows - 1 of every `step` rows, all multiples of 32."""
        assert not any(size % BLOCK_ROWS for size in (first, rows, step)) and self.matrix.rows % step == 0
        count, part = self.matrix.rows // step, replace(self.matrix, rows=rows)
        if self._kernels is not None:
            numbers = self._numbers(count * rows)
            with on_device(self.packed.device):
                self._kernels.decode(self._parts, self.layout, numbers, first, groups=(rows, step))
            return numbers.view(count, rows, -1)
        if not self._decodes_by_distance:
            return self.decoded(0, self.matrix.rows).view(count, step, -1)[:, first : first + rows]
        size = self.matrix.block_bytes // BLOCK_ROWS  # of a row, in a whole block
        distances = size * torch.arange(first, self.matrix.rows, step, dtype=torch.int64, device=self.packed.device)
        out = torch.empty(count, rows, part.columns, dtype=torch.bfloat16, device=self.packed.device)
        decode(self.packed.view(1, -1), (), distances, part, out)
        return out

    def decoded(self, first: int, last: int) -> Tensor:
        """Rows first .. last - 1 in bf16; in the CPU's layout blocks of 32 rows are dequantized whole."""
        if self._kernels is not None:
            numbers = self._numbers(last - first)
            with on_device(self.packed.device):
                self._kernels.decode(self._parts, self.layout, numbers, first)
            return numbers
        start = first // BLOCK_ROWS
        blocks = -(-last // BLOCK_ROWS) - start
        part = replace(self.matrix, rows=min(blocks * BLOCK_ROWS, self.matrix.rows - start * BLOCK_ROWS))
        size = self.matrix.block_bytes
        out = torch.empty(1, part.rows, part.columns, dtype=torch.bfloat16, device=self.packed.device)
        decode(self.packed[start * size : (start + blocks) * size].view(1, -1), (0,), self._first, part, out)
        return out[0, first - start * BLOCK_ROWS : last - start * BLOCK_ROWS]

    def _numbers(self, rows: int) -> Tensor:
        return torch.empty(rows, self.matrix.columns, dtype=torch.bfloat16, device=self.packed.device)
