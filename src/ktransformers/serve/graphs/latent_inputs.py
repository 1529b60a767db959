"""Latent attention of captured decode steps without the small kernels of the stock module.

Between projections and attention the stock module normalises the latent, rotates queries and key, and concatenates both
several times: about 16 kernels of a microsecond or two in each layer. Here one kernel writes the key and the rotary
part of the absorbed queries (`latent_inputs_triton.py`), the product with the keys' part of `kv_b_proj` writes the rest
of the queries to where attention reads them, and the product with its values' part writes the input of `o_proj`.
Projections are calls of the stock linear layers, so their LoRA, quantized weights and hooks apply.

A module is recognised by what it computes. It is called once with random numbers while attention records what it is
given: if one of three forms of rotary embedding gives the same queries and key, within rounding, attention has a scale
alone, and the result is `o_proj` of attention's, the module's forward is replaced. The new forward runs inside of
`fused_latents` only; everywhere else, and for rows with LoRA of `kv_b_proj`, the stock one does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktransformers.ground.packages import import_triton_module
from ktransformers.modeling.norm import norm_epsilon
from ktransformers.modeling.substitute import ABSORBED, Substitution, matches, random_numbers
from ktransformers.serve.attention.fused_attention import RecordedAttention, record_attention
from ktransformers.serve.attention.latent import LATENT_ATTRIBUTE, LatentProjection
from ktransformers.serve.attention.spec import AttentionSpec

TRITON = "ktransformers.serve.graphs.latent_inputs_triton"
PROBED_ROWS = 3
ARGUMENTS = {"hidden_states", "position_embeddings"}


class RotaryStyle(NamedTuple):
    paired: bool  # numbers of a pair are neighbours in the input; otherwise half of all apart
    paired_out: bool
    rounded: bool  # products are rounded one by one


# Of DeepSeek-V3 with and without `rope_interleave`, and of DeepSeek-V2, which multiplies complex numbers.
STYLES = (RotaryStyle(True, False, True), RotaryStyle(False, False, True), RotaryStyle(True, True, False))
Angles = tuple[Tensor, Tensor]  # cos and sin, [R, rope // 2]
AttendLatents = Callable[[AttentionSpec, Tensor, Tensor], Tensor]  # absorbed queries and keys -> sums of latents
_attend: ContextVar[tuple[AttendLatents, Callable[[nn.Module], bool]] | None] = ContextVar(
    "kt_fused_latents", default=None
)


@contextmanager
def fused_latents(attend: AttendLatents, has_lora: Callable[[nn.Module], bool]) -> Iterator[None]:
    """While the model is called, latent attention of every row is `attend`'s, `[heads, R, rank + rope]` and
    `[1, R, rank + rope]` -> `[R, heads, rank]`. `has_lora`: whether rows have LoRA of this linear layer.

    A ContextVar carries both past the model's forward, as in `serve/attention/attention.py`."""
    token = _attend.set((attend, has_lora))
    try:
        yield
    finally:
        _attend.reset(token)


def write_inputs(
    query: Tensor,
    latent: Tensor,
    weight: Tensor,
    epsilon: float,
    angles: Angles,
    style: RotaryStyle,
    absorbed: Tensor,
    key: Tensor,
) -> None:
    """Queries `[R, heads, nope + rope]` and latents `[R, rank + rope]` as they are projected -> the rotary part of
    `absorbed` `[heads, R, rank + rope]`, and `key` `[R, rank + rope]`."""
    kernels = import_triton_module(TRITON) if query.is_cuda else None
    if kernels is not None:
        kernels.write_inputs(query, latent, weight, epsilon, *angles, style, absorbed, key)
        return
    rank = weight.shape[0]
    rope = latent.shape[1] - rank
    values = latent[:, :rank].float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    key[:, :rank] = (values * scale).to(key.dtype) * weight
    key[:, rank:] = _rotate(latent[:, rank:], *angles, style)
    cos, sin = (one[:, None] for one in angles)
    absorbed[..., rank:] = _rotate(query[..., query.shape[2] - rope :], cos, sin, style).transpose(0, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, style: RotaryStyle) -> Tensor:
    dtype, half = x.dtype, x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if style.paired else (x[..., :half], x[..., half:])
    if not style.rounded:
        first, second = first.float(), second.float()
    a, b = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack([a, b], dim=-1).flatten(-2) if style.paired_out else torch.cat([a, b], dim=-1)
    return rotated.to(dtype)


