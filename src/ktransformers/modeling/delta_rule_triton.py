"""One step of the gated delta rule for many sequences in one Triton kernel (`delta_rule.py`).

A program has one head of one sequence and some columns of its state `[K, V]`: the state is read once and written once,
where the operators of torch pass over it about ten times. Everything is float32, as in the stock code.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 32  # of the state, of a program
EPSILON = tl.constexpr(1e-6)  # of the norms of query and key


@triton.jit
def _delta_step(
    query,  # [N, H, K]
    key,
    value,  # [N, H, V]
    decay,  # [N, H]
    beta,
    state,  # float32 [N, H, K, V], contiguous
    new_state,
    out,  # [N, H, V], contiguous
    heads,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    decay_row,
    decay_head,
    beta_row,
    beta_head,
    K: tl.constexpr,
    V: tl.constexpr,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, WIDE)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    q = tl.load(query + row * query_row + head * query_head + k, mask=k < K, other=0.0).to(tl.float32)
    new_key = tl.load(key + row * key_row + head * key_head + k, mask=k < K, other=0.0).to(tl.float32)
    if NORMED:
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPSILON)
        new_key *= tl.rsqrt(tl.sum(new_key * new_key, axis=0) + EPSILON)
    q /= tl.sqrt(K * 1.0)
    new_value = tl.load(value + row * value_row + head * value_head + v, mask=v < V, other=0.0).to(tl.float32)
    g = tl.exp(tl.load(decay + row * decay_row + head * decay_head).to(tl.float32))
    b = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    at = ((row * heads + head).to(tl.int64) * K + k)[:, None] * V + v[None, :]
    mask = (k < K)[:, None] & (v < V)[None, :]
    s = tl.load(state + at, mask=mask, other=0.0) * g
    delta = (new_value - tl.sum(s * new_key[:, None], axis=0)) * b
    s += new_key[:, None] * delta[None, :]
    tl.store(new_state + at, s, mask=mask)
    result = tl.sum(s * q[:, None], axis=0)
    tl.store(out + (row * heads + head) * V + v, result.to(out.dtype.element_ty), mask=v < V)


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, normed: bool
) -> tuple[Tensor, Tensor]:
    """`[N, H, K]` twice, `[N, H, V]`, `[N, H]` twice and `[N, H, K, V]` -> `[N, H, V]` and the new state."""
    (rows, heads, size), columns = query.shape, value.shape[2]
    query, key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (query, key, value))
    state = state.contiguous()
    out = torch.empty(rows, heads, columns, dtype=query.dtype, device=query.device)
    new_state = torch.empty_like(state)
    kernel: Any = _delta_step[(rows, heads, triton.cdiv(columns, COLUMNS))]
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        kernel(
            query,
            key,
            value,
            decay,
            beta,
            state,
            new_state,
            out,
            heads,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *decay.stride(),
            *beta.stride(),
            K=size,
            V=columns,
            NORMED=normed,
            WIDE=triton.next_power_of_2(size),
            COLUMNS=COLUMNS,
        )
    return out, new_state
