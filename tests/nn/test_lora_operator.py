"""LoRA through the operator: every form of it against float64, the corners of autograd, and what is packed when."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ktransformers.errors import InputError
from ktransformers.nn import ExpertStore, reference
from ktransformers.nn.lora import ExpertLora, Factor
from ktransformers.nn.lora_factors import factors_of, packed_adapter
from ktransformers.nn.operator import apply_experts, experts, handle_of

from .test_operator import EXPERTS, Case, relative


@dataclass(frozen=True)
class Form:
    """Ranks of the factors, 0 where there is none; `shared` is one factor for gate and up."""

    gate: int = 0
    up: int = 0
    down: int = 0
    shared: int = 0
    gated: bool = True
    dtype: torch.dtype = torch.float32
    rounded: bool = True  # to bf16


FORMS = {
    "shared": Form(shared=16, down=8),
    "split": Form(gate=8, up=8, down=8),
    "uneven": Form(gate=3, up=40, down=1),
    "gate": Form(gate=5),
    "up": Form(up=5),
    "down": Form(down=33),
    "no_gate": Form(up=6, down=7, gated=False),
    "wide": Form(shared=256, down=70),
    "bf16": Form(shared=16, down=8, dtype=torch.bfloat16),
    "fp16": Form(gate=8, up=8, down=8, dtype=torch.float16),
}


def make_lora(case: Case, form: Form, seed: int = 0) -> ExpertLora:
    """Factors of numbers that bf16 holds exactly, unless the form says otherwise, and scales that are powers of two."""
    g = torch.Generator().manual_seed(seed)
    draw = torch.float64 if form.dtype == torch.float64 else torch.float32
    hidden, intermediate = case.store.hidden_size, case.store.intermediate_size

    def factor(rank: int, wide: int, out: int, scale: float) -> Factor | None:
        if not rank:
            return None
        a, b = (
            torch.randn(EXPERTS, *shape, generator=g, dtype=draw) * size**-0.5
            for shape, size in (((rank, wide), wide), ((out, rank), rank))
        )
        if form.rounded:
            a, b = a.bfloat16(), b.bfloat16()
        return Factor(a.to(form.dtype).requires_grad_(), b.to(form.dtype).requires_grad_(), scale)

    return ExpertLora(
        gate_up=factor(form.shared, hidden, 2 * intermediate, 0.5),
        gate=factor(form.gate, hidden, intermediate, 2.0),
        up=factor(form.up, hidden, intermediate, 0.5),
        down=factor(form.down, intermediate, hidden, 1.0),
    )


def leaves(lora: ExpertLora) -> list[Tensor]:
    return list(factors_of(lora).tensors)


def delta(factor: Factor | None) -> Tensor | float:
    return 0.0 if factor is None else factor.scale * factor.b.double() @ factor.a.double()


def exact(case: Case, lora: ExpertLora) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients (hidden, weights, factors) of the layer with LoRA folded in, in float64."""
    hidden = case.hidden.detach().double().requires_grad_()
    weights = case.weights.detach().double().requires_grad_()
    gate_delta, up_delta = delta(lora.gate), delta(lora.up)
    if lora.gate_up is not None:
        gate_delta, up_delta = delta(lora.gate_up).chunk(2, dim=1)  # type: ignore[union-attr]
    layer = case.layer
    out = torch.zeros(case.hidden.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        token, slot = torch.where(case.ids == e)
        x = hidden[token]

        def add(d: Tensor | float, rows: Tensor, expert: int = e) -> Tensor | float:
            return 0.0 if isinstance(d, float) else rows @ d[expert].T

        up = x @ layer.up[e].double().T + add(up_delta, x)
        if layer.gate is None:
            inner = torch.nn.functional.silu(up)
        else:
            inner = torch.nn.functional.silu(x @ layer.gate[e].double().T + add(gate_delta, x)) * up
        y = inner @ layer.down[e].double().T + add(delta(lora.down), inner)
        out = out.index_add(0, token, y * weights[token, slot, None])
    grads = torch.autograd.grad(out, [hidden, weights, *leaves(lora)], case.grad.double())
    return out.detach(), list(grads)


def found(case: Case, lora: ExpertLora, retain: bool = True) -> tuple[Tensor, list[Tensor]]:
    out = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora, retain=retain)
    return out.detach(), list(torch.autograd.grad(out, [case.hidden, case.weights, *leaves(lora)], case.grad))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_output_and_gradients(isa: str, form: Form) -> None:
    case = Case(isa, tokens=37, gated=form.gated)
    lora = make_lora(case, form)
    out, grads = found(case, lora)
    expected_out, expected = exact(case, lora)
    # Gradients come in the dtype of the factor: half precision rounds them once more.
    limit = 2 * case.tolerance() if form.dtype == torch.float32 else max(2 * case.tolerance(), 5e-3)
    assert relative(out, expected_out) < case.tolerance()
    for got, want, leaf in zip(grads, expected, [case.hidden, case.weights, *leaves(lora)], strict=True):
        assert got.shape == leaf.shape and got.dtype == leaf.dtype
        assert relative(got, want.double()) < limit
    assert relative(reference.forward(case.layer, case.hidden, case.ids, case.weights).detach(), expected_out) > 0.05


