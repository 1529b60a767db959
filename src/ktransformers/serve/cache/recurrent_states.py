"""Convolution and recurrent states of many sequences (gated delta rule, Mamba, short convolutions) in one forward pass.

transformers has one contract for such states: a module asks the cache for them (`get_conv_state`,
`get_recurrent_state`, in releases up to 5.17 `layers[i].conv_states` and `layers[i].recurrent_states`) and returns them
(`update_...`); MiniMax has an older one of the same kind. `StateBatch` is that contract over the states of slots
(`KVSlot.states`). Modules are recognised by using it: `serve_states` calls the model
once with two tokens, gives every module that accepts a cache one of its own, and replaces the forward of those that put
a state into it.

While `use_states(spans)` is open, such a module gets the row `[1, T, H]` of the whole batch and calls its stock forward
once for each chunk of a prompt, `[1, n, H]`, and once for the new tokens of all sequences together, `[n, 1, H]`. States
of sequences that decode together stay rows of one tensor, so that nothing is gathered or scattered while the same
sequences decode. Modules that ignore the state before a chunk of several rows (Jamba's scan does) get such chunks row
by row.

LoRA of linear layers inside such a module applies to the rows of the call, not to those of the batch.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ktransformers.modeling.substitute import PROBE_ERRORS, TWO_TOKENS, Restore, call_with_two_tokens
from ktransformers.serve.attention.step import Span
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.cache.snapshots import copy_states
from ktransformers.serve.scheduler.lora import adapter_rows, apply_adapter_to_all, apply_linear_lora

CACHE_PARAMETERS = ("cache_params", "past_key_values")  # names under which a module's forward accepts a cache
CONVOLUTION = "convolution"  # prefix of the names of states that are the last inputs of a convolution


class StateRows(Protocol):
    """Where the states of a call's rows are kept: `[n, ...]` of a layer and name."""

    @property
    def started(self) -> bool:
        """Whether there are states."""

    def load(self, layer: int, name: str) -> Tensor: ...

    def save(self, layer: int, name: str, state: Tensor) -> None: ...


@dataclass(frozen=True)
class SlotStates:
    """Row i of a state belongs to `slots[i]`."""

    slots: Sequence[KVSlot]
    started: bool

    def load(self, layer: int, name: str) -> Tensor:
        return _stack([slot.states[layer][name] for slot in self.slots])

    def save(self, layer: int, name: str, state: Tensor) -> None:
        for slot, row in zip(self.slots, state.unbind(), strict=True):
            slot.states.put(layer, name, row)


class _Indexed:
    """What a function returns for an index, in the place of a sequence."""

    def __init__(self, get: Callable[[int], Any]) -> None:
        self._get = get

    def __getitem__(self, index: int) -> Any:
        return self._get(index)


class _LayerStates:
    """The states of one layer under the names of transformers up to 5.17."""

    record_past = False  # no state is kept that would be rolled back

    def __init__(self, batch: StateBatch, layer: int) -> None:
        self.conv_states = _Indexed(functools.partial(batch.get_conv_state, layer))
        self.recurrent_states = _Indexed(functools.partial(batch.get_recurrent_state, layer))


