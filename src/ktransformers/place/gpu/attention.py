"""Attention of a training step, replayed: the launching that Python does for it, once a shape instead of once a pass.

With experts fast enough a step of some thousand tokens is over before Python has launched stock attention with its LoRA
three times (forward, again under checkpointing, backward): some three hundred kernels a layer. So `forward` of every
`self_attn` of a checkpointed decoder layer is wrapped. A kind of call that comes again and again (shapes, switches,
where the parameters lie) is recorded as two CUDA graphs a layer, one that computes the output, one that computes it
again with gradients and goes back through it; from then on a call is a copy into buffers, a replay and a copy out,
inside of one autograd function that keeps the layer's input alone. Sequences are filled up to a few lengths, at their
end, where causal attention does not look.

The surprising decision: the graph for backward needs nothing of the one before. That costs a forward pass of attention,
which a device that waits for Python has time for, and frees a recording from any order in which layers are called; so
one set of buffers and one pool of memory do for all layers. Whatever is not known to be safe goes on as it was: other
arguments, hooks inside, batches that keep the device busy anyway, layers without checkpointing.

Hidden states `[B, T, H]`; rotary embeddings `[.., T, d]`, masks `[.., T, T]`, position ids `[.., T]`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktransformers import log
from ktransformers.place.gpu.calls import Call, Form, Key, read, state_of
from ktransformers.place.gpu.capture import capture
from ktransformers.place.gpu.desk import Desk, Gradients, Rows

NAME = "self_attn"
SEEN = 2  # calls of a kind before one is recorded
MOST = 8  # kinds of calls that a layer remembers as graphs
TOKENS = 4096  # of a call: from here on the device is busy for longer than Python takes
LONGEST = 2048  # of a sequence: what a graph's memory holds is there for good
# Others give the weights of attention too: a replay leaves them out, which only somebody who watches would notice.
WEIGHTLESS = ("sdpa", "flash_attention_2", "flash_attention_3")
NOTHING = torch.empty(0)
_log = log.logger(__name__)


class Tape(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class Again:
    """Where there are no graphs, in tests: what was recorded is computed once more."""

    replay: Callable[[], None]


@dataclass
class Recording:
    """One layer's graphs for one kind of call."""

    desk: Desk
    ahead: Tape
    back: Tape | None = None
    trained: Sequence[Tensor] = ()
    gradients: Gradients | None = None

    def compute(self, call: Call) -> Tensor:
        desk, (count, length, _) = self.desk, call.hidden.shape
        out = desk.out.new_empty(count, length, desk.out.shape[2])
        for piece in desk.pieces(call):
            desk.lay(call, piece)
            self.ahead.replay()
            out[piece].copy_(desk.out[: piece.stop - piece.start, :length])
        return out

    def differentiate(self, call: Call, rising: Tensor, upward: bool) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states and of what is trained."""
        assert self.back is not None and self.gradients is not None
        desk = self.desk
        found = torch.empty_like(call.hidden) if upward else None
        self.gradients.clear()
        for piece in desk.pieces(call):
            desk.lay(call, piece, rising)
            self.back.replay()
            if found is not None:
                found[piece].copy_(desk.hidden[: piece.stop - piece.start, : found.shape[1]])
        return found, *self.gradients.take()


class Replay(torch.autograd.Function):
    """One call of attention; of what it computes only the input is kept."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, call: Call, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.recording, ctx.chance = recording, _chance(hidden.device)
        ctx.call = replace(call, hidden=NOTHING)  # what is saved may be let go of until it is wanted
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        return recording.compute(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rising: Tensor | None) -> tuple[Any, ...]:
        recording: Recording = ctx.recording
        if rising is None:
            return None, None, None, *[None] * len(recording.trained)
        (hidden,) = ctx.saved_tensors
        with _at(hidden.device, ctx.chance):  # dropout falls as it did in forward
            call = replace(ctx.call, hidden=hidden)
            return None, None, *recording.differentiate(call, rising, ctx.needs_input_grad[2])


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _chance(device: torch.device) -> int:
    """How far the device's random numbers have got."""
    return _generator(device).get_offset() if device.type == "cuda" else 0


