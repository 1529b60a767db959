"""A weight `[N, K]` of a linear layer or an embedding that is not stored as its values in the model's dtype.

To everything else it is a tensor of that dtype: PEFT sees an ordinary frozen weight of an ordinary `nn.Linear`. A class
of such weights says what it computes from its storage (`linear`, `own_operator`). Any other operator gets `dense()`, a
copy in the model's dtype, and so do a copied module and a saved file; what would write into the weight is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ktransformers.ground.errors import InputError


class FrozenWeight(Tensor):
    @property
    def identity(self) -> object:
        """Equal for all tensors of these values, whatever their dtype or device."""
        raise NotImplementedError

    @property
    def stored_as(self) -> str:
        """The format or dtype of the storage, for messages."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """`F.linear`; None if the product needs a dense copy."""
        raise NotImplementedError

    @classmethod
    def own_operator(cls, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operator that needs no dense copy, else NotImplemented."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
                x, weight = named["input"], named["weight"]
                if torch.is_autocast_enabled(x.device.type):
                    x = x.to(torch.get_autocast_dtype(x.device.type))
                if isinstance(weight, cls) and (product := weight.linear(x, named.get("bias"))) is not None:
                    return product
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        aliases = [argument.alias_info for argument in func._schema.arguments]
        if torch.is_inference_mode_enabled() and any(alias is not None and not alias.is_write for alias in aliases):
            with torch.inference_mode(False):  # torch accepts no view of inference mode of a tensor from outside of it
                return cls.__torch_dispatch__(func, types, args, kwargs)
        result = cls.own_operator(name, func, args, kwargs)
        if result is not NotImplemented:
            return result
        written = [value for alias, value in zip(aliases, args, strict=False) if alias is not None and alias.is_write]
        for value in (*written, kwargs.get("out")):
            if isinstance(value, cls):
                raise value.refused(name)
        return func(*tree_map(_dense, tuple(args)), **tree_map(_dense, kwargs))

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Accepts the same values in another dtype or on another device, which `nn.Module.to` sets."""
        if not isinstance(value, type(self)) or value.identity != self.identity:
            raise self.refused("an assignment to .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.__dict__.update(value.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary parameter: a module is copied to train the copy."""
        return nn.Parameter(self.dense(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def refused(self, operation: str) -> InputError:
        expected = f"only reads: it is frozen, stored in {self.stored_as}"
        remedy = "a deep copy of the module can be changed; merge adapters into the checkpoint with `kt merge`"
        return InputError("weight", f"{operation}, which writes into it", expected, remedy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, stored in {self.stored_as})"


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, FrozenWeight) else value
