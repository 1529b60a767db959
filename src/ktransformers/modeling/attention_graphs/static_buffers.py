"""Tensors at fixed addresses that graphs of attention read and write.

Calls of one signature have one set of static inputs; all layers use it in turn, a piece of a call at a time. Pieces are
padded at the end of their sequences, and by whole sequences. Hidden states and gradients are padded with zeros. Real
tokens never attend to padding; padding rows attend to every key, because a fully masked row makes softmax return NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ktransformers.modeling.attention_graphs.signature import TOKEN_AXES, AttentionCall, Key


class GrowingBuffers:
    """Buffers by name and dtype, as large as the largest that was asked for. A larger one does not invalidate a smaller
    one that a graph uses."""

    def __init__(self) -> None:
        self._buffers: dict[Key, Tensor] = {}

    def get(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape at the start of the buffer."""
        key, count = (name, like.dtype), torch.Size(shape).numel()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.zeros(count, dtype=like.dtype, device=like.device)
        return buffer[:count].view(torch.Size(shape))


class StaticInputs:
    """`hidden` holds hidden states and, after a backward graph, their gradient; `out` the output or, before a backward
    graph, the gradient of it."""

    def __init__(self, call: AttentionCall, buffers: GrowingBuffers) -> None:
        self._buffers = buffers
        self.hidden = buffers.get("hidden", call.piece_shape, call.hidden)
        self.out = self.hidden[:0]  # until the output's dtype is known
        shaped = zip(call.tensors, call.tensor_shapes, strict=True)
        self.tensors = [torch.zeros(shape, dtype=tensor.dtype, device=tensor.device) for tensor, shape in shaped]
        self._held: tuple[Tensor, ...] = ()  # what was copied last: all layers of a pass are called with the same
        self._versions: tuple[int, ...] = ()

    def shape_output(self, out: Tensor) -> None:
        if not self.out.numel():
            self.out = self._buffers.get("out", out.shape, out)

    def fill(self, call: AttentionCall, piece: slice, grad_out: Tensor | None = None) -> None:
        """Copy a piece of a call and, for backward, of its output's gradient."""
        count, length = piece.stop - piece.start, call.hidden.shape[1]
        for target, source in ((self.hidden, call.hidden), (self.out, grad_out)):
            if source is not None:
                if count < call.piece_shape[0] or length < call.piece_shape[1]:
                    target.zero_()
                target[:count, :length].copy_(source[piece])
        per_sequence = any(tensor.shape[0] > 1 for tensor in call.tensors)
        versions = (piece.start if per_sequence else 0, *(tensor._version for tensor in call.tensors))
        if versions == self._versions and all(map(operator.is_, call.tensors, self._held)):
            return
        for name, target, tensor in zip(call.signature.names, self.tensors, call.tensors, strict=True):
            if name == "attention_mask":
                _mask_padding(target, min(count, tensor.shape[0]), length)
            if tensor.shape[0] == call.hidden.shape[0]:
                tensor, target = tensor[piece], target[:count]
            for axis in TOKEN_AXES[name]:
                target = target.narrow(axis, 0, length)
            target.copy_(tensor)
        self._held, self._versions = call.tensors, versions


def _mask_padding(mask: Tensor, count: int, length: int) -> None:
    """Around the part of `[.., T', T']` that is copied: the first `count` sequences and `length` tokens."""
    is_bool = mask.dtype == torch.bool
    if length < mask.shape[-1]:
        mask.fill_(False if is_bool else torch.finfo(mask.dtype).min)
        mask[..., length:, :].fill_(is_bool)
    if count < mask.shape[0]:
        mask[count:].fill_(is_bool)


class GradientBuffers:
    """Gradients of parameters, contiguous for each dtype, so that they are copied out in one piece. Parameters that the
    module did not use have none."""

    def __init__(self, parameters: Sequence[Tensor], buffers: GrowingBuffers) -> None:
        sizes: dict[torch.dtype, int] = {}
        self._slices = []
        for parameter in parameters:
            start = sizes.get(parameter.dtype, 0)
            sizes[parameter.dtype] = start + parameter.numel()
            self._slices.append((parameter.dtype, start, sizes[parameter.dtype], parameter.shape))
        like = {parameter.dtype: parameter for parameter in parameters}
        self._flat = {dtype: buffers.get("gradients", [size], like[dtype]) for dtype, size in sizes.items()}
        self._sums = self._views(self._flat)
        self._used = [False] * len(parameters)

    def _views(self, flat: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
        return [flat[dtype][start:end].view(shape) for dtype, start, end, shape in self._slices]

    def clear(self) -> None:
        for flat in self._flat.values():
            flat.zero_()

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            if grad is not None:
                self._sums[index] += grad
                self._used[index] = True

    def copies(self) -> list[Tensor | None]:
        views = self._views({dtype: flat.clone() for dtype, flat in self._flat.items()})
        return [view if used else None for view, used in zip(views, self._used, strict=True)]
