"""`BaseMoEWrapper`: the experts of one layer behind kt-kernel's inference interface.

`submit_forward` queues copies of the batch into host memory (`batch_buffers.py`) and a host callback that starts the
experts; `sync_forward` queues a callback that waits for them and a copy of the result to the device. All of it is
ordered by the caller's CUDA stream and can be captured in a CUDA graph: nothing waits on the host, Python does not run
at a replay, and inputs have been read from the caller's tensors, in the order of the stream, when `submit_forward`
returns. Tensors in host memory need no CUDA at all: the same calls then copy and start at once.

A call into the core belongs to a batch size. Those that a captured graph refers to are kept for good, others until the
stream has passed them. Batches larger than `chunked_prefill_size` are computed in pieces of that size.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kt_kernel.batch_buffers import BatchBuffers, BufferKey, KExpertsCPUBuffer
from kt_kernel.kt_kernel_ext import CPUInfer
from kt_kernel.methods import method_of
from kt_kernel.weights import LayerPlace, check_order, load_store, release_sources, store_from_tensors
from ktransformers import _core
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.place.host_call import HostCall
from ktransformers.quant.kt_layers import add_tree_layer

__all__ = ["BaseMoEWrapper", "KExpertsCPUBuffer"]

DEFAULT_CHUNK = 8192  # tokens
MAX_IDLE_CALLS = 8  # of sizes that no graph refers to, for each layer


@dataclass
class PreparedBatch:
    """Calls into the core for one batch size, over buffers of that size: of the experts that are computed at once, and
    of deferred ones, if any."""

    views: BatchBuffers
    calls: list[HostCall]
    captured: bool = False
    passed: torch.cuda.Event | None = None  # behind the last use on a stream

    def is_idle(self) -> bool:
        if self.captured or not all(call.call.done for call in self.calls):
            return False
        return self.passed is None or bool(self.passed.query())  # type: ignore[no-untyped-call]

    def wait(self, deferred: bool = False) -> Tensor:
        """The output in host memory, which is complete behind it in the order of the stream."""
        self.calls[int(deferred)].wait()
        return self.views.deferred_out if deferred else self.views.out


@dataclass(frozen=True)
class Deferred:
    """Experts of an earlier layer whose result is added to the next output."""

    layer: int
    model: str  # its weight_path: layers of two models may take turns
    batch: PreparedBatch


@dataclass
class Submitted:
    """What `sync_forward` completes: the batch as given, and its first piece under way."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    piece: PreparedBatch
    earlier: Deferred | None


@dataclass
class DeviceState:
    """What the layers on one device share."""

    deferred: Deferred | None = None
    stream: int | None = None  # of the last call
    passed: torch.cuda.Event | None = None


