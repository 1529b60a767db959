"""SGLang's `KTEPWrapperMethod` with any set of experts on the GPU, none included.

Mainline has the first N experts of each layer there. Here the experts of a mask are: their weights are loaded into
slots 0 to n - 1, and ids are mapped to slots before the GPU's product, so that experts of the CPU are -1 as in
mainline. Without experts on the GPU its product is left out; without experts on the CPU there is no wrapper. Batches
above a threshold are computed on the GPU from streamed experts (`streaming.py`).

The class has to be named as mainline's: FusedMoE compares the name.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kt_kernel import KTMoEWrapper
from ktransformers.ground.errors import InputError
from ktransformers.serve.sglang import adapters, streaming
from ktransformers.serve.sglang.options import ServerOptions
from ktransformers.serve.sglang.placement import ExpertPlacement, place_experts


class _Loading(threading.local):
    """Model loaders use several threads."""

    slot_given = False  # FusedMoE's loader is being given a slot instead of an expert's number


_loading = _Loading()


class Deployment:
    """What the layers of one server share."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.streams = streaming.LayerStreams(options.gpu_prefill_token_threshold)
        self._placement: ExpertPlacement | None = None

    def placement(self) -> ExpertPlacement:
        """Read when the first layer is built: the plugin runs before SGLang has downloaded a model."""
        if self._placement is None:
            self._placement = place_experts(self.options)
        return self._placement


def masked_method(stock: type[Any], options: ServerOptions) -> type[Any]:
    """The subclass of SGLang's class for these options, under the name of that class."""
    return type("KTEPWrapperMethod", (MaskedExpertMethod, stock), {"deployment": Deployment(options)})


