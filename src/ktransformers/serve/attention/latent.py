"""Multi-head latent attention (MLA) over slots that hold latents.

In these families the keys and values of all heads are products of one latent `[rank]` a token with `kv_b_proj`; a
rotary key `[rope]` that all heads share is appended to the keys. The stock modules call `expand_kv` for that. Here it
returns what it is given, as one head: its key is latent and rotary key, its value the latent, and a slot holds
`rank + rope` numbers of a token instead of those of all heads.

There are two ways to compute the same. *Absorbed*: a query is multiplied with the keys' part of `kv_b_proj` and attends
to latents, and its result is multiplied with the values' part. That reads the fewest bytes for a new token. *Expanded*:
keys and values of all cached tokens are computed first, some heads at a time. A chunk takes the way with fewer
operations. Absorbed products of few rows read the packed weight of a quantized `kv_b_proj`, on a CPU and on a GPU.
Modules are recognised by `expand_kv` and the sizes that it uses; the families are compared with the stock model when a
server starts (`forward.py`). Captured decode steps on a GPU absorb as well (`graphs/paged_attention.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.ground.pool import default_pool
from ktransformers.modeling.substitute import Restore, Substitution, unprobed
from ktransformers.quantized.gpu.head_products import HeadRows
from ktransformers.quantized.weight import QuantizedWeight
from ktransformers.quantized.widened import COLUMN_MULTIPLE, stored_weight
from ktransformers.serve.scheduler.lora import LinearLora

LATENT_ATTRIBUTE = "kt_latent"  # of an attention module whose slots hold latents
SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
KeyAndValue = tuple[Tensor, Tensor]
ExpandFn = Callable[[Tensor, Tensor], KeyAndValue]
MAX_EXPANDED = 1 << 24  # numbers of keys and values that are expanded at a time
# Rows of float32, at most, with which packed weights are multiplied on the CPU to expand; dense ones take less time for
# more.
# Codes of e4m3 become floats again for every two rows.
CODES_ROWS, E4M3_ROWS = 256, 32


RowLoras = Sequence[tuple[slice, LinearLora]]  # LoRA of `kv_b_proj` for some rows


@dataclass(frozen=True, eq=False)
class LatentProjection:
    """`kv_b_proj` of one attention module."""

    linear: nn.Linear  # [heads * (nope + value), rank]
    heads: int
    rank: int
    nope: int  # numbers of a head's key without the rotary key
    rope: int
    value: int

    @property
    def key_rows(self) -> HeadRows:
        """Of the weight, those that make keys."""
        return HeadRows(0, self.nope, self.nope + self.value)

    @property
    def value_rows(self) -> HeadRows:
        return HeadRows(self.nope, self.value, self.nope + self.value)

    def query_latents(self, passed: Tensor, out: Tensor | None = None) -> Tensor:
        """`[heads, T, nope]` of queries times the keys' part: `[heads, T, rank]`."""
        weight = self.linear.weight
        if isinstance(weight, QuantizedWeight):
            return weight.multiply_heads(passed, self.key_rows, along_rows=True, out=out)
        return head_products(passed, self._numbers_of_keys, out)

    def latent_values(self, latent: Tensor, out: Tensor | None = None) -> Tensor:
        """`[heads, T, rank]` of latents times the values' part: `[heads, T, value]`."""
        weight = self.linear.weight
        if isinstance(weight, QuantizedWeight):
            return weight.multiply_heads(latent, self.value_rows, out=out)
        return head_products(latent, self._by_head()[:, self.nope :], out)

    @functools.cached_property
    def _numbers_of_keys(self) -> Tensor:
        """`[heads, rank, nope]` of a dense weight; on the CPU a copy: the core's products of queries run along
        its rows."""
        by_head = self._by_head()[:, : self.nope].transpose(1, 2)
        return by_head.contiguous() if by_head.is_cpu else by_head

    def _by_head(self) -> Tensor:
        return stored_weight(self.linear.weight).detach().view(self.heads, self.nope + self.value, self.rank)

    def _expanded(self, latents: Tensor, first: int, last: int) -> Tensor:
        """`[n, rank]` times the rows of heads first .. last - 1 transposed. Codes on the CPU are multiplied where that
        takes less time than decoding and multiplying numbers: few rows, or bf16."""
        weight, size = self.linear.weight, self.nope + self.value
        if isinstance(weight, QuantizedWeight) and weight.device.type == "cpu" and last - first == self.heads:
            rows = E4M3_ROWS if _core.format(weight.spec)["element"] == "e4m3" else CODES_ROWS
            if len(latents) <= rows or latents.dtype == torch.bfloat16:
                return F.linear(latents, weight)
        return F.linear(latents, self._rows(first * size, last * size))

    def _rows(self, first: int, last: int) -> Tensor:
        weight = self.linear.weight
        if isinstance(weight, QuantizedWeight):
            return weight.decoded(first, last).to(weight.dtype)
        return weight[first:last]

    def prefers_absorbed(self, rows: int, keys: int) -> bool:
        """Whether `rows` queries over `keys` cached tokens take fewer products absorbed than expanded."""
        projection = self.rank * (self.nope + self.value)
        expanded = keys * (projection + rows * (self.nope + self.rope + self.value))
        return rows * (projection + keys * (2 * self.rank + self.rope)) < expanded

    def absorb(self, query: Tensor, loras: RowLoras) -> Tensor:
        """Queries `[heads, T, nope + rope]` for latents: `[heads, T, rank + rope]`."""
        passed = query[..., : self.nope]
        latent = self.query_latents(passed)
        for rows, lora in loras:
            b = lora.b.view(-1, self.heads, self.nope + self.value)[..., : self.nope]
            ranks = torch.einsum("htd,rhd->htr", passed[:, rows].float(), b) * lora.scales
            latent[:, rows] += (ranks @ lora.a).to(latent.dtype)
        return torch.cat([latent, query[..., self.nope :]], dim=-1)

    def values_of(self, latent: Tensor, loras: RowLoras) -> Tensor:
        """Weighted sums of latents `[heads, T, rank]` as sums of values `[heads, T, value]`."""
        out = self.latent_values(latent)
        for rows, lora in loras:
            b = lora.b.view(-1, self.heads, self.nope + self.value)[..., self.nope :]
            ranks = (latent[:, rows].float() @ lora.a.T) * lora.scales
            out[:, rows] += torch.einsum("htr,rhd->htd", ranks, b).to(out.dtype)
        return out

    def expand(self, latents: Tensor, first: int, last: int, lora: LinearLora | None) -> tuple[Tensor, Tensor]:
        """Keys `[heads, n, nope + rope]` and values `[heads, n, value]` of heads first .. last - 1, of cached tokens
        `[n, rank + rope]`."""
        size = self.nope + self.value
        compressed, rotary = latents[:, : self.rank], latents[:, self.rank :]
        expanded = self._expanded(compressed, first, last)
        if lora is not None:
            ranks = compressed.float() @ lora.a.T
            expanded = (expanded.float() + ranks @ lora.b[:, first * size : last * size] * lora.scales).to(latents)
        by_head = expanded.view(-1, last - first, size).transpose(0, 1)
        keys = torch.cat([by_head[..., : self.nope], rotary.expand(last - first, -1, -1)], dim=-1)
        return keys, by_head[..., self.nope :]

    def head_groups(self, keys: int) -> Sequence[tuple[int, int]]:
        """Ranges of heads whose expanded keys and values are at most MAX_EXPANDED numbers."""
        step = max(1, MAX_EXPANDED // (keys * (self.nope + self.rope + self.value)))
        return [(first, min(first + step, self.heads)) for first in range(0, self.heads, step)]


def head_products(x: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """`[heads, T, K]` times `[heads, N, K]` transposed, head by head: `[heads, T, N]`."""
    fits = x.is_cpu and weights.dtype == torch.bfloat16 and x.shape[-1] % COLUMN_MULTIPLE == 0
    if not fits:
        return torch.bmm(x, weights.to(x.dtype).transpose(1, 2), out=out)
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1], weights.shape[1])
    for first in range(0, x.shape[1], _core.linear_rows()):
        rows = slice(first, first + _core.linear_rows())
        default_pool().linear_heads(x[:, rows], weights, out[:, rows])
    return out


