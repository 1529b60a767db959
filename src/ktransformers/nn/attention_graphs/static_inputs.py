"""Buffers around recorded attention: what a graph reads and what it leaves, at addresses that never change.

Every kind of call has a tray, all layers use it in turn, a piece of a call at a time. What is laid there is filled up
at the end of its sequences, and by sequences that are nobody's: hidden states and gradients with zeros, masks so that
tokens see nobody there and nobody sees everybody, because a row without a key would be no number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ktransformers.nn.attention_graphs.signature import AXES, AttentionCall, Key


class GrowingBuffers:
    """Buffers by name, as large as the largest that was asked for; whoever holds a smaller one keeps it."""

    def __init__(self) -> None:
        self._known: dict[Key, Tensor] = {}

    def of(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """So many numbers, the first of the buffer."""
        key, count = (name, like.dtype), torch.Size(shape).numel()
        found = self._known.get(key)
        if found is None or found.numel() < count:
            found = self._known[key] = torch.zeros(count, dtype=like.dtype, device=like.device)
        return found[:count].view(torch.Size(shape))


class StaticInputs:
    """Buffers of one kind of call. `inward` holds hidden states and, when a graph is through with them, their gradient;
    `outward` the output or, for backward, the gradient that it gets."""

    def __init__(self, call: AttentionCall, buffers: GrowingBuffers) -> None:
        self._buffers = buffers
        self.inward = buffers.of("inward", call.shape, call.hidden)
        self.outward = self.inward[:0]  # until somebody knows the output's type
        shaped = zip(call.tensors, call.shapes, strict=True)
        self.tensors = [torch.zeros(shape, dtype=one.dtype, device=one.device) for one, shape in shaped]
        self._held: tuple[Tensor, ...] = ()  # what was laid last: every layer of a pass brings the same
        self._versions: tuple[int, ...] = ()

    def expect(self, out: Tensor) -> None:
        """Outputs like this one."""
        if not self.outward.numel():
            self.outward = self._buffers.of("outward", out.shape, out)

    def pieces(self, call: AttentionCall) -> Iterator[slice]:
        count, most = call.hidden.shape[0], call.shape[0]
        return (slice(start, min(count, start + most)) for start in range(0, count, most))

    def lay(self, call: AttentionCall, piece: slice, rising: Tensor | None = None) -> None:
        """A piece of a call and, for backward, of its output's gradient."""
        count, length = piece.stop - piece.start, call.hidden.shape[1]
        for target, source in ((self.inward, call.hidden), (self.outward, rising)):
            if source is not None:
                if count < call.shape[0] or length < call.shape[1]:
                    target.zero_()
                target[:count, :length].copy_(source[piece])
        apart = any(tensor.shape[0] > 1 for tensor in call.tensors)  # not the same for all pieces
        versions = (piece.start if apart else 0, *(tensor._version for tensor in call.tensors))
        if versions == self._versions and all(map(operator.is_, call.tensors, self._held)):
            return
        for name, target, tensor in zip(call.form.names, self.tensors, call.tensors, strict=True):
            if name == "attention_mask":
                _open_for_nobody(target, min(count, tensor.shape[0]), length)
            if tensor.shape[0] == call.hidden.shape[0]:
                tensor, target = tensor[piece], target[:count]
            for axis in AXES[name]:
                target = target.narrow(axis, 0, length)
            target.copy_(tensor)
        self._held, self._versions = call.tensors, versions


def _open_for_nobody(mask: Tensor, count: int, length: int) -> None:
    """`[.., T', T']` around what is laid in its first `count` sequences and `length` tokens."""
    whole = mask.dtype == torch.bool
    if length < mask.shape[-1]:
        mask.fill_(False if whole else torch.finfo(mask.dtype).min)
        mask[..., length:, :].fill_(whole)
    if count < mask.shape[0]:
        mask[count:].fill_(whole)


class GradientBuffers:
    """Of parameters, one behind the other for each of their types, so that they leave in one copy. Those that a module
    did not use have none."""

    def __init__(self, parameters: Sequence[Tensor], buffers: GrowingBuffers) -> None:
        sizes: dict[torch.dtype, int] = {}
        self._places = []
        for parameter in parameters:
            start = sizes.get(parameter.dtype, 0)
            sizes[parameter.dtype] = start + parameter.numel()
            self._places.append((parameter.dtype, start, sizes[parameter.dtype], parameter.shape))
        like = {parameter.dtype: parameter for parameter in parameters}
        self._flat = {dtype: buffers.of("trained", [size], like[dtype]) for dtype, size in sizes.items()}
        self._sums = self._views(self._flat)
        self._used = [False] * len(parameters)

    def _views(self, flat: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
        return [flat[dtype][start:end].view(shape) for dtype, start, end, shape in self._places]

    def clear(self) -> None:
        for flat in self._flat.values():
            flat.zero_()

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for at, grad in enumerate(grads):
            if grad is not None:
                self._sums[at] += grad
                self._used[at] = True

    def take(self) -> list[Tensor | None]:
        views = self._views({dtype: flat.clone() for dtype, flat in self._flat.items()})
        return [view if used else None for view, used in zip(views, self._used, strict=True)]
