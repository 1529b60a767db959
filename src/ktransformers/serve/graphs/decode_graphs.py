"""Decoding in CUDA graphs: a step in which every sequence has one new token, replayed without Python between its
kernels.

Such steps come in a few sizes; between two of them rows that nobody asked for are computed along and thrown away. What
differs from step to step is a table of numbers (`decode.py`): tokens, positions, adapters, addresses of slots. It is
written into pinned memory, and the graph itself begins with the copy up and ends with the copy of the most likely
tokens down; all logits stay on the device, in memory that the next step writes to again. Attention is `decode.py`'s,
experts are `place/host_callback.py`'s, LoRA is `mixture.py`'s, everything else is the stock model, called under capture
as it is called otherwise.

A graph is captured for a size and a set of adapters, and serves every mixture of these and of the base: a step takes
the smallest set that has all that its rows want, and steps of the base alone take the graph without. A few sets are
kept; the one that was not used for the longest time is forgotten when there are more, and so is a set when one of its
adapters is unloaded and no request wants it any more.

A size that has come a few times is rehearsed: computed outside of a graph as it would be inside, which makes what has
to be there before, and then once more with torch refusing whatever would wait for the device. So what a graph cannot
hold is found where it does no harm. Everything else (prompts, scored prompts, families with a state) goes kernel by
kernel as before, and so does a size, or a set of adapters, that was refused. The surprising decision: a step that is
rehearsed, captured and replayed writes the same keys to the same places each time, so all of it happens in the middle
of an answer.

All graphs share one pool of memory. When residents change, graphs compute what they should, but on the CPU; they are
captured anew.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.errors import InputError
from ktransformers.log import logger
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.cuda_graphs import capture
from ktransformers.nn.operator import placed_for
from ktransformers.nn.padding import padded
from ktransformers.place.gpu.multi_lora import LoraCacheFull
from ktransformers.place.host_callback import MOST
from ktransformers.place.placement import Placement
from ktransformers.serve.engine.attention import AttentionSpec, use_attention
from ktransformers.serve.engine.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.engine.kv_cache import Owner
from ktransformers.serve.engine.lora import DEVICE_COPY_LOCK
from ktransformers.serve.graphs import decode_attention
from ktransformers.serve.graphs.adapter_set import Adapters, AdapterSet, sort_adapters
from ktransformers.serve.graphs.decode_attention import (
    ACTIVE,
    ADAPTER,
    FIRST_ADDRESS,
    POSITION,
    TOKEN,
    CacheLines,
    attend_new_tokens,
    table_lines,
)

LOG = logger(__name__)
SIZES = (1, 2, 4, 8, 16, 24, MOST)  # rows
LEAST = 3  # steps of a size before it is captured
SETS = 4  # of adapters that graphs are kept for
SET_BYTES = 1 << 30  # of their copies of factors
COUNTED = 256  # kinds of steps that are counted at a time

Compute = Callable[[], Tensor]  # the logits [R, V] of what the table says
Record = Callable[[Compute], Compute]  # one that does the same without Python
StepKind = tuple[int, Adapters]  # of step: rows, and adapters that they may want


@dataclass(frozen=True)
class DecodeStep:
    """A kind of step, ready to be computed again and again. A graph knows the tensors by their addresses alone: they
    live as long as it does."""

    table: Tensor  # int64 [lines, R], pinned
    there: Tensor  # the same on the device
    tokens: Tensor  # int64 [R], pinned: the most likely ones
    mixture: AdapterSet
    again: Compute

    def fill(self, pieces: Sequence[Chunk]) -> None:
        table = self.table.numpy()
        table[:] = 0
        for row, piece in enumerate(pieces):
            adapter = 0 if piece.adapter is None else self.mixture.indices[piece.adapter]
            table[:FIRST_ADDRESS, row] = piece.tokens[0], piece.position, piece.slot.capacity, 1, adapter
            table[FIRST_ADDRESS:, row] = piece.slot.addresses()


class DecodeGraphs:
    """Of a model on one device. `placement` has its experts, None where it has none."""

    def __init__(
        self, model: nn.Module, placement: Placement | None, record: Record | None = None, most: int = MOST
    ) -> None:
        self._model: Any = model
        self._placement = placement
        self.device = next(model.parameters()).device
        self._record: Record | None = record or StepCapture(self.device)  # None: it has failed
        self._sizes = [*(size for size in SIZES if size < most), min(most, MOST)]
        self.most = self._sizes[-1]
        self._base = AdapterSet((), self.device)
        self._sets: OrderedDict[Adapters, AdapterSet] = OrderedDict()  # the longest unused first; the base is in none
        self._steps: dict[StepKind, DecodeStep] = {}
        self._seen: Counter[StepKind] = Counter()
        self._refused: set[StepKind] = set()
        self._generation = self._now()
        self._layers: tuple[int, ...] = ()
        self.replayed = 0  # steps

    def run(self, pieces: Sequence[Chunk]) -> list[ForwardResult | None] | None:
        """As `Forward.run`; None: this step goes another way. Logits are good until the next step."""
        size = self._size(pieces)
        if size is None:
            return None
        if self._now() != self._generation:
            self._clear()
            self._generation = self._now()
        kind = self._kind(size, pieces)
        if kind in self._refused:
            return None
        step = self._steps.get(kind)
        if step is None:
            step = self._make(kind, pieces)
            if step is None:
                return None
        else:
            step.fill(pieces)
        if kind[1]:
            self._sets.move_to_end(kind[1])
        logits = step.again()
        if self._placement is not None:
            self._placement.complain(size)
        self.replayed += 1
        tokens = step.tokens.tolist()
        return [
            ForwardResult(logits[row], tokens[row] if piece.greedy else None) if piece.wants_logits else None
            for row, piece in enumerate(pieces)
        ]

    def _now(self) -> int:
        return 0 if self._placement is None else self._placement.generation

    def _size(self, pieces: Sequence[Chunk]) -> int | None:
        size = next((size for size in self._sizes if len(pieces) <= size), None)
        if size is None or self._record is None:
            return None
        if not self._layers:
            self._layers = tuple(sorted(pieces[0].slot.keys))
        ours = len(self._layers)
        fits = (
            len(piece.tokens) == 1 and piece.logits_reader is None and len(piece.slot.keys) == ours for piece in pieces
        )
        return size if ours and all(fits) else None

    def _kind(self, size: int, pieces: Sequence[Chunk]) -> StepKind:
        wanted = {piece.adapter for piece in pieces if piece.adapter is not None}
        if not wanted:
            return size, ()
        known = [one for one in self._sets if wanted <= set(one) and (size, one) not in self._refused]
        return size, min(known, key=len, default=sort_adapters(wanted))

    def forget(self, owner: Owner) -> None:
        """An adapter was unloaded, and no request wants it any more."""
        self._drop([one for one in self._sets if any(adapter.owner == owner for adapter in one)])
        self._refused = {kind for kind in self._refused if not kind[1]}  # for whom there was no room there may be now
        self._seen = Counter({kind: seen for kind, seen in self._seen.items() if not kind[1]})

    def _clear(self) -> None:
        self._steps.clear()
        self._seen.clear()
        self._refused.clear()
        self._drop(list(self._sets))
        if self._placement is not None:
            self._placement.forget_graphs()

    def _drop(self, sets: Sequence[Adapters]) -> None:
        """Every step was waited for, so nothing is under way that would read what goes with a graph."""
        for one in sets:
            del self._sets[one]
        self._steps = {kind: step for kind, step in self._steps.items() if not kind[1] or kind[1] in self._sets}
        if self._placement is not None:
            used = {layer.adapters for mixture in self._sets.values() for layer in mixture.layers.values()}
            self._placement.retain(used)

    def _bound(self) -> None:
        while len(self._sets) > SETS or sum(one.bytes for one in self._sets.values()) > SET_BYTES:
            self._drop([next(iter(self._sets))])

    def _make(self, kind: StepKind, pieces: Sequence[Chunk]) -> DecodeStep | None:
        if len(self._seen) > COUNTED:
            self._seen.clear()
        self._seen[kind] += 1
        if self._seen[kind] < LEAST:
            return None
        while self._record is not None and kind not in self._refused:
            try:
                return self._capture(self._record, kind, pieces)
            except (LoraCacheFull, torch.cuda.OutOfMemoryError) as error:
                self._make_room(kind, error)
            except InputError as error:  # of this size and set: another one may be possible
                self._refuse(kind, error)
            except Exception as error:  # the step itself is still to be computed, and a server to go on
                self._give_up(error)
        return None

    def _make_room(self, kind: StepKind, error: Exception) -> None:
        """For a set of adapters another one goes; where there is none left, this one is too large."""
        others = [one for one in self._sets if one != kind[1]]
        if not kind[1]:
            self._give_up(error)
        elif others:
            self._drop(others[:1])
        else:
            self._refuse(kind, error)

    def _refuse(self, kind: StepKind, error: Exception) -> None:
        size, adapters = kind
        beside = f" with {', '.join(one.name or 'LoRA' for one in adapters)}" if adapters else ""
        LOG.warning("batches of %d%s are decoded kernel by kernel: %s", size, beside, error)
        self._refused.add(kind)
        self._drop([])  # what was made for it

    def _give_up(self, error: Exception) -> None:
        LOG.warning("decoding goes kernel by kernel: %s: %s", type(error).__name__, error)
        self._clear()
        self._record = None

    def _capture(self, record: Record, kind: StepKind, pieces: Sequence[Chunk]) -> DecodeStep:
        size, adapters = kind
        mixture = self._sets.get(adapters) or (AdapterSet(adapters, self.device) if adapters else self._base)
        if mixture.bytes > SET_BYTES:
            raise InputError("CUDA graph", f"copies of {mixture.bytes} bytes for linear layers", f"{SET_BYTES} at most")
        pinned = self.device.type == "cuda"
        table = torch.zeros(table_lines(len(self._layers)), size, dtype=torch.int64, pin_memory=pinned)
        tokens = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        there = torch.zeros(table.shape, dtype=table.dtype, device=self.device)
        compute = functools.partial(self._compute, mixture, table, there, tokens)
        step = DecodeStep(table, there, tokens, mixture, compute)
        step.fill(pieces)
        with nullcontext() if self._placement is None else self._placement.rehearsal():
            step = self._steps[kind] = replace(step, again=record(compute))
        if adapters:
            self._sets[adapters] = mixture
            self._bound()
        return step

    def _compute(self, mixture: AdapterSet, table: Tensor, there: Tensor, tokens: Tensor) -> Tensor:
        there.copy_(table, non_blocking=True)
        words = {"input_ids": there[TOKEN][None], "position_ids": there[POSITION][None], "use_cache": False}
        with (
            torch.inference_mode(),
            use_attention(functools.partial(self._attend, there)),
            padded(there[ACTIVE] != 0),
            mixture.applied(there[ADAPTER]),
        ):
            logits: Tensor = self._model(**words).logits[0]
            tokens.copy_(logits.argmax(-1), non_blocking=True)
        return logits

    def _attend(self, table: Tensor, kind: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = FIRST_ADDRESS + self._layers.index(kind.layer)
        return attend_new_tokens(table, CacheLines(at, at + len(self._layers)), kind, query, key, value)


class StepCapture:
    """Records on a GPU. Graphs replay one after another, so they may use the same memory: each is captured into the
    pool of the one before, which is held for that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream, current = self._stream, torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                compute()
                with _waiting_refused():
                    compute()
            graph, pool = torch.cuda.CUDAGraph(), None if self._last is None else self._last.pool()
            found: list[Tensor] = []
            capture(graph, lambda: found.append(compute()), self._device, pool, stream)
        self._last = graph

        def again() -> Tensor:
            graph.replay()
            torch.cuda.current_stream(self._device).synchronize()
            return found[0]

        return again


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """What waits for the device would break a capture; here it is an error like any other. torch refuses it to all
    threads, so nobody may be loading an adapter meanwhile."""
    warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not know of every wait
    with DEVICE_COPY_LOCK:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def why_not(forward: Forward | SequentialForward, placement: Placement | None) -> str:
    """What keeps a model's steps out of graphs; empty: nothing that is known before they are tried."""
    model = forward.model
    if forward.append_only:
        return f"sequences of {model.config.model_type} are computed one at a time"
    devices = {one.device for name, one in model.named_parameters() if ".experts." not in name}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model is on {', '.join(sorted(map(str, devices)))}, not on one GPU"
    device = next(iter(devices))
    if not decode_attention.is_supported(device):
        return "there is no Triton"
    if placement is not None and placement.defers:
        return "deferred experts come by way of Python"
    stores = {name: getattr(module, "kt_store", None) for name, module in expert_modules(model).items()}
    alone = [name for name, store in stores.items() if store is None or placed_for(store, device) is None]
    return f"no engine has the experts of {len(alone)} layers, {alone[0]} the first" if alone else ""
