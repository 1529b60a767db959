"""Experts in the bytes of their release: what is decoded equals an independent decoder bit for bit, and every call of
whoever learns gives the bits that the same numbers give when they are packed as bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded, decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from tests.support.formats import SPECS
from tests.support.gguf_blocks import HALVES, SMALL, random_blocks

FORMATS = [*SPECS, "bf16:12", *HALVES]
EXPERTS, HIDDEN, INTERMEDIATE = 3, 512, 256


def random_encoded(format: str, rows: int, columns: int, seed: int) -> Encoded:
    random = np.random.default_rng(seed)
    if format in HALVES:
        blocks = random_blocks(format, (EXPERTS, rows), columns, random)
        return Encoded(format, torch.from_numpy(blocks), None, columns=columns)
    numbers = torch.from_numpy(random.standard_normal((EXPERTS, rows, columns), dtype=np.float32))
    return encode(numbers * 0.1, format)


def random_layer(formats: dict[str, str]) -> dict[str, Encoded]:
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {name: random_encoded(formats[name], *shapes[name], seed) for seed, name in enumerate(shapes)}


def stores(formats: str | dict[str, str], isa: str, precision: str = "bf16") -> tuple[ExpertStore, ExpertStore]:
    """A store of random released bytes, and one of the numbers that they stand for."""
    if isinstance(formats, str):
        formats = dict.fromkeys(("gate", "up", "down"), formats)
    layer = random_layer(formats)
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, isa=isa, precision=precision, formats=formats)
    store.pack(**layer)
    plain = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, isa=isa, precision=precision)
    plain.pack(**{name: decode(matrix) for name, matrix in layer.items()})
    return store, plain


def bits(tensor: Tensor) -> Tensor:
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # A zero's sign is nobody's business.
    return torch.where(tensor == 0, torch.zeros_like(tensor), tensor).view(size)


def batch(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(2)
    return hidden, ids, weights


@pytest.mark.parametrize("format", FORMATS)
def test_every_call_gives_the_bits_of_the_decoded_numbers(isa: str, format: str) -> None:
    store, plain = stores(format, isa)
    for matrix in ("gate", "up", "down"):
        assert torch.equal(bits(store.decode(matrix, 1)), bits(plain.decode(matrix, 1))), matrix
    for tokens in (1, 19):
        hidden, ids, weights = batch(tokens)
        ids[:, 0], ids[:, 1] = 0, ids.amax(1)  # for the first expert more rows than a tile has, and few for the others
        assert torch.equal(store.forward(hidden, ids, weights, needs_grad=True), plain.forward(hidden, ids, weights))
        grad = torch.randn(tokens, HIDDEN).bfloat16()
        for found, expected in zip(
            store.backward(grad, hidden, ids, weights), plain.backward(grad, hidden, ids, weights), strict=True
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_agrees_with_the_definition(format: str) -> None:
    """In float32 nothing is rounded: GGUF's types have the bits that the `gguf` package gives."""
    store, _ = stores(format, "generic", "f32")
    layer = random_layer(dict.fromkeys(("gate", "up", "down"), format))
    for matrix, encoded in layer.items():
        for expert, values in enumerate(decode(encoded)):
            assert torch.equal(bits(store.decode(matrix, expert)), bits(values)), (matrix, expert)


def test_formats_may_differ_between_matrices() -> None:
    store, plain = stores({"gate": "q4_k", "up": "q5_k", "down": "q6_k"}, "generic")
    hidden, ids, weights = batch(9)
    assert torch.equal(store.forward(hidden, ids, weights, needs_grad=True), plain.forward(hidden, ids, weights))


@pytest.mark.parametrize(
    "formats",
    [
        ("int4:32", "mxfp4", "q4_k"),
        ("iq1_s", "iq1_m", "tq1_0"),
        ("iq2_xxs", "iq2_xs", "iq2_s"),
        ("iq3_xxs", "iq3_s", "tq2_0"),
    ],
    ids="-".join,
)
def test_gradients_by_differences(formats: tuple[str, str, str]) -> None:
    """In double, on encoded weights: the slope of forward is what backward says."""
    store, _ = stores(dict(zip(("gate", "up", "down"), formats, strict=True)), "generic", "f64")
    hidden, ids, weights = batch(5)
    hidden, weights = hidden.double(), weights.double()
    grad = torch.randn(5, HIDDEN, dtype=torch.float64)
    grad_hidden, grad_weights = store.backward(grad, hidden, ids, weights)
    direction, step = torch.randn_like(hidden), 1e-6

    def value(shift: float) -> Tensor:
        return (store.forward(hidden + shift * direction, ids, weights) * grad).sum()

    slope = (value(step) - value(-step)) / (2 * step)
    assert torch.allclose(slope, (grad_hidden * direction).sum(), rtol=1e-6)
    turn = torch.randn_like(weights)
    slope = (store.forward(hidden, ids, weights + turn) - store.forward(hidden, ids, weights)).mul(grad).sum()
    assert torch.allclose(slope, (grad_weights * turn).sum(), rtol=1e-9)