def use_latents(is_served: Callable[[], bool]) -> Substitution[tuple[Any, LatentProjection], bool]:
    """Makes the slots of all MLA modules hold latents while `is_served`. Otherwise `expand_kv` expands, as while the
    stock attention is compared. Products with packed weights are compared with those of dequantized weights, for one
    weight of every format and shape on each device."""
    checked: set[tuple[Any, ...]] = set()

    def recognise(model: nn.Module) -> Iterator[tuple[Any, LatentProjection]]:
        for module in model.modules():
            projection = _projection_of(module)
            if projection is not None:
                yield module, projection

    def replace(target: tuple[Any, LatentProjection], _: bool, restore: Restore) -> None:
        module, projection = target
        weight = projection.linear.weight
        if isinstance(weight, QuantizedWeight) and (kind := (weight.spec, weight.shape, weight.device)) not in checked:
            weight.check_heads(projection.key_rows)
            weight.check_heads(projection.value_rows)
            checked.add(kind)
        restore.put(module, LATENT_ATTRIBUTE, projection)
        restore.put(module, "expand_kv", functools.partial(_keep_latents, is_served, module.expand_kv))

    return Substitution("latent attention", recognise, unprobed, replace)


def _projection_of(module: Any) -> LatentProjection | None:
    linear = getattr(module, "kv_b_proj", None)
    if not callable(getattr(module, "expand_kv", None)) or not isinstance(linear, nn.Linear) or linear.bias is not None:
        return None
    heads, rank, nope, rope, value = (getattr(module, name, None) for name in SIZES)
    if not all(isinstance(size, int) for size in (heads, rank, nope, rope, value)):
        return None
    if (linear.out_features, linear.in_features) != (heads * (nope + value), rank):
        return None
    return LatentProjection(linear, heads, rank, nope, rope, value)


def _keep_latents(is_served: Callable[[], bool], expand: ExpandFn, latent: Tensor, rotary: Tensor) -> KeyAndValue:
    """`[1, 1, T, rank]` and `[1, 1, T, rope]` -> a key of one head, and the value that is its beginning."""
    if not is_served():
        return expand(latent, rotary)
    return torch.cat([latent, rotary], dim=-1), latent
