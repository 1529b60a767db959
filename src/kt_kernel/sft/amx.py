"""`AMXSFTMoEWrapper`, the object of `KTMoEWrapper(mode="sft")`: `BaseSFTMoEWrapper` with weights by method.

Each method loads from any source in its format (`kt_kernel.weights`), from tensors, and from the native forms of
`kt_kernel.sft.weights`; quantized weights are kept, never requantised for backward. The name stays kt-kernel's: the
kernels are those of the CPU at hand, AMX or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kt_kernel.methods import method_of
from kt_kernel.sft.base import BaseSFTMoEWrapper
from kt_kernel.sft.weights import ROLES, BlockFP8ExpertWeights, RAWINT4ExpertWeights
from kt_kernel.weights import LayerPlace, check_order, load_store, store_from_encoded, store_from_tensors
from ktransformers.checkpoint import Encoded
from ktransformers.ground.errors import InputError
from ktransformers.quant.kt_layers import write_tree_layer

BF16_MANTISSA = 7  # bits


class AMXSFTMoEWrapper(BaseSFTMoEWrapper):
    @property
    def _place(self) -> LayerPlace:
        sizes = (self.num_experts, self.hidden_size, self.moe_intermediate_size)
        return LayerPlace(self.layer_idx, *sizes, self.swiglu_limit)

    def load_weights(self, physical_to_logical_map_cpu: Tensor | None = None) -> None:
        """All experts from `weight_path`; runtime expert i is the checkpoint's `physical_to_logical_map_cpu[i]`."""
        self.use_store(load_store(self.weight_path, self._place, self.method, physical_to_logical_map_cpu))

    def load_weights_from_tensors(
        self, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor, physical_to_logical_map_cpu: Tensor | None = None
    ) -> None:
        """From gate and up `[E, I, H]` and down `[E, H, I]` in any float dtype, encoded in the method's format."""
        tensors = (gate_proj, up_proj, down_proj)
        self.use_store(store_from_tensors(*tensors, self._place, self.method, physical_to_logical_map_cpu))

    def load_block_fp8_weights(
        self, weights: BlockFP8ExpertWeights, physical_to_logical_map_cpu: Tensor | None = None
    ) -> None:
        """From e4m3 matrices and float32 scales of 128 x 128 blocks."""
        self._load_native("FP8", weights, "fp8:128x128", torch.float32, physical_to_logical_map_cpu)

    def load_rawint4_weights(
        self, weights: RAWINT4ExpertWeights, physical_to_logical_map_cpu: Tensor | None = None
    ) -> None:
        """From 4-bit values and bf16 scales of 32 columns."""
        self._load_native("RAWINT4", weights, "int4:32", torch.bfloat16, physical_to_logical_map_cpu)

    def load_mxfp4_weights(self, weights: Mapping[str, Any], physical_to_logical_map_cpu: Tensor | None = None) -> None:
        """From e2m1 values and scales of 32 columns under `gate`, `up`, `down` and `gate_scale` and so on; scales are
        powers of two in bf16, or e8m0."""
        spellings: dict[str, tuple[str, ...]] = {}
        for role in ROLES:
            spellings[role] = (role, f"{role}_proj", f"{role}_weight")
            spellings[f"{role}_scale"] = (*(f"{name}_scale" for name in spellings[role]), f"{role}_scales")
        by_role = SimpleNamespace(**{name: _entry(weights, names) for name, names in spellings.items()})
        self._load_native("MXFP4", by_role, "mxfp4", torch.uint8, physical_to_logical_map_cpu)

    def save_backward_weights_from_tensors(
        self,
        gate_proj: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        physical_to_logical_map_cpu: Tensor | None,
        output_path: str,
    ) -> None:
        """Write the layer as kt-kernel's `.kt` files, those for its backward pass included, for `threadpool_count` NUMA
        parts: for kt-kernel, because backward here reads the weights of forward."""
        bits = method_of(self.method).bits
        if not bits:
            remedy = "construct the wrapper with INT8_SFT or AMXINT4_SFT"
            raise InputError("save_backward_weights_from_tensors", f"method {self.method}", "INT8 or INT4", remedy)
        order = check_order(physical_to_logical_map_cpu, self.num_experts)
        tensors = {"gate": gate_proj, "up": up_proj, "down": down_proj}
        experts = {role: tensor.detach().cpu()[order] for role, tensor in tensors.items()}
        write_tree_layer(Path(output_path), self.layer_idx, experts, bits, self.threadpool_count, backward=True)

    def _load_native(
        self, method: str, weights: Any, spec: str, scale_dtype: torch.dtype, order: Tensor | None
    ) -> None:
        if method_of(self.method) is not method_of(method):
            raise InputError("method", self.method, f"{method}'s", "load_weights_from_tensors takes bf16")
        matrices = {}
        for role in ROLES:
            qweight = _stacked(getattr(weights, role)).contiguous().view(torch.uint8)
            scales = _stacked(getattr(weights, f"{role}_scale"))
            if scale_dtype == torch.uint8 and scales.dtype != torch.uint8:
                scales = _to_e8m0(f"{role}_scale", scales)
            columns = self.moe_intermediate_size if role == "down" else self.hidden_size
            encoded = Encoded(spec, qweight, scales.to(scale_dtype).contiguous(), columns=columns, name=role)
            matrices[role] = encoded
        self.use_store(store_from_encoded(matrices, self._place, order))


def _entry(entries: Mapping[str, Any], spellings: Sequence[str]) -> Any:
    for name in spellings:
        if name in entries:
            return entries[name]
    raise InputError(spellings[0], f"no such key among {', '.join(entries)}", f"one of {', '.join(spellings)}")


def _stacked(matrices: Tensor | Sequence[Tensor]) -> Tensor:
    return matrices if isinstance(matrices, Tensor) else torch.stack([matrix.detach().cpu() for matrix in matrices])


def _to_e8m0(name: str, scales: Tensor) -> Tensor:
    """Exponents of powers of two, exactly; other numbers are refused."""
    bits = scales.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exact = (bits & ((1 << BF16_MANTISSA) - 1) == 0) & (bits >> 15 == 0) & (bits != 0)
    if not bool(exact.all()):
        raise InputError(name, "scales that are not powers of two", "those of an MXFP4 checkpoint")
    return (bits >> BF16_MANTISSA).to(torch.uint8)  # bf16 and e8m0 have the same bias
