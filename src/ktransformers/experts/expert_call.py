"""An asynchronous call of one expert layer: bound to its tensors once, submitted and awaited any number of times."""

from __future__ import annotations

from torch import Tensor

from ktransformers import _core


class ExpertCall:
    """Returned by `ExpertStore.prepare`. Every `submit` reads hidden states and routing from the bound tensors."""

    def __init__(self, call: _core.Call, out: Tensor) -> None:
        self._call = call
        self.out = out

    def submit(self) -> None:
        """Start the computation and return at once. Another thread may `wait`."""
        self._call.submit()

    def wait(self) -> Tensor:
        """The output of the last submission."""
        self._call.wait()
        return self.out

    @property
    def done(self) -> bool:
        """Whether no submission is running."""
        return self._call.done

    @property
    def address(self) -> int:
        """The argument of `_core.host_callbacks()`."""
        return self._call.address
