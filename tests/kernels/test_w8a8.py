"""Experts in int8 and int4 with 8-bit activations: the result is that of the definition on every variant, LoRA stays
exact, what cannot have it is refused, and nothing depends on threads, groups or neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, decode, encode, format_of, nibbles
from ktransformers.errors import InputError
from ktransformers.nn import ExpertStore
from ktransformers.nn.lora import ExpertLora, Factor
from ktransformers.nn.operator import apply_experts
from ktransformers.nn.reference import ACTIVATIONS, Layer, forward
from ktransformers.nn.store import Dropout

from .conftest import Batch, error, make_batch, make_layer, tolerance

# A byte of an activated row may round the other way where its float is off by a bit; each is 1/127 of the largest.
ROUNDED = 1e-3
FROM = 64  # tokens


@dataclass(frozen=True)
class Rounded:
    """A made-up layer in a format, or one for each matrix, and the layer of the numbers that it stands for."""

    layer: Layer
    matrices: dict[str, Encoded]

    @staticmethod
    def of(layer: Layer, spec: str | dict[str, str] = "int8") -> Rounded:
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
    def of(layer: Layer, rank: int, seed: int) -> Lora:
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
        return matrix.codes[expert].long(), scales[:, 0]
    most, least = scales.amax(1), scales.amin(1)
    channel = torch.where(most >= -least, most, least) / 16
    ratios = (scales * torch.where(channel == 0, 0, 8 / channel)[:, None]).round().clamp(min=-127).long()
    ratios = ratios.repeat_interleave(format_of(matrix.format).span or matrix.columns, 1)[:, : matrix.columns]
    codes = nibbles(matrix.codes[expert]).long() - 8
    return (codes * ratios + 4) >> 3, channel


def product(x: Tensor, matrix: Encoded, expert: int) -> Tensor:
    """Rows `[n, K]` in float32 as bytes, times the codes of an expert, summed exactly."""
    weights, channel = as_bytes(matrix, expert)
    assert weights.min() >= -128 and weights.max() <= 127
    largest = x.abs().amax(-1, keepdim=True)
    codes = (x * torch.full_like(largest, 127).div(largest)).round().long()  # 127 / largest is two operations
    sums = codes @ weights.T
    return (sums.float() * (largest / 127 * channel)).double()


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


CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (3, 192, 128, {}),
    "odd": (4, 200, 72, {"biases": True}),
    "no gate": (2, 37, 100, {"gated": False, "activation": "relu2", "biases": True}),
    "oai": (3, 96, 33, {"activation": "swiglu_oai", "alpha": 1.702, "limit": 2.0}),
    "gelu": (2, 65, 64, {"activation": "gelu_tanh"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_the_definition(isa: str, case: str, pool: _core.Pool) -> None:
    experts, hidden, intermediate, options = CASES[case]
    given = Rounded.of(make_layer(experts, hidden, intermediate, **options))
    batch = make_batch(given.layer, 75, 2, fine=case != "plain")
    found = given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    assert error(found, defined(given, batch)) < ROUNDED


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


@pytest.mark.parametrize("spec", SPECS)
def test_int4_is_brought_to_bytes_first(isa: str, spec: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 328, 200, biases=spec == "96"), SPECS[spec])
    batch = make_batch(given.layer, 75, 2)
    store = given.store(pool, isa)
    found = store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    assert error(found, defined(given, batch)) < ROUNDED
    few = (batch.hidden[: FROM - 1], batch.ids[: FROM - 1], batch.weights[: FROM - 1])
    assert torch.equal(store.forward(*few, w8a8=True), store.forward(*few))


def test_scales_of_int4_far_apart(isa: str, pool: _core.Pool) -> None:
    """Groups of zeros, of negative zeros and of the smallest numbers beside large ones, and a whole output of zeros."""
    given = Rounded.of(make_layer(2, 256, 128), "int4:32")
    for matrix in given.matrices.values():
        assert matrix.scales is not None
        groups = torch.arange(matrix.scales.numel()).view(matrix.scales.shape) % 7
        matrix.scales.copy_(matrix.scales * 2.0 ** -(groups * groups).float())
        matrix.scales[groups == 3], matrix.scales[groups == 5] = 0.0, -0.0
        matrix.scales[:, 9] = 0
    batch = make_batch(given.layer, 70, 2)
    found = given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    assert error(found, defined(given, batch)) < ROUNDED
    assert not found[:, 9].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_hidden_states_of_any_dtype(isa: str, dtype: torch.dtype, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 130, 64))
    batch = make_batch(given.layer, FROM, 2)
    batch = replace(batch, hidden=batch.hidden.to(dtype))
    out = torch.empty(batch.hidden.shape)
    given.store(pool, isa).forward(batch.hidden, batch.ids, batch.weights, out=out, w8a8=True)
    assert error(out, defined(given, batch)) < ROUNDED


def test_lora_is_not_rounded(isa: str, pool: _core.Pool) -> None:
    """Rows of two adapters and of none in one batch; bf16 variants round what they always round, and no more."""
    given = Rounded.of(make_layer(2, 136, 72))
    store, batch = given.store(pool, isa), make_batch(given.layer, 90, 2)
    loras = [Lora.of(given.layer, 8, 1), Lora.of(given.layer, 20, 2)]
    adapter = (torch.arange(90) % 3 - 1).int()
    found = store.forward(
        batch.hidden,
        batch.ids,
        batch.weights,
        adapter=adapter,
        adapters=[lora.adapter(store) for lora in loras],
        w8a8=True,
    )
    want = defined(given, batch, loras, adapter)
    assert error(found, want) < ROUNDED + tolerance(isa)
    assert error(found, defined(given, batch)) > 0.1, "LoRA does nothing here"


@pytest.mark.parametrize("spec", ["int8", "int4:64"])
def test_nothing_depends_on_threads_groups_or_neighbours(
    isa: str, spec: str, pool_of: Callable[[int, int], _core.Pool]
) -> None:
    given = Rounded.of(make_layer(3, 160, 200), spec)
    batch = make_batch(given.layer, 150, 2)
    alone = given.store(pool_of(1, 1), isa).forward(batch.hidden, batch.ids, batch.weights, w8a8=True)
    for threads, groups in ((3, 1), (4, 2)):
        store = given.store(pool_of(threads, groups), isa)
        assert torch.equal(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), alone)
        few = slice(20, 20 + FROM)
        some = store.forward(batch.hidden[few], batch.ids[few], batch.weights[few], w8a8=True)
        assert torch.equal(some, alone[few])
        call = store.prepare(batch.hidden, batch.ids, batch.weights, w8a8=True)
        call.submit()
        assert torch.equal(call.wait(), alone)


def test_few_tokens_are_computed_as_ever(isa: str, pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 96, 64))
    store, batch = given.store(pool, isa), make_batch(given.layer, FROM, 2, here=True)
    parts = (batch.hidden[:-1], batch.ids[:-1], batch.weights[:-1])
    assert torch.equal(store.forward(*parts, w8a8=True), store.forward(*parts))
    whole = (batch.hidden, batch.ids, batch.weights)
    assert not torch.equal(store.forward(*whole, w8a8=True), store.forward(*whole))
    store.w8a8 = True
    assert torch.equal(store.forward(*whole), store.forward(*whole, w8a8=True))
    assert torch.equal(store.forward(*whole, w8a8=False), given.store(pool, isa).forward(*whole))


def test_how_far_it_is_from_the_numbers(pool: _core.Pool) -> None:
    """Rows of x have little beyond three deviations; activated rows have, the longer the more."""
    layer = make_layer(2, 512, 256)
    given, batch = Rounded.of(layer), make_batch(layer, 128, 2, here=True, seed=1)  # another: rows of x are not weights
    store, want = given.store(pool), forward(layer, batch.hidden, batch.ids, batch.weights)
    exact = error(store.forward(batch.hidden, batch.ids, batch.weights), want)
    rounded = error(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), want)
    assert exact < 0.016 and 0.018 < rounded < 0.027


@pytest.mark.parametrize("group", [32, 128])
def test_how_far_int4_is_from_the_numbers(group: int, pool: _core.Pool) -> None:
    """Bytes add little to what 4 bits have lost."""
    layer = make_layer(2, 512, 256)
    given, batch = Rounded.of(layer, f"int4:{group}"), make_batch(layer, 128, 2, here=True, seed=1)
    store, want = given.store(pool), forward(layer, batch.hidden, batch.ids, batch.weights)
    exact = error(store.forward(batch.hidden, batch.ids, batch.weights), want)
    rounded = error(store.forward(batch.hidden, batch.ids, batch.weights, w8a8=True), want)
    assert exact < rounded < exact + 0.005
    assert rounded < {32: 0.155, 128: 0.18}[group]


def test_other_experts_are_refused(pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 64, 64))
    exact, plain = given.store(pool, precision="f32"), ExpertStore(2, 64, 64, pool=pool)
    mixed = ExpertStore(2, 64, 64, pool=pool, formats={"gate": "int8", "up": "int4:32", "down": "q4_0"})
    for store, why in ((exact, "f32"), (plain, "bf16.*int8 or int4"), (mixed, "int4:32, int8, q4_0")):
        with pytest.raises(InputError, match=f"w8a8.*{why}"):
            store.w8a8 = True
        assert not store.w8a8
        rows, routes = torch.zeros(70, 64), torch.zeros(70, 1)
        with pytest.raises(InputError, match="w8a8"):
            store.forward(rows, routes.long(), routes, w8a8=True)


def test_gradients_are_refused(pool: _core.Pool) -> None:
    given = Rounded.of(make_layer(2, 64, 64))
    store, batch = given.store(pool), make_batch(given.layer, 70, 2)
    whole = (batch.hidden, batch.ids, batch.weights)
    with pytest.raises(InputError, match="gradients"):
        store.forward(*whole, keep=store.new_keep(70, 2), w8a8=True)
    with pytest.raises(InputError, match="gradients"):
        store.forward(*whole, dropout=Dropout(0.1), w8a8=True)
    store.w8a8 = True
    with pytest.raises(InputError, match="gradients"):
        store.backward(batch.hidden, *whole)
    with pytest.raises(InputError, match="gradients"):
        apply_experts(store, batch.hidden.requires_grad_(), batch.ids, batch.weights)
    factor = torch.zeros(2, 8, 64, requires_grad=True)
    lora = ExpertLora(down=Factor(factor, torch.zeros(2, 64, 8), 1.0))
    with pytest.raises(InputError, match="gradients"):
        apply_experts(store, batch.hidden.detach(), batch.ids, batch.weights, lora=lora)
    with torch.no_grad():
        apply_experts(store, *whole, lora=lora)