def test_retain_and_recompute_give_the_same_bits(isa: str) -> None:
    case = Case(isa, tokens=50)
    lora = make_lora(case, FORMS["split"])
    kept, computed = found(case, lora, retain=True), found(case, lora, retain=False)
    assert torch.equal(kept[0], computed[0])
    for a, b in zip(kept[1], computed[1], strict=True):
        assert torch.equal(a, b)


def test_the_same_a_tensor_is_a_shared_a(isa: str) -> None:
    case = Case(isa)
    fused = make_lora(case, FORMS["shared"])
    assert fused.gate_up is not None
    a, b, scale = fused.gate_up.a, fused.gate_up.b, fused.gate_up.scale
    half = b.shape[1] // 2
    apart = replace(fused, gate_up=None, gate=Factor(a, b[:, :half], scale), up=Factor(a, b[:, half:], scale))
    assert factors_of(apart).roles == ("gate_a", "gate_b", "up_b", "down_a", "down_b")
    one = found(case, fused)
    out = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=apart)
    grads = torch.autograd.grad(out, [case.hidden, case.weights, *leaves(fused)], case.grad)
    assert torch.equal(out, one[0])
    for x, y in zip(grads, one[1], strict=True):
        assert torch.equal(x, y)


def test_experts_last_as_peft_stores_b() -> None:
    case = Case("generic")
    lora = make_lora(case, FORMS["shared"])
    assert lora.gate_up is not None and lora.down is not None
    stored = lora.gate_up.b.detach().permute(1, 2, 0).contiguous().requires_grad_()  # [out, r, E]
    strided = replace(lora, gate_up=replace(lora.gate_up, b=stored.permute(2, 0, 1)))
    out = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=strided)
    plain, grads = found(case, lora)
    assert torch.equal(out, plain)
    (grad,) = torch.autograd.grad(out, stored, case.grad)
    at = [leaf is lora.gate_up.b for leaf in leaves(lora)].index(True)
    assert torch.equal(grad.permute(2, 0, 1), grads[2 + at])


def test_an_expert_without_tokens_gets_zeros() -> None:
    case = Case("generic")
    case.ids = case.ids.clamp(0, 1)
    lora = make_lora(case, FORMS["split"])
    _, (_, _, *grads) = found(case, lora)
    for grad in grads:
        assert bool(grad[:2].any()) and not bool(grad[2:].any())


def test_frozen_factors_cost_no_gradient_and_still_pass_it_on() -> None:
    case = Case("generic")
    lora = make_lora(case, FORMS["split"])
    learned = found(case, lora)[1]
    for leaf in leaves(lora):
        leaf.requires_grad_(False)
    out = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora)
    grads = torch.autograd.grad(out, (case.hidden, case.weights), case.grad)
    assert torch.equal(grads[0], learned[0]) and torch.equal(grads[1], learned[1])


