"""Attention of a training step, replayed: the launching that Python does for it, once a shape instead of once a pass.

With experts fast enough a step of some thousand tokens is over before Python has launched stock attention with its LoRA
three times (forward, again under checkpointing, backward): some three hundred kernels a layer. So `forward` of every
`self_attn` of a checkpointed decoder layer is wrapped. A kind of call that comes again and again (shapes, switches,
where the parameters lie) is recorded as two CUDA graphs a layer, one that computes the output, one that computes it
again with gradients and goes back through it; from then on a call is a copy into buffers, a replay and a copy out,
inside of one autograd function that keeps the layer's input alone. Sequences are filled up to a few lengths, at their
end, where causal attention does not look, and come in pieces, whose size bounds what graphs hold (`calls.py`).

The surprising decision: the graph for backward needs nothing of the one before. That costs a forward pass of attention,
which a device that waits for Python has time for, and frees a recording from any order in which layers are called; so
one set of buffers and one pool of memory do for all layers. Whatever is not known to be safe goes on as it was: other
arguments and results, hooks inside, batches that keep the device busy anyway, layers without checkpointing.

Hidden states `[B, T, H]`; rotary embeddings `[.., T, d]`, masks `[.., T, T]`, position ids `[.., T]`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktransformers import log
from ktransformers.nn.attention_graphs.signature import (
    AttentionCall,
    CallSignature,
    Key,
    draws,
    read,
    state_of,
    trained_by,
)
from ktransformers.nn.attention_graphs.static_inputs import GradientBuffers, GrowingBuffers, StaticInputs
from ktransformers.nn.cuda_graphs import capture

NAME = "self_attn"
SEEN = 2  # calls of a kind before one is recorded
MOST = 8  # kinds of calls that a layer remembers as graphs
NOTED = 256  # kinds that it counts
LOST = 32  # calls after which a pass that never went back is no longer waited for
TOKENS = 4096  # of a call: from here on the device is busy for longer than Python takes
LONGEST = 2048  # of a sequence: what a graph's memory holds is there for good
# Others give the weights of attention too: a replay leaves them out, which only somebody who watches would notice.
WEIGHTLESS = ("sdpa", "flash_attention_2", "flash_attention_3")
NOTHING = torch.empty(0)
_log = log.logger(__name__)


class Graph(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class RecomputeGraph:
    """Where there are no graphs, in tests: what was recorded is computed once more."""

    replay: Callable[[], None]


class CallKind(NamedTuple):
    """What calls that go through the same graphs have in common."""

    tray: Key
    upward: bool  # hidden states want a gradient
    how: str  # transformers' implementation
    state: Key


@dataclass
class CallStats:
    """Of a kind that is not recorded yet."""

    seen: int = 0
    pending: int = 0  # calls that will be repeated, kernel by kernel
    lowest: int = 0  # that it was in the last calls

    def count(self) -> None:
        self.seen += 1
        self.lowest = min(self.lowest, self.pending)
        if self.seen % LOST == 0:
            self.pending -= self.lowest
            self.lowest = self.pending


@dataclass
class GraphPair:
    """One layer's graphs for one kind of call."""

    tray: StaticInputs
    ahead: Graph
    back: Graph | None = None
    trained: Sequence[Tensor] = ()
    gradients: GradientBuffers | None = None

    def compute(self, call: AttentionCall) -> Tensor:
        tray, (count, length, _) = self.tray, call.hidden.shape
        out = tray.outward.new_empty(count, length, tray.outward.shape[2])
        for piece in tray.pieces(call):
            tray.lay(call, piece)
            self.ahead.replay()
            out[piece].copy_(tray.outward[: piece.stop - piece.start, :length])
        return out

    def differentiate(self, call: AttentionCall, rising: Tensor, upward: bool) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states and of what is trained."""
        assert self.back is not None and self.gradients is not None
        found = torch.empty_like(call.hidden) if upward else None
        self.gradients.clear()
        for piece in self.tray.pieces(call):
            self.tray.lay(call, piece, rising)
            self.back.replay()
            if found is not None:
                found[piece].copy_(self.tray.inward[: piece.stop - piece.start, : found.shape[1]])
        return found, *self.gradients.take()


class ReplayedAttention(torch.autograd.Function):
    """One call of attention; of what it computes only the input is kept."""

    @staticmethod
    def forward(ctx: Any, tapes: GraphPair, call: AttentionCall, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.tapes, ctx.chance = tapes, _chance(hidden.device)
        ctx.call = replace(call, hidden=NOTHING)  # what is saved may be let go of until it is wanted
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        return tapes.compute(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rising: Tensor | None) -> tuple[Any, ...]:
        tapes: GraphPair = ctx.tapes
        if rising is None:
            return None, None, None, *[None] * len(tapes.trained)
        (hidden,) = ctx.saved_tensors
        with _at(hidden.device, ctx.chance):  # dropout falls as it did in forward
            call = replace(ctx.call, hidden=hidden)
            return None, None, *tapes.differentiate(call, rising, ctx.needs_input_grad[2])


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _chance(device: torch.device) -> int:
    """How far the device's random numbers have got."""
    return _generator(device).get_offset() if device.type == "cuda" else 0