def angles_of(position_embeddings: Any) -> Angles | None:
    """Of `(cos, sin)`, whose halves are equal, or of complex numbers, of one row of tokens; None: of another form."""
    if isinstance(position_embeddings, Tensor):
        if not position_embeddings.is_complex() or position_embeddings.dim() != 3:
            return None
        numbers = torch.view_as_real(position_embeddings)[0]
        return numbers[..., 0], numbers[..., 1]
    if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
        return None
    cos, sin = (one[0, :, : one.shape[-1] // 2] for one in position_embeddings)
    return cos, sin


@dataclass(frozen=True, eq=False)
class FusedLatentAttention:
    """In the place of an attention module's forward."""

    module: Any
    stock: Callable[..., Any]
    projection: LatentProjection
    epsilon: float
    style: RotaryStyle
    spec: AttentionSpec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = _attend.get()
        hidden_states: Tensor | None = kwargs.get("hidden_states", args[0] if args else None)
        angles = angles_of(kwargs.get("position_embeddings"))
        if current is None or hidden_states is None or angles is None or current[1](self.projection.linear):
            return self.stock(*args, **kwargs)
        return self.compute(hidden_states, angles, current[0]), None

    def compute(self, hidden_states: Tensor, angles: Angles, attend: AttendLatents) -> Tensor:
        """`[1, R, H]` -> the same."""
        absorbed, key = self.inputs(hidden_states, angles)
        sums = attend(self.spec, absorbed, key[None])
        latent, rows = self.projection, sums.shape[0]
        values = sums.new_empty(rows, latent.heads, latent.value)
        latent.latent_values(sums.transpose(0, 1), out=values.transpose(0, 1))
        projected: Tensor = self.module.o_proj(values.view(1, rows, -1))
        return projected

    def inputs(self, hidden_states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Absorbed queries `[heads, R, rank + rope]` and keys `[R, rank + rope]`."""
        module, latent, rows = self.module, self.projection, hidden_states.shape[1]
        if getattr(module, "q_lora_rank", None) is None:
            queries = module.q_proj(hidden_states)
        else:
            queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
        query = queries.view(rows, latent.heads, latent.nope + latent.rope)
        compressed = module.kv_a_proj_with_mqa(hidden_states)[0]
        absorbed = query.new_empty(latent.heads, rows, latent.rank + latent.rope)
        key = query.new_empty(rows, latent.rank + latent.rope)
        weight = module.kv_a_layernorm.weight.detach()
        write_inputs(query, compressed, weight, self.epsilon, angles, self.style, absorbed, key)
        latent.query_latents(query[..., : latent.nope].transpose(0, 1), out=absorbed[..., : latent.rank])
        return absorbed, key


def _latent_modules(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        stock, norm = module.forward, getattr(module, "kv_a_layernorm", None)
        if getattr(module, LATENT_ATTRIBUTE, None) is None or isinstance(stock, FusedLatentAttention):
            continue
        if norm_epsilon(norm) is not None and set(inspect.signature(stock).parameters) >= ARGUMENTS:
            yield module


def _fused(module: Any) -> FusedLatentAttention | None:
    """The first form that computes what the stock module computes."""
    projection: LatentProjection = getattr(module, LATENT_ATTRIBUTE)
    epsilon, weight = norm_epsilon(module.kv_a_layernorm), projection.linear.weight
    down = getattr(module, "kv_a_proj_with_mqa", None)
    if epsilon is None or not isinstance(down, nn.Linear) or not weight.is_floating_point():
        return None
    generator = torch.Generator().manual_seed(0)
    dtype = module.kv_a_layernorm.weight.dtype
    hidden = torch.randn(1, PROBED_ROWS, down.in_features, generator=generator).to(weight.device, dtype)
    turns = torch.rand(1, PROBED_ROWS, projection.rope // 2, generator=generator).to(weight.device) * 6
    tuples = tuple(torch.cat([one, one], -1).to(hidden.dtype) for one in (turns.cos(), turns.sin()))
    for embeddings in (tuples, torch.polar(torch.ones_like(turns), turns)):
        given = {"hidden_states": hidden, "position_embeddings": embeddings, "attention_mask": None}
        recorded, angles = record_attention(module.forward, given, random_numbers()), angles_of(embeddings)
        if recorded is None or angles is None or not _has_scale_alone(recorded.spec):
            continue
        for style in STYLES:
            candidate = FusedLatentAttention(module, module.forward, projection, epsilon, style, recorded.spec)
            if _computes_the_same(candidate, hidden, angles, recorded):
                return candidate
    return None


def _has_scale_alone(spec: AttentionSpec) -> bool:
    plain = spec.window is None and spec.chunk is None and not spec.softcap and spec.sinks is None
    return plain and spec.selection is None


def _computes_the_same(
    fused: FusedLatentAttention, hidden: Tensor, angles: Angles, recorded: RecordedAttention
) -> bool:
    absorbed, key = fused.inputs(hidden, angles)
    expected = fused.projection.absorb(recorded.query, [])
    rotary = slice(fused.projection.rank, None)  # a small part of the whole, and the one that styles differ in
    pairs = [(absorbed, expected), (key[None], recorded.key)]
    pairs += [(one[..., rotary], other[..., rotary]) for one, other in pairs]
    pairs.append((fused.module.o_proj(recorded.heads_of_rows()), recorded.output))
    return all(matches(ours, stock, ABSORBED) for ours, stock in pairs)


# Of a model that is served: its attention is that of `serve/attention/attention.py`.
FUSED_LATENTS = Substitution(
    "latent attention of captured steps",
    _latent_modules,
    _fused,
    lambda module, fused, restore: restore.put(module, "forward", fused),
)
