"""A batch through one layer of experts that is started and awaited, again and again."""

from __future__ import annotations

from torch import Tensor

from ktransformers import _core


class ExpertCall:
    """A call bound to its tensors, which may be submitted again and again; the routing is read anew each time."""

    def __init__(self, call: _core.Call, out: Tensor) -> None:
        self._call = call
        self.out = out

    def submit(self) -> None:
        """Start; returns at once. `wait` may come from another thread."""
        self._call.submit()

    def wait(self) -> Tensor:
        """The result of what was last submitted."""
        self._call.wait()
        return self.out

    @property
    def done(self) -> bool:
        """Nothing is under way."""
        return self._call.done

    @property
    def address(self) -> int:
        """What `_core.host_callbacks()` take as their argument."""
        return self._call.address
