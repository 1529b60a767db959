"""`Placeholder`: a frozen weight with shape and dtype and without bytes, in the place of experts that live in a store.

Adapter frameworks find what they adapt among a module's parameters, by name and shape; `gate_up_proj` [E, 2I, H] must
therefore be there although its numbers are packed elsewhere. A ghost can be renamed, cast, copied and moved like any
parameter, at no cost. It says "cpu" whatever device it is moved to, because that is where its numbers are and where an
adapter on them belongs. Whoever wants to compute with it is told where the experts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.errors import InputError

# What leaves a tensor as it is but for its dtype.
_SAME = {"detach", "alias", "clone", "_to_copy", "lift_fresh", "view_as", "empty_like"}


class Placeholder(Tensor):
    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype) -> Placeholder:
        ghost: Placeholder = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        return ghost

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Placeholder:
        name = func.overloadpacket.__name__
        ghost = next((value for value in args if isinstance(value, Placeholder)), None)
        if ghost is None or name not in _SAME:
            raise InputError(
                "packed experts",
                f"{name} on a parameter of theirs",
                "computation by the experts implementation 'kt'",
                'model.set_experts_implementation("kt"); merging, editing or saving needs the stock model',
            )
        return cls(ghost.shape, (kwargs or {}).get("dtype") or ghost.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return frozen_ghost(self.shape, self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Ghost({list(self.shape)}, {self.dtype}, packed)"


def frozen_ghost(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """As a parameter; it is a `Placeholder` as well."""
    return nn.Parameter(Placeholder(shape, dtype), requires_grad=False)
