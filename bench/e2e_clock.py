"""Time of the parts of a training step for `train_e2e.py`: experts and attention, forward, recomputed and backward.

Hooks before and after modules synchronise with the device, so a profiled step takes longer than a timed one: its parts
are shares, not the step's seconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

PARTS = ("experts_forward", "experts_backward", "experts_again", "attention", "optimizer", "rest")


class Clock:
    """Seconds between hooks around modules, in both directions; synchronises with the device at each.

    A module's input passes through a view of its own, whose gradient is complete when the module's backward has ended;
    that of the output is complete when it begins. What runs again under checkpointing is marked by a flag.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.in_backward = False
        self._handles: list[Any] = []
        self._begun = 0.0

    def now(self) -> float:
        self._wait()
        return time.perf_counter()

    def add(self, part: str, begun: float) -> None:
        self.seconds[part] += self.now() - begun

    def watch(self, module: nn.Module, forward: str, again: str, backward: str) -> None:
        import torch

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            hidden = args[0] if args else kwargs["hidden_states"]
            if torch.is_grad_enabled() and hidden.requires_grad:
                hidden = hidden.view_as(hidden)
                hidden.register_hook(lambda gradient: self.add(backward, self._begun))
            self._begun = self.now()
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.add(again if self.in_backward else forward, self._begun)
            self._begun = self.now()  # what runs again does so inside a backward that had begun
            first = output[0] if isinstance(output, tuple) else output
            if first is not None and first.requires_grad:  # None: recomputation has all it needs, and stopped
                first.register_hook(self._start)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _start(self, gradient: torch.Tensor) -> None:
        self._begun = self.now()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