def test_only_the_factors_learn() -> None:
    """The first layer of a model with frozen embeddings: nothing else asks for a gradient."""
    case = Case("generic")
    lora = make_lora(case, FORMS["shared"])
    learned = found(case, lora)[1]
    out = apply_experts(case.store, case.hidden.detach(), case.ids, case.weights.detach(), lora=lora)
    for got, want in zip(torch.autograd.grad(out, leaves(lora), case.grad), learned[2:], strict=True):
        assert torch.equal(got, want)


def test_checkpointing_and_accumulation() -> None:
    case = Case("generic")
    lora = make_lora(case, FORMS["split"])
    once = found(case, lora)[1]
    for _ in range(2):
        out = checkpoint(
            lambda h, w: apply_experts(case.store, h, case.ids, w, lora=lora),
            case.hidden,
            case.weights,
            use_reentrant=False,
        )
        assert isinstance(out, Tensor)
        out.backward(case.grad)
    for leaf, grad in zip([case.hidden, case.weights, *leaves(lora)], once, strict=True):
        assert leaf.grad is not None and torch.allclose(leaf.grad, 2 * grad)


def test_the_operator_is_well_formed() -> None:
    case = Case("generic", tokens=6)
    factors = factors_of(make_lora(case, FORMS["split"]))
    ids = case.ids.clamp(0, EXPERTS - 1)
    given = (case.hidden, ids, case.weights, list(factors.tensors), handle_of(case.store), " ".join(factors.roles))
    torch.library.opcheck(experts, (*given, list(factors.scales), True, 0.25, 7))


def test_packed_when_a_version_changes() -> None:
    case = Case("generic")
    lora = make_lora(case, FORMS["down"])
    before = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora)
    first = packed_adapter(case.store, factors_of(lora))
    assert packed_adapter(case.store, factors_of(lora)) is first
    assert lora.down is not None
    with torch.no_grad():
        lora.down.b.mul_(2)
    after, _ = found(case, lora)
    assert not torch.equal(before, after) and relative(after, exact(case, lora)[0]) < case.tolerance()
    assert packed_adapter(case.store, factors_of(lora)) is first, "changed factors are packed into the same memory"


def test_memory_that_comes_to_hold_another_adapter() -> None:
    case = Case("generic")
    for seed in range(8):  # freed tensors' addresses are given out again
        lora = make_lora(case, FORMS["down"], seed)
        with torch.no_grad():
            out = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora)
        assert relative(out, exact(case, lora)[0]) < case.tolerance()
        del lora


def test_inference_tensors_are_packed_every_time() -> None:
    case = Case("generic")
    with torch.inference_mode():
        lora = ExpertLora(down=Factor(torch.randn(EXPERTS, 4, 41), torch.randn(EXPERTS, 70, 4), 1.0))
        first = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora)
        assert lora.down is not None
        lora.down.b.zero_()
        second = apply_experts(case.store, case.hidden, case.ids, case.weights, lora=lora)
        plain = apply_experts(case.store, case.hidden, case.ids, case.weights)
    assert torch.equal(second, plain) and not torch.equal(first, plain)