@contextlib.contextmanager
def _at(device: torch.device, chance: int) -> Iterator[None]:
    """Random numbers from there on; afterwards from where they were."""
    if device.type != "cuda":
        yield
        return
    generator = _generator(device)
    now = generator.get_offset()
    generator.set_offset(chance)
    try:
        yield
    finally:
        generator.set_offset(now)


class GraphPool:
    """What all layers on a device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = GrowingBuffers()
        self.trays: dict[Key, StaticInputs] = {}
        self.full = False  # there is no memory left
        self._pool: Any = None
        self._stream: Any = None  # that buffers are used on

    def follows(self) -> bool:
        """Whether this is the stream of all calls so far, and nobody records it."""
        if self.device.type != "cuda":
            return True
        here = torch.cuda.current_stream(self.device)
        self._stream = self._stream or here
        return bool(self._stream == here) and not torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], None]) -> Graph:
        """Once as it is, so that kernels are there and loaded, then into a graph."""
        run()
        if self.device.type != "cuda":
            return RecomputeGraph(run)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        capture(graph, run, self.device, self._pool)
        return graph


class GraphedAttention:
    """`forward` of one `self_attn`, in its place."""

    def __init__(self, layer: Any, module: nn.Module, studio: GraphPool) -> None:
        self.layer, self.module, self.studio = layer, module, studio
        self.stock: Callable[..., Any] = module.forward
        self.known: dict[CallKind, GraphPair] = {}
        self.barred = False  # it cannot be recorded
        self._noted: dict[CallKind, CallStats] = {}
        self._own = "forward" in vars(module)
        self.__wrapped__ = self.stock  # for who asks what arguments it has
        module.forward = self

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.stock, memo)  # a copy of the model is a stock one

    def close(self) -> None:
        """Whoever has wrapped it since goes on, by way of what is not recorded."""
        self.barred = True
        self.known.clear()
        if self.module.forward is self:
            del self.module.forward
            if self._own:
                self.module.forward = self.stock

    def __call__(self, *args: Any, **words: Any) -> Any:
        call = self._read(args, words)
        kind = None if call is None else self._kind(call)
        tapes = None if call is None or kind is None else self._tapes(call, kind)
        if call is None or tapes is None:
            return self.stock(*args, **words)
        if not torch.is_grad_enabled():
            return tapes.compute(call), None
        return ReplayedAttention.apply(tapes, call, call.hidden, *tapes.trained), None  # type: ignore[no-untyped-call]

    def _read(self, args: tuple[Any, ...], words: Mapping[str, Any]) -> AttentionCall | None:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return None
        if not (self.layer.gradient_checkpointing and self.module.training) or (self.barred and not self.known):
            return None
        return read(args, words)

    def _kind(self, call: AttentionCall) -> CallKind | None:
        """None: none that is recorded."""
        hidden, kind = call.hidden, self.studio.device.type
        if call.shape[1] > LONGEST or hidden.shape[0] * call.shape[1] > TOKENS:
            return None
        if hidden.device != self.studio.device or not self.studio.follows():
            return None
        masked = "attention_mask" in call.form.names
        if call.filled_up and not masked and not call.word("is_causal", getattr(self.module, "is_causal", False)):
            return None
        how = str(getattr(getattr(self.module, "config", None), "_attn_implementation", ""))
        if self.module._forward_hooks and how not in WEIGHTLESS:
            return None
        state = state_of(self.module)
        if state is None:
            return None
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        dtypes = tuple(tensor.dtype for tensor in call.tensors)
        tray = call.shape, hidden.dtype, call.form, call.shapes, dtypes, cast
        return CallKind(tray, hidden.requires_grad, how, state)

    def _tapes(self, call: AttentionCall, kind: CallKind) -> GraphPair | None:
        """A pass that is repeated under checkpointing has to go the way of the first one, with whose tensors it is
        compared: so a kind is recorded when no call of it is still to be repeated."""
        found, learns = self.known.get(kind), torch.is_grad_enabled()
        if not learns and draws(self.module):  # reentrant checkpointing would draw otherwise when it repeats
            return None
        if found is not None and (found.back is not None or not learns):
            return found
        noted = self._noted.setdefault(kind, CallStats())
        if torch._C._current_graph_task_id() != -1:  # in a backward pass
            noted.pending = max(0, noted.pending - 1) if learns else noted.pending
            return None
        noted.count()
        if noted.seen > SEEN and not noted.pending and (found is not None or len(self.known) < MOST):
            found = self._record(call, kind, learns)
            if found is not None:
                del self._noted[kind]
                return found
        noted.pending += 1 if learns else 0
        if len(self._noted) > NOTED:
            self._noted = {one: count for one, count in self._noted.items() if count.pending}
        return None

    def _record(self, call: AttentionCall, kind: CallKind, learns: bool) -> GraphPair | None:
        studio = self.studio
        if self.barred or studio.full:
            return None
        # Checkpointing has hooks for what autograd saves: they shall not see what is saved for a graph. It repeats this
        # pass, but not what is drawn for a recording.
        plainly = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        try:
            with plainly, _at(studio.device, _chance(studio.device)):
                if kind.tray not in studio.trays:
                    studio.trays[kind.tray] = StaticInputs(call, studio.buffers)
                tray = studio.trays[kind.tray]
                tray.lay(replace(call, hidden=call.hidden.detach()), next(tray.pieces(call)))
                found = self.known.get(kind)
                if found is None:
                    found = GraphPair(tray, studio.record(self._ahead(tray, call.form)))
                if learns:
                    found.trained = [parameter for parameter, _ in trained_by(self.module).values()]
                    found.gradients = GradientBuffers(found.trained, studio.buffers)
                    found.back = studio.record(self._back(tray, call.form, found.gradients, kind.upward))
        except Exception as error:  # of any kind: the call itself is still to be made, and a training to go on
            self._give_up(error)
            return None
        self.known[kind] = found
        return found

    def _give_up(self, error: Exception) -> None:
        """What is recorded stays, because passes that went that way will be repeated."""
        if isinstance(error, torch.OutOfMemoryError):
            self.studio.full = True
            _log.warning("no more attention is recorded, Python launches it kernel by kernel: no GPU memory is left")
        else:
            self.barred = True
            name = type(self.module).__name__
            _log.warning("%s is not recorded, Python launches it kernel by kernel: %s", name, error)

    def _call(self, tray: StaticInputs, form: CallSignature, hidden: Tensor) -> Tensor:
        found = self.stock(hidden_states=hidden, **form.words(tray.tensors))
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError("it gives something else than an output and weights")
        out: Tensor = found[0]
        tray.expect(out)
        return out

    def _ahead(self, tray: StaticInputs, form: CallSignature) -> Callable[[], None]:
        cast = _autocast(self.studio.device.type)

        def run() -> None:
            with torch.no_grad(), cast():
                out = self._call(tray, form, tray.inward)
                tray.outward.copy_(out)

        return run

    def _back(
        self, tray: StaticInputs, form: CallSignature, gradients: GradientBuffers, upward: bool
    ) -> Callable[[], None]:
        cast = _autocast(self.studio.device.type)

        def run() -> None:
            hidden = tray.inward.detach().requires_grad_(upward)
            with torch.enable_grad(), cast(), _stand_ins(self.module) as learned:
                out = self._call(tray, form, hidden)
            inputs = [hidden, *learned] if upward else learned
            grads = list(torch.autograd.grad(out, inputs, tray.outward, allow_unused=True)) if inputs else []
            if upward:
                risen = grads.pop(0)
                tray.inward.zero_() if risen is None else tray.inward.copy_(risen)
            gradients.add(grads)

        return run


@contextlib.contextmanager
def _stand_ins(module: nn.Module) -> Iterator[list[Tensor]]:
    """The same numbers as other leaves while this lasts: autograd has nodes of its own for parameters, that know the
    streams of passes before, and a graph cannot wait for those."""
    trained = trained_by(module).values()
    found = [parameter.detach().requires_grad_() for parameter, _ in trained]
    for (_, places), alias in zip(trained, found, strict=True):
        for held, name in places:
            held[name] = alias
    try:
        yield found
    finally:
        for parameter, places in trained:
            for held, name in places:
                held[name] = parameter


def _autocast(kind: str) -> Callable[[], Any]:
    """As it is now, for later; without its memory of weights, which would point into a graph."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def record_attention(model: nn.Module, devices: Sequence[torch.device]) -> list[GraphedAttention]:
    """From now on calls of attention on these devices are recorded where that is possible, layers with experts or
    without alike; modules that are recorded already stay as they are."""
    studios = {device: GraphPool(device) for device in devices}
    found = []
    for layer in model.modules():
        module = getattr(layer, NAME, None)
        if not hasattr(layer, "gradient_checkpointing") or not isinstance(module, nn.Module):
            continue
        device = next((parameter.device for parameter in module.parameters()), None)
        if device in studios and not isinstance(module.forward, GraphedAttention):
            found.append(GraphedAttention(layer, module, studios[device]))
    return found