class MaskedExpertMethod:
    """Goes before SGLang's class, whose attributes it uses and some of whose methods it replaces."""

    deployment: Deployment
    gpu_method: Any
    kt_config: Any
    wrapper: Any
    num_gpu_experts: int
    tp_rank: int

    def __init__(self, gpu_method: Any, kt_config: Any) -> None:
        self._placement = self.deployment.placement()
        index = kt_config.layer_idx
        if index not in self._placement.on_gpu:
            expected = "layers that config.json lists with experts"
            raise InputError(f"layer {index}", "experts", expected, "start without the plugin: SGLANG_PLUGINS=none")
        self.slot_of = self._placement.slots(index)
        count = len(self._placement.on_gpu[index])
        config = replace(kt_config, num_gpu_experts=count, num_layers=self._placement.layers)
        super().__init__(gpu_method, config)  # type: ignore[call-arg]  # of SGLang's class
        self._stream: streaming.StreamedLayer | None = None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._check(layer, num_experts)
        self.global_num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size_per_partition = intermediate_size_per_partition
        self.gpu_method.create_weights(
            layer=layer,
            num_experts=self.num_gpu_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            params_dtype=params_dtype,
            **extra_weight_attrs,
        )
        device = next((weight.device for weight in layer.parameters()), torch.device("cpu"))
        # One more entry for ids of -1, which index from the end.
        self._slots = torch.tensor([*self.slot_of, -1], dtype=torch.int32, device=device)
        if self.tp_rank == 0 and self.num_gpu_experts < num_experts:
            self.wrapper = self._new_wrapper(layer, num_experts, hidden_size)
            adapters.EXPERT_LAYERS[self.kt_config.layer_idx] = self

    def _check(self, layer: Any, num_experts: int) -> None:
        name = f"layer {self.kt_config.layer_idx}"
        if getattr(layer, "moe_ep_size", 1) > 1:
            raise InputError("--ep-size", layer.moe_ep_size, "1 with --kt-weight-path", "use --tp-size instead")
        if getattr(layer, "num_fused_shared_experts", 0):
            given = f"{layer.num_fused_shared_experts} shared experts fused with routed ones"
            raise InputError(name, given, "routed experts alone", "add --disable-shared-experts-fusion")
        if num_experts != self._placement.experts:
            raise InputError(name, f"{num_experts} experts", f"{self._placement.experts}, as config.json says")
        activation = layer.moe_runner_config.activation
        if activation != "silu":
            raise InputError(name, f"activation {activation}", "silu", "serve this model with `kt serve`")

    def _new_wrapper(self, layer: Any, num_experts: int, hidden_size: int) -> Any:
        config, runner, options = self.kt_config, layer.moe_runner_config, self.deployment.options
        limit = getattr(runner, "gemm1_clamp_limit", None) or getattr(runner, "swiglu_limit", None)
        deferred = config.max_deferred_experts_per_token or 0
        return KTMoEWrapper(
            layer_idx=config.layer_idx,
            num_experts=num_experts,
            num_experts_per_tok=layer.top_k,
            hidden_size=hidden_size,
            moe_intermediate_size=layer.intermediate_size_per_partition * layer.moe_tp_size,
            gpu_experts_mask=torch.tensor([slot >= 0 for slot in self.slot_of]),
            cpuinfer_threads=config.cpuinfer_threads,
            threadpool_count=config.threadpool_count,
            numa_nodes=None if options.numa_nodes is None else list(options.numa_nodes),
            weight_path=config.weight_path,
            chunked_prefill_size=config.chunked_prefill_size,
            method=config.method,
            max_deferred_experts_per_token=deferred if self._placement.may_defer(config.layer_idx) else 0,
            swiglu_limit=float(limit or 0.0),
            swiglu_alpha=float(getattr(runner, "gemm1_alpha", None) or 0.0),
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.num_gpu_experts and hasattr(self.gpu_method, "process_weights_after_loading"):
            self.gpu_method.process_weights_after_loading(layer)
        if self.wrapper is None:
            return
        self.wrapper.load_weights(self._physical_to_logical())
        device = self._slots.device
        self._stream = self.deployment.streams.add(self.wrapper, device)
        adapters.pack_for_every_request(self.deployment.options, self)

    def _physical_to_logical(self) -> Tensor:
        from sglang.srt.eplb.expert_location_dispatch import get_global_expert_location_metadata  # type: ignore[import-not-found]

        metadata = get_global_expert_location_metadata()
        table = None if metadata is None else metadata.physical_to_logical_map_cpu
        if table is None:  # a model without expert parallelism
            return torch.arange(self.global_num_experts, dtype=torch.int64)
        row: Tensor = table[self.kt_config.layer_idx].contiguous()
        return row

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        self.moe_runner_config = moe_runner_config
        # The model multiplies the sum of both shares by routed_scaling_factor.
        config = replace(moe_runner_config, num_local_experts=self.num_gpu_experts, routed_scaling_factor=None)
        self.gpu_method.create_moe_runner(layer, config)

    def apply(self, layer: nn.Module, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput  # type: ignore[import-not-found]

        topk = _standard_topk(dispatch_output)
        hidden, ids, weights = dispatch_output.hidden_states, topk.topk_ids, topk.topk_weights
        if self._stream is not None and self._stream.takes(hidden):
            return StandardCombineInput(hidden_states=self._stream.forward(hidden, ids, weights))
        stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
        if self.wrapper is not None:
            self.wrapper.submit_forward(hidden, ids, weights, stream)
        output = None
        if self.num_gpu_experts:
            on_gpu = topk._replace(topk_ids=self._slots[ids.long()])
            output = self.gpu_method.apply(layer, dispatch_output._replace(topk_output=on_gpu)).hidden_states
        if self.wrapper is not None:
            cpu_output = self.wrapper.sync_forward(hidden, stream)
            output = cpu_output if output is None else output + cpu_output
        elif output is None:  # a rank without a wrapper: rank 0 adds all experts
            output = torch.zeros_like(hidden)
        return StandardCombineInput(hidden_states=output)


def _standard_topk(dispatch_output: Any) -> Any:
    """Ids and weights; some runners of the GPU leave routing to their kernels."""
    topk = dispatch_output.topk_output
    return topk if hasattr(topk, "topk_ids") else topk.to_standard()


def load_into_slot(
    original: Any, layer: Any, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
) -> None:
    """Around FusedMoE._weight_loader_physical, and the `_weight_loader_impl` that it calls: the slot of an expert on
    the GPU in place of its number. Mainline calls the inner one with an expert's number too, without asking whether it
    is on the GPU, for models that have no expert parallelism."""
    slots = None if _loading.slot_given else getattr(layer.quant_method, "slot_of", None)
    if slots is None:
        original(layer, param, loaded_weight, weight_name, shard_id, expert_id)
    elif slots[expert_id] >= 0:
        _loading.slot_given = True
        try:
            original(layer, param, loaded_weight, weight_name, shard_id, slots[expert_id])
        finally:
            _loading.slot_given = False
