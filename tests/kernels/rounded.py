"""Layers in int8 and int4 for the tests of W8A8, and what that is by definition: bytes, sums of integers, scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, decode, format_of, nibbles
from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.gate import ACTIVATIONS
from ktransformers.nn import ExpertStore
from tests.support.reference import ReferenceLayer

from .conftest import Batch

# A byte of an activated row may round the other way where its float is off by a bit; each is 1/127 of the largest.
ROUNDED = 1e-3
FEW = 4  # rows of an expert, at most, that are multiplied with its codes as they lie


# By matrix: groups that divide a step of 64 and others, all types of scales, whole rows, int8 beside them.
SPECS: dict[str, str | dict[str, str]] = {
    "32": "int4:32",
    "f16": "int4:64:f16",
    "f32": "int4:128:f32",
    "rows": "int4:0:f32",
    "96": {"gate": "int4:96", "up": "int4:96:f16", "down": "int4:0"},
    "mixed": {"gate": "int8", "up": "int4:32:f16", "down": "int4:64"},
    "down alone": {"gate": "int4:128", "up": "int8", "down": "int8"},
}


@dataclass(frozen=True)
class Rounded:
    """A made-up layer in a format, or one for each matrix, and the layer of the numbers that it stands for."""

    layer: ReferenceLayer
    matrices: dict[str, Encoded]

    @staticmethod
    def of(layer: ReferenceLayer, spec: str | dict[str, str] = "int8") -> Rounded:
        given = {"gate": layer.gate, "up": layer.up, "down": layer.down}
        specs = spec if isinstance(spec, dict) else dict.fromkeys(given, spec)
        matrices = {name: encode(m.float(), specs[name]) for name, m in given.items() if m is not None}
        up, down = decode(matrices["up"]), decode(matrices["down"])
        gate = decode(matrices["gate"]) if "gate" in matrices else None
        return Rounded(replace(layer, gate=gate, up=up, down=down, packed=torch.float32), matrices)

    def store(self, pool: _core.Pool, isa: str | None = None, precision: str = "bf16") -> ExpertStore:
        layer = self.layer
        experts, hidden, intermediate = layer.down.shape
        gate = {"gated": layer.gate is not None, "activation": layer.activation}
        store = ExpertStore(
            experts,
            hidden,
            intermediate,
            limit=layer.limit,
            alpha=layer.alpha,
            pool=pool,
            isa=isa,
            precision=precision,
            formats={name: matrix.format for name, matrix in self.matrices.items()},
            **gate,  # type: ignore[arg-type]
        )
        biases = {"gate_bias": layer.gate_bias, "up_bias": layer.up_bias, "down_bias": layer.down_bias}
        store.pack(**self.matrices, **biases)  # type: ignore[arg-type]
        return store


@dataclass(frozen=True)
class Lora:
    """Factors [E, r, in] and [E, out, r] of each matrix, with one scale."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    scale: float

    @staticmethod
    def of(layer: ReferenceLayer, rank: int, seed: int) -> Lora:
        random = torch.Generator().manual_seed(seed)
        experts, hidden, intermediate = layer.down.shape
        sizes = {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
        a = {n: torch.randn(experts, rank, k, generator=random).mul_(k**-0.5).bfloat16() for n, (k, _) in sizes.items()}
        b = {n: torch.randn(experts, o, rank, generator=random).mul_(0.5).bfloat16() for n, (_, o) in sizes.items()}
        return Lora(a, b, 0.5)

    def adapter(self, store: ExpertStore) -> _core.Adapter:
        rank = self.a["up"].shape[1]
        made = store.new_adapter(rank, rank, rank)
        factors = {f"{n}_{which}": t[n] for which, t in (("a", self.a), ("b", self.b)) for n in ("gate", "up", "down")}
        made.pack(**factors, gate_scale=self.scale, up_scale=self.scale, down_scale=self.scale)
        return made

    def add(self, name: str, expert: int, x: Tensor) -> Tensor:
        return self.scale * (x.double() @ self.a[name][expert].double().T) @ self.b[name][expert].double().T


def as_bytes(matrix: Encoded, expert: int) -> tuple[Tensor, Tensor]:
    """Integers `[N, K]` of 8 bits and a scale `[N]` for each output, which int4 has to be brought to."""
    assert matrix.scales is not None
    scales = matrix.scales[expert].float().view(matrix.rows, -1)
    if matrix.format == "int8":
        return matrix.qweight[expert].long(), scales[:, 0]
    most, least = scales.amax(1), scales.amin(1)
    channel = torch.where(most >= -least, most, least) / 16
    ratios = (scales * torch.where(channel == 0, 0, 8 / channel)[:, None]).round().clamp(min=-127).long()
    ratios = ratios.repeat_interleave(format_of(matrix.format).span or matrix.columns, 1)[:, : matrix.columns]
    codes = nibbles(matrix.qweight[expert]).long() - 8
    return (codes * ratios + 4) >> 3, channel


def product(x: Tensor, matrix: Encoded, expert: int) -> Tensor:
    """Rows `[n, K]` in float32 as bytes, times the codes of an expert, summed exactly. Of int4 few rows meet the codes
    as they are, group by group, and many what is made of them."""
    largest = x.abs().amax(-1, keepdim=True)
    codes = (x * torch.full_like(largest, 127).div(largest)).round().long()  # 127 / largest is two operations
    if len(x) <= FEW and matrix.format != "int8":
        return codes.double() @ decode(one(matrix, expert))[0].double().T * (largest / 127).double()
    weights, channel = as_bytes(matrix, expert)
    assert weights.min() >= -128 and weights.max() <= 127
    sums = codes @ weights.T
    return (sums.float() * (largest / 127 * channel)).double()


def one(matrix: Encoded, expert: int) -> Encoded:
    assert matrix.scales is not None
    return replace(matrix, qweight=matrix.qweight[expert : expert + 1], scales=matrix.scales[expert : expert + 1])


def defined(given: Rounded, batch: Batch, adapters: Sequence[Lora] = (), adapter: Tensor | None = None) -> Tensor:
    """What W8A8 is, in float64 but for what it rounds."""
    layer = given.layer
    out = torch.zeros(batch.hidden.shape, dtype=torch.float64)
    for index in range(layer.down.shape[0]):
        token, slot = torch.where(batch.ids == index)
        rows = batch.hidden[token].float()

        def multiply(name: str, x: Tensor, bias: Tensor | None, index: int = index, token: Tensor = token) -> Tensor:
            y = product(x.float().bfloat16().float() if name == "down" else x, given.matrices[name], index)
            for place, lora in enumerate(adapters):
                own = torch.ones(len(token), dtype=torch.bool) if adapter is None else adapter[token] == place
                y[own] += lora.add(name, index, x[own])
            return y if bias is None else y + bias[index].double()

        if not len(token):
            continue
        up = multiply("up", rows, layer.up_bias)
        gate = up if layer.gate is None else multiply("gate", rows, layer.gate_bias)
        if layer.limit > 0:
            gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
        if layer.activation == "swiglu_oai":
            inner = gate * torch.sigmoid(layer.alpha * gate) * (up + 1)
        else:
            inner = ACTIVATIONS[layer.activation](gate) * (1 if layer.gate is None else up)
        down = multiply("down", inner, layer.down_bias)
        out.index_add_(0, token, down * batch.weights[token, slot, None].double())
    return out
