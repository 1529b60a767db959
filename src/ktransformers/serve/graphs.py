"""Decoding in CUDA graphs: a step in which every sequence has one new token, replayed without Python between its
kernels.

Such steps come in a few sizes; between two of them rows that nobody asked for are computed along and thrown away. What
differs from step to step is a table of numbers (`decode.py`): tokens, positions, addresses of slots. It is written into
pinned memory, and the graph itself begins with the copy up and ends with the copy of the most likely tokens down; all
logits stay on the device, in memory that the next step writes to again. Attention is `decode.py`'s, experts are
`place/few.py`'s, everything else is the stock model, called under capture as it is called otherwise.

A size that has come a few times is rehearsed: computed outside of a graph as it would be inside, which makes what has
to be there before, and then once more with torch refusing whatever would wait for the device. So what a graph cannot
hold is found where it does no harm. Everything else (prompts, adapters, scored prompts, families with a state) goes
kernel by kernel as before, and so does a size that was refused. The surprising decision: a step that is rehearsed,
captured and replayed writes the same keys to the same places each time, so all of it happens in the middle of an
answer.

All graphs share one pool of memory. When residents change, graphs compute what they should, but on the CPU; they are
captured anew.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.errors import InputError
from ktransformers.log import logger
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.mixed import mixed
from ktransformers.nn.operator import placed_for
from ktransformers.nn.padding import padded
from ktransformers.place.few import MOST
from ktransformers.place.placement import Placement
from ktransformers.serve import decode
from ktransformers.serve.attention import Kind, attending
from ktransformers.serve.decode import ASKED, FIRST, POSITION, TOKEN, Places, attend_new, table_lines
from ktransformers.serve.forward import Alone, Forward, Found, Piece
from ktransformers.serve.lora import LOADING, linear_shares

LOG = logger(__name__)
SIZES = (1, 2, 4, 8, 16, 24, MOST)  # rows
LEAST = 3  # steps of a size before it is captured

Compute = Callable[[], Tensor]  # the logits [R, V] of what the table says
Record = Callable[[Compute], Compute]  # one that does the same without Python


@dataclass(frozen=True)
class Step:
    """A size, ready to be computed again and again. A graph knows the tensors by their addresses alone: they live as
    long as it does."""

    table: Tensor  # int64 [lines, R], pinned
    there: Tensor  # the same on the device
    tokens: Tensor  # int64 [R], pinned: the most likely ones
    again: Compute

    def fill(self, pieces: Sequence[Piece]) -> None:
        table = self.table.numpy()
        table[:] = 0
        for row, piece in enumerate(pieces):
            table[:FIRST, row] = piece.tokens[0], piece.position, piece.slot.capacity, 1
            table[FIRST:, row] = piece.slot.addresses()


class Graphs:
    """Of a model on one device. `placement` has its experts, None where it has none."""

    def __init__(
        self, model: nn.Module, placement: Placement | None, record: Record | None = None, most: int = MOST
    ) -> None:
        self._model: Any = model
        self._placement = placement
        self.device = next(model.parameters()).device
        self._record: Record | None = record or Capture(self.device)  # None: it has failed
        self._sizes = [*(size for size in SIZES if size < most), min(most, MOST)]
        self.most = self._sizes[-1]
        self._steps: dict[int, Step] = {}
        self._seen: Counter[int] = Counter()
        self._refused: set[int] = set()
        self._generation = 0
        self._layers: tuple[int, ...] = ()
        self.replayed = 0  # steps

    def run(self, pieces: Sequence[Piece]) -> list[Found | None] | None:
        """As `Forward.run`; None: this step goes another way. Logits are good until the next step."""
        size = self._size(pieces)
        if size is None:
            return None
        generation = 0 if self._placement is None else self._placement.generation
        if generation != self._generation:
            self._forget()
            self._generation = generation
        step = self._steps.get(size)
        if step is None:
            step = self._make(size, pieces)
            if step is None:
                return None
        else:
            step.fill(pieces)
        logits = step.again()
        if self._placement is not None:
            self._placement.complain(size)
        self.replayed += 1
        tokens = step.tokens.tolist()
        return [
            Found(logits[row], tokens[row] if piece.greedy else None) if piece.last else None
            for row, piece in enumerate(pieces)
        ]

    def _size(self, pieces: Sequence[Piece]) -> int | None:
        size = next((size for size in self._sizes if len(pieces) <= size), None)
        if size is None or size in self._refused or self._record is None:
            return None
        if not self._layers:
            self._layers = tuple(sorted(pieces[0].slot.keys))
        ours = len(self._layers)
        fits = (
            len(piece.tokens) == 1 and piece.adapter is None and piece.read is None and len(piece.slot.keys) == ours
            for piece in pieces
        )
        return size if ours and all(fits) else None

    def _forget(self) -> None:
        self._steps.clear()
        self._seen.clear()
        self._refused.clear()

    def _make(self, size: int, pieces: Sequence[Piece]) -> Step | None:
        self._seen[size] += 1
        if self._seen[size] < LEAST or self._record is None:
            return None
        pinned = self.device.type == "cuda"
        table = torch.zeros(table_lines(len(self._layers)), size, dtype=torch.int64, pin_memory=pinned)
        tokens = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        there = torch.zeros(table.shape, dtype=table.dtype, device=self.device)
        compute = functools.partial(self._compute, table, there, tokens)
        step = Step(table, there, tokens, compute)
        step.fill(pieces)
        try:
            with nullcontext() if self._placement is None else self._placement.rehearsal():
                return self._steps.setdefault(size, replace(step, again=self._record(compute)))
        except InputError as error:  # of this size: another one may be possible
            LOG.warning("batches of %d are decoded kernel by kernel: %s", size, error)
            self._refused.add(size)
        except Exception as error:  # the step itself is still to be computed, and a server to go on
            LOG.warning("decoding goes kernel by kernel: %s: %s", type(error).__name__, error)
            self._forget()
            self._record = None
        return None

    def _compute(self, table: Tensor, there: Tensor, tokens: Tensor) -> Tensor:
        rows = table.shape[1]
        there.copy_(table, non_blocking=True)
        words = {"input_ids": there[TOKEN][None], "position_ids": there[POSITION][None], "use_cache": False}
        with (
            torch.inference_mode(),
            attending(functools.partial(self._attend, there)),
            padded(there[ASKED] != 0),
            linear_shares((), rows),
            mixed({}),
        ):
            logits: Tensor = self._model(**words).logits[0]
            tokens.copy_(logits.argmax(-1), non_blocking=True)
        return logits

    def _attend(self, table: Tensor, kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = FIRST + self._layers.index(kind.layer)
        return attend_new(table, Places(at, at + len(self._layers)), kind, query, key, value)


class Capture:
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
            # Other threads load adapters meanwhile: what they do is no business of this capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = compute()
            current.wait_stream(stream)
        self._last = graph

        def again() -> Tensor:
            graph.replay()
            torch.cuda.current_stream(self._device).synchronize()
            return logits

        return again


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """What waits for the device would break a capture; here it is an error like any other. torch refuses it to all
    threads, so nobody may be loading an adapter meanwhile."""
    warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not know of every wait
    with LOADING:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def why_not(forward: Forward | Alone, placement: Placement | None) -> str:
    """What keeps a model's steps out of graphs; empty: nothing that is known before they are tried."""
    model = forward.model
    if forward.whole_prefixes:
        return f"sequences of {model.config.model_type} are computed one at a time"
    devices = {one.device for name, one in model.named_parameters() if ".experts." not in name}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the model is on {', '.join(sorted(map(str, devices)))}, not on one GPU"
    device = next(iter(devices))
    if not decode.runs_on(device):
        return "there is no Triton"
    if placement is not None and placement.defers:
        return "deferred experts come by way of Python"
    stores = {name: getattr(module, "kt_store", None) for name, module in expert_modules(model).items()}
    alone = [name for name, store in stores.items() if store is None or placed_for(store, device) is None]
    return f"no engine has the experts of {len(alone)} layers, {alone[0]} the first" if alone else ""
