"""The two kinds of inference wrappers: experts quantised by kt-kernel's converter, or in the format of a release."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from kt_kernel.experts_base import BaseMoEWrapper
from ktransformers.errors import InputError


class AMXMoEWrapper(BaseMoEWrapper):
    """Methods AMXINT4, AMXINT8, MOE_INT4, MOE_INT8 and LLAMAFILE."""


class NativeMoEWrapper(BaseMoEWrapper):
    """Methods that keep a released format, in which single experts can be written back for a GPU."""

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """Write an expert in the release's layout to host memory at these addresses, one for each of `gpu_tp_count`
        ranks: a rank's rows of gate, then those of up, and its columns of down."""
        if self.method != "BF16":
            remedy = "BF16, or let `kt serve` stream experts in any format"
            raise InputError("submit_write_weight_scale_to_buffer", f"method {self.method}", "BF16", remedy)
        store = self._loaded()
        if self.moe_intermediate_size % gpu_tp_count or len(w13_weight_ptrs) < gpu_tp_count:
            given = f"{gpu_tp_count} ranks for {self.moe_intermediate_size} rows and {len(w13_weight_ptrs)} addresses"
            raise InputError("gpu_tp_count", given, "a divisor of the intermediate size, with an address for each rank")
        gate, up, down = (store.decode(role, expert_id) for role in ("gate", "up", "down"))
        rows = self.moe_intermediate_size // gpu_tp_count
        for rank in range(gpu_tp_count):
            part = slice(rank * rows, (rank + 1) * rows)
            size = _write(w13_weight_ptrs[rank], gate[part])
            _write(w13_weight_ptrs[rank] + size, up[part])
            _write(w2_weight_ptrs[rank], down[:, part].contiguous())

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Nothing to wait for: the expert was written when the call above returned."""


def _write(address: int, tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    ctypes.memmove(address, tensor.data_ptr(), size)
    return size