@pytest.mark.parametrize("format", ["int4:32", "fp8:128x128", "q6_k", "bf16", "bf16:12", *SMALL])
def test_memory_moves_from_store_to_store(format: str) -> None:
    store = stores("int8", "generic")[1] if format == "bf16" else stores(format, "generic")[0]
    other = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, isa="generic", formats=format)
    memory = {name: tensor.clone() for name, tensor in store.memory().items()}
    other.adopt(**memory)
    hidden, ids, weights = batch(7)
    assert torch.equal(other.forward(hidden, ids, weights), store.forward(hidden, ids, weights))
    assert other.packed_bytes == store.packed_bytes
    if format != "bf16":
        layer = random_layer(dict.fromkeys(("gate", "up", "down"), format))
        blocks = EXPERTS * (2 * INTERMEDIATE + HIDDEN) // 32
        assert store.packed_bytes <= sum(matrix.bytes for matrix in layer.values()) + 256 * blocks


@pytest.mark.parametrize("format", HALVES)
def test_a_layer_takes_what_was_released(format: str) -> None:
    """Of an expert's size in Qwen3-30B: what is padded vanishes."""
    values, size = GGUF_BLOCKS[format]
    store = ExpertStore(1, 2048, 768, isa="generic", formats=format)
    assert store.packed_bytes <= 1.02 * 3 * 2048 * 768 / values * size


def test_groups_of_threads_hold_their_slices() -> None:
    layer = random_layer(dict.fromkeys(("gate", "up", "down"), "int4:32"))
    results, memories = [], []
    for groups in (1, 2):
        pool = _core.Pool(threads=2, groups=groups, pin=False)
        store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, pool=pool, isa="generic", formats="int4:32")
        store.pack(**layer)
        again = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, pool=pool, isa="generic", formats="int4:32")
        memories.append(store.memory())
        again.adopt(**memories[-1])
        results += [store.forward(*batch(11)), again.forward(*batch(11))]
    assert all(torch.equal(result, results[0]) for result in results)
    assert all(torch.equal(memories[0][name], memories[1][name]) for name in memories[0])


def test_odd_sizes() -> None:
    """Rows that fill no strip, columns that fill no span."""
    experts, hidden, intermediate = 2, 96, 50
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(experts, intermediate, hidden, generator=generator) for _ in range(2))
    down = torch.randn(experts, hidden, intermediate, generator=generator)
    layer = {"gate": encode(gate, "int4:64"), "up": encode(up, "fp8:1x128"), "down": encode(down, "int8")}
    formats = {name: matrix.format for name, matrix in layer.items()}
    store = ExpertStore(experts, hidden, intermediate, isa="generic", formats=formats)
    store.pack(**layer)
    plain = ExpertStore(experts, hidden, intermediate, isa="generic")
    plain.pack(**{name: decode(matrix) for name, matrix in layer.items()})
    x = torch.randn(6, hidden, generator=generator)
    ids = torch.randint(0, experts, (6, 1), generator=generator)
    weights = torch.ones(6, 1)
    assert torch.equal(store.forward(x, ids, weights, needs_grad=True), plain.forward(x, ids, weights))


def test_fused_gate_up() -> None:
    fused = encode(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), "mxfp4")
    down = encode(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE), "mxfp4")
    values = decode(fused)
    for interleaved in (False, True):
        store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, isa="generic", formats="mxfp4")
        store.pack(gate_up=fused, down=down, interleaved=interleaved)
        gate = values[:, 0::2] if interleaved else values[:, :INTERMEDIATE]
        assert torch.equal(store.decode("gate", 2).float(), gate[2])


def test_refusals() -> None:
    def make(**settings: object) -> ExpertStore:
        return ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, **settings)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="int4:33"):
        make(formats="int4:33")
    with pytest.raises(ValueError, match="one of bf16, bf16:12, int8"):
        make(formats="q9_k")
    with pytest.raises(ValueError, match="one with a grid"):
        _core.grid("q4_k")
    with pytest.raises(ValueError, match="same kind"):
        make(formats={"gate": "bf16", "up": "int8", "down": "int8"})
    with pytest.raises(InputError, match="formats"):
        make(formats={"gate": "int8", "down": "int8"})
    layer = random_layer(dict.fromkeys(("gate", "up", "down"), "int8"))
    with pytest.raises(InputError, match="format int8"):
        make(formats="int4:32").pack(**layer)
    with pytest.raises(InputError, match="an Encoded of format int8"):
        make(formats="int8").pack(**{**layer, "down": decode(layer["down"])})
    store = make(formats="int8")
    store.pack(**layer)
    short = {name: tensor[:-64] for name, tensor in store.memory().items()}
    with pytest.raises(ValueError, match="bytes of packed blocks"):
        make(formats="int8").adopt(**short)
