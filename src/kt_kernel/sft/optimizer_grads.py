"""The rule by which a backward pass overwrites or accumulates the gradients of parameters that alias its buffers.

A parameter is registered with a view of the gradient buffer that holds its gradient. After a backward pass
`parameter.grad` is that view. If every `grad` is None before a backward pass, the pass overwrites the buffers (the
window is closed); if every `grad` is its view, the pass adds to them (the window is open). Anything else, such as a
`grad` that an optimiser replaced, would be lost, so it raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ktransformers.ground.errors import InputError


@dataclass(frozen=True)
class RegisteredGrad:
    parameter: nn.Parameter
    view: Tensor

    @property
    def aliases(self) -> bool:
        grad = self.parameter.grad
        return grad is not None and (grad.data_ptr(), grad.shape, grad.stride(), grad.dtype) == (
            self.view.data_ptr(),
            self.view.shape,
            self.view.stride(),
            self.view.dtype,
        )


class OptimizerGrads:
    def __init__(self) -> None:
        self._registered: dict[str, RegisteredGrad] = {}

    def register(self, name: str, parameter: nn.Parameter, view: Tensor) -> None:
        if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
            given = f"a gradient of {view.dtype} {list(view.shape)} on {view.device}"
            raise InputError(name, given, f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}")
        if parameter.grad is not None and not RegisteredGrad(parameter, view).aliases:
            raise InputError(name, "a parameter that has a gradient already", "one without", "set its grad to None")
        self._registered[name] = RegisteredGrad(parameter, view)

    def state(self) -> str:
        """ "empty": nothing is registered; "closed": the next pass overwrites; "open": it accumulates."""
        if not self._registered:
            return "empty"
        entries = self._registered.values()
        if all(entry.parameter.grad is None for entry in entries):
            return "closed"
        if all(entry.aliases for entry in entries):
            return "open"
        names = [
            name for name, entry in self._registered.items() if entry.parameter.grad is not None and not entry.aliases
        ]
        given = f"{', '.join(names)} replaced" if names else "gradients of some of them alone"
        raise RuntimeError(
            f"expert LoRA gradients: given {given}, expected all None or all the registered buffers; set every grad to "
            "None (zero_grad), and write into a gradient instead of replacing it"
        )

    def publish(self) -> None:
        """Make every registered view the gradient of its parameter, after a backward pass."""
        for entry in self._registered.values():
            entry.parameter.grad = entry.view

    def release(self) -> None:
        """Close the window: the gradients become None. The registrations stay."""
        for entry in self._registered.values():
            entry.parameter.grad = None
