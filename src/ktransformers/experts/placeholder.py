"""`Placeholder`: a frozen parameter with shape and dtype but no storage, in place of experts that are in a store.

Adapter frameworks look up what they adapt among a module's parameters, by name and shape, so `gate_up_proj` [E, 2I, H]
must exist although its values are packed elsewhere. A placeholder can be renamed, cast, copied and moved like any
parameter, at no cost. Its device is "cpu" even after a move to a GPU, because its values are in host memory and an
adapter on them belongs there. Computing with it is an error that names the experts implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.ground.errors import InputError

# Operators whose result differs from their input at most in dtype.
_ALLOWED_OPERATORS = {"detach", "alias", "clone", "_to_copy", "lift_fresh", "view_as", "empty_like"}


class Placeholder(Tensor):
    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype) -> Placeholder:
        tensor: Placeholder = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Placeholder:
        name = func.overloadpacket.__name__
        source = next((value for value in args if isinstance(value, Placeholder)), None)
        if source is None or name not in _ALLOWED_OPERATORS:
            raise InputError(
                "packed experts",
                f"{name} on a parameter of theirs",
                "computation by the experts implementation 'kt'",
                'model.set_experts_implementation("kt"); merging, editing or saving needs the stock model',
            )
        return cls(source.shape, (kwargs or {}).get("dtype") or source.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return frozen_placeholder(self.shape, self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({list(self.shape)}, {self.dtype}, packed)"


def frozen_placeholder(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A placeholder as a parameter; it is an instance of both classes."""
    return nn.Parameter(Placeholder(shape, dtype), requires_grad=False)
