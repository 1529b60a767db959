"""Same input, same bits: for any threads, groups and company in the batch, and from any layout of the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ktransformers import _core
from ktransformers.nn import ExpertStore
from tests.support.reference import ReferenceLayer

from .conftest import DTYPES, make_batch, make_layer, make_store


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("hidden", "intermediate"), [(70, 50), (33, 4200), (2600, 17)])
def test_threads_and_groups(
    isa: str, pool_of: Callable[[int, int], _core.Pool], gated: bool, hidden: int, intermediate: int
) -> None:
    layer = make_layer(3, hidden, intermediate, gated=gated, biases=True)
    batch = make_batch(layer, 40, 2)
    results = []
    for threads, groups in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (5, 2)):
        store = make_store(layer, pool_of(threads, groups), isa)
        results += [store.forward(batch.hidden, batch.ids, batch.weights) for _ in range(2)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_company_in_the_batch(isa: str, pool: _core.Pool) -> None:
    layer = make_layer(4, 70, 50, biases=True)
    store, batch = make_store(layer, pool, isa), make_batch(layer, 130, 3)
    everybody = store.forward(batch.hidden, batch.ids, batch.weights)
    for picked in ([0], [129], [5, 77], list(range(3, 60)), list(range(129, -1, -1))):
        few = store.forward(batch.hidden[picked], batch.ids[picked], batch.weights[picked])
        assert torch.equal(few, everybody[picked])


def test_company_where_k_is_cut(isa: str, pool: _core.Pool) -> None:
    """One row takes hidden whole, 150 rows take it in chunks: the sums must be formed in one order all the same."""
    layer = make_layer(1, 2600, 20)
    store, batch = make_store(layer, pool, isa), make_batch(layer, 150, 1, here=True)
    everybody = store.forward(batch.hidden, batch.ids, batch.weights)
    for token in (0, 149):
        alone = store.forward(*(t[token : token + 1] for t in (batch.hidden, batch.ids, batch.weights)))
        assert torch.equal(alone[0], everybody[token])


def sources(layer: ReferenceLayer) -> list[Callable[[ExpertStore], None]]:
    """All the ways in which a checkpoint may hold these experts."""
    gate, up, down = layer.gate, layer.up, layer.down
    gate_bias, up_bias, down_bias = layer.gate_bias, layer.up_bias, layer.down_bias
    assert gate is not None and gate_bias is not None and up_bias is not None and down_bias is not None
    fused, fused_bias = torch.cat([gate, up], 1), torch.cat([gate_bias, up_bias], 1)
    mixed = torch.stack([gate, up], 2).flatten(1, 2)
    mixed_bias = torch.stack([gate_bias, up_bias], 2).flatten(1, 2)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).contiguous()

    def one_by_one(store: ExpertStore) -> None:
        for e in reversed(range(len(up))):
            biases = {"gate_bias": gate_bias[e], "up_bias": up_bias[e], "down_bias": down_bias[e]}
            store.pack(gate=gate[e], up=up[e], down=down[e], first_expert=e, **biases)

    def pairs(store: ExpertStore) -> None:
        for e in range(0, len(up), 2):
            here = slice(e, e + 2)
            store.pack(
                gate_up=fused[here],
                down=down[here],
                gate_up_bias=fused_bias[here],
                down_bias=down_bias[here],
                first_expert=e,
            )

    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    together = {"gate_up_bias": fused_bias, "down_bias": down_bias}
    in_turns = {"gate_up_bias": mixed_bias, "down_bias": down_bias}
    return [
        lambda s: s.pack(gate=gate, up=up, down=down, **biases),
        lambda s: s.pack(gate_up=fused, down=down, **together),
        lambda s: s.pack(gate_up=mixed, down=down, interleaved=True, **in_turns),
        lambda s: s.pack(gate_up=turned(fused), down=turned(down), transposed=True, **together),
        lambda s: s.pack(gate_up=turned(mixed), down=turned(down), transposed=True, interleaved=True, **in_turns),
        lambda s: s.pack(gate=turned(gate), up=turned(up), down=turned(down), transposed=True, **biases),
        # Every other expert and column of a larger tensor.
        lambda s: s.pack(
            gate=gate.repeat_interleave(2, 0).repeat_interleave(3, 2)[::2, :, ::3], up=up, down=down, **biases
        ),
        one_by_one,
        pairs,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_source_layouts_pack_alike(isa: str, pool: _core.Pool, dtype: torch.dtype) -> None:
    layer = make_layer(4, 45, 37, biases=True, dtype=dtype)
    batch = make_batch(layer, 12, 2)
    results = []
    for pack in sources(layer):
        store = ExpertStore(4, 45, 37, pool=pool, isa=isa)
        pack(store)
        results.append(store.forward(batch.hidden, batch.ids, batch.weights))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ungated_layouts_pack_alike(isa: str, pool: _core.Pool, dtype: torch.dtype) -> None:
    layer = make_layer(3, 45, 37, gated=False, activation="relu2", dtype=dtype)
    batch = make_batch(layer, 12, 2)
    straight, turned = (ExpertStore(3, 45, 37, gated=False, activation="relu2", pool=pool, isa=isa) for _ in range(2))
    straight.pack(up=layer.up, down=layer.down)
    turned.pack(up=layer.up.transpose(1, 2).contiguous(), down=layer.down.transpose(1, 2).contiguous(), transposed=True)
    x = (batch.hidden, batch.ids, batch.weights)
    assert torch.equal(straight.forward(*x), turned.forward(*x))


def test_weights_are_rounded_as_torch_rounds(isa: str, pool: _core.Pool) -> None:
    """float32 and float16 sources give the bits of their bfloat16 copies, ties and subnormals included."""
    for dtype in (torch.float32, torch.float16):
        layer = make_layer(2, 40, 33, dtype=dtype)
        ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 6e-8, -6.1e-5, 0.0, -0.0], dtype=dtype)
        layer.up[0, 0, :6] = ties
        layer.down[1, 3, :6] = ties
        assert layer.gate is not None
        rounded = replace(layer, gate=layer.gate.bfloat16(), up=layer.up.bfloat16(), down=layer.down.bfloat16())
        batch = make_batch(layer, 12, 2)
        x = (batch.hidden, batch.ids, batch.weights)
        assert torch.equal(make_store(layer, pool, isa).forward(*x), make_store(rounded, pool, isa).forward(*x))