@contextlib.contextmanager
def _at(device: torch.device, chance: int) -> Iterator[None]:
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


class Studio:
    """What all layers on a device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = Rows()
        self.desks: dict[Key, Desk] = {}
        self.refused = False
        self._pool: Any = None
        self._stream: Any = None  # that buffers are used on

    def follows(self) -> bool:
        """Whether this is the stream of all calls so far."""
        if self.device.type != "cuda":
            return True
        here = torch.cuda.current_stream(self.device)
        self._stream = self._stream or here
        return bool(self._stream == here)

    def record(self, run: Callable[[], None]) -> Tape:
        """Once as it is, so that kernels are there and loaded, then into a graph."""
        run()
        if self.device.type != "cuda":
            return Again(run)
        torch.cuda.synchronize(self.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        capture(graph, run, self.device, self._pool)
        return graph

    def refuse(self, error: RuntimeError) -> None:
        """Nothing more; what is recorded stays, because passes that went that way will be repeated."""
        self.refused = True
        why = "there is no GPU memory left for it" if isinstance(error, torch.OutOfMemoryError) else str(error)
        _log.warning("attention is not recorded, Python launches it kernel by kernel: %s", why)


class Attention:
    """`forward` of one `self_attn`, in its place."""

    def __init__(self, layer: Any, module: nn.Module, studio: Studio) -> None:
        self.layer, self.module, self.studio = layer, module, studio
        self.stock: Callable[..., Any] = module.forward
        self.known: dict[Key, Recording] = {}
        self._seen: dict[Key, int] = {}
        self._open: dict[Key, int] = {}  # calls that went kernel by kernel and will be repeated
        functools.update_wrapper(self, self.stock)
        module.forward = self

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.stock, memo)  # a copy of the model is a stock one

    def close(self) -> None:
        self.known.clear()
        self.module.forward = self.stock

    def __call__(self, *args: Any, **words: Any) -> Any:
        found = self._find(args, words)
        if found is None:
            return self.stock(*args, **words)
        recording, call = found
        if not torch.is_grad_enabled():
            return recording.compute(call), None
        return Replay.apply(recording, call, call.hidden, *recording.trained), None  # type: ignore[no-untyped-call]

    def _find(self, args: tuple[Any, ...], words: Mapping[str, Any]) -> tuple[Recording, Call] | None:
        if not (self.layer.gradient_checkpointing and self.module.training):
            return None
        call = read(args, words)
        key = None if call is None else self._key(call)
        if call is None or key is None:
            return None
        recording = self._recording(call, key, torch.is_grad_enabled())
        return None if recording is None else (recording, call)

    def _key(self, call: Call) -> Key | None:
        """The kind of a call, first of all what it asks of a desk; None: none that is recorded."""
        hidden, studio, kind = call.hidden, self.studio, self.studio.device.type
        if (
            call.shape[1] > LONGEST
            or hidden.shape[0] * call.shape[1] > TOKENS
            or hidden.device != studio.device
            or not studio.follows()
        ):
            return None
        if torch.compiler.is_compiling() or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        masked = "attention_mask" in call.form.names
        if hidden.shape[1] < call.shape[1] and not masked and not getattr(self.module, "is_causal", False):
            return None
        how = getattr(getattr(self.module, "config", None), "_attn_implementation", "")
        if self.module._forward_hooks and how not in WEIGHTLESS:
            return None
        state = state_of(self.module)
        if state is None:
            return None
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        dtypes = tuple(tensor.dtype for tensor in call.tensors)
        return (call.shape, hidden.dtype, call.form, call.shapes, dtypes, cast), hidden.requires_grad, how, state

    def _recording(self, call: Call, key: Key, learns: bool) -> Recording | None:
        """A pass that is repeated under checkpointing has to go the way of the first one, with whose tensors it is
        compared: so a kind is recorded when no call of it is still to be repeated."""
        found, pending = self.known.get(key), self._open.get(key, 0)
        if found is not None and not pending and (found.back is not None or not learns):
            return found
        if torch._C._current_graph_task_id() != -1:  # in a backward pass
            self._open[key] = max(0, pending - learns)
            return None
        self._seen[key] = self._seen.get(key, 0) + 1
        room = not self.studio.refused and (found is not None or len(self.known) < MOST)
        if room and self._seen[key] > SEEN and not pending:
            found = self._record(call, key, learns)
            if found is not None:
                return found
        self._open[key] = pending + learns
        return None

    def _record(self, call: Call, key: Key, learns: bool) -> Recording | None:
        studio = self.studio
        # Checkpointing has hooks for what autograd saves: they shall not see what is saved for a graph.
        plainly = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        try:
            with plainly:
                if key[0] not in studio.desks:
                    studio.desks[key[0]] = Desk(call, studio.rows)
                desk = studio.desks[key[0]]
                desk.lay(replace(call, hidden=call.hidden.detach()), next(desk.pieces(call)))
                found = self.known.get(key)
                if found is None:
                    found = Recording(desk, studio.record(self._ahead(desk, call.form)))
                if learns:
                    found.trained = [one for _, _, one in trained_by(self.module)]
                    found.gradients = Gradients(found.trained, studio.rows)
                    run = self._back(desk, call.form, found.gradients, call.hidden.requires_grad)
                    found.back = studio.record(run)
        except RuntimeError as error:  # no memory, or something that a graph cannot hold
            studio.refuse(error)
            return None
        self.known[key] = found
        return found

    def _call(self, desk: Desk, form: Form, hidden: Tensor) -> Tensor:
        found: Tensor = self.stock(hidden_states=hidden, **form.words(desk.tensors))[0]
        desk.expect(found)
        return found

    def _ahead(self, desk: Desk, form: Form) -> Callable[[], None]:
        cast = _autocast(self.studio.device.type)

        def run() -> None:
            with torch.no_grad(), cast():
                out = self._call(desk, form, desk.hidden)
                desk.out.copy_(out)

        return run

    def _back(self, desk: Desk, form: Form, gradients: Gradients, upward: bool) -> Callable[[], None]:
        cast = _autocast(self.studio.device.type)

        def run() -> None:
            hidden = desk.hidden.detach().requires_grad_(upward)
            with torch.enable_grad(), cast(), _stand_ins(self.module) as learned:
                out = self._call(desk, form, hidden)
            grads = list(torch.autograd.grad(out, [*[hidden] * upward, *learned], desk.out, allow_unused=True))
            if upward and (risen := grads.pop(0)) is not None:
                desk.hidden.copy_(risen)
            for target, grad in zip(gradients.views, grads, strict=True):
                if grad is not None:
                    target += grad

        return run


def trained_by(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Parameters that learn, and where they stand."""
    places = [(one.__dict__["_parameters"], name) for one in module.modules() for name, _ in one._parameters.items()]
    found = [(held, name, held[name]) for held, name in places if held[name] is not None and held[name].requires_grad]
    return list({id(parameter): (held, name, parameter) for held, name, parameter in found}.values())


@contextlib.contextmanager
def _stand_ins(module: nn.Module) -> Iterator[list[Tensor]]:
    """The same numbers as other leaves while this lasts: autograd has nodes of its own for parameters, that know the
    streams of passes before, and a graph cannot wait for those."""
    places = trained_by(module)
    found = [parameter.detach().requires_grad_() for _, _, parameter in places]
    for (held, name, _), alias in zip(places, found, strict=True):
        held[name] = alias
    try:
        yield found
    finally:
        for held, name, parameter in places:
            held[name] = parameter


def _autocast(kind: str) -> Callable[[], Any]:
    """As it is now, for later; without its memory of weights, which would point into a graph."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def record_attention(model: nn.Module, devices: Sequence[torch.device]) -> list[Attention]:
    """From now on calls of attention on these devices are recorded where that is possible, layers with experts or
    without alike."""
    studios = {device: Studio(device) for device in devices}
    found = []
    for layer in model.modules():
        module = getattr(layer, NAME, None)
        if not hasattr(layer, "gradient_checkpointing") or not isinstance(module, nn.Module):
            continue
        device = next((parameter.device for parameter in module.parameters()), None)
        if device in studios:
            found.append(Attention(layer, module, studios[device]))
    return found
