"""Attention modules of stock models for a few rows on a GPU, in few kernels: one product for queries, keys and values,
and one kernel for the norms of heads and rotary embedding (`modeling/rotary_triton.py`) instead of about forty.

A module is recognised by what it computes. It has `q_proj`, `k_proj`, `v_proj`, `o_proj` and `head_dim`, and maybe
norms of each head, `q_norm` and `k_norm`. Before its first batch its own `forward` is called with random hidden states
and random cosines and sines, and with an attention function that records what it is given and returns random numbers.
The module is fused if queries, keys and values are ours, and if its output is `o_proj` of what the attention function
returned; the specification of the attention is taken from that call. Otherwise, and with gradients, the module's
own `forward` runs.

Weights of the three projections become views of one tensor, so there is one copy of them. Where the rows of a batch
have LoRA, the three modules are called, because their hooks add it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ktransformers.ground.packages import import_triton_module
from ktransformers.modeling.norm import epsilon_of
from ktransformers.modeling.substitute import Substitution, attempt, matches, random_numbers, unprobed
from ktransformers.serve.attention.attention import current_attention, use_attention
from ktransformers.serve.attention.query_scales import SCALED_ATTRIBUTE
from ktransformers.serve.attention.spec import AttentionSpec, current_spec
from ktransformers.serve.scheduler.lora import current_linear_lora, use_linear_lora

TRITON = "ktransformers.modeling.rotary_triton"
PROBE_ROWS = 3
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Norm = tuple[Tensor, float]  # weight [d], epsilon
AttentionOutput = tuple[Tensor, Any]
REFUSED: tuple[Norm, Norm] = ((torch.empty(0), 0.0), (torch.empty(0), 0.0))  # norms that are not those of each head


def _may_fuse(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in (*PROJECTIONS, "o_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts) or not isinstance(getattr(module, "head_dim", None), int):
        return False
    first = next(module.parameters())
    is_stock = not isinstance(module.forward, FusedAttention)
    return is_stock and first.is_cuda and first.dtype in DTYPES and import_triton_module(TRITON) is not None


class FusedAttention:
    """The forward of one attention module."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._stock: Callable[..., AttentionOutput] = module.forward
        self._norms = _head_norms(module)
        self._joint = None if self._norms is REFUSED else _join(module)
        self._angles_of_halves = False  # cosines and sines are those of one half of the rotated numbers
        self._spec: AttentionSpec | None = None  # of a module that was compared with its stock code and is fused
        self._compared = self._norms is REFUSED

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> AttentionOutput:
        embeddings: Any = kwargs.get("position_embeddings")
        if not self._fits(hidden_states, args, kwargs, embeddings):
            return self._stock(hidden_states, *args, **kwargs)
        if not self._compared:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                return self._stock(hidden_states, *args, **kwargs)
            self._spec, self._compared = self._compare(hidden_states, kwargs), True
        attention = current_attention()
        if self._spec is None or attention is None:
            return self._stock(hidden_states, *args, **kwargs)
        self._spec = current_spec(self._module, self._spec)
        rows = hidden_states[0]
        query, key, value = self._inputs(rows, *embeddings)
        out = attention(self._spec, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        return self._module.o_proj(out.reshape(1, rows.shape[0], -1)), None

    def _fits(self, hidden: Tensor, args: Any, kwargs: dict[str, Any], embeddings: Any) -> bool:
        if args or hidden.dim() != 3 or hidden.shape[0] != 1 or not hidden.shape[1]:
            return False
        if torch.is_grad_enabled() or kwargs.get("past_key_values") is not None or current_attention() is None:
            return False
        if not isinstance(embeddings, tuple) or len(embeddings) != 2:
            return False
        shape = (1, hidden.shape[1])
        return all(isinstance(one, Tensor) and one.dim() == 3 and one.shape[:2] == shape for one in embeddings)

    def _inputs(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[T, heads, d]`."""
        module, kernels = self._module, import_triton_module(TRITON)
        assert kernels is not None
        query, key, value = self._project(rows)
        rotary = cos.shape[2] * (2 if self._angles_of_halves else 1)
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            query, key = kernels.norm_and_rotate(
                query, key, self._norms, cos[0].contiguous(), sin[0].contiguous(), module.head_dim, rotary
            )
        return query, key, value.reshape(rows.shape[0], -1, module.head_dim)

    def _project(self, rows: Tensor) -> tuple[Tensor, ...]:
        module = self._module
        projections = [getattr(module, name) for name in PROJECTIONS]
        if self._joint is None or current_linear_lora() is not None:
            return tuple(projection(rows) for projection in projections)
        weight, bias = self._joint
        if weight.data_ptr() != module.q_proj.weight.data_ptr():  # other weights were put into the modules
            return tuple(projection(rows) for projection in projections)
        sizes = [projection.out_features for projection in projections]
        return torch.split(F.linear(rows, weight, bias), sizes, dim=1)

    def _compare(self, hidden: Tensor, kwargs: dict[str, Any]) -> AttentionSpec | None:
        """The specification that the stock code gives its attention function; None: it computes something else."""
        numbers, module = random_numbers(), self._module

        def random(like: Tensor) -> Tensor:
            return numbers(1, PROBE_ROWS, like.shape[2]).to(like)

        embeddings = tuple(random(one) for one in kwargs["position_embeddings"])
        probe = random(hidden)
        given = kwargs | {"hidden_states": probe, "position_embeddings": embeddings}
        with use_linear_lora(None):
            recorded = record_attention(self._stock, given, numbers)
            if recorded is None or not matches(module.o_proj(recorded.heads_of_rows()), recorded.output):
                return None
            spec = recorded.spec
            if spec.latent is not None or spec.selection is not None or getattr(module, SCALED_ATTRIBUTE, False):
                return None
            width = embeddings[0].shape[2]
            for self._angles_of_halves in (False, True):
                if width * (2 if self._angles_of_halves else 1) > module.head_dim:
                    continue
                fused = self._inputs(probe[0], *embeddings)
                stock = (recorded.query, recorded.key, recorded.value)
                if all(matches(ours.transpose(0, 1), one) for ours, one in zip(fused, stock, strict=True)):
                    return spec
        return None


@dataclass(frozen=True)
class RecordedAttention:
    """What stock code gives its attention function, and its output `[1, R, H]` after that returned `attended`."""

    spec: AttentionSpec
    query: Tensor  # [heads, R, d]
    key: Tensor  # [groups, R, d]
    value: Tensor
    attended: Tensor  # [R, heads, dv], random numbers
    output: Tensor

    def heads_of_rows(self) -> Tensor:
        """`[1, R, heads * dv]`, the input of `o_proj`."""
        return self.attended.reshape(1, self.attended.shape[0], -1)


def record_attention(
    stock: Callable[..., Any], arguments: dict[str, Any], numbers: Callable[..., Tensor]
) -> RecordedAttention | None:
    """Of one call of an attention module; None: it does not accept the arguments, or calls its function otherwise than
    once."""
    calls: list[tuple[AttentionSpec, Tensor, Tensor, Tensor, Tensor]] = []

    def record(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        columns = value.shape[2] if spec.latent is None else spec.latent.value
        attended = numbers(query.shape[1], query.shape[0], columns).to(query)
        calls.append((spec, query, key, value, attended))
        return attended

    with use_attention(record):
        result = attempt(lambda: stock(**arguments))
    if len(calls) != 1 or not isinstance(result, tuple) or not isinstance(result[0], Tensor):
        return None
    return RecordedAttention(*calls[0], result[0])


def _head_norms(module: Any) -> tuple[Norm, Norm] | None:
    """Of queries and keys; None: the module has none, REFUSED: it has others."""
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return None
    found = []
    for norm in norms:
        weight = getattr(norm, "weight", None)
        epsilon = epsilon_of(norm)
        if not isinstance(weight, Tensor) or weight.shape != (module.head_dim,) or epsilon is None:
            return REFUSED
        found.append((weight.detach(), epsilon))
    return found[0], found[1]


def _join(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """One weight and one bias of the three projections, of which theirs become views; None: they cannot be joined."""
    projections = [getattr(module, name) for name in PROJECTIONS]
    weights, biases = [one.weight for one in projections], [one.bias for one in projections]
    plain = all(type(one) is nn.Linear and "forward" not in vars(one) for one in projections)
    plain = plain and all(type(weight.data) is Tensor and weight.dtype in DTYPES for weight in weights)  # not quantized
    hooked = any(one._forward_pre_hooks for one in projections)
    if not plain or hooked or len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) > 1:
        return None
    if len({bias is None for bias in biases}) > 1:
        return None
    with torch.no_grad():
        return _join_tensors(weights), None if biases[0] is None else _join_tensors(biases)


def _join_tensors(parts: list[Any]) -> Tensor:
    joint = torch.cat([part.data for part in parts])
    for part, view in zip(parts, torch.split(joint, [len(part) for part in parts]), strict=True):
        part.data = view
    return joint


FUSED_ATTENTION: Substitution[nn.Module, bool] = Substitution(
    "attention modules",
    lambda model: filter(_may_fuse, model.modules()),
    unprobed,
    lambda module, _, restore: restore.put(module, "forward", FusedAttention(module)),
)