def test_several_adapters_and_none_in_one_call(isa: str) -> None:
    case = Case(isa, tokens=60)
    loras = [make_lora(case, FORMS[name], seed) for seed, name in enumerate(("split", "shared", "down", "split"))]
    adapters = [packed_adapter(case.store, factors_of(lora)) for lora in loras]
    which = torch.randint(-1, 4, (60,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    hidden, weights = case.hidden.detach(), case.weights.detach()
    mixed = case.store.forward(hidden, case.ids, weights, adapter=which, adapters=adapters)
    for index in range(-1, 4):
        rows = which == index
        alone = [] if index < 0 else [adapters[index]]
        one = case.store.forward(hidden, case.ids, weights, adapters=alone)
        assert torch.equal(mixed[rows], one[rows])


def test_wrong_factors_are_refused_by_name() -> None:
    case = Case("generic")
    good = make_lora(case, FORMS["split"])
    assert good.gate is not None and good.up is not None and good.down is not None
    with pytest.raises(ValueError, match="up_a"):
        bad = replace(good, up=replace(good.up, a=good.up.a[:, :, :-1]))
        apply_experts(case.store, case.hidden, case.ids, case.weights, lora=bad)
    with pytest.raises(ValueError, match="down_b"):
        bad = replace(good, down=replace(good.down, b=good.down.b[:, :-1]))
        apply_experts(case.store, case.hidden, case.ids, case.weights, lora=bad)
    with pytest.raises(TypeError, match="gate_b"):
        bad = replace(good, gate=replace(good.gate, b=good.gate.b.detach().int()))
        apply_experts(case.store, case.hidden, case.ids, case.weights, lora=bad)
    with pytest.raises(InputError, match="gate_up beside"):
        apply_experts(case.store, case.hidden, case.ids, case.weights, lora=replace(good, gate_up=good.gate))
    with pytest.raises(InputError, match="no factor"):
        apply_experts(case.store, case.hidden, case.ids, case.weights, lora=ExpertLora())
    with pytest.raises(ValueError, match="gate_rank"):
        Case("generic", gated=False).store.new_adapter(gate_rank=4)
    with pytest.raises(ValueError, match="shared"):
        case.store.new_adapter(gate_rank=4, up_rank=8, shared=True)
    other = Case("generic").store.new_adapter(down_rank=4)
    with pytest.raises(ValueError, match="another layer"):
        case.store.forward(case.hidden, case.ids, case.weights, adapters=[other])
    with pytest.raises(ValueError, match="adapter: given 1 for token 3"):
        which = torch.tensor([0, -1, 0, 1] + [0] * 19, dtype=torch.int32)
        case.store.forward(case.hidden, case.ids, case.weights, adapter=which, adapters=[case.store.new_adapter()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (128, 131), (17, 64)])
def test_transposing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    store = ExpertStore(2, 32, 32)
    source = torch.randn(shape).to(dtype)
    target = torch.empty(shape[::-1], dtype=dtype)
    store.transpose(source, target)
    assert torch.equal(target, source.t())
    if shape != (1, 1):
        with pytest.raises(ValueError, match="target"):
            store.transpose(source, torch.empty(shape, dtype=dtype))
        with pytest.raises(ValueError, match="dense"):
            store.transpose(source, torch.empty(shape, dtype=dtype).t())


def test_gradients_lie_as_peft_has_its_factors() -> None:
    """B with the experts innermost: the parameter's gradient is taken as it comes, not copied."""
    store = ExpertStore(4, 64, 32)
    store.pack(gate_up=torch.randn(4, 64, 64) / 8, down=torch.randn(4, 64, 32) / 6)
    a, b = torch.randn(4, 8, 64, requires_grad=True), torch.randn(64, 8 * 4, requires_grad=True)
    lora = ExpertLora(gate_up=Factor(a, b.view(64, 8, 4).permute(2, 0, 1), 0.5))
    hidden, ids, weights = torch.randn(9, 64), torch.randint(4, (9, 2)), torch.rand(9, 2)
    apply_experts(store, hidden, ids, weights, lora=lora).sum().backward()
    assert b.grad is not None and b.grad.is_contiguous() and b.grad.any()
    twin = torch.empty_like(b).copy_(b.detach()).requires_grad_()
    dense = twin.view(64, 8, 4).permute(2, 0, 1).contiguous()
    lora = ExpertLora(gate_up=Factor(a, dense, 0.5))
    apply_experts(store, hidden, ids, weights, lora=lora).sum().backward()
    assert torch.equal(b.grad, twin.grad)
