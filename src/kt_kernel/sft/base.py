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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from kt_kernel.experts_base import BaseMoEWrapper
from kt_kernel.kt_kernel_ext import CPUInfer
from kt_kernel.methods import SKIP_LORA, method_of
from kt_kernel.sft.runtime import KTAMXNotAvailableError
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

# At most one: passes run in the order of their submission.
_workers: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_workers.clear)


def _worker() -> ThreadPoolExecutor:
    if not _workers:
        _workers.append(ThreadPoolExecutor(1, "kt-sft", initializer=avoid_pool_cpus))
    return _workers[0]


class CheckpointCacheState(Enum):
    EMPTY = "empty"
    READY = "ready"
    POISONED = "poisoned"


@dataclass(frozen=True)
class SavedForward:
    """What a backward pass needs of a forward pass, in host memory."""

    hidden: Tensor  # bf16 [T, H]
    ids: Tensor
    weights: Tensor
    keep: Tensor  # gate and up of every row
    dropout: Dropout
    shape: torch.Size  # of the caller's hidden states


@dataclass(frozen=True)
class PendingPass:
    result: Future[Any]
    device: torch.device


@dataclass(frozen=True)
class RegisteredGrad:
    """A parameter whose gradient is a view of a gradient buffer."""

    parameter: nn.Parameter
    view: Tensor

    @property
    def aliases(self) -> bool:
        grad, view = self.parameter.grad, self.view
        return grad is not None and _place(grad) == _place(view)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(eq=False, repr=False)
