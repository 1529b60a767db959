"""kt-kernel, driven through the classes of its extension; run by `bench/moe.py --peers kt=/path/to/python` in BF16, by
`bench/formats.py --peers kt_int8=/path/to/python` with weights that it quantises at load (`--kind`).

Everything goes in as raw addresses, so the tensors behind them are kept for as long as a task may read them. Its
workers are bound to the first CPUs, and both its queue and the thread that waits for a task spin: on a machine with
CPUs to spare two are left to them, or they would share a CPU with a worker and slow the whole layer. One NUMA node is
used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from peers.protocol import serve
from shapes import Shape, Weights, Work

SPARE = 2  # CPUs left to the threads that submit and wait
WORKER = "numa_"  # what the names of its worker threads start with


def default_threads() -> int:
    cpus = os.cpu_count() or 1
    return cpus - SPARE if cpus > 2 * SPARE else cpus


class KtKernel:
    CLASSES: ClassVar = {"bf16": "AMXBF16_MOE", "int8": "AMXInt8_MOE", "int4": "AMXInt4_MOE"}

    def __init__(self, threads: int, kind: str) -> None:
        import kt_kernel  # noqa: F401 (chooses the extension for this CPU)
        from kt_kernel import kt_kernel_ext

        self._ext: Any = kt_kernel_ext
        self._kind = kind
        self._threads = threads or default_threads()
        workers = self._ext.WorkerPoolConfig()
        workers.subpool_count = 1
        workers.subpool_numa_map = [0]
        workers.subpool_thread_count = [self._threads]
        self._queue = self._ext.CPUInfer(workers)
        self._leave_workers_alone()
        self._layers: list[Any] = []

    def _leave_workers_alone(self) -> None:
        """Moves every thread that is not a worker to the CPUs behind the workers', where there are any."""
        spare = set(range(self._threads, os.cpu_count() or 1)) & os.sched_getaffinity(0)
        if not spare:
            return
        for task in Path("/proc/self/task").iterdir():
            if not (task / "comm").read_text().startswith(WORKER):
                os.sched_setaffinity(int(task.name), spare)
        torch.set_num_threads(len(spare))  # more would wait for each other, spinning

    def facts(self) -> dict[str, Any]:
        try:
            version = importlib.metadata.version("kt-kernel")
        except importlib.metadata.PackageNotFoundError:  # unpacked onto PYTHONPATH, without its metadata
            import kt_kernel

            version = getattr(kt_kernel, "__version__", "unknown")
        return {"version": version, "threads": self._threads, "kind": self._kind, "torch": torch.__version__}

    def _run(self, task: Any) -> None:
        self._queue.submit(task)
        self._queue.sync()

    def configure(self, shape: Shape) -> Any:
        """The settings of one more layer, as far as inference and training differ."""
        return self._ext.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.intermediate, 0)  # none on a GPU

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        self._shape = shape
        self._experts = torch.arange(shape.experts, dtype=torch.int64)
        self._layers, seconds = [], []
        for layer in range(layers):
            config = self.configure(shape)
            config.layer_idx = layer
            config.max_len = max(32, -(-max_tokens // 32) * 32)
            config.pool = self._queue.backend_
            config.physical_to_logical_map = self._experts.data_ptr()
            config.gate_proj = weights.gate.data_ptr()
            config.up_proj = weights.up.data_ptr()
            config.down_proj = weights.down.data_ptr()
            start = time.perf_counter()
            moe = getattr(self._ext.moe, self.CLASSES[self._kind])(config)
            try:
                task = moe.load_weights_task()
            except TypeError:  # some versions want the map here too
                task = moe.load_weights_task(self._experts.data_ptr())
            self._run(task)
            seconds.append(time.perf_counter() - start)
            self._layers.append(moe)
        return seconds

    def bind(self, work: Work) -> Callable[[int], torch.Tensor]:
        count = torch.tensor([work.hidden.shape[0]], dtype=torch.int32)
        out = torch.zeros_like(work.hidden)

        def call(step: int) -> torch.Tensor:
            layer, ids = work.step(step)
            self._run(
                self._layers[layer].forward_task(
                    count.data_ptr(),
                    self._shape.top_k,
                    ids.data_ptr(),
                    work.weights.data_ptr(),
                    work.hidden.data_ptr(),
                    out.data_ptr(),
                    False,  # do not add to what is there
                )
            )
            return out

        return call


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kind", choices=list(KtKernel.CLASSES), default="bf16")
    return parser


def main() -> None:
    args = options(__doc__).parse_args()
    serve(lambda: KtKernel(args.threads, args.kind))
    os._exit(0)  # its pool does not always come down


if __name__ == "__main__":
    main()
