"""The two kinds of inference wrappers: experts quantised by kt-kernel's converter, or in the format of a release."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kt_kernel.experts_base import BaseMoEWrapper
from kt_kernel.weights import check_order, open_layer
from kt_kernel.write_back import split_for_ranks, write
from ktransformers.checkpoint import Encoded
from ktransformers.checkpoint.sources import LayerSource


class AMXMoEWrapper(BaseMoEWrapper):
    """Methods AMXINT4, AMXINT8, MOE_INT4, MOE_INT8 and LLAMAFILE."""


class NativeMoEWrapper(BaseMoEWrapper):
    """Methods that keep a released format, in which single experts can be written back for a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._order = list(range(self.num_experts))
        self._files: LayerSource | None = None

    def load_weights(self, physical_to_logical_map_cpu: Tensor | None = None) -> None:
        self._order = check_order(physical_to_logical_map_cpu, self.num_experts)
        super().load_weights(physical_to_logical_map_cpu)

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """Write an expert to host memory at these addresses, one for each of `gpu_tp_count` ranks, in the layout of
        `write_back.py`."""
        for rank, part in enumerate(split_for_ranks(self._released(expert_id), gpu_tp_count)):
            write(w13_weight_ptrs[rank], part.w13)
            write(w2_weight_ptrs[rank], part.w2)
            if part.w13_scale is not None:
                write(w13_scale_ptrs[rank], part.w13_scale)
                write(w2_scale_ptrs[rank], part.w2_scale)

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Nothing to wait for: the expert was written when the call above returned."""

    def _released(self, expert: int) -> dict[str, Tensor | Encoded]:
        """Gate, up and down of an expert, in the bytes of the release: bf16 from the packed experts, anything else from
        the files, whose pages the system keeps as long as memory allows."""
        store = self._loaded()
        if set(store.formats.values()) == {"bf16"}:
            return {role: store.decode(role, expert)[None] for role in ("gate", "up", "down")}
        if self._files is None:
            self._files = open_layer(self.weight_path, self._place)
        assert self._files.expert is not None
        return self._files.expert(self._order[expert]).tensors
