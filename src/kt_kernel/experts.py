"""`KTMoEWrapper`: the factory by which programs written for kt-kernel make the experts of a layer.

It takes the arguments of kt-kernel 0.7.2 and of 0.5.0 and earlier, by position or by name: where 0.5.1 put
`gpu_experts_mask`, earlier versions and stock SGLang give `num_gpu_experts`, the number of experts from 0 on that the
GPU computes. If both are given, the mask counts.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kt_kernel.batch_buffers import KExpertsCPUBuffer
from kt_kernel.methods import METHODS, SFT_METHODS, SKIP_LORA
from kt_kernel.utils.amx import AMXMoEWrapper, NativeMoEWrapper
from ktransformers.ground.errors import InputError


class KTMoEWrapper:
    def __new__(  # a factory: the object is one of the wrappers
        cls,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: Tensor | int | None = None,
        cpuinfer_threads: int | None = 0,
        threadpool_count: int = 1,
        weight_path: str = "",
        chunked_prefill_size: int | None = 512,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "AMXINT4",
        numa_nodes: list[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int | None = None,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
    ) -> Any:
        given = dict(locals())
        if mode == "sft":
            from kt_kernel.sft.amx import AMXSFTMoEWrapper

            _check_method(method, mode, SFT_METHODS)
            wrapper: type[Any] = AMXSFTMoEWrapper
        elif mode == "inference":
            _check_method(method, mode, METHODS)
            wrapper = NativeMoEWrapper if METHODS[method].native else AMXMoEWrapper
            given["gpu_experts_mask"] = _mask(gpu_experts_mask, num_gpu_experts, num_experts)
        else:
            raise InputError("mode", repr(mode), "'inference' or 'sft'")
        # A wrapper's fields are those of the arguments that it takes.
        return wrapper(**{entry.name: given[entry.name] for entry in fields(wrapper) if entry.init})

    @staticmethod
    def set_capture_batch_sizes(capture_bs: list[int]) -> None:
        """Announce batch sizes that will be captured. Addresses are stable without it: buffers are not by size."""
        KExpertsCPUBuffer.capture_bs = list(capture_bs)

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        return list(KExpertsCPUBuffer.capture_bs)

    @staticmethod
    def clear_buffer_cache() -> None:
        """Free the buffers of batches; captured graphs must not be replayed afterwards."""
        KExpertsCPUBuffer.clear_cache()

    @staticmethod
    def clear_sft_buffer_cache() -> None:
        """Nothing to free: buffers of training return to a pool with their last reference."""


def _check_method(method: str, mode: str, known: dict[str, Any]) -> None:
    if method.removesuffix(SKIP_LORA if mode == "sft" else "") not in known:
        raise InputError("method", repr(method), f"for mode {mode!r} one of {', '.join(known)}")


def _mask(mask: Tensor | int | None, first: int | None, experts: int) -> Tensor:
    """A number in the mask's place is that of kt-kernel 0.5.0 and earlier, which had `num_gpu_experts` there."""
    if isinstance(mask, Tensor):
        return mask
    count = (first or 0) if mask is None else mask
    if not 0 <= count <= experts:
        raise InputError("num_gpu_experts", count, f"0 to {experts}")
    return torch.arange(experts, device="cpu") < count