class BaseSFTMoEWrapper:
    """Constructed by `KTMoEWrapper(mode="sft")`. A subclass loads weights into `store`. `group_size`, `zero_point` and
    `share_backward_bb` have no effect: the files say how their values are grouped, and backward reads the packed
    weights of forward. The clamp `swiglu_limit` works with every method."""

    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    _: KW_ONLY
    num_gpu_experts: int = 0
    cpuinfer_threads: int = 0
    threadpool_count: int = 1
    weight_path: str = ""
    chunked_prefill_size: int = 512
    method: str = "AMXBF16_SFT"
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    max_cache_depth: int = 1
    group_size: int = 128
    zero_point: bool = True
    full_weight_grad: bool = False
    swiglu_limit: float = 0.0

    share_backward_bb = False

    def __post_init__(self) -> None:
        method_of(self.method)
        sizes = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size", "max_cache_depth")
        for name in (*sizes, "lora_rank"):
            if getattr(self, name) < 1:
                remedy = "leave init_lora_weights out to compute without LoRA" if name == "lora_rank" else ""
                raise InputError(name, getattr(self, name), "at least 1", remedy)
        self.num_gpu_experts = self.num_gpu_experts or 0
        if not 0 <= self.num_gpu_experts <= self.num_experts:
            raise InputError("num_gpu_experts", self.num_gpu_experts, f"0 to {self.num_experts}")
        if not 0 <= self.lora_dropout < 1:
            raise InputError("lora_dropout", self.lora_dropout, "at least 0 and less than 1")
        if self.full_weight_grad:
            raise InputError("full_weight_grad", True, "False", FROZEN)
        self.lora_scaling = self.lora_alpha / self.lora_rank
        self.cpu_infer = CPUInfer.shared(self.cpuinfer_threads, self.threadpool_count)
        self.store: ExpertStore | None = None
        self._on_gpu = torch.arange(self.num_experts, device="cpu") < self.num_gpu_experts
        self._lora: ExpertLora | None = None
        # The caller's LoRA tensors and gradient buffers, in the order of LORA_NAMES.
        self._weights: tuple[Tensor, ...] = ()
        self._grads: tuple[Tensor, ...] = ()
        self.saved: list[SavedForward] = []
        self._inference: BaseMoEWrapper | None = None
        self._inference_hidden: Tensor | None = None
        self._pending: dict[str, PendingPass] = {}
        self._registered: dict[str, RegisteredGrad] = {}
        self.clear_checkpoint_output()

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
        experts, rank, hidden, inner = self.num_experts, self.lora_rank, self.hidden_size, self.moe_intermediate_size
        first = [(experts, rank, hidden), (experts, inner, rank)]
        shapes = [*first, *first, (experts, rank, inner), (experts, hidden, rank)]
        for name, shape, weight, grad in zip(LORA_NAMES, shapes, weights, grads, strict=True):
            for label, tensor in ((name, weight), (f"grad_{name}", grad)):
                if tensor.device.type != "cpu" or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
                    given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                    raise InputError(label, given, f"floats {list(shape)} in host memory, bf16 for kt-kernel")
                if not tensor.is_contiguous():
                    raise InputError(label, f"strides {list(tensor.stride())}", "a contiguous tensor")
        self._weights = tuple(tensor.detach() for tensor in weights)
        self._grads = tuple(tensor.detach() for tensor in grads)
        self._lora = ExpertLora.of_tensors(CORE_ROLES, self._weights, (self.lora_scaling,) * 3)
        self.update_lora_weights()

    def update_lora_weights(self) -> None:
        """Read the six LoRA tensors again, after a write that torch does not see (through `.data` or an address);
        torch's own writes are noticed without this."""
        if self._lora is None:
            raise RuntimeError("LoRA tensors are missing: call init_lora_weights first")
        increment_version([tensor for tensor in self._weights if not tensor.is_inference()])
        if self.store is not None:
            self._adapters()

    def _adapters(self) -> list[_core.Adapter]:
        """The LoRA tensors as the core has them, packed again if they have changed."""
        return [] if self._lora is None else [packed_adapter(self._loaded(), self._lora)]

    def use_store(self, store: ExpertStore) -> None:
        """Compute with these experts."""
        self.store, self._inference = store, None
        if self._lora is not None:
            self.update_lora_weights()
        if torch.cuda.is_available():  # its pinned memory cannot be allocated while a stream is captured
            self._inference_wrapper()

    def _loaded(self) -> ExpertStore:
        if self.store is None:
            raise RuntimeError(f"layer {self.layer_idx} has no weights yet: call load_weights first")
        return self.store

    def _require_none(self, kind: str, sync: str) -> None:
        if kind in self._pending:
            raise RuntimeError(f"a {kind} pass was submitted and not awaited: call {sync} first")

    def _take(self, kind: str, submit: str) -> PendingPass:
        if kind not in self._pending:
            raise RuntimeError(f"no {kind} pass was submitted: call {submit} first")
        return self._pending.pop(kind)

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
        compute = self._begin_forward(hidden_states, expert_ids, weights, save_for_backward)
        return _to_device(compute(), output_device or hidden_states.device)

    def submit_forward(
        self, hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, save_for_backward: bool = True
    ) -> None:
        """Start a forward pass; `sync_forward` returns its output."""
        self._require_none("forward", "sync_forward")
        compute = self._begin_forward(hidden_states, expert_ids, weights, save_for_backward)
        self._pending["forward"] = PendingPass(_worker().submit(compute), hidden_states.device)

    def sync_forward(self, output_device: torch.device | str | None = None) -> Tensor:
        pending = self._take("forward", "submit_forward")
        return _to_device(pending.result.result(), output_device or pending.device)

    def _begin_forward(self, hidden: Tensor, ids: Tensor, weights: Tensor, save: bool) -> Callable[[], Tensor]:
        """The pass, whose inputs have been copied: the caller may write into its tensors."""
        self._loaded()
        self._check_batch(hidden, ids, weights)
        if save and len(self.saved) >= self.max_cache_depth:
            raise RuntimeError(
                f"{len(self.saved)} forward passes are saved for backward, max_cache_depth is {self.max_cache_depth}: "
                "run their backward passes, pass save_for_backward=False, or construct with a greater depth"
            )
        dropout = NO_DROPOUT
        if self.lora_dropout and (save or inside_checkpointed_block()):
            dropout = Dropout(self.lora_dropout, int(torch.randint(2**62, ())))
        dtypes = ((hidden, torch.bfloat16), (ids, torch.int64), (weights, torch.float32))
        rows = [tensor.detach().reshape(-1, tensor.shape[-1]).to(hidden.device, dtype) for tensor, dtype in dtypes]
        return partial(self._compute, start_device_to_host(rows), save, dropout, hidden.shape)

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
        # `needs_grad`: the same rounding whether the pass saves or not.
        options: Any = {"adapters": self._adapters(), "dropout": dropout, "needs_grad": True}
        with torch.no_grad():
            out = store.forward(hidden, ids, weights, skip=self._on_gpu, keep=keep, **options)
        if keep is not None:
            self.saved.append(SavedForward(hidden, ids, weights, keep, dropout, shape))
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
            self._inference = BaseMoEWrapper(
                self.layer_idx,
                self.num_experts,
                self.num_experts_per_tok,
                self.hidden_size,
                self.moe_intermediate_size,
                self._on_gpu,
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
        self, grad_output: Tensor, output_device: torch.device | str | None = None, optimizer_grad_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the hidden states (bf16) and of the routing weights (float32) of the last saved forward pass;
        the LoRA gradients, times `optimizer_grad_scale`, go into the registered buffers."""
        compute = self._begin_backward(grad_output, optimizer_grad_scale)
        return self._finish_backward(compute(), output_device or grad_output.device)

    def submit_backward_async(
        self, grad_output: Tensor, output_device: torch.device | str | None = None, optimizer_grad_scale: float = 1.0
    ) -> None:
        """Start a backward pass; `sync_backward` returns its gradients."""
        self._require_none("backward", "sync_backward")
        compute = self._begin_backward(grad_output, optimizer_grad_scale)
        device = torch.device(output_device or grad_output.device)
        self._pending["backward"] = PendingPass(_worker().submit(compute), device)

    def sync_backward(self) -> tuple[Tensor, Tensor]:
        pending = self._take("backward", "submit_backward_async")
        return self._finish_backward(pending.result.result(), pending.device)

    def _begin_backward(self, grad_output: Tensor, scale: float) -> Callable[[], tuple[Tensor, Tensor]]:
        self._require_none("forward", "sync_forward")
        if not self.saved:
            raise RuntimeError("no forward pass is saved: call forward with save_for_backward=True before backward")
        if grad_output.shape != self.saved[-1].shape:
            given = f"shape {list(grad_output.shape)}"
            raise InputError("grad_output", given, f"{list(self.saved[-1].shape)}, that of the last saved forward")
        accumulate = self.validate_authoritative_optimizer_grad_state() == "open"
        copy = start_device_to_host((grad_output.detach().to(torch.bfloat16),))
        return partial(self._compute_backward, copy, self.saved.pop(), accumulate, scale)

    def _compute_backward(
        self, copy: DeviceToHost, saved: SavedForward, accumulate: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        (grad_output,) = copy.finish()
        trains_lora = self._lora is not None and not self.method.endswith(SKIP_LORA)
        buffers = self._grads if trains_lora else ()
        direct = not accumulate and scale == 1.0
        # One rounding: the sum, or the scaled gradient, is rounded to the buffer's dtype, not its addends.
        targets = buffers if direct else tuple(buffer_pool.empty(grad.shape, torch.float32) for grad in buffers)
        with torch.no_grad():
            grad_hidden, grad_weights = self._loaded().backward(
                grad_output.reshape(saved.hidden.shape),
                saved.hidden,
                saved.ids,
                saved.weights,
                skip=self._on_gpu,
                keep=saved.keep,
                adapters=self._adapters(),
                factors=[targets] if trains_lora else None,
                dropout=saved.dropout,
            )
            if not direct:
                for buffer, target in zip(buffers, targets, strict=True):
                    target.mul_(scale)
                    buffer.copy_(target.add_(buffer) if accumulate else target)
        return grad_hidden.view(saved.shape), grad_weights

    def _finish_backward(self, grads: tuple[Tensor, Tensor], device: torch.device | str) -> tuple[Tensor, Tensor]:
        for entry in self._registered.values():
            entry.parameter.grad = entry.view
        return _to_device(grads[0], device), _to_device(grads[1], device)

    def submit_backward_repack(self) -> None:
        """Nothing to do: backward transposes blocks of the packed weights as it reads them."""

    def wait_backward_repack(self) -> None:
        """Nothing to wait for, see `submit_backward_repack`."""

    # Gradients that optimisers own: parameters whose gradients are views of the buffers of `init_lora_weights`.

    def register_authoritative_optimizer_grad(self, name: str, param: nn.Parameter, grad_view: Tensor) -> None:
        """From now on `param.grad` is `grad_view` after every backward pass. If every registered gradient is None
        before a pass, the pass overwrites the buffers; if every one is its view, the pass adds to them."""
        if self._lora is None:
            raise RuntimeError("gradient buffers are missing: call init_lora_weights first")
        storages = {grad.untyped_storage().data_ptr() for grad in self._grads}
        if grad_view.untyped_storage().data_ptr() not in storages:
            raise InputError(name, "a tensor of its own", "a view of a gradient buffer of init_lora_weights")
        if (param.shape, param.dtype, param.device) != (grad_view.shape, grad_view.dtype, grad_view.device):
            given = f"a gradient of {grad_view.dtype} {list(grad_view.shape)} on {grad_view.device}"
            raise InputError(name, given, f"{param.dtype} {list(param.shape)} on {param.device}")
        entry = RegisteredGrad(param, grad_view)
        if param.grad is not None and not entry.aliases:
            raise InputError(name, "a parameter that has a gradient already", "one without", "set its grad to None")
        self._registered[name] = entry

    def release_authoritative_optimizer_grads(self) -> None:
        """The registered gradients become None, and the next backward pass overwrites. The registrations stay."""
        for entry in self._registered.values():
            entry.parameter.grad = None

    def validate_authoritative_optimizer_grad_state(self) -> str:
        """ "empty" (nothing registered), "closed" (the next pass overwrites) or "open" (it accumulates). Raises for
        anything else, such as a gradient that an optimiser replaced: it would be lost."""
        entries = self._registered
        if all(entry.parameter.grad is None for entry in entries.values()):
            return "closed" if entries else "empty"
        if all(entry.aliases for entry in entries.values()):
            return "open"
        names = [name for name, entry in entries.items() if entry.parameter.grad is not None and not entry.aliases]
        given = f"{', '.join(names)} replaced" if names else "gradients of some of them alone"
        raise RuntimeError(
            f"expert LoRA gradients: given {given}, expected all None or all the registered buffers; set every grad to "
            "None (zero_grad), and write into a gradient instead of replacing it"
        )

    # One saved output, for programs that checkpoint activations themselves: the first pass of a block saves it, the
    # recomputation takes it instead of computing the experts again.

    def cache_checkpoint_output(self, output: Tensor) -> None:
        self.validate_checkpoint_cache_empty()
        self._checkpoint_output, self.checkpoint_cache_state = output.detach(), CheckpointCacheState.READY

    def get_checkpoint_output(self) -> Tensor:
        self._require_checkpoint_cache(CheckpointCacheState.READY)
        return self._checkpoint_output

    def validate_checkpoint_output(self, like: Tensor | None = None) -> None:
        """Raise unless an output is saved, of the shape and dtype of `like` if that is given."""
        output = self.get_checkpoint_output()
        if like is not None and (output.shape, output.dtype) != (like.shape, like.dtype):
            raise RuntimeError(
                f"the checkpoint cache holds {output.dtype} {list(output.shape)}, the recomputation has {like.dtype} "
                f"{list(like.shape)}: it is another batch"
            )

    def validate_checkpoint_cache_empty(self) -> None:
        self._require_checkpoint_cache(CheckpointCacheState.EMPTY)

    def clear_checkpoint_output(self) -> None:
        self._checkpoint_output, self._poison = torch.empty(0), ""
        self.checkpoint_cache_state = CheckpointCacheState.EMPTY

    def poison_checkpoint_output(self, reason: str = "a pass failed") -> None:
        """Make every later use of the saved output raise until it is cleared: it may be that of another batch."""
        self.clear_checkpoint_output()
        self._poison, self.checkpoint_cache_state = f" ({reason})", CheckpointCacheState.POISONED

    def _require_checkpoint_cache(self, expected: CheckpointCacheState) -> None:
        if self.checkpoint_cache_state is not expected:
            raise RuntimeError(
                f"the checkpoint cache is {self.checkpoint_cache_state.value}{self._poison}, expected "
                f"{expected.value}: clear it and start the step again; a first pass fills it, its recomputation takes "
                "the output and clears it"
            )

    # What kt-kernel has and this library has not.

    def init_full_weight_grad_buffers(self, *_: Any, **__: Any) -> None:
        raise KTAMXNotAvailableError("init_full_weight_grad_buffers", "a call", "no training of base weights", FROZEN)

    def update_base_weights(self) -> None:
        raise KTAMXNotAvailableError("update_base_weights", "a call", "no training of base weights", FROZEN)


def _to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    target = torch.device(device)
    return tensor if target.type == "cpu" else start_host_to_device((tensor,), target).finish()[0]
