"""`forward` of every `self_attn` of a checkpointed decoder layer, wrapped: calls that come often are captured as a pair
of CUDA graphs a layer and replayed inside of one autograd function that keeps the layer's input alone.

A replayed call copies its inputs into static buffers, replays, and copies the output out. Sequences are padded at their
end, where causal attention does not look, and come in pieces, whose size bounds the memory of a graph. Whatever is not
known to be safe stays with stock attention: other arguments and results, hooks inside, batches that keep the device
busy anyway, layers without checkpointing. The package's docstring says why these are graphs of our own.

Hidden states `[B, T, H]`; rotary embeddings `[.., T, d]`, masks `[.., T, T]`, position ids `[.., T]`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktransformers.ground import env
from ktransformers.modeling.attention_graphs.signature import (
    AttentionCall,
    CallSignature,
    Key,
    has_dropout,
    module_state,
    read_call,
    trained_parameters,
)
from ktransformers.modeling.attention_graphs.static_buffers import GradientBuffers, GrowingBuffers, StaticInputs
from ktransformers.modeling.cuda_graphs import MAX_COUNTED, GraphCache, GraphPool

MODULE_NAME = "self_attn"
MAX_GRAPH_PAIRS = 8  # of a layer
RECOMPUTE_WINDOW = 32  # calls after which a pass that was never recomputed is no longer waited for
MAX_TOKENS = 4096  # of a call: above, the device is busy for longer than Python takes
MAX_LENGTH = 2048  # of a sequence: what a graph's memory holds is there for good
# Other implementations return attention weights too: a replay leaves them out, which only a hook would notice.
WITHOUT_WEIGHTS = ("sdpa", "flash_attention_2", "flash_attention_3")
EMPTY = torch.empty(0)


class CallKey(NamedTuple):
    """What calls that go through the same graphs have in common."""

    inputs: Key  # shapes, dtypes and constants
    hidden_needs_grad: bool
    implementation: str  # transformers' word for it
    state: Key


@dataclass
class PendingRecomputes:
    """Calls under one key that went through stock attention and will be recomputed in a backward pass."""

    calls: int = 0
    pending: int = 0
    lowest: int = 0  # value of `pending` during the last calls: so many are never recomputed

    def count_call(self) -> None:
        self.calls += 1
        self.lowest = min(self.lowest, self.pending)
        if self.calls % RECOMPUTE_WINDOW == 0:
            self.pending -= self.lowest
            self.lowest = self.pending


@dataclass(frozen=True)
class GraphPair:
    """One layer's graphs for one key. The second recomputes the output and goes back through it; it is there when a
    call with gradients has come."""

    inputs: StaticInputs
    forward: Callable[[], None]
    backward: Callable[[], None] | None = None
    trained: Sequence[Tensor] = ()
    gradients: GradientBuffers | None = None

    def compute(self, call: AttentionCall) -> Tensor:
        inputs, (count, length, _) = self.inputs, call.hidden.shape
        out = inputs.out.new_empty(count, length, inputs.out.shape[2])
        for piece in call.pieces():
            inputs.fill(call, piece)
            self.forward()
            out[piece].copy_(inputs.out[: piece.stop - piece.start, :length])
        return out

    def differentiate(self, call: AttentionCall, grad_out: Tensor, needs_grad: bool) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states, with `needs_grad`, and of the trained parameters."""
        assert self.backward is not None and self.gradients is not None
        grad_hidden = torch.empty_like(call.hidden) if needs_grad else None
        self.gradients.clear()
        for piece in call.pieces():
            self.inputs.fill(call, piece, grad_out)
            self.backward()
            if grad_hidden is not None:
                grad_hidden[piece].copy_(self.inputs.hidden[: piece.stop - piece.start, : grad_hidden.shape[1]])
        return grad_hidden, *self.gradients.copies()


