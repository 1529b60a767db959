"""Decoder layers of stock models for new tokens on the CPU in calls of the core (`csrc/moe/decode_layer.h`):
x + attention(norm(x)), and x + experts(norm(x)) with a softmax router; two calls, or one for all layers of a model
(`decode_stack.py`).

While one token is decoded, a stock layer spends more time in Python and in torch's small operators than in its matrix
products. A layer is recognised by what it computes. It has `input_layernorm`, `self_attn`, `post_attention_layernorm`
and `mlp`. Before the first batch its own parts are called with random hidden states, random cosines and sines and
caches of random keys and values: its attention is computed by the core if the result is the same, and so are its
routed experts; each half for itself, and neither if the layer does more than add the two. Projections may have biases,
attention sinks, and cosines may be those of half a head (gpt-oss). The core runs for batches of single new tokens
without LoRA; otherwise, and while a part of the layer has hooks, the layer's own `forward` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.experts.backend import KtExperts, packed_experts
from ktransformers.experts.interface import mask_padding
from ktransformers.experts.lora import current_mixed_lora
from ktransformers.experts.peft_lora import read_lora
from ktransformers.experts.store import ExpertStore, weights_are_rounded
from ktransformers.ground.pool import default_pool
from ktransformers.modeling.norm import norm_epsilon
from ktransformers.modeling.substitute import Substitution, attempt, matches, random_numbers, unprobed
from ktransformers.quantized.weight import CpuPacked, QuantizedWeight
from ktransformers.quantized.widened import stored_weight
from ktransformers.serve.attention.attention import Cache, by_blocks, use_attention
from ktransformers.serve.attention.query_scales import SCALED_ATTRIBUTE
from ktransformers.serve.attention.spec import AttentionSpec, current_spec
from ktransformers.serve.attention.step import BatchStep, current_step
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, BlockMemory
from ktransformers.serve.cache.recurrent_states import StatefulForward
from ktransformers.serve.scheduler.lora import current_linear_lora, use_linear_lora

DTYPES = (torch.bfloat16, torch.float32)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION_PARTS = {*PROJECTIONS, "q_norm", "k_norm"}
ROUTERS = ("gate", "router")  # names of them
PROBE_KEYS = (5, 1, 8)  # of the sequences that both compute; the last one of each is new
SMALLEST_PROBE = 1 / 128  # size of hidden states
ROUTER_TRIALS = 4  # with other hidden states: two experts that are nearly equal may be chosen in another order


def fits_core(step: BatchStep) -> bool:
    """Whether the core may compute a batch: single new tokens, and not too many."""
    few = len(step.spans) <= _core.linear_rows()
    return few and len(step.decoding) == len(step.spans) and not step.memory.rounded


def _may_decode(module: Any) -> bool:
    """Whether the parts of a layer may be called with random numbers: attention that writes more than keys and values
    for its sequences (convolution and recurrent states, keys of an indexer) would write those."""
    norms = [norm_epsilon(getattr(module, name, None)) for name in ("input_layernorm", "post_attention_layernorm")]
    parts = [getattr(module, name, None) for name in ("self_attn", "mlp")]
    if None in norms or not all(isinstance(part, nn.Module) for part in parts):
        return False
    attention = module.self_attn
    if not {name for name, part in attention.named_children() if list(part.parameters())} <= ATTENTION_PARTS:
        return False
    if set(attention._parameters) - {"sinks"} or attention._buffers:
        return False
    weight = module.input_layernorm.weight
    return not isinstance(module.forward, CoreDecodeLayer) and weight.is_cpu and weight.dtype in DTYPES


class CoreDecodeLayer:
    """The forward of one decoder layer."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._stock: Callable[..., Any] = module.forward
        self._compared = False
        self._core: _core.DecodeLayer | None = None
        self._spec: AttentionSpec | None = None  # of attention that the core computes
        self._store: ExpertStore | None = None  # of experts that the core computes
        self.repeats_rotary = False  # cosines and sines are given for half of the numbers that are rotated
        self._like = torch.empty(0)  # [groups, 0, d], of keys and values
        self._cached: tuple[BlockMemory, Cache] | None = None
        self._weights: list[tuple[dict[str, Any], str, Any]] = []  # parameters of modules, and those that the core has
        self._hooks = [hooks for part in _parts(module) for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = self._fitting_step(hidden_states, args, kwargs)
        if step is None:
            return self._stock(hidden_states, *args, **kwargs)
        if not self._compared and not any(self._hooks):  # they would be called with random numbers
            self._compared = True
            self._compare(hidden_states, kwargs)
        if self._core is None or self._changed():
            return self._stock(hidden_states, *args, **kwargs)
        if self._spec is None:
            inner = self._module.self_attn(hidden_states=self._module.input_layernorm(hidden_states), **kwargs)[0]
            attended = hidden_states + inner
        else:
            cos, sin = kwargs["position_embeddings"]
            rotary = [repeated(one[0]) if self.repeats_rotary else one[0].contiguous() for one in (cos, sin)]
            attended = self._attend(hidden_states[0], step, *rotary)[None]
        if self._store is None:
            return attended + _experts_output(self._module.mlp(self._module.post_attention_layernorm(attended)))
        return self._route(attended[0])[None]

    @property
    def computes_whole_layer(self) -> bool:
        """With the weights that the layer was compared with."""
        return self._spec is not None and self._store is not None and not self._changed()

    def _fitting_step(self, hidden: Tensor, args: Any, kwargs: dict[str, Any]) -> BatchStep | None:
        """That of a batch of single new tokens without LoRA."""
        step = current_step()
        if step is None or args or hidden.dim() != 3 or len(step.spans) != hidden.shape[1] or hidden.shape[0] != 1:
            return None
        if torch.is_grad_enabled() or kwargs.get("past_key_values") is not None or not fits_core(step):
            return None
        embeddings: Any = kwargs.get("position_embeddings")
        if current_linear_lora() is not None or not isinstance(embeddings, tuple) or len(embeddings) != 2:
            return None
        return step if hidden.is_contiguous() else None

    def _changed(self) -> bool:
        """Whether weights were replaced, hooks were added or the experts have LoRA since the layer was compared."""
        for parameters, name, weight in self._weights:
            if parameters[name] is not weight:
                return True
        if any(self._hooks):
            return True
        if self._store is None:
            return False
        experts: Any = self._module._modules["mlp"]._modules["experts"]  # several lookups by name take longer
        return experts.kt.store is not self._store or _needs_stock(experts)

    def cache(self, memory: BlockMemory) -> tuple[Cache, int]:
        """The keys and values of the layer, and the window of its queries; 0: they attend to all keys."""
        assert self._spec is not None
        spec = self._spec = current_spec(self._module.self_attn, self._spec)
        if self._cached is None or self._cached[0] is not memory:
            self._cached = memory, by_blocks(memory.of_layer(spec.layer, self._like, self._like))
        return self._cached[1], spec.window or 0

    def _attend(self, rows: Tensor, step: BatchStep, cos: Tensor, sin: Tensor) -> Tensor:
        """x + attention(norm(x))."""
        assert self._core is not None
        out = torch.empty_like(rows)
        cache, window = self.cache(step.memory)
        self._core.attend(rows, out, cos, sin, cache, step.sequences, window)
        return out

    def _route(self, rows: Tensor) -> Tensor:
        """x + experts(norm(x))."""
        assert self._core is not None and self._store is not None
        out, w8a8 = torch.empty_like(rows), self._store.w8a8
        self._core.route(rows, out, w8a8, weights_are_rounded() and not w8a8)
        return out

    def _compare(self, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        module = self._module
        if any(isinstance(part.forward, StatefulForward) for part in module.modules()):
            return
        probe = Probe(hidden, kwargs)
        core = _core.DecodeLayer(default_pool(), hidden.shape[-1])
        with use_linear_lora(None):
            if not attempt(lambda: probe.is_sum_of_halves(module, self._stock)):
                return
            spec = attempt(lambda: probe.bind_attention(module, core))
            store = attempt(lambda: probe.bind_experts(module, core))
        if spec is None and store is None:
            return
        self._core, self._spec, self._store = core, spec, store
        self.repeats_rotary = probe.repeats_rotary
        parts = [module.input_layernorm, module.post_attention_layernorm]
        if spec is not None:
            groups = module.self_attn.k_proj.out_features // module.self_attn.head_dim
            self._like = hidden.new_empty(groups, 0, module.self_attn.head_dim)
            parts += [getattr(module.self_attn, name, None) for name in (*PROJECTIONS, "q_norm", "k_norm")]
            parts.append(module.self_attn)  # its sinks
        if store is not None:
            parts.append(_router(module))
        self._weights = [
            (part._parameters, name, weight)
            for part in parts
            if part is not None
            for name, weight in part._parameters.items()
        ]


def compute_layers(
    layers: Sequence[CoreDecodeLayer], rows: Tensor, step: BatchStep, cos: Tensor, sin: Tensor
) -> Tensor:
    """Layers that follow each other, for rows `[T, H]`, new tokens of this step; cos and sin `[T, r]`, repeated where
    the layers repeat them. Each `computes_whole_layer`."""
    out, cores, w8a8 = torch.empty_like(rows), [], []
    for layer in layers:
        assert layer._core is not None and layer._store is not None
        cores.append(layer._core)
        w8a8.append(layer._store.w8a8)
    held = [layer.cache(step.memory) for layer in layers]
    caches, windows = [cache for cache, _ in held], [window for _, window in held]
    _core.decode_layers(cores, rows, out, cos, sin, caches, windows, step.sequences, w8a8, weights_are_rounded())
    return out


def repeated(half: Tensor) -> Tensor:
    """Cosines or sines of the first half of the rotated numbers `[T, r / 2]` -> of all of them."""
    return torch.cat([half, half], dim=-1)


def _router(module: Any) -> Any:
    """The router of a decoder layer, or None."""
    return next((router for name in ROUTERS if (router := getattr(module.mlp, name, None)) is not None), None)


def _experts_output(result: Any) -> Any:
    """Some families return the router's scores too."""
    return result[0] if isinstance(result, tuple) else result


def _parts(module: Any) -> list[nn.Module]:
    """Of a decoder layer."""
    parts = [module.self_attn, module.mlp, module.input_layernorm, module.post_attention_layernorm]
    parts += [getattr(module.mlp, name, None) for name in (*ROUTERS, "experts")]
    return [part for part in parts if isinstance(part, nn.Module)]


def _needs_stock(experts: Any) -> bool:
    """Whether the experts have LoRA, or another backend than this process's CPU."""
    kt: KtExperts = experts.kt
    if kt.backend is None or kt.backend is not kt.local or kt.lora is not None:
        return True
    return current_mixed_lora(experts) is not None or read_lora(experts, kt) is not None


class Probe:
    """Random inputs that the stock code and the core compute."""

    def __init__(self, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        self._random = random_numbers()
        self._rows = len(PROBE_KEYS)
        self._hidden = self._random(1, self._rows, hidden.shape[2]).to(hidden)
        embeddings = tuple(self._random(1, self._rows, one.shape[2]).to(one) for one in kwargs["position_embeddings"])
        self._arguments = kwargs | {"position_embeddings": embeddings}
        self._cos, self._sin = embeddings[0][0], embeddings[1][0]
        self._caches: list[tuple[Tensor, Tensor]] = []  # of each row: keys and values [groups, keys, d]
        self._specs: list[AttentionSpec] = []
        self.repeats_rotary = False

    def _attention(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of stock code to the caches, whose last key and value are the row's own: `[T, heads, d]`."""
        if not self._caches:
            self._caches = [
                tuple(self._random(new.shape[0], keys, new.shape[2]).to(new) for new in (key, value))  # type: ignore[misc]
                for keys in PROBE_KEYS
            ]
        self._specs.append(spec)
        rows, group = [], query.shape[0] // key.shape[0]
        for row, (keys, values) in enumerate(self._caches):
            held = torch.cat([keys[:, :-1], key[:, row : row + 1]], dim=1).float().repeat_interleave(group, dim=0)
            read = torch.cat([values[:, :-1], value[:, row : row + 1]], dim=1).float().repeat_interleave(group, dim=0)
            scores = (held @ query[:, row].float()[:, :, None])[..., 0] * spec.scale
            if spec.sinks is not None:
                scores = torch.cat([scores, spec.sinks.float()[:, None]], dim=-1)
            rows.append((scores.softmax(-1)[:, None, : keys.shape[1]] @ read)[:, 0])
        return torch.stack(rows).to(query)

    def _stock_attention(self, module: Any, hidden: Tensor) -> Tensor:
        """What the layer adds to its hidden states, before it does so."""
        with use_attention(self._attention):
            out: Tensor = module.self_attn(hidden_states=module.input_layernorm(hidden), **self._arguments)[0]
        return out

    def _stock_experts(self, module: Any, hidden: Tensor) -> Tensor:
        """What the layer adds after attention."""
        out: Tensor = _experts_output(module.mlp(module.post_attention_layernorm(hidden)))
        return out

    def _sized(self, added: Tensor) -> Tensor:
        """Hidden states of an eighth of the size of what is added to them: larger ones would hide it in a sum of few
        bits, whatever it is. A norm gives nearly the same numbers for both, unless they are so small that its epsilon
        counts."""
        size = added.float().square().mean().sqrt() / 8
        return (self._hidden.float() * size.clamp(min=SMALLEST_PROBE)).to(self._hidden)

    def is_sum_of_halves(self, module: Any, stock: Callable[..., Any]) -> bool:
        """Whether the layer adds its attention and its experts, each of the norm of its input, and nothing else: bit
        by bit, because one half may be much smaller than the other."""
        hidden = self._sized(self._stock_attention(module, self._hidden))
        with use_attention(self._attention):
            whole = stock(hidden, **self._arguments)
        attended = hidden + self._stock_attention(module, hidden)
        return isinstance(whole, Tensor) and torch.equal(attended + self._stock_experts(module, attended), whole)

    def bind_attention(self, module: Any, core: _core.DecodeLayer) -> AttentionSpec | None:
        """None: the core would compute something else."""
        attention = module.self_attn
        weights = [_core_weight(getattr(attention, name, None)) for name in PROJECTIONS]
        spec = self._specs[-1] if self._specs else None
        if any(weight is None for weight in weights) or spec is None or getattr(attention, SCALED_ATTRIBUTE, False):
            return None
        others = (spec.softcap, spec.latent, spec.selection, spec.chunk)
        if any(other is not None for other in others):
            return None
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        epsilons = [norm_epsilon(norm) for norm in (module.input_layernorm, *head_norms)]
        if any(norm is not None and norm_epsilon(norm) is None for norm in head_norms):
            return None
        core.set_attention(
            module.input_layernorm.weight.detach(),
            None if head_norms[0] is None else head_norms[0].weight.detach(),
            None if head_norms[1] is None else head_norms[1].weight.detach(),
            [epsilon or 0.0 for epsilon in epsilons],
            weights,
            [_bias(getattr(attention, name)) for name in PROJECTIONS],
            spec.core_sinks,
            attention.head_dim,
            spec.scale,
        )
        hidden = self._sized(self._stock_attention(module, self._hidden))
        expected, out = self._stock_attention(module, hidden), torch.empty_like(hidden)
        for repeats in (False, True) if 2 * self._cos.shape[1] <= attention.head_dim else (False,):
            cos, sin = (repeated(one) if repeats else one for one in (self._cos, self._sin))
            core.attend(hidden[0], out[0], cos, sin, *self._in_blocks())
            if matches(_difference(out, hidden), expected):
                self.repeats_rotary = repeats
                return spec
        return None

    def _in_blocks(self) -> tuple[tuple[Tensor, Tensor], _core.StepSequences]:
        """The caches of the rows as the core takes them, a block for each."""
        rows = len(self._caches)
        cache = [one.new_zeros(rows, one.shape[0], BLOCK_TOKENS, one.shape[2]) for one in self._caches[0]]
        for row, held in enumerate(self._caches):
            for blocks, one in zip(cache, held, strict=True):
                blocks[row, :, : one.shape[1]] = one
        numbers, last = np.arange(rows, dtype=np.int32), np.array(PROBE_KEYS, np.int32) - 1
        return (cache[0], cache[1]), _core.StepSequences(numbers, last, numbers[:, None].copy())

    def bind_experts(self, module: Any, core: _core.DecodeLayer) -> ExpertStore | None:
        """None: the core would compute something else, or a score of nearly one hides whether scores are normalised."""
        experts, gate = getattr(module.mlp, "experts", None), _router(module)
        kt = None if experts is None else packed_experts(experts)
        top_k = getattr(gate, "top_k", getattr(module.mlp, "top_k", None))
        if kt is None or kt.store is None or not isinstance(top_k, int) or not isinstance(gate, nn.Module):
            return None
        store = kt.store
        if _needs_stock(experts) or set(gate._parameters) - {"weight", "bias"} or gate._buffers:
            return None
        ids = torch.zeros(1, 1, dtype=torch.int64)
        if mask_padding(ids) is not ids:
            return None
        router, norm = stored_weight(gate.get_parameter("weight")).detach(), module.post_attention_layernorm

        def is_same(normalise: bool) -> bool:
            core.set_experts(
                norm.weight.detach(), norm_epsilon(norm) or 0.0, router, _bias(gate), store.core, top_k, normalise
            )
            core.route(hidden[0], out[0], store.w8a8, weights_are_rounded() and not store.w8a8)
            return matches(_difference(out, hidden), expected)

        for _ in range(ROUTER_TRIALS):
            hidden = self._sized(self._stock_experts(module, self._hidden))
            expected, out = self._stock_experts(module, hidden), torch.empty_like(hidden)
            matching = [normalise for normalise in (True, False) if is_same(normalise)]
            if len(matching) == 1 and is_same(matching[0]):
                return store
            self._hidden = self._random(*self._hidden.shape).to(self._hidden)
        return None


def _difference(sum: Tensor, hidden: Tensor) -> Tensor:
    """What was added to the hidden states, in their dtype."""
    return (sum.float() - hidden.float()).to(hidden)


def _core_weight(linear: Any) -> Any:
    """The weight of a linear layer as the core takes it; None: it takes another one."""
    if not isinstance(linear, nn.Linear):
        return None
    weight = stored_weight(linear.weight)
    if isinstance(weight, QuantizedWeight):
        impl = weight.impl
        return impl.linear if isinstance(impl, CpuPacked) and impl.order is None else None
    return weight.detach() if weight.dtype == torch.bfloat16 and weight.is_contiguous() else None


def _bias(module: nn.Module) -> Tensor | None:
    bias = module._parameters.get("bias")
    return None if bias is None else bias.detach()


DECODE_LAYERS: Substitution[nn.Module, bool] = Substitution(
    "decoder layers",
    lambda model: filter(_may_decode, model.modules()),
    unprobed,
    lambda module, _, restore: restore.put(module, "forward", CoreDecodeLayer(module)),
)
