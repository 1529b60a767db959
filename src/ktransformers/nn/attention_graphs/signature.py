"""Calls of a stock attention module, as far as they can be told apart and repeated: `attention.py` records them.

A call is hidden states `[B, T, H]` and words; tensors among these are known by name, with the axes that tokens have in
them: rotary embeddings `[.., T, d]`, masks `[.., T, T]`, position ids `[.., T]`; the first axis is 1 or B. Sequences
know nothing of each other, so a call is made in pieces of a few of them, filled up at their end to one of a few lengths
T'. What a module computes besides depends on its state: where its parameters lie, and its switches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ktransformers.place.gpu.expert_graphs import size_of

PIECE = 1024  # tokens: memory of a graph is a piece's, and a device has enough to do with them
AXES = {"position_embeddings": (-2,), "attention_mask": (-2, -1), "position_ids": (-1,)}
UNUSED = frozenset({"num_items_in_batch"})  # what trainers pass down for the loss
CONSTANT = (bool, int, float, str, type(None))
Key = tuple[Any, ...]


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a call besides hidden states: names of tensors, which of them came in a tuple, and the rest."""

    names: tuple[str, ...]
    tuples: frozenset[str]
    constants: tuple[tuple[str, Any], ...]

    def words(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.constants)
        for name, tensor in zip(self.names, tensors, strict=True):
            found[name] = (*found.get(name, ()), tensor) if name in self.tuples else tensor
        return found


@dataclass(frozen=True)
class AttentionCall:
    """One call that may be replayed."""

    hidden: Tensor
    tensors: tuple[Tensor, ...]
    form: CallSignature
    shape: tuple[int, int, int]  # of a piece's hidden states: sequences, T', H
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of a piece

    @property
    def filled_up(self) -> bool:
        return self.hidden.shape[1] < self.shape[1]

    def word(self, name: str, default: object) -> object:
        """One of the constants."""
        return dict(self.form.constants).get(name, default)


def read(args: tuple[Any, ...], words: Mapping[str, Any]) -> AttentionCall | None:
    """None: there is something among the arguments that nobody knows."""
    words = {"hidden_states": args[0], **words} if len(args) == 1 else words
    hidden = words.get("hidden_states")
    if len(args) > 1 or not isinstance(hidden, Tensor) or hidden.dim() != 3 or not hidden.numel():
        return None
    names: list[str] = []
    tensors: list[Tensor] = []
    tuples, constants = set(), []
    for name, value in words.items():
        if name == "hidden_states" or name in UNUSED:
            continue
        if isinstance(value, CONSTANT):
            constants.append((name, value))
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if name not in AXES or not all(isinstance(one, Tensor) and not one.requires_grad for one in parts):
            return None
        if isinstance(value, tuple):
            tuples.add(name)
        names += [name] * len(parts)
        tensors += parts
    room = size_of(hidden.shape[1])
    shape = min(hidden.shape[0], max(1, PIECE // room)), room, hidden.shape[2]
    shapes = [_in_a_piece(name, one, hidden, shape) for name, one in zip(names, tensors, strict=True)]
    known = tuple(one for one in shapes if one is not None)
    if len(known) < len(shapes):
        return None
    return AttentionCall(
        hidden, tuple(tensors), CallSignature(tuple(names), frozenset(tuples), tuple(constants)), shape, known
    )


def _in_a_piece(name: str, tensor: Tensor, hidden: Tensor, piece: tuple[int, int, int]) -> tuple[int, ...] | None:
    """The tensor's shape there; None: its axes are not what they should be."""
    shape, axes = list(tensor.shape), AXES[name]
    if len(shape) <= len(axes) or shape[0] not in (1, hidden.shape[0]):
        return None
    shape[0] = min(shape[0], piece[0])
    for axis in axes:
        if shape[axis] != hidden.shape[1]:
            return None
        shape[axis] = piece[1]
    return tuple(shape)


def state_of(module: nn.Module) -> Key | None:
    """What a graph of this module takes for granted: where parameters lie, and every switch that PEFT and training
    have. None: there are hooks inside, which a replay would not call."""
    found: list[Any] = []
    below = [module]
    while below:
        one = below.pop()
        inside = one.__dict__
        hooks = inside["_forward_hooks"] or inside["_forward_pre_hooks"]
        if one is not module and (hooks or inside["_backward_hooks"] or inside["_backward_pre_hooks"]):
            return None
        found += (id(one), inside["training"])
        for tensor in (*inside["_parameters"].values(), *inside["_buffers"].values()):
            if tensor is not None:
                found += (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
        if hasattr(one, "merged_adapters"):
            peft: Any = one
            active, scaling = peft._active_adapter, inside.get("scaling", {})
            found += (peft._disable_adapters, active if isinstance(active, str) else tuple(active))
            found += (*peft.merged_adapters, *scaling.values())
        elif isinstance(one, nn.Dropout):
            found.append(one.p)
        below += [child for child in inside["_modules"].values() if child is not None]
    return tuple(found)


def draws(module: nn.Module) -> bool:
    """Whether it asks for random numbers."""
    inside = (one for one in module.modules() if isinstance(one, nn.Dropout))
    return module.training and (bool(getattr(module, "attention_dropout", 0)) or any(one.p > 0 for one in inside))


def trained_by(module: nn.Module) -> dict[int, tuple[Tensor, list[tuple[dict[str, Any], str]]]]:
    """Parameters that learn, by id, each with all of the places where it stands."""
    found: dict[int, tuple[Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for one in module.modules():
        held: dict[str, Any] = one.__dict__["_parameters"]
        for name, parameter in held.items():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(id(parameter), (parameter, []))[1].append((held, name))
    return found
