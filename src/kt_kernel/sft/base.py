"""`BaseSFTMoEWrapper`: the experts of one layer with LoRA, forward and backward, under kt-kernel's names of methods.

Shapes: E experts, K per token, H hidden, I intermediate, T tokens, r rank; hidden states bf16 `[T, H]`, ids int64 and
routing weights float32 `[T, K]`, other dtypes are cast. The computing is `ExpertStore`'s
(`ktransformers.experts.store`). The six LoRA tensors belong to the caller: A `[E, r, H]` of gate and up and `[E, r, I]`
of down, B `[E, I, r]` and `[E, H, r]`; backward writes their gradients into buffers of the same shapes. Tensors on a
GPU are copied to the host and results back.

A forward pass with `save_for_backward` pushes what backward needs on a stack of `max_cache_depth` entries, and a
backward pass pops the last one. LoRA's dropout acts in saving passes, and in passes that do not save but lie inside a
checkpointed block, whose recomputation draws the same seed from torch's generator; in all other passes it is off.
`submit_*` computes in a thread of the process, so that the caller's GPU work goes on.

Any number of tokens is computed: `chunked_prefill_size` bounds nothing, because no buffer has its size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from kt_kernel.experts_base import BaseMoEWrapper
from kt_kernel.kt_kernel_ext import CPUInfer
from kt_kernel.sft.checkpoint_cache import CheckpointCacheState, CheckpointOutputCache
from kt_kernel.sft.errors import KTAMXNotAvailableError
from kt_kernel.sft.optimizer_grads import OptimizerGrads
from ktransformers import _core
from ktransformers.experts import buffer_pool
from ktransformers.experts.checkpointing import inside_checkpointed_block
from ktransformers.experts.lora import CORE_ROLES, ExpertLora, packed_adapter
from ktransformers.experts.store import NO_DROPOUT, Dropout, ExpertStore
from ktransformers.experts.transfer import DeviceToHost, start_device_to_host, start_host_to_device
from ktransformers.ground.errors import InputError
from ktransformers.ground.pool import avoid_pool_cpus

LORA_NAMES = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
FROZEN = "the experts' own weights are frozen here: train LoRA on them, or the stock model without ktransformers"

_workers: list[ThreadPoolExecutor] = []  # at most one: passes run in the order of their submission
os.register_at_fork(after_in_child=_workers.clear)


def _worker() -> ThreadPoolExecutor:
    if not _workers:
        _workers.append(ThreadPoolExecutor(1, "kt-sft", initializer=avoid_pool_cpus))
    return _workers[0]


@dataclass(frozen=True)
class SavedForward:
    """What a backward pass needs of a forward pass."""

    hidden: Tensor  # bf16 [T, H], in host memory like the rest
    ids: Tensor
    weights: Tensor
    keep: Tensor  # gate and up of every row
    dropout: Dropout
    shape: torch.Size  # of the caller's hidden states


@dataclass(frozen=True)
class LoraBuffers:
    """The caller's LoRA tensors and gradient buffers, in the order of `LORA_NAMES`, and what the core takes."""

    weights: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    factors: ExpertLora


@dataclass(frozen=True)
class PendingPass:
    result: Future[Any]
    device: torch.device


