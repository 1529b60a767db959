"""`kt_kernel_ext`: the objects of kt-kernel's extension that its users reach for, and a direction for all others.

`CPUInfer` runs tasks, pairs of the address of a C function `void(void*)` and its argument, one after another on a
thread of its own, submitted directly or in the order of a CUDA stream. Experts do not pass through that queue: they run
on the pool of ktransformers, whose size `CPUInfer` sets if it is the first to ask. Importing this module imports
neither torch nor the native core.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it; typing and dataclasses take longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, ClassVar

    from ktransformers import _core

    Task = tuple[int, int]  # addresses: function, argument

KT_NAMES = {"avx512": "avx512_base", "avx_vnni": "avx2"}  # kt-kernel's names of variants that have another one here
INT8_KERNELS = {"amx": "amx-int8"} | dict.fromkeys(("avx512_bf16", "avx512_vnni", "avx512_base"), "avx512-vnni")
# Methods that `CPUInfer` has only where CUDA is.
STREAM_METHODS = ("submit_with_cuda_stream", "sync_with_cuda_stream")
USE_INSTEAD = {
    "moe": "kt_kernel.KTMoEWrapper, which chooses the kernel by `method`",
    "linear": "torch.nn.functional.linear",
    "mlp": "kt_kernel.KTMoEWrapper",
    "mla": "the attention of transformers",
    "kvcache": "the cache of transformers",
    "utils": "torch.Tensor.to",
    "FP8LayerwiseTransport": "the policy `stream` of `kt serve`",
    "initialize_fp8_layerwise_control": "the policy `stream` of `kt serve`",
    "FP8_LAYERWISE_CONTROL_BYTES": "the policy `stream` of `kt serve`",
    "FP8_LAYERWISE_MAX_TP_SIZE": "the policy `stream` of `kt serve`",
}


class WorkerPoolConfig:
    def __init__(
        self,
        subpool_count: int = 1,
        subpool_numa_map: list[int] | None = None,
        subpool_thread_count: list[int] | None = None,
    ) -> None:
        self.subpool_count = subpool_count
        self.subpool_numa_map = subpool_numa_map or [0]
        self.subpool_thread_count = subpool_thread_count or [1]


class QuantConfig:
    def __init__(self) -> None:
        self.quant_method = ""
        self.bits = 0
        self.group_size = 0
        self.zero_point = False
        self.per_channel = False


class WorkerPool:
    """The threads of a `CPUInfer`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads


class CPUInfer:
    _shared: ClassVar[CPUInfer | None] = None

    def __init__(self, threads: int | WorkerPoolConfig) -> None:
        config = WorkerPoolConfig(1, [0], [threads]) if isinstance(threads, int) else threads
        count = sum(config.subpool_thread_count)
        if count <= 0:
            raise ValueError(f"CPUInfer: given {count} threads, expected at least 1")
        self.backend_ = WorkerPool(count)
        self._tasks: _core.TaskQueue | None = None

    @classmethod
    def shared(cls, threads: int | None, pools: int, numa_nodes: list[int] | None = None) -> CPUInfer:
        """The one of this process, which the first wrapper creates; later arguments are ignored, as by kt-kernel."""
        from kt_kernel.thread_pool import use_threads

        if CPUInfer._shared is None:
            CPUInfer._shared = CPUInfer(use_threads(threads, pools, numa_nodes))
        return CPUInfer._shared

    def submit(self, task: Task) -> None:
        """Queue a task; returns at once."""
        self._queue().submit(*task)

    def sync(self, allow_n_pending: int = 0) -> None:
        """Wait until at most so many tasks are queued or running; raises the first error of a task."""
        if self._tasks is not None:
            self._tasks.wait(allow_n_pending)

    def __getattr__(self, name: str) -> Any:
        """Programs ask `hasattr(infer, "submit_with_cuda_stream")` whether there is CUDA."""
        if name in STREAM_METHODS:
            import torch

            if torch.cuda.is_available():
                return getattr(self, f"_{name}")
        raise AttributeError(f"CPUInfer has no {name}" + (" without CUDA" if name in STREAM_METHODS else ""))

    def _submit_with_cuda_stream(self, stream: int, task: Task) -> None:
        """`submit` in the order of the stream, at every replay if it is being captured."""
        self._queue_step(stream, *task, 0)

    def _sync_with_cuda_stream(self, stream: int, allow_n_pending: int = 0) -> None:
        """The stream waits as `sync` does; the calling thread goes on."""
        self._queue_step(stream, 0, 0, allow_n_pending)

    def _queue_step(self, stream: int, function: int, argument: int, pending: int) -> None:
        import torch

        from ktransformers.place.gpu.cuda_driver import call_on_host

        queue = self._queue()
        given: Any = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(given):
            once = not torch.cuda.is_current_stream_capturing()
        call_on_host(stream, queue.callback, queue.step(function, argument, pending, once))

    def _queue(self) -> _core.TaskQueue:
        if self._tasks is None:
            from ktransformers import _core

            self._tasks = _core.TaskQueue()
        return self._tasks


def cpu_variant() -> str:
    """kt-kernel's name of the variant that the core computes with; the core's own where kt-kernel has none."""
    from ktransformers import _core

    return KT_NAMES.get(_core.isa(), _core.isa())


def __getattr__(name: str) -> Any:
    if name == "__cpu_variant__":
        return cpu_variant()
    if name == "__int8_kernel__":
        return INT8_KERNELS.get(cpu_variant(), "ktransformers")
    if name in LAYOUTS:
        return LAYOUTS[name]
    if name in USE_INSTEAD:
        raise AttributeError(f"kt_kernel_ext.{name}: not part of ktransformers' kt_kernel; use {USE_INSTEAD[name]}")
    raise AttributeError(f"module 'kt_kernel_ext' has no attribute {name!r}")


# Names by which programs tell that weights and kernels fit together. The kernels run on every CPU.
LAYOUTS = {
    "__int8_weight_layout__": "kt-int8-n32-k64-vnni-v1",
    "__fp8_kernel__": "avx512-fp8-decode-bf16",
    "__fp8_weight_layout__": "block-e4m3-128x128",
    "__rawint4_kernel__": "amx-int4-kgroup-g32",
    "__rawint4_weight_layout__": "compressed-tensors-rawint4-g32-v1",
}