class StateBatch:
    """The cache of one call of a module."""

    def __init__(self, rows: StateRows) -> None:
        self._rows = rows
        self._states: dict[tuple[int, str], Tensor] = {}  # [n, ...], read or written by this call

    @property
    def layers(self) -> _Indexed:
        return _Indexed(functools.partial(_LayerStates, self))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get(layer_idx, f"{CONVOLUTION}{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._get(layer_idx, f"recurrent{state_idx}")

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._get(layer_idx, "linear")

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Inputs `[n, channels, rows]`; returns them after the ones before them, of which the last are kept."""
        name = f"{CONVOLUTION}{state_idx}"
        before = self._get(layer_idx, name)
        if before is None:
            kept = conv_kernel_size or conv_states.shape[-1]
            inputs = pad(conv_states, (max(0, kept - conv_states.shape[-1]), 0))
        else:
            kept = before.shape[-1]
            inputs = torch.cat([before, conv_states], dim=-1)
        self._states[layer_idx, name] = inputs[..., -kept:].clone()
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._set(layer_idx, f"recurrent{state_idx}", recurrent_states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._set(layer_idx, "linear", linear_cache)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._rows.started

    def is_recording_past(self, layer_idx: int) -> bool:
        """No state is kept that would be rolled back."""
        return False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values are `attention.py`'s: only attention that is called to find states comes here."""
        return key_states, value_states

    def store(self) -> None:
        """Keep what the call left; also what it only read, because kernels update states in place."""
        for (layer, name), state in self._states.items():
            self._rows.save(layer, name, state)

    def _get(self, layer: int, name: str) -> Tensor | None:
        if (layer, name) not in self._states and self._rows.started:
            self._states[layer, name] = self._rows.load(layer, name)
        return self._states.get((layer, name))

    def _set(self, layer: int, name: str, state: Tensor) -> Tensor:
        before = self._get(layer, name)
        state = state if before is None else state.to(before.dtype)
        if state.untyped_storage().nbytes() > state.nbytes:  # a part of the activations of a chunk, which would stay
            state = state.clone()
        self._states[layer, name] = state
        return state


def _stack(states: Sequence[Tensor]) -> Tensor:
    """`[n, ...]`: the tensor of which the states are the rows, where they are; else a copy."""
    first = states[0]
    if len(states) == 1:
        return first[None]
    step, storage = states[1].storage_offset() - first.storage_offset(), first.untyped_storage().data_ptr()
    offsets = range(first.storage_offset(), first.storage_offset() + step * len(states), step or 1)
    together = step >= first.numel() and all(
        state.untyped_storage().data_ptr() == storage
        and state.storage_offset() == offset
        and state.stride() == first.stride()
        for state, offset in zip(states, offsets, strict=False)
    )
    if together:
        return first.as_strided((len(states), *first.shape), (step, *first.stride()), first.storage_offset())
    return torch.stack(list(states))


@dataclass(frozen=True)
class RowGroup:
    """Rows of the batch that a module computes in one call: a chunk, or one row of each of several sequences."""

    spans: Sequence[Span]
    rows: slice | Tensor  # of the batch; a tensor: one row of each span

    @property
    def started(self) -> bool:
        return self.spans[0].position > 0

    @property
    def count(self) -> int:
        return sum(span.rows for span in self.spans)

    def lora(self) -> AbstractContextManager[None]:
        """LoRA of the linear layers by rows of this group."""
        if len(self.spans) == 1:  # a module may also compute a row before the first one
            return apply_adapter_to_all(self.spans[0].adapter)
        return apply_linear_lora(adapter_rows((span.adapter, span.rows) for span in self.spans), self.count)

    def take(self, value: Any, rows: int) -> Any:
        """Of a tensor `[1, rows, ...]` the rows of this group, `[1, n, ...]` or `[n, 1, ...]`; of a tuple, of its
        members. Anything else is passed as it is."""
        if isinstance(value, tuple):
            return tuple(self.take(member, rows) for member in value)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, rows):
            return value
        return value[:, self.rows] if isinstance(self.rows, slice) else value[0, self.rows.to(value.device)][:, None]

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the result of this group into that of the batch."""
        if isinstance(self.rows, slice):
            whole[:, self.rows] = part
        else:
            whole[0, self.rows.to(whole.device)] = part[:, 0]


class BatchRows:
    """The spans of a batch, grouped by calls of a module."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._spans, self._device = spans, device
        self.count = sum(span.rows for span in spans)

    def compute(self, module: StatefulForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a module for the whole batch."""
        groups = self.rows if module.by_row else self.chunks
        return self.join(groups, [self._compute_group(group, module, args, kwargs) for group in groups])

    def _compute_group(
        self, group: RowGroup, module: StatefulForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        states = SlotStates([span.slot for span in group.spans], group.started)
        taken = {name: group.take(value, self.count) for name, value in kwargs.items()}
        with group.lora():
            return module.call(states, group.take(args, self.count), taken)

    @functools.cached_property
    def chunks(self) -> list[RowGroup]:
        """A call for each chunk, and one for all new tokens."""
        return self._group(self._spans)

    @functools.cached_property
    def rows(self) -> list[RowGroup]:
        """As `chunks`, but chunks in the middle of a sequence row by row."""
        return self._group([part for span in self._spans for part in _split_started(span)])

    def _group(self, spans: Sequence[Span]) -> list[RowGroup]:
        steps: list[list[Span]] = []  # single rows; the second one of a slot needs the state after the first
        chunks: list[Span] = []
        seen: Counter[int] = Counter()
        for span in spans:
            if span.rows > 1 or not span.position:
                chunks.append(span)
                continue
            step = seen[id(span.slot)]
            seen[id(span.slot)] += 1
            steps += [[]] if step == len(steps) else []
            steps[step].append(span)
        return [self._group_single_rows(step) for step in steps] + [
            RowGroup([span], slice(span.first, span.last)) for span in chunks
        ]

    def _group_single_rows(self, spans: Sequence[Span]) -> RowGroup:
        return RowGroup(spans, torch.tensor([span.first for span in spans], device=self._device))

    def join(self, groups: Sequence[RowGroup], parts: Sequence[Any]) -> Any:
        """The result of the whole batch: `[1, T, ...]` of the groups' `[1, n, ...]` and `[n, 1, ...]`."""
        first = parts[0]
        if isinstance(first, tuple):
            return tuple(self.join(groups, members) for members in zip(*parts, strict=True))
        by_rows = all(
            isinstance(part, Tensor) and part.shape[:2] in ((1, group.count), (group.count, 1))
            for group, part in zip(groups, parts, strict=True)
        )
        if not by_rows:
            return first  # no result of tokens: MiniMax returns its state too
        if len(groups) == 1:
            return first.reshape(1, self.count, *first.shape[2:])
        whole = first.new_empty(1, self.count, *first.shape[2:])
        for group, part in zip(groups, parts, strict=True):
            group.put(part, whole)
        return whole


def _split_started(span: Span) -> list[Span]:
    if not span.position:
        return [span]
    return [
        Span(span.slot, span.first + row, span.first + row + 1, span.position + row, span.adapter)
        for row in range(span.rows)
    ]


class BatchStates(Protocol):
    """Computes a module with states for all rows of a batch."""

    def compute(self, module: StatefulForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_batch_states: ContextVar[BatchStates | None] = ContextVar("kt_batch_states", default=None)


@contextmanager
def use_batch_states(batch: BatchStates) -> Iterator[None]:
    """While the model is called, `batch` computes its modules with states.

    A ContextVar carries it past the model's forward, as in `attention.py`."""
    token = _batch_states.set(batch)
    try:
        yield
    finally:
        _batch_states.reset(token)


def use_states(spans: Sequence[Span], device: torch.device) -> AbstractContextManager[None]:
    """While the model is called, states are kept in the slots of these spans, which cover the batch."""
    return use_batch_states(BatchRows(spans, device))


class StatefulForward:
    """Replaces the forward of a module that keeps states. `by_row`: the stock forward computes several rows right only
    at the beginning of a sequence."""

    def __init__(self, stock: Callable[..., Any], parameter: str, index: int, by_row: bool) -> None:
        self.stock, self._parameter, self._index, self.by_row = stock, parameter, index, by_row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = _batch_states.get()
        given = args[self._index] if len(args) > self._index else kwargs.get(self._parameter)
        if batch is None or given is not None:  # the stock model, or a module inside of one with states
            return self.stock(*args, **kwargs)
        return batch.compute(self, args, kwargs)

    def call(self, rows: StateRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stock forward with the states of these rows, which are updated."""
        states = StateBatch(rows)
        if len(args) > self._index:
            result = self.stock(*args[: self._index], states, *args[self._index + 1 :], **kwargs)
        else:
            result = self.stock(*args, **kwargs | {self._parameter: states})
        states.store()
        return result


def serve_states(model: PreTrainedModel, restore: Restore) -> dict[str, bool]:
    """Replace the forward of every module that keeps states; returns, by their names, whether chunks in the middle of a
    sequence are computed row by row."""
    probes: dict[str, _Probe] = {}
    with Restore() as probing:
        for name, module in model.named_modules():
            forward = None if isinstance(module, PreTrainedModel) else _forward_with_cache(module)
            if forward is not None:
                probes[name] = _Probe(forward)
                probing.put(module, "forward", probes[name])
        call_with_two_tokens(model, "a family that can be computed")
    found = {name: probe.forward for name, probe in probes.items() if probe.keeps_states}
    for name, stateful in found.items():
        restore.put(model.get_submodule(name), "forward", stateful)
    return {name: stateful.by_row for name, stateful in found.items()}


def _forward_with_cache(module: nn.Module) -> StatefulForward | None:
    """None: the module's forward does not accept a cache."""
    stock = module.forward.stock if isinstance(module.forward, StatefulForward) else module.forward
    names = list(inspect.signature(stock).parameters)
    parameter = next((name for name in CACHE_PARAMETERS if name in names), None)
    return None if parameter is None else StatefulForward(stock, parameter, names.index(parameter), by_row=False)


class _Probe:
    """In the place of a module's forward: calls it with a cache of its own and looks at what the module keeps there."""

    def __init__(self, forward: StatefulForward) -> None:
        self.forward, self.keeps_states = forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slot = KVSlot.alone(0)
        try:
            result = self._run(slot, args, kwargs)
        except PROBE_ERRORS:  # its cache is of another kind
            return self.forward.stock(*args, **kwargs)
        if slot.states:
            self.keeps_states = True
            self.forward.by_row = self._ignores_recurrent(slot, args, kwargs)
        return result

    def _run(self, slot: KVSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward.call(SlotStates([slot], started=bool(slot.states)), args, kwargs)

    def _ignores_recurrent(self, slot: KVSlot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether two rows after another recurrent state have the same result, bit for bit."""
        other = KVSlot.alone(0)
        other.states = copy_states(slot.states)
        recurrent = [
            state
            for layer in other.states.values()
            for name, state in layer.items()
            if not name.startswith(CONVOLUTION)
        ]
        for state in recurrent:
            state += 1
        results = [self._run(one, args, kwargs) for one in (slot, other)]
        outputs = [result if isinstance(result, tuple) else (result,) for result in results]
        by_rows = [pair for pair in zip(*outputs, strict=True) if pair[0].shape[:2] == TWO_TOKENS.shape]
        return bool(recurrent) and all(torch.equal(*pair) for pair in by_rows)
