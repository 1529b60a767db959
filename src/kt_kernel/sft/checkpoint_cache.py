"""One saved output of an expert layer, for programs that checkpoint activations themselves: the first pass saves it,
the recomputation takes it instead of computing the experts again.

A failed pass poisons the cache, so that a recomputation that comes all the same raises instead of returning the output
of another batch.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor


class CheckpointCacheState(Enum):
    EMPTY = "empty"
    READY = "ready"
    POISONED = "poisoned"


class CheckpointOutputCache:
    """Holds at most one output; `state` says whether there is one."""

    def __init__(self) -> None:
        self.state = CheckpointCacheState.EMPTY
        self._output: Tensor | None = None
        self._reason = ""

    def put(self, output: Tensor) -> None:
        if self.state is not CheckpointCacheState.EMPTY:
            raise RuntimeError(f"the checkpoint cache is {self.state.value}: take or clear its output before the next")
        self._output, self.state = output.detach(), CheckpointCacheState.READY

    def get(self) -> Tensor:
        if self.state is CheckpointCacheState.POISONED:
            raise RuntimeError(f"the checkpoint cache is poisoned ({self._reason}): clear it and start the step again")
        if self._output is None:
            raise RuntimeError("the checkpoint cache is empty: the first pass of this block saved no output")
        return self._output

    def require_like(self, other: Tensor) -> None:
        """Raise unless the output has the shape and dtype of `other`."""
        output = self.get()
        if (output.shape, output.dtype) != (other.shape, other.dtype):
            raise RuntimeError(
                f"the checkpoint cache holds {output.dtype} {list(output.shape)}, the recomputation has {other.dtype} "
                f"{list(other.shape)}: it is another batch"
            )

    def require_empty(self) -> None:
        if self.state is not CheckpointCacheState.EMPTY:
            raise RuntimeError(
                f"the checkpoint cache is {self.state.value}, expected empty: a recomputation is missing"
            )

    def clear(self) -> None:
        self._output, self._reason, self.state = None, "", CheckpointCacheState.EMPTY

    def poison(self, reason: str = "a pass failed") -> None:
        self._output, self._reason, self.state = None, reason, CheckpointCacheState.POISONED