class BaseSFTMoEWrapper:
    """Constructed by `KTMoEWrapper(mode="sft")`. A subclass loads weights into `store`."""

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        *,
        num_gpu_experts: int = 0,
        cpuinfer_threads: int = 0,
        threadpool_count: int = 1,
        weight_path: str = "",
        chunked_prefill_size: int = 512,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        full_weight_grad: bool = False,
        swiglu_limit: float = 0.0,
        trains_lora: bool = True,
    ) -> None:
        sizes = {"num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok, "hidden_size": hidden_size}
        sizes |= {"moe_intermediate_size": moe_intermediate_size, "max_cache_depth": max_cache_depth}
        for name, size in (sizes | {"lora_rank": lora_rank}).items():
            if size < 1:
                remedy = "leave init_lora_weights out to compute without LoRA" if name == "lora_rank" else ""
                raise InputError(name, size, "at least 1", remedy)
        if not 0 <= num_gpu_experts <= num_experts:
            raise InputError("num_gpu_experts", num_gpu_experts, f"0 to {num_experts}")
        if not 0 <= lora_dropout < 1:
            raise InputError("lora_dropout", lora_dropout, "at least 0 and less than 1")
        if full_weight_grad:
            raise InputError("full_weight_grad", True, "False", FROZEN)
        self.layer_idx, self.num_experts, self.num_experts_per_tok = layer_idx, num_experts, num_experts_per_tok
        self.hidden_size, self.moe_intermediate_size = hidden_size, moe_intermediate_size
        self.num_gpu_experts, self.weight_path = num_gpu_experts, weight_path
        self.cpuinfer_threads, self.threadpool_count = cpuinfer_threads, threadpool_count
        self.chunked_prefill_size, self.max_cache_depth = chunked_prefill_size, max_cache_depth
        self.lora_rank, self.lora_alpha, self.lora_dropout = lora_rank, lora_alpha, lora_dropout
        self.lora_scaling = lora_alpha / lora_rank
        self.full_weight_grad, self.swiglu_limit = full_weight_grad, swiglu_limit
        self.share_backward_bb = False  # of no effect: backward reads the packed weights of forward
        self.cpu_infer = CPUInfer.shared(cpuinfer_threads, threadpool_count)
        self.store: ExpertStore | None = None
        self._trains_lora = trains_lora
        self._skip = torch.arange(num_experts, device="cpu") < num_gpu_experts if num_gpu_experts else None
        self._lora: LoraBuffers | None = None
        self._packed: tuple[_core.Adapter, ...] = ()
        self._packed_versions: tuple[int, ...] | None = None  # of the LoRA tensors when they were packed
        self._saved: list[SavedForward] = []
        self._inference: BaseMoEWrapper | None = None
        self._inference_hidden: Tensor | None = None
        self._forward: PendingPass | None = None
        self._backward: PendingPass | None = None
        self._checkpoint_output = CheckpointOutputCache()
        self._optimizer_grads = OptimizerGrads()

    @property
    def lora_initialized(self) -> bool:
        return self._lora is not None

    # LoRA.

    def init_lora_weights(
        self,
        gate_lora_a: Tensor,
        gate_lora_b: Tensor,
        up_lora_a: Tensor,
        up_lora_b: Tensor,
        down_lora_a: Tensor,
        down_lora_b: Tensor,
        grad_gate_lora_a: Tensor,
        grad_gate_lora_b: Tensor,
        grad_up_lora_a: Tensor,
        grad_up_lora_b: Tensor,
        grad_down_lora_a: Tensor,
        grad_down_lora_b: Tensor,
    ) -> None:
        """Use these tensors, in host memory, as LoRA and for its gradients; they are read and written in place."""
        weights = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b)
        grads = (grad_gate_lora_a, grad_gate_lora_b, grad_up_lora_a, grad_up_lora_b, grad_down_lora_a, grad_down_lora_b)
        for name, shape, weight, grad in zip(LORA_NAMES, self._lora_shapes(), weights, grads, strict=True):
            for label, tensor in ((name, weight), (f"grad_{name}", grad)):
                if tensor.device.type != "cpu" or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
                    given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                    raise InputError(label, given, f"floats {list(shape)} in host memory, bf16 for kt-kernel")
                if not tensor.is_contiguous():
                    raise InputError(label, f"strides {list(tensor.stride())}", "a contiguous tensor")
        weights = tuple(tensor.detach() for tensor in weights)  # type: ignore[assignment]
        scales = (self.lora_scaling,) * 3
        self._packed_versions = None
        self._lora = LoraBuffers(
            weights, tuple(grad.detach() for grad in grads), ExpertLora.of_tensors(CORE_ROLES, weights, scales)
        )
        self.update_lora_weights()

    def _lora_shapes(self) -> list[tuple[int, int, int]]:
        experts, rank, hidden, inner = self.num_experts, self.lora_rank, self.hidden_size, self.moe_intermediate_size
        first = [(experts, rank, hidden), (experts, inner, rank)]
        return [*first, *first, (experts, rank, inner), (experts, hidden, rank)]

    def update_lora_weights(self) -> None:
        """Read the six LoRA tensors again, after a write that torch does not see (through `.data` or an address);
        torch's own writes are noticed without this."""
        if self._lora is None:
            raise RuntimeError("LoRA tensors are missing: call init_lora_weights first")
        increment_version([tensor for tensor in self._lora.weights if not tensor.is_inference()])
        if self.store is not None:
            self._adapters()

    def _adapters(self) -> Sequence[_core.Adapter]:
        """The LoRA tensors as the core has them, packed again if a version counter has changed."""
        if self._lora is None:
            return ()
        weights = self._lora.weights
        versions = None if weights[0].is_inference() else tuple(tensor._version for tensor in weights)
        if versions is None or versions != self._packed_versions:
            self._packed = (packed_adapter(self._loaded(), self._lora.factors),)
            self._packed_versions = versions
        return self._packed

    def use_store(self, store: ExpertStore) -> None:
        """Compute with these experts."""
        self.store, self._inference, self._packed_versions = store, None, None
        if self._lora is not None:
            self.update_lora_weights()
        if torch.cuda.is_available():  # its pinned memory cannot be allocated while a stream is captured
            self._inference_wrapper()

    def _loaded(self) -> ExpertStore:
        if self.store is None:
            raise RuntimeError(f"layer {self.layer_idx} has no weights yet: call load_weights first")
        return self.store

    # Forward.

    def forward(
        self,
        hidden_states: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        save_for_backward: bool = True,
        output_device: torch.device | str | None = None,
    ) -> Tensor:
        """Sum over K of weight * expert(hidden) in bf16, in the shape of the hidden states. Ids outside [0, E) and
        experts below `num_gpu_experts` contribute nothing."""
        copy, dropout = self._begin(hidden_states, expert_ids, weights, save_for_backward, submitted=False)
        out = self._compute(copy, save_for_backward, dropout, hidden_states.shape)
        return _to_device(out, output_device or hidden_states.device)

    def submit_forward(
        self, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, save_for_backward: bool = True
    ) -> None:
        """Start a forward pass; `sync_forward` returns its output."""
        if self._forward is not None:
            raise RuntimeError("a forward pass was submitted before: call sync_forward first")
        copy, dropout = self._begin(hidden_states, expert_ids, weights, save_for_backward, submitted=True)
        shape = hidden_states.shape
        result = _worker().submit(self._compute, copy, save_for_backward, dropout, shape)
        self._forward = PendingPass(result, hidden_states.device)

    def sync_forward(self, output_device: torch.device | str | None = None) -> Tensor:
        pending, self._forward = self._forward, None
        if pending is None:
            raise RuntimeError("no forward pass was submitted: call submit_forward first")
        out: Tensor = pending.result.result()
        return _to_device(out, output_device or pending.device)

    def _begin(
        self, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, save_for_backward: bool, submitted: bool
    ) -> tuple[DeviceToHost, Dropout]:
        self._loaded()
        self._check_batch(hidden_states, expert_ids, weights)
        if save_for_backward and len(self._saved) >= self.max_cache_depth:
            raise RuntimeError(
                f"{len(self._saved)} forward passes are saved for backward, max_cache_depth is {self.max_cache_depth}: "
                "run their backward passes, pass save_for_backward=False, or construct with a greater depth"
            )
        device, top_k = hidden_states.device, self.num_experts_per_tok
        batch = (
            _as_rows(hidden_states, self.hidden_size, torch.bfloat16, device),
            _as_rows(expert_ids, top_k, torch.int64, device),
            _as_rows(weights, top_k, torch.float32, device),
        )
        dropout = NO_DROPOUT
        if self.lora_dropout and (save_for_backward or inside_checkpointed_block()):
            dropout = Dropout(self.lora_dropout, int(torch.randint(2**62, ())))
        if device.type != "cpu":
            return start_device_to_host(batch), dropout
        # The caller may write into its tensors before the worker or a backward pass reads them.
        copies = tuple(map(torch.clone, batch)) if save_for_backward or submitted else batch
        return DeviceToHost((), copies, None), dropout

    def _check_batch(self, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if not hidden_states.dim() or hidden_states.shape[-1] != self.hidden_size:
            given, expected = f"shape {list(hidden_states.shape)}", f"[tokens, {self.hidden_size}]"
            raise InputError("hidden_states", given, expected)
        tokens = hidden_states.numel() // self.hidden_size
        for name, tensor in (("expert_ids", expert_ids), ("weights", weights)):
            if tensor.shape[-1:] != (self.num_experts_per_tok,) or tensor.numel() != tokens * self.num_experts_per_tok:
                raise InputError(name, f"shape {list(tensor.shape)}", f"[{tokens}, {self.num_experts_per_tok}]")

    def _compute(self, copy: DeviceToHost, save: bool, dropout: Dropout, shape: torch.Size) -> Tensor:
        hidden, ids, weights = copy.finish()
        store = self._loaded()
        keep = store.new_keep(*ids.shape) if save else None
        with torch.no_grad():
            out = store.forward(
                hidden,
                ids,
                weights,
                skip=self._skip,
                keep=keep,
                adapters=self._adapters(),
                dropout=dropout,
                needs_grad=True,  # the same rounding whether the pass saves or not
            )
        if keep is not None:
            self._saved.append(SavedForward(hidden, ids, weights, keep, dropout, shape))
        return out.view(shape)

    def submit_forward_inference(
        self, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, cuda_stream: int | None = None
    ) -> None:
        """Start a forward pass with LoRA for serving, in the order of the stream, as the inference wrapper does: it can
        be captured in a CUDA graph, nothing is saved and nothing dropped."""
        inference = self._inference_wrapper()
        inference.use_adapters(self._adapters())
        inference.submit_forward(hidden_states, expert_ids, weights, cuda_stream)
        self._inference_hidden = hidden_states

    def sync_forward_inference(self, cuda_stream: int | None = None) -> Tensor:
        """The output of the last submission, in the shape, dtype and device of its hidden states."""
        hidden, self._inference_hidden = self._inference_hidden, None
        if hidden is None:
            raise RuntimeError("no inference pass was submitted: call submit_forward_inference first")
        return self._inference_wrapper().sync_forward(hidden, cuda_stream)

    def _inference_wrapper(self) -> BaseMoEWrapper:
        if self._inference is None:
            mask = torch.arange(self.num_experts, device="cpu") < self.num_gpu_experts
            self._inference = BaseMoEWrapper(
                self.layer_idx,
                self.num_experts,
                self.num_experts_per_tok,
                self.hidden_size,
                self.moe_intermediate_size,
                mask,
                self.cpuinfer_threads,
                self.threadpool_count,
                self.weight_path,
                self.chunked_prefill_size,
                method="LLAMAFILE",  # the one that takes every format and computes it exactly
                swiglu_limit=self.swiglu_limit,
            )
            self._inference.use_store(self._loaded())
        return self._inference

    # Backward.

    def backward(
        self,
        grad_output: Tensor,
        output_device: torch.device | str | None = None,
        optimizer_grad_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the hidden states (bf16) and of the routing weights (float32) of the last saved forward pass;
        the LoRA gradients, times `optimizer_grad_scale`, go into the registered buffers."""
        saved, accumulate = self._begin_backward(grad_output)
        grads = self._compute_backward(_to_host(grad_output), saved, accumulate, optimizer_grad_scale)
        return self._finish_backward(grads, torch.device(output_device or grad_output.device))

    def submit_backward_async(
        self,
        grad_output: Tensor,
        output_device: torch.device | str | None = None,
        optimizer_grad_scale: float = 1.0,
    ) -> None:
        """Start a backward pass; `sync_backward` returns its gradients."""
        if self._backward is not None:
            raise RuntimeError("a backward pass was submitted before: call sync_backward first")
        saved, accumulate = self._begin_backward(grad_output)
        result = _worker().submit(
            self._compute_backward, _to_host(grad_output, submitted=True), saved, accumulate, optimizer_grad_scale
        )
        self._backward = PendingPass(result, torch.device(output_device or grad_output.device))

    def sync_backward(self) -> tuple[Tensor, Tensor]:
        pending, self._backward = self._backward, None
        if pending is None:
            raise RuntimeError("no backward pass was submitted: call submit_backward_async first")
        return self._finish_backward(pending.result.result(), pending.device)

    def _begin_backward(self, grad_output: Tensor) -> tuple[SavedForward, bool]:
        if self._forward is not None:
            raise RuntimeError("a forward pass was submitted and not awaited: call sync_forward before backward")
        if not self._saved:
            raise RuntimeError("no forward pass is saved: call forward with save_for_backward=True before backward")
        if grad_output.shape != self._saved[-1].shape:
            given = f"shape {list(grad_output.shape)}"
            raise InputError("grad_output", given, f"{list(self._saved[-1].shape)}, that of the last saved forward")
        accumulate = self._optimizer_grads.state() == "open"
        return self._saved.pop(), accumulate

    def _compute_backward(
        self, copy: DeviceToHost, saved: SavedForward, accumulate: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        (grad_output,) = copy.finish()
        lora = self._lora if self._trains_lora else None
        buffers: tuple[Tensor, ...] = () if lora is None else lora.grads
        direct = not accumulate and scale == 1.0
        # One rounding: the sum, or the scaled gradient, is rounded to the buffer's dtype, not its addends.
        targets = buffers if direct else tuple(buffer_pool.empty(grad.shape, torch.float32) for grad in buffers)
        with torch.no_grad():
            grad_hidden, grad_weights = self._loaded().backward(
                grad_output.reshape(saved.hidden.shape),
                saved.hidden,
                saved.ids,
                saved.weights,
                skip=self._skip,
                keep=saved.keep,
                adapters=self._adapters(),
                factors=None if lora is None else [targets],
                dropout=saved.dropout,
            )
            if not direct:
                for buffer, target in zip(buffers, targets, strict=True):
                    target.mul_(scale)
                    buffer.copy_(target.add_(buffer) if accumulate else target)
        return grad_hidden.view(saved.shape), grad_weights

    def _finish_backward(self, grads: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        self._optimizer_grads.publish()
        grad_hidden, grad_weights = grads
        return _to_device(grad_hidden, device), _to_device(grad_weights, device)

    def submit_backward_repack(self) -> None:
        """Nothing to do: backward transposes blocks of the packed weights as it reads them."""

    def wait_backward_repack(self) -> None:
        """Nothing to wait for, see `submit_backward_repack`."""

    # Gradients that optimisers own.

    def register_authoritative_optimizer_grad(self, name: str, param: nn.Parameter, grad_view: Tensor) -> None:
        """From now on `param.grad` is `grad_view` after every backward pass, and decides whether the next pass
        overwrites or accumulates (`kt_kernel.sft.optimizer_grads`). `grad_view` is a view of a gradient buffer."""
        if self._lora is None:
            raise RuntimeError("gradient buffers are missing: call init_lora_weights first")
        storages = {grad.untyped_storage().data_ptr() for grad in self._lora.grads}
        if grad_view.untyped_storage().data_ptr() not in storages:
            raise InputError(name, "a tensor of its own", "a view of a gradient buffer of init_lora_weights")
        self._optimizer_grads.register(name, param, grad_view)

    def release_authoritative_optimizer_grads(self) -> None:
        """Close the window: the registered gradients become None, and the next backward pass overwrites."""
        self._optimizer_grads.release()

    def validate_authoritative_optimizer_grad_state(self) -> str:
        """ "empty" (nothing registered), "closed" (the next pass overwrites) or "open" (it accumulates); raises
        RuntimeError for a mixture."""
        return self._optimizer_grads.state()

    # Outputs of checkpointed blocks.

    @property
    def checkpoint_cache_state(self) -> CheckpointCacheState:
        return self._checkpoint_output.state

    def cache_checkpoint_output(self, output: Tensor) -> None:
        """Save the output of a checkpointed block's first pass; one at a time."""
        self._checkpoint_output.put(output)

    def get_checkpoint_output(self) -> Tensor:
        return self._checkpoint_output.get()

    def validate_checkpoint_output(self, like: Tensor | None = None) -> None:
        """Raise unless an output is saved, of the shape and dtype of `like` if that is given."""
        self._checkpoint_output.get() if like is None else self._checkpoint_output.require_like(like)

    def validate_checkpoint_cache_empty(self) -> None:
        self._checkpoint_output.require_empty()

    def clear_checkpoint_output(self) -> None:
        self._checkpoint_output.clear()

    def poison_checkpoint_output(self, reason: str = "a pass failed") -> None:
        """Make every later use of the saved output raise until it is cleared."""
        self._checkpoint_output.poison(reason)

    # What kt-kernel has and this library has not.

    def init_full_weight_grad_buffers(self, *_: Any, **__: Any) -> None:
        raise KTAMXNotAvailableError("init_full_weight_grad_buffers", "a call", "no training of base weights", FROZEN)

    def update_base_weights(self) -> None:
        raise KTAMXNotAvailableError("update_base_weights", "a call", "no training of base weights", FROZEN)


def _as_rows(tensor: Tensor, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[..., columns]` as `[T, columns]` without gradients."""
    rows = tensor.detach()
    if rows.dim() != 2:
        rows = rows.reshape(-1, columns)
    if rows.dtype != dtype or rows.device != device:
        rows = rows.to(device, dtype)
    return rows.contiguous()


def _to_host(grad_output: Tensor, submitted: bool = False) -> DeviceToHost:
    grad = grad_output.detach().to(torch.bfloat16).contiguous()
    if grad.device.type != "cpu":
        return start_device_to_host((grad,))
    return DeviceToHost((), (grad.clone() if submitted else grad,), None)


def _to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    target = torch.device(device)
    return tensor if target.type == "cpu" else start_host_to_device((tensor,), target).finish()[0]