@dataclass(eq=False, repr=False)
class BaseMoEWrapper:
    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    gpu_experts_mask: Tensor
    cpuinfer_threads: int | None
    threadpool_count: int
    weight_path: str
    chunked_prefill_size: int
    cpu_save: bool = False
    max_deferred_experts_per_token: int = 0
    method: str = "AMXINT4"
    numa_nodes: list[int] | None = None
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0

    _devices: ClassVar[dict[torch.device, DeviceState]] = {}

    def __post_init__(self) -> None:
        self.gpu_experts_mask = _owned_mask(self.gpu_experts_mask, self.num_experts)
        self.num_gpu_experts = int(self.gpu_experts_mask.sum())
        self.weight_path = str(self.weight_path or "")
        self.chunked_prefill_size = _chunk(self.chunked_prefill_size)
        self.max_deferred_experts_per_token = int(self.max_deferred_experts_per_token or 0)
        if not 0 <= self.max_deferred_experts_per_token <= self.num_experts_per_tok:
            given, expected = self.max_deferred_experts_per_token, f"0 to {self.num_experts_per_tok}"
            raise InputError("max_deferred_experts_per_token", given, f"{expected}, the experts of a token")
        self.swiglu_limit, self.swiglu_alpha = float(self.swiglu_limit), float(self.swiglu_alpha)
        self._method = method_of(self.method)
        self.cpu_infer = CPUInfer.shared(self.cpuinfer_threads, self.threadpool_count, self.numa_nodes)
        self.moe: ExpertStore | None = None
        sizes = (self.num_experts, self.hidden_size, self.moe_intermediate_size)
        self._place = LayerPlace(self.layer_idx, *sizes, self.swiglu_limit, self.swiglu_alpha)
        self._batches: OrderedDict[tuple[Any, ...], PreparedBatch] = OrderedDict()
        self._submitted: Submitted | None = None
        self.adapters: tuple[_core.Adapter, ...] = ()  # LoRA of these experts
        self._adapter_of_row: Tensor | None = None  # the caller's, on the device of the hidden states
        self._adapter_rows: Tensor | None = None  # int32 [chunked_prefill_size], in host memory

    # Weights.

    def load_weights(self, physical_to_logical_map_cpu: Tensor | None = None) -> None:
        """All experts from `weight_path`; runtime expert i is the checkpoint's `physical_to_logical_map_cpu[i]`."""
        self.use_store(load_store(self.weight_path, self._place, self.method, physical_to_logical_map_cpu))

    def load_weights_from_tensors(
        self, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor, physical_to_logical_map_cpu: Tensor | None = None
    ) -> None:
        """From gate and up `[E, I, H]` and down `[E, H, I]` in the order of the wrapper's experts: as in kt-kernel the
        map is not applied here. With `cpu_save` the quantised experts are also written below `weight_path`, as `.kt`
        files for `threadpool_count` NUMA nodes."""
        check_order(physical_to_logical_map_cpu, self.num_experts)
        store = store_from_tensors(gate_proj, up_proj, down_proj, self._place, self.method)
        if self.cpu_save:
            if not self.method.startswith("AMXINT") or not self.weight_path:
                given = f"True with method {self.method} and weight_path {self.weight_path!r}"
                raise InputError("cpu_save", given, "AMXINT4 or AMXINT8, and a directory to write to")
            tensors = {"gate": gate_proj, "up": up_proj, "down": down_proj}
            experts = {role: tensor.detach().cpu() for role, tensor in tensors.items()}
            parts = max(1, self.threadpool_count)
            add_tree_layer(Path(self.weight_path), self.layer_idx, experts, self._method.bits, parts)
        self.use_store(store)

    def use_store(self, store: ExpertStore) -> None:
        """Compute with these experts."""
        if self._method.w8a8:
            store.w8a8 = True
        self._batches.clear()
        self.moe = store
        if torch.cuda.is_available():  # pinned memory cannot be allocated while a stream is captured
            device = torch.device("cuda", torch.cuda.current_device())
            for deferred in {False, self.max_deferred_experts_per_token > 0}:
                key = BufferKey(device, self.hidden_size, self.num_experts_per_tok, deferred=deferred)
                KExpertsCPUBuffer.reserve(key, self.chunked_prefill_size)

    def use_adapters(self, adapters: Sequence[_core.Adapter], adapter_of_row: Tensor | None = None) -> None:
        """Compute with LoRA: row t of a batch has `adapters[adapter_of_row[t]]`, or none for -1; without a table one
        adapter is that of every row. The table, int32 on the device of the hidden states, is read at every call and at
        every replay, as ids are; it belongs to the caller. Packed adapters come from `ExpertStore.new_adapter` of
        `self.moe`; what is packed into them later acts on the next call. No captured graph is replayed afterwards."""
        if adapter_of_row is None and len(adapters) > 1:
            raise InputError("adapters", f"{len(adapters)} without adapter_of_row", "at most one, or the table")
        if adapter_of_row is not None and (adapter_of_row.dtype != torch.int32 or adapter_of_row.dim() != 1):
            given = f"{adapter_of_row.dtype} {list(adapter_of_row.shape)}"
            raise InputError("adapter_of_row", given, "torch.int32 [tokens]")
        if tuple(adapters) == self.adapters and adapter_of_row is self._adapter_of_row:
            return
        self._batches.clear()
        self.adapters, self._adapter_of_row, self._adapter_rows = tuple(adapters), adapter_of_row, None
        if adapter_of_row is not None:
            with torch.inference_mode(False):
                pinned = adapter_of_row.is_cuda
                rows = self.chunked_prefill_size
                self._adapter_rows = torch.full((rows,), -1, dtype=torch.int32, device="cpu", pin_memory=pinned)

    def _loaded(self) -> ExpertStore:
        if self.moe is None:
            given = f"layer {self.layer_idx} without weights"
            raise InputError("KTMoEWrapper", given, "load_weights or load_weights_from_tensors before forward")
        return self.moe

    @staticmethod
    def force_release_loader() -> None:
        """Close the files that weights were read from."""
        release_sources()

    # Forward.

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int | None = None
    ) -> Tensor:
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    def submit_forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int | None = None
    ) -> None:
        """Start the experts on a batch `[..., H]` with ids and weights `[..., k]`. Ids outside of 0 to E - 1, and those
        under `gpu_experts_mask`, contribute nothing; weights are used as they are."""
        hidden, ids, weights = self._check(hidden_states, topk_ids, topk_weights)
        state = self._devices.setdefault(hidden.device, DeviceState())
        with _on_stream(hidden.device, cuda_stream):
            self._wait_for_other_stream(state, hidden.device)
            size = min(hidden.shape[0], self.chunked_prefill_size)
            if hidden.shape[0] > size:  # later pieces are read in sync_forward; the caller may change the ids before
                ids, weights = ids.clone(), weights.clone()
            earlier = self._take_deferred(state, hidden.shape[0])
            defers = self.max_deferred_experts_per_token > 0 and hidden.shape[0] <= size
            piece = self._start(hidden[:size], ids[:size], weights[:size], defers)
            if defers:
                state.deferred = Deferred(self.layer_idx, self.weight_path, piece)
        self._submitted = Submitted(hidden, ids, weights, piece, earlier)

    def sync_forward(self, hidden_states: Tensor, cuda_stream: int | None = None) -> Tensor:
        """The output of the batch that was submitted last, in the shape, dtype and device of `hidden_states`, ordered
        on the stream."""
        submitted, self._submitted = self._submitted, None
        if submitted is None:
            raise RuntimeError(f"layer {self.layer_idx}: sync_forward without submit_forward")
        hidden, size = submitted.hidden, self.chunked_prefill_size
        with _on_stream(hidden.device, cuda_stream):
            out = torch.empty_like(hidden)
            out[:size].copy_(submitted.piece.wait(), non_blocking=True)
            for first in range(size, out.shape[0], size):
                rows = slice(first, first + size)
                piece = self._start(hidden[rows], submitted.ids[rows], submitted.weights[rows], False, first)
                out[rows].copy_(piece.wait(), non_blocking=True)
                self._mark_passed(hidden.device, piece)
            if submitted.earlier is not None:
                out += submitted.earlier.batch.wait(deferred=True).to(out.device, non_blocking=True)
            self._mark_passed(hidden.device, submitted.piece)
        return out.view(hidden_states.shape)

    def select_deferred_experts(
        self, expert_ids: Tensor, expert_scores: Tensor, protected_k: int
    ) -> tuple[Tensor, Tensor]:
        """(ids to compute now, ids to defer), each `[T, k]` with -1 in place of the other's, on the device of the ids.
        A token's `protected_k` experts of highest weight are computed at once, and an expert that is among these for
        any token of the batch is for every token, as in kt-kernel."""
        nothing = torch.full_like(expert_ids, -1)
        if protected_k <= 0:
            return nothing, expert_ids
        if protected_k >= expert_ids.shape[1]:
            return expert_ids, nothing
        top = torch.topk(expert_scores, protected_k, dim=1).indices
        # Ids that name no expert share the last entry of the table.
        outside = (expert_ids < 0) | (expert_ids >= self.num_experts)
        named = torch.where(outside, self.num_experts, expert_ids).long()
        table = torch.zeros(self.num_experts + 1, dtype=torch.bool, device=expert_ids.device)
        table.index_fill_(0, named.gather(1, top).flatten(), True)
        now = table[named]
        return torch.where(now, expert_ids, nothing), torch.where(now, nothing, expert_ids)

    def _check(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if hidden.shape[-1] != self.hidden_size:
            raise InputError("hidden_states", f"shape {list(hidden.shape)}", f"[..., {self.hidden_size}]")
        rows = hidden.detach().reshape(-1, self.hidden_size)
        flat_ids, flat_weights = (tensor.detach().reshape(-1, tensor.shape[-1]) for tensor in (ids, weights))
        if flat_ids.shape != flat_weights.shape or flat_ids.shape[0] != rows.shape[0]:
            given = f"ids {list(ids.shape)} and weights {list(weights.shape)} for {rows.shape[0]} tokens"
            raise InputError("topk_ids, topk_weights", given, f"both [tokens, {self.num_experts_per_tok}]")
        if flat_ids.dtype not in (torch.int64, torch.int32):
            flat_ids = flat_ids.to(torch.int64)
        if flat_weights.dtype == torch.float64:
            flat_weights = flat_weights.to(torch.float32)
        if {flat_ids.device, flat_weights.device} != {rows.device}:
            given = f"hidden states on {rows.device}, ids on {ids.device}, weights on {weights.device}"
            raise InputError("forward", given, "one device")
        return rows, flat_ids, flat_weights

    # One piece.

    def _start(self, hidden: Tensor, ids: Tensor, weights: Tensor, defers: bool, first: int = 0) -> PreparedBatch:
        """Queue the copies of a batch into host memory, and the start of its experts; `first`: its first row."""
        batch = self._prepare(hidden, ids, weights, defers)
        views = batch.views
        if defers:
            protected = self.num_experts_per_tok - self.max_deferred_experts_per_token
            ids, later_ids = self.select_deferred_experts(ids, weights, protected)
            views.deferred_ids.copy_(later_ids, non_blocking=True)
        views.hidden.copy_(hidden, non_blocking=True)
        views.ids.copy_(ids, non_blocking=True)
        views.weights.copy_(weights, non_blocking=True)
        if self._adapter_rows is not None and self._adapter_of_row is not None:
            rows = self._adapter_of_row[first : first + hidden.shape[0]]
            self._adapter_rows[: hidden.shape[0]].copy_(rows, non_blocking=True)
        for call in batch.calls:
            call.submit()
        return batch

    def _prepare(self, hidden: Tensor, ids: Tensor, weights: Tensor, deferred: bool) -> PreparedBatch:
        key = (hidden.device, hidden.shape, ids.shape, hidden.dtype, ids.dtype, weights.dtype, deferred)
        capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = self._new_batch(hidden, ids, weights, deferred, capturing)
            if not capturing:  # events cannot be asked while a stream is captured
                self._drop_idle()
        elif not capturing:
            for call in batch.calls:
                call.raise_error()
        self._batches.move_to_end(key)
        batch.captured = batch.captured or capturing
        return batch

    def _new_batch(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, deferred: bool, capturing: bool
    ) -> PreparedBatch:
        key = BufferKey(hidden.device, self.hidden_size, ids.shape[1], hidden.element_size(), deferred)
        if capturing and not KExpertsCPUBuffer.holds(key, self.chunked_prefill_size):
            given = f"hidden states in {hidden.dtype} with {ids.shape[1]} experts per token on {hidden.device}"
            expected = "what was computed once outside of a capture"
            raise InputError("CUDA graph", given, expected, "call forward once, then capture it")
        both = KExpertsCPUBuffer.reserve(key, self.chunked_prefill_size)
        views = both[self.layer_idx % len(both)].views(hidden, ids, weights)
        rows = None if self._adapter_rows is None else self._adapter_rows[: hidden.shape[0]]
        options: Any = {"skip": self.gpu_experts_mask, "adapter": rows, "adapters": self.adapters}

        def call(ids: Tensor, out: Tensor) -> HostCall:
            prepared = self._loaded().prepare(views.hidden, ids, views.weights, out=out, **options)
            return HostCall(prepared, hidden.is_cuda)

        later = [call(views.deferred_ids, views.deferred_out)] if deferred else []
        return PreparedBatch(views, [call(views.ids, views.out), *later])

    def _drop_idle(self) -> None:
        """Drop the least recently used sizes that no graph refers to and that no stream has yet to reach."""
        beyond = len([batch for batch in self._batches.values() if not batch.captured]) - MAX_IDLE_CALLS
        for key in [key for key, batch in list(self._batches.items())[:-1] if batch.is_idle()][: max(beyond, 0)]:
            del self._batches[key]

    # The order of calls.

    def _take_deferred(self, state: DeviceState, tokens: int) -> Deferred | None:
        """What an earlier layer of the same pass deferred. A pass whose last layer defers experts loses them: the next
        pass begins with a lower layer, and its output must not contain them."""
        deferred, state.deferred = state.deferred, None
        if deferred is None or deferred.layer >= self.layer_idx or deferred.model != self.weight_path:
            return None
        return deferred if deferred.batch.views.out.shape == (tokens, self.hidden_size) else None

    def _wait_for_other_stream(self, state: DeviceState, device: torch.device) -> None:
        """Buffers are ordered by one stream; the first call on another one waits for it, on the device."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if state.passed is not None and state.stream != stream.cuda_stream:
            stream.wait_event(state.passed)
        state.stream = stream.cuda_stream

    def _mark_passed(self, device: torch.device, piece: PreparedBatch) -> None:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        state = self._devices[device]
        state.passed = piece.passed = torch.cuda.current_stream(device).record_event()


@contextlib.contextmanager
def _on_stream(device: torch.device, stream: int | None) -> Iterator[None]:
    """Make the caller's stream current; None: it is already. Host callbacks need the device's context as well."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        if stream is None or stream == torch.cuda.current_stream(device).cuda_stream:
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):  # type: ignore[no-untyped-call]
                yield


def _owned_mask(given: Tensor, experts: int) -> Tensor:
    """A copy of the mask in host memory. Calls read it when they start, so what is written into it acts on the next."""
    if given.dtype != torch.bool or tuple(given.shape) != (experts,):
        raise InputError("gpu_experts_mask", f"{given.dtype} {list(given.shape)}", f"torch.bool [{experts}]")
    mask = torch.empty(experts, dtype=torch.bool, device="cpu", pin_memory=torch.cuda.is_available())
    return mask.copy_(given)


def _chunk(given: int | None) -> int:
    """Stock SGLang passes -1 where its chunked prefill is off; batches are still computed in pieces then."""
    if given == 0:
        raise InputError("chunked_prefill_size", given, "a positive number of tokens, or -1 for any")
    return int(given) if given is not None and given > 0 else DEFAULT_CHUNK
