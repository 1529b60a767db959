"""`HostCall`: a call into the core that is queued on the current CUDA stream as host callbacks, so that it can be
captured in a CUDA graph; with tensors in host memory it runs at once.

A host callback cannot raise an error, so whoever queued it asks for the error of an earlier call or replay
(`raise_error`). It holds raw addresses: the call and its tensors must outlive what is queued, and in a captured graph
every replay."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ktransformers import _core
from ktransformers.experts.store import ExpertCall
from ktransformers.place.gpu.cuda_driver import call_on_host


@functools.cache
def _callbacks() -> Any:
    return _core.host_callbacks()


@dataclass(frozen=True)
class HostCall:
    call: ExpertCall
    on_stream: bool

    def submit(self) -> None:
        """Start the experts. The stream's device must be current."""
        if self.on_stream:
            call_on_host(torch.cuda.current_stream().cuda_stream, _callbacks()["submit"], self.call.address)
        else:
            self.call.submit()

    def wait(self) -> None:
        """What is queued behind this finds the output complete."""
        if self.on_stream:
            call_on_host(torch.cuda.current_stream().cuda_stream, _callbacks()["wait"], self.call.address)
        else:
            self.call.wait()

    def raise_error(self) -> None:
        """Of a call that has ended; nothing while it runs."""
        if self.call.done:
            self.call.wait()
