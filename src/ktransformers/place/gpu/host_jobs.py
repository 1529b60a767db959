"""Work on the CPU that a CUDA stream waits for, without the host waiting for either.

A job runs in one thread, in the order of submission: it waits for its inputs (copies to the host, whose event it
synchronises with) and computes. After each job the thread writes the job's number into pinned memory, also where the
job failed; a stream waits for that number by the driver's call, so kernels behind it may read what the job has written
into pinned memory. An error is raised by the next call of `raise_failed` or by the job's own future: the caller sees to
it that one of them comes before the results are used. Where the driver refuses such waits, and on a CPU, the host
waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ktransformers.log import logger
from ktransformers.place.gpu.cuda_driver import wait_for_number

_log = logger(__name__)


@dataclass(frozen=True)
class HostJob:
    number: int
    future: Future[None]


class HostJobs:
    """Jobs of one engine; `worker` has one thread."""

    def __init__(self, device: torch.device, worker: ThreadPoolExecutor) -> None:
        self.device, self._worker = device, worker
        self._done = torch.zeros(1, dtype=torch.int32)  # number of the last job that has ended
        self._queued = 0
        self._stream_waits = device.type == "cuda"
        self._unchecked: deque[HostJob] = deque()
        if self._stream_waits:
            self._done = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            # The number must stay where it is until no stream waits for it.
            weakref.finalize(self, _synchronize, device, self._done).atexit = False

    def start(self, compute: Callable[[], object]) -> HostJob:
        """`compute` must not allocate pinned or device memory: a driver that waits for the device would wait for a
        stream that waits for this job."""
        self._queued += 1
        number, done = self._queued, self._done.numpy()

        def work() -> None:
            try:
                compute()
            finally:
                done[0] = number

        job = HostJob(number, self._worker.submit(work))
        self._unchecked.append(job)
        return job

    def stream_waits_for(self, job: HostJob) -> None:
        """What is queued on the current stream from now on runs after the job."""
        if self._stream_waits:
            stream = torch.cuda.current_stream(self.device).cuda_stream
            with torch.cuda.device(self.device):
                code = wait_for_number(stream, self._done.data_ptr(), job.number)
            if not code:
                return
            self._stream_waits = False
            _log.warning("the driver refuses streams that wait for host memory (CUDA error %d); the host waits", code)
        job.future.result()

    def raise_failed(self) -> None:
        """Raise the error of a job that has ended."""
        while self._unchecked and self._unchecked[0].future.done():
            self._unchecked.popleft().future.result()


def _synchronize(device: torch.device, number: torch.Tensor) -> None:
    torch.cuda.synchronize(device)
