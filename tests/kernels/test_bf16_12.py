"""bf16:12 is bf16 in fewer bytes: the same bits from every call, for every bf16 number, or a refusal to pack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded, decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.store import PatchOverflowError
from ktransformers.nn import ExpertStore

from .conftest import make_batch, make_layer
from .rounded import Lora

SPEC = "bf16:12"
GROUP = 128  # columns that share 16 high bytes with 16 rows


def encoded(bits: Tensor) -> Encoded:
    """int16 [E, N, K] as bf16 numbers, NaN and infinite ones included, which `encode` refuses."""
    return Encoded(SPEC, bits.contiguous().view(torch.uint8), None, columns=bits.shape[2])


def as_bits(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().view(torch.int16)


def patches(columns: int) -> int:
    """That a strip of 16 rows has."""
    return -(-columns // 32) + 16


def store_of(down: Tensor, isa: str = "", precision: str = "bf16") -> ExpertStore:
    """Experts without a gate whose down has the bits `down`, [1, H, I]."""
    _, hidden, intermediate = down.shape
    store = ExpertStore(1, hidden, intermediate, gated=False, isa=isa, precision=precision, formats=SPEC)
    store.pack(up=encoded(torch.zeros(1, intermediate, hidden, dtype=torch.int16)), down=encoded(down))
    return store


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return as_bits(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02)


def test_every_bf16_number(isa: str) -> None:
    """All 65536, eight high bytes in a group: zeros, subnormal and infinite numbers, every NaN."""
    groups = torch.arange(-32768, 32768).to(torch.int16).view(32, 16, GROUP)
    down = groups.transpose(0, 1).reshape(1, 16, 32 * GROUP)
    assert torch.equal(store_of(down, isa).decode("down", 0).view(torch.int16), down[0])


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_exact_precisions(precision: str) -> None:
    down = gaussian(1, 40, 200)
    found = store_of(down, "generic", precision).decode("down", 0)
    assert torch.equal(found.float(), down[0].view(torch.bfloat16).float())


def test_patches_to_the_last_one(isa: str) -> None:
    """As many foreign high bytes in a strip as it has patches, of every kind of number; then one more."""
    random = torch.Generator().manual_seed(3)
    rows, columns = 16, 352  # the last group is incomplete
    # High bytes 0x30 to 0x3f, about as often as each other, fill every table.
    down = torch.randint(0x3000, 0x4000, (1, rows, columns), generator=random).to(torch.int16)
    flat = down.view(-1)
    foreign = [0, -32768, 1, 0x7F80, -128, 0x7FFF, 0x7FC1, -1, 0x0080, 0x4000, 0x1234, -30000]
    count = patches(columns)
    at = torch.randperm(rows * columns, generator=random)[: count + 1]
    for place, index in enumerate(at[:count].tolist()):
        flat[index] = foreign[place % len(foreign)]
    assert torch.equal(store_of(down, isa).decode("down", 0).view(torch.int16), down[0])
    flat[at[count]] = 0x4000
    with pytest.raises(PatchOverflowError, match=r"down of expert 0: given more values .* store this matrix as bf16"):
        store_of(down, isa)


@pytest.mark.parametrize("zeros", [0.3, 0.99, 1.0])
def test_sparse_matrices_need_no_patches(zeros: float) -> None:
    random = torch.Generator().manual_seed(1)
    down = gaussian(1, 64, 512)
    down = torch.where(torch.rand(down.shape, generator=random) < zeros, torch.zeros_like(down), down)
    assert torch.equal(store_of(down).decode("down", 0).view(torch.int16), down[0])


def test_a_failed_pack_leaves_experts_that_cannot_be_used() -> None:
    wild = torch.randint(-32768, 32768, (1, 64, 64), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    store = ExpertStore(1, 64, 64, formats=SPEC)
    good = encoded(gaussian(1, 64, 64))
    store.pack(gate=good, up=good, down=good)
    for role in ("gate", "up", "down"):
        with pytest.raises(PatchOverflowError, match=f"{role} of expert 0") as refused:
            store.pack(**{"gate": good, "up": good, "down": good, role: encoded(wild)})
        assert refused.value.role == role
        with pytest.raises(RuntimeError, match="is not packed"):
            store.forward(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def layers(isa: str, experts: int, hidden: int, intermediate: int, gated: bool) -> tuple[ExpertStore, ExpertStore]:
    """The same numbers in bf16:12 and in bf16, with patches in every strip."""
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    numbers = {}
    for seed, (role, shape) in enumerate(shapes.items()):
        random = torch.Generator().manual_seed(seed)
        values = torch.randn(experts, *shape, generator=random) * 0.05
        values[:, ::16, 3] *= 2.0**-40
        values[:, 5::16, 40 % shape[1]] *= 2.0**20 if role == "down" else 2.0**-20
        numbers[role] = values.bfloat16()
    if not gated:
        del numbers["gate"]
    coded = ExpertStore(experts, hidden, intermediate, gated=gated, isa=isa, formats=SPEC)
    coded.pack(**{role: encode(values, SPEC) for role, values in numbers.items()})
    plain = ExpertStore(experts, hidden, intermediate, gated=gated, isa=isa)
    plain.pack(**numbers)
    return coded, plain


@pytest.mark.parametrize(("hidden", "intermediate", "gated"), [(320, 160, True), (100, 70, True), (136, 96, False)])
def test_every_call_has_the_bits_of_bf16(isa: str, hidden: int, intermediate: int, gated: bool) -> None:
    coded, plain = layers(isa, 3, hidden, intermediate, gated)
    for tokens in (1, 2, 5, 16, 61):
        random = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, hidden, generator=random).bfloat16()
        weights, ids = torch.randn(tokens, 3, generator=random).softmax(-1).topk(2)
        for needs_grad in (False, True):
            found = coded.forward(x, ids, weights, needs_grad=needs_grad)
            assert torch.equal(found.view(torch.int16), plain.forward(x, ids, weights).view(torch.int16))
        grad = torch.randn(tokens, hidden, generator=random).bfloat16()
        for one, other in zip(
            coded.backward(grad, x, ids, weights), plain.backward(grad, x, ids, weights), strict=True
        ):
            assert torch.equal(one, other)


def test_lora_and_its_gradients_have_the_bits_of_bf16(isa: str) -> None:
    layer = make_layer(2, 160, 96)
    assert layer.gate is not None
    matrices = {"gate": layer.gate, "up": layer.up, "down": layer.down}
    coded, plain = ExpertStore(2, 160, 96, isa=isa, formats=SPEC), ExpertStore(2, 160, 96, isa=isa)
    coded.pack(**{role: encode(values, SPEC) for role, values in matrices.items()})
    plain.pack(**matrices)
    for tokens in (1, 3, 40):
        batch = make_batch(layer, tokens, 2, here=True)
        results = []
        for store in (coded, plain):
            adapters = [Lora.of(layer, 8, 1).adapter(store)]
            results.append([store.forward(batch.hidden, batch.ids, batch.weights, adapters=adapters)])
            grad = torch.randn(tokens, 160, generator=torch.Generator().manual_seed(5)).to(batch.hidden.dtype)
            results[-1] += store.backward(grad, batch.hidden, batch.ids, batch.weights, adapters=adapters)[:2]
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        bare = plain.forward(batch.hidden, batch.ids, batch.weights)
        assert not torch.equal(results[0][0], bare), "LoRA does nothing here"


def test_size_beside_bf16() -> None:
    """Of an expert of Qwen3-30B and of gpt-oss."""
    for hidden, intermediate in ((2048, 768), (2880, 2880), (7168, 2048)):
        coded = ExpertStore(1, hidden, intermediate, formats=SPEC).packed_bytes
        assert coded <= 0.77 * ExpertStore(1, hidden, intermediate).packed_bytes
        assert coded <= 1.53 * 3 * hidden * intermediate


def test_numbers_of_gaussian_laplace_and_student_weights_fit() -> None:
    torch.manual_seed(0)
    shape = (1, 256, 1024)
    for numbers in (
        torch.randn(shape),
        torch.distributions.Laplace(0.0, 1.0).sample(shape),
        torch.distributions.StudentT(4.0).sample(shape),
        torch.randn(shape) * (torch.randn(1, 256, 1) / 2).exp(),  # rows of different sizes
    ):
        down = as_bits(numbers * 0.02)
        assert torch.equal(store_of(down).decode("down", 0).view(torch.int16), down[0])


def test_encoding_rounds_to_bf16_and_no_further() -> None:
    numbers = torch.randn(2, 30, 50)
    assert torch.equal(decode(encode(numbers, SPEC)), numbers.bfloat16().float())
