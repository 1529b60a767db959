"""Calls of a stock attention module, as far as they can be told apart and repeated: what is the same for two calls that
go through the same graph.

A call is hidden states `[B, T, H]` and keyword arguments. Tensors among these are known by name, with the axes that
tokens have in them: rotary embeddings `[.., T, d]`, masks `[.., T, T]`, position ids `[.., T]`; the first axis is 1 or
B. Sequences are independent of each other, so a call is computed in pieces of a few sequences, padded at their end to
one of a few lengths T'. What a module computes besides depends on its state: the addresses of its parameters, and the
switches of PEFT and of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ktransformers.modeling.cuda_graphs import padded_tokens

PIECE_TOKENS = 1024  # graph memory is that of a piece, and so many tokens keep a device busy
TOKEN_AXES = {"position_embeddings": (-2,), "attention_mask": (-2, -1), "position_ids": (-1,)}
UNUSED_ARGUMENTS = frozenset({"num_items_in_batch"})  # what trainers pass down for the loss
CONSTANT_TYPES = (bool, int, float, str, type(None))
Key = tuple[Any, ...]


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a call besides hidden states: names of tensors, which of them came in a tuple, and constants."""

    names: tuple[str, ...]
    tuples: frozenset[str]
    constants: tuple[tuple[str, Any], ...]

    def keywords(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        keywords: dict[str, Any] = dict(self.constants)
        for name, tensor in zip(self.names, tensors, strict=True):
            keywords[name] = (*keywords.get(name, ()), tensor) if name in self.tuples else tensor
        return keywords


@dataclass(frozen=True)
class AttentionCall:
    """One call that may be replayed."""

    hidden: Tensor
    tensors: tuple[Tensor, ...]
    signature: CallSignature
    piece_shape: tuple[int, int, int]  # of a piece's hidden states: sequences, T', H
    tensor_shapes: tuple[tuple[int, ...], ...]  # of the tensors of a piece

    @property
    def needs_padding(self) -> bool:
        return self.hidden.shape[1] < self.piece_shape[1]

    def constant(self, name: str, default: object) -> object:
        return dict(self.signature.constants).get(name, default)

    def pieces(self) -> list[slice]:
        """Sequences of each piece; the last one may be short."""
        count, size = self.hidden.shape[0], self.piece_shape[0]
        return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def read_call(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> AttentionCall | None:
    """None: there is an argument that graphs do not support."""
    keywords = {"hidden_states": args[0], **keywords} if len(args) == 1 else keywords
    hidden = keywords.get("hidden_states")
    if len(args) > 1 or not isinstance(hidden, Tensor) or hidden.dim() != 3 or not hidden.numel():
        return None
    names: list[str] = []
    tensors: list[Tensor] = []
    tuples, constants = set(), []
    for name, value in keywords.items():
        if name == "hidden_states" or name in UNUSED_ARGUMENTS:
            continue
        if isinstance(value, CONSTANT_TYPES):
            constants.append((name, value))
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if name not in TOKEN_AXES or not all(isinstance(part, Tensor) and not part.requires_grad for part in parts):
            return None
        if isinstance(value, tuple):
            tuples.add(name)
        names += [name] * len(parts)
        tensors += parts
    length = padded_tokens(hidden.shape[1])
    piece_shape = min(hidden.shape[0], max(1, PIECE_TOKENS // length)), length, hidden.shape[2]
    shapes = [_shape_in_piece(name, tensor, hidden, piece_shape) for name, tensor in zip(names, tensors, strict=True)]
    known = tuple(shape for shape in shapes if shape is not None)
    if len(known) < len(shapes):
        return None
    signature = CallSignature(tuple(names), frozenset(tuples), tuple(constants))
    return AttentionCall(hidden, tuple(tensors), signature, piece_shape, known)


def _shape_in_piece(
    name: str, tensor: Tensor, hidden: Tensor, piece_shape: tuple[int, int, int]
) -> tuple[int, ...] | None:
    """None: the axes of the tensor are not what its name promises."""
    shape, axes = list(tensor.shape), TOKEN_AXES[name]
    if len(shape) <= len(axes) or shape[0] not in (1, hidden.shape[0]):
        return None
    shape[0] = min(shape[0], piece_shape[0])
    for axis in axes:
        if shape[axis] != hidden.shape[1]:
            return None
        shape[axis] = piece_shape[1]
    return tuple(shape)


def module_state(module: nn.Module) -> Key | None:
    """What a graph of this module takes for granted: addresses of parameters, and every switch that PEFT and training
    have. None: there are hooks inside, which a replay would not call."""
    state: list[Any] = []
    stack = [module]
    while stack:
        part = stack.pop()
        fields = part.__dict__
        hooks = fields["_forward_hooks"] or fields["_forward_pre_hooks"]
        if part is not module and (hooks or fields["_backward_hooks"] or fields["_backward_pre_hooks"]):
            return None
        state += (id(part), fields["training"])
        for tensor in (*fields["_parameters"].values(), *fields["_buffers"].values()):
            if tensor is not None:
                state += (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
        if hasattr(part, "merged_adapters"):
            peft: Any = part
            active, scaling = peft._active_adapter, fields.get("scaling", {})
            state += (peft._disable_adapters, active if isinstance(active, str) else tuple(active))
            state += (*peft.merged_adapters, *scaling.values())
        elif isinstance(part, nn.Dropout):
            state.append(part.p)
        stack += [child for child in fields["_modules"].values() if child is not None]
    return tuple(state)


def has_dropout(module: nn.Module) -> bool:
    """Whether a call draws random numbers."""
    dropouts = (part for part in module.modules() if isinstance(part, nn.Dropout))
    return module.training and (bool(getattr(module, "attention_dropout", 0)) or any(part.p > 0 for part in dropouts))


def trained_parameters(module: nn.Module) -> dict[int, tuple[Tensor, list[tuple[dict[str, Any], str]]]]:
    """Parameters with gradients by id, each with all (dictionary, name) that hold it: tied ones have several."""
    trained: dict[int, tuple[Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for part in module.modules():
        parameters: dict[str, Any] = part.__dict__["_parameters"]
        for name, parameter in parameters.items():
            if parameter is not None and parameter.requires_grad:
                trained.setdefault(id(parameter), (parameter, []))[1].append((parameters, name))
    return trained