class ReplayedAttention(torch.autograd.Function):
    """One call of attention; of what it computes only the input is kept."""

    @staticmethod
    def forward(ctx: Any, graphs: GraphPair, call: AttentionCall, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.graphs, ctx.rng_offset = graphs, _rng_offset(hidden.device)
        ctx.call = replace(call, hidden=EMPTY)  # hidden states are saved below, where checkpointing can free them
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        return graphs.compute(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:
        graphs: GraphPair = ctx.graphs
        if grad_out is None:
            return None, None, None, *[None] * len(graphs.trained)
        (hidden,) = ctx.saved_tensors
        with _rng_at(hidden.device, ctx.rng_offset):  # the dropout masks of forward
            call = replace(ctx.call, hidden=hidden)
            return None, None, *graphs.differentiate(call, grad_out, ctx.needs_input_grad[2])


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _rng_offset(device: torch.device) -> int:
    return _generator(device).get_offset() if device.type == "cuda" else 0


@contextlib.contextmanager
def _rng_at(device: torch.device, offset: int) -> Iterator[None]:
    """Random numbers of the device from this offset on; afterwards from where they were."""
    if device.type != "cuda":
        yield
        return
    generator = _generator(device)
    before = generator.get_offset()
    generator.set_offset(offset)
    try:
        yield
    finally:
        generator.set_offset(before)


class DeviceState:
    """What the graphs of all layers on a device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = GraphPool(device)
        self.buffers = GrowingBuffers()
        self.inputs: dict[Key, StaticInputs] = {}
        self._stream: Any = None  # of all calls so far

    def on_its_stream(self) -> bool:
        """Whether the current stream is the one that buffers are used on, and not being captured."""
        if self.device.type != "cuda":
            return True
        current = torch.cuda.current_stream(self.device)
        self._stream = self._stream or current
        return bool(self._stream == current) and not torch.cuda.is_current_stream_capturing()


class GraphedAttention:
    """Takes the place of `forward` of one `self_attn`."""

    def __init__(self, layer: Any, module: nn.Module, shared: DeviceState) -> None:
        self.layer, self.module, self.shared = layer, module, shared
        self.stock: Callable[..., Any] = module.forward
        self.graphs: GraphCache[CallKey, GraphPair] = GraphCache(
            type(module).__name__, shared.pool, max_graphs=MAX_GRAPH_PAIRS
        )
        self._recomputes: dict[CallKey, PendingRecomputes] = {}
        self._overridden = "forward" in vars(module)
        self.__wrapped__ = self.stock  # for inspect.signature
        module.forward = self

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.stock, memo)  # a copy of the model is a stock one

    def close(self) -> None:
        """Restore stock `forward`. If it was wrapped again since, this stays below and only passes calls on."""
        self.graphs.close()
        if self.module.forward is self:
            del self.module.forward
            if self._overridden:
                self.module.forward = self.stock

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        call = self._read(args, keywords)
        key = None if call is None else self._key(call)
        graphs = None if call is None or key is None else self._find(call, key)
        if call is None or graphs is None:
            return self.stock(*args, **keywords)
        if not torch.is_grad_enabled():
            return graphs.compute(call), None
        return ReplayedAttention.apply(graphs, call, call.hidden, *graphs.trained), None  # type: ignore[no-untyped-call]

    def _read(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> AttentionCall | None:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return None
        if not (self.layer.gradient_checkpointing and self.module.training):
            return None
        return None if self.graphs.closed and not self.graphs.captured else read_call(args, keywords)

    def _key(self, call: AttentionCall) -> CallKey | None:
        """None: calls like this one are not captured."""
        hidden, device = call.hidden, self.shared.device
        if call.piece_shape[1] > MAX_LENGTH or hidden.shape[0] * call.piece_shape[1] > MAX_TOKENS:
            return None
        if hidden.device != device or not self.shared.on_its_stream():
            return None
        masked = "attention_mask" in call.signature.names
        causal = call.constant("is_causal", getattr(self.module, "is_causal", False))
        if call.needs_padding and not masked and not causal:
            return None
        implementation = str(getattr(getattr(self.module, "config", None), "_attn_implementation", ""))
        if self.module._forward_hooks and implementation not in WITHOUT_WEIGHTS:
            return None
        state = module_state(self.module)
        if state is None:
            return None
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        dtypes = tuple(tensor.dtype for tensor in call.tensors)
        inputs = call.piece_shape, hidden.dtype, call.signature, call.tensor_shapes, dtypes, autocast
        return CallKey(inputs, hidden.requires_grad, implementation, state)

    def _find(self, call: AttentionCall, key: CallKey) -> GraphPair | None:
        """Checkpointing compares the tensors that a pass saves with those of its recomputation, so both are replayed or
        neither: a key is captured when no earlier call under it is still to be recomputed."""
        graphs, needs_grad = self.graphs.get(key), torch.is_grad_enabled()
        if not needs_grad and has_dropout(self.module):  # reentrant checkpointing's recomputation would draw otherwise
            return None
        if graphs is not None and (graphs.backward is not None or not needs_grad):
            return graphs
        recomputes = self._recomputes.setdefault(key, PendingRecomputes())
        if torch._C._current_graph_task_id() != -1:  # in a backward pass
            recomputes.pending = max(0, recomputes.pending - needs_grad)
            return None
        recomputes.count_call()
        if self.graphs.due(key) and not recomputes.pending:
            graphs = self.graphs.capture(key, lambda: self._capture(call, key, needs_grad))
            if graphs is not None:
                del self._recomputes[key]
                return graphs
        recomputes.pending += needs_grad
        if len(self._recomputes) > MAX_COUNTED:
            self._recomputes = {one: counts for one, counts in self._recomputes.items() if counts.pending}
        return None

    def _capture(self, call: AttentionCall, key: CallKey, needs_grad: bool) -> GraphPair:
        """Without the hooks by which checkpointing sees what autograd saves, and without moving the random numbers:
        checkpointing repeats this pass, but not what a capture saves and draws."""
        shared, signature = self.shared, call.signature
        no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with no_hooks, _rng_at(shared.device, _rng_offset(shared.device)):
            if key.inputs not in shared.inputs:
                shared.inputs[key.inputs] = StaticInputs(call, shared.buffers)
            inputs = shared.inputs[key.inputs]
            inputs.fill(replace(call, hidden=call.hidden.detach()), call.pieces()[0])
            graphs = self.graphs.get(key) or GraphPair(inputs, shared.pool.record(self._forward(inputs, signature)))
            if not needs_grad:
                return graphs
            trained = [parameter for parameter, _ in trained_parameters(self.module).values()]
            gradients = GradientBuffers(trained, shared.buffers)
            backward = shared.pool.record(self._backward(inputs, signature, gradients, key.hidden_needs_grad))
            return replace(graphs, backward=backward, trained=trained, gradients=gradients)

    def _call_stock(self, inputs: StaticInputs, signature: CallSignature, hidden: Tensor) -> Tensor:
        result = self.stock(hidden_states=hidden, **signature.keywords(inputs.tensors))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError("attention returns something else than an output and weights")
        out: Tensor = result[0]
        inputs.shape_output(out)
        return out

    def _forward(self, inputs: StaticInputs, signature: CallSignature) -> Callable[[], None]:
        autocast = _autocast(self.shared.device.type)

        def run() -> None:
            with torch.no_grad(), autocast():
                out = self._call_stock(inputs, signature, inputs.hidden)
                inputs.out.copy_(out)

        return run

    def _backward(
        self, inputs: StaticInputs, signature: CallSignature, gradients: GradientBuffers, hidden_needs_grad: bool
    ) -> Callable[[], None]:
        autocast = _autocast(self.shared.device.type)

        def run() -> None:
            hidden = inputs.hidden.detach().requires_grad_(hidden_needs_grad)
            with torch.enable_grad(), autocast(), _aliased_parameters(self.module) as aliases:
                out = self._call_stock(inputs, signature, hidden)
            leaves = [hidden, *aliases] if hidden_needs_grad else aliases
            grads = list(torch.autograd.grad(out, leaves, inputs.out, allow_unused=True)) if leaves else []
            if hidden_needs_grad:
                grad_hidden = grads.pop(0)
                inputs.hidden.zero_() if grad_hidden is None else inputs.hidden.copy_(grad_hidden)
            gradients.add(grads)

        return run


@contextlib.contextmanager
def _aliased_parameters(module: nn.Module) -> Iterator[list[Tensor]]:
    """Other leaves with the same memory in place of the trained parameters: the AccumulateGrad nodes of parameters
    remember the streams of earlier passes, for which a capture cannot wait."""
    trained = trained_parameters(module).values()
    aliases = [parameter.detach().requires_grad_() for parameter, _ in trained]
    for (_, places), alias in zip(trained, aliases, strict=True):
        for parameters, name in places:
            parameters[name] = alias
    try:
        yield aliases
    finally:
        for parameter, places in trained:
            for parameters, name in places:
                parameters[name] = parameter


def _autocast(device_type: str) -> Callable[[], Any]:
    """The autocast of now, for later; without its cache of cast weights, which would point into a graph's memory."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)


def record_attention(model: nn.Module, devices: Sequence[torch.device]) -> list[GraphedAttention]:
    """From now on calls of attention on these devices are captured where that is possible, in layers with experts or
    without; modules that are wrapped already stay as they are. Nothing is wrapped if KT_GRAPHS leaves attention out."""
    shared = {device: DeviceState(device) for device in devices} if env.graphs_enabled("attention") else {}
    wrapped = []
    for layer in model.modules():
        module = getattr(layer, MODULE_NAME, None)
        if not hasattr(layer, "gradient_checkpointing") or not isinstance(module, nn.Module):
            continue
        device = next((parameter.device for parameter in module.parameters()), None)
        if device in shared and not isinstance(module.forward, GraphedAttention):
            wrapped.append(GraphedAttention(layer, module, shared[device]))
    return wrapped
