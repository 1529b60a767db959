"""LoRA through the operator: every form against float64, corner cases of autograd, and when factors are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ktransformers.experts.backend import LocalExperts
from ktransformers.experts.lora import ExpertLora, LoraPair, packed_adapter
from ktransformers.experts.operator import apply_experts, experts, handle_of
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from tests.support import reference
from tests.support.lora_cases import LORA_FORMS, LoraForm, apply_lora, factor_tensors, make_lora, reference_lora
from tests.support.operator_cases import EXPERTS, OperatorCase, relative_error


@pytest.mark.parametrize("form", LORA_FORMS.values(), ids=LORA_FORMS.keys())
def test_lora_output_and_gradients_match_float64(isa: str, form: LoraForm) -> None:
    case = OperatorCase(isa, tokens=37, gated=form.gated)
    lora = make_lora(case, form)
    out, grads = apply_lora(case, lora)
    expected_out, expected = reference_lora(case, lora)
    # Gradients come in the dtype of the factor: half precision rounds them once more.
    limit = 2 * case.tolerance() if form.dtype == torch.float32 else max(2 * case.tolerance(), 5e-3)
    assert relative_error(out, expected_out) < case.tolerance()
    for got, want, leaf in zip(grads, expected, [case.hidden, case.weights, *factor_tensors(lora)], strict=True):
        assert got.shape == leaf.shape and got.dtype == leaf.dtype
        assert relative_error(got, want.double()) < limit
    assert (
        relative_error(reference.forward(case.layer, case.hidden, case.ids, case.weights).detach(), expected_out) > 0.05
    )


def test_retain_and_recompute_give_the_same_bits(isa: str) -> None:
    case = OperatorCase(isa, tokens=50)
    lora = make_lora(case, LORA_FORMS["split"])
    kept, computed = apply_lora(case, lora, retain=True), apply_lora(case, lora, retain=False)
    assert torch.equal(kept[0], computed[0])
    for a, b in zip(kept[1], computed[1], strict=True):
        assert torch.equal(a, b)


def test_same_tensor_as_both_a_is_a_shared_a(isa: str) -> None:
    case = OperatorCase(isa)
    fused = make_lora(case, LORA_FORMS["shared"])
    assert fused.gate_up is not None
    a, b, scale = fused.gate_up.a, fused.gate_up.b, fused.gate_up.scaling
    half = b.shape[1] // 2
    apart = replace(fused, gate_up=None, gate=LoraPair(a, b[:, :half], scale), up=LoraPair(a, b[:, half:], scale))
    assert apart.roles == ("gate_a", "gate_b", "up_b", "down_a", "down_b")
    single = apply_lora(case, fused)
    out = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=apart)
    grads = torch.autograd.grad(out, [case.hidden, case.weights, *factor_tensors(fused)], case.grad)
    assert torch.equal(out, single[0])
    for x, y in zip(grads, single[1], strict=True):
        assert torch.equal(x, y)


def test_b_with_experts_innermost() -> None:
    case = OperatorCase("generic")
    lora = make_lora(case, LORA_FORMS["shared"])
    assert lora.gate_up is not None and lora.down is not None
    stored = lora.gate_up.b.detach().permute(1, 2, 0).contiguous().requires_grad_()  # [out, r, E]
    strided = replace(lora, gate_up=replace(lora.gate_up, b=stored.permute(2, 0, 1)))
    out = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=strided)
    plain, grads = apply_lora(case, lora)
    assert torch.equal(out, plain)
    (grad,) = torch.autograd.grad(out, stored, case.grad)
    at = [leaf is lora.gate_up.b for leaf in factor_tensors(lora)].index(True)
    assert torch.equal(grad.permute(2, 0, 1), grads[2 + at])


def test_expert_without_tokens_gets_zero_gradients() -> None:
    case = OperatorCase("generic")
    case.ids = case.ids.clamp(0, 1)
    lora = make_lora(case, LORA_FORMS["split"])
    _, (_, _, *grads) = apply_lora(case, lora)
    for grad in grads:
        assert bool(grad[:2].any()) and not bool(grad[2:].any())


def test_frozen_factors_get_no_gradient_but_pass_it_to_hidden_states() -> None:
    case = OperatorCase("generic")
    lora = make_lora(case, LORA_FORMS["split"])
    learned = apply_lora(case, lora)[1]
    for leaf in factor_tensors(lora):
        leaf.requires_grad_(False)
    out = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora)
    grads = torch.autograd.grad(out, (case.hidden, case.weights), case.grad)
    assert torch.equal(grads[0], learned[0]) and torch.equal(grads[1], learned[1])


def test_factors_alone_need_gradients() -> None:
    """The first layer of a model with frozen embeddings: hidden states need no gradient."""
    case = OperatorCase("generic")
    lora = make_lora(case, LORA_FORMS["shared"])
    learned = apply_lora(case, lora)[1]
    out = apply_experts(case.backend, case.hidden.detach(), case.ids, case.weights.detach(), lora=lora)
    for got, want in zip(torch.autograd.grad(out, factor_tensors(lora), case.grad), learned[2:], strict=True):
        assert torch.equal(got, want)


def test_lora_under_checkpointing_and_gradient_accumulation() -> None:
    case = OperatorCase("generic")
    lora = make_lora(case, LORA_FORMS["split"])
    once = apply_lora(case, lora)[1]
    for _ in range(2):
        out = checkpoint(
            lambda h, w: apply_experts(case.backend, h, case.ids, w, lora=lora),
            case.hidden,
            case.weights,
            use_reentrant=False,
        )
        assert isinstance(out, Tensor)
        out.backward(case.grad)
    for leaf, grad in zip([case.hidden, case.weights, *factor_tensors(lora)], once, strict=True):
        assert leaf.grad is not None and torch.allclose(leaf.grad, 2 * grad)


def test_opcheck_accepts_the_operator_with_lora() -> None:
    case = OperatorCase("generic", tokens=6)
    factors = make_lora(case, LORA_FORMS["split"])
    ids = case.ids.clamp(0, EXPERTS - 1)
    given = (case.hidden, ids, case.weights, list(factors.tensors), handle_of(case.backend), " ".join(factors.roles))
    torch.library.opcheck(experts, (*given, list(factors.scales), True, 0.25, 7, 0))


def test_factors_are_packed_again_when_their_version_changes() -> None:
    case = OperatorCase("generic")
    lora = make_lora(case, LORA_FORMS["down"])
    before = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora)
    first = packed_adapter(case.store, lora)
    assert packed_adapter(case.store, lora) is first
    assert lora.down is not None
    with torch.no_grad():
        lora.down.b.mul_(2)
    after, _ = apply_lora(case, lora)
    assert not torch.equal(before, after) and relative_error(after, reference_lora(case, lora)[0]) < case.tolerance()
    assert packed_adapter(case.store, lora) is first, "changed factors are packed into the same memory"


def test_reused_memory_is_not_taken_for_the_old_adapter() -> None:
    case = OperatorCase("generic")
    for seed in range(8):  # freed tensors' addresses are given out again
        lora = make_lora(case, LORA_FORMS["down"], seed)
        with torch.no_grad():
            out = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora)
        assert relative_error(out, reference_lora(case, lora)[0]) < case.tolerance()
        del lora


def test_inference_tensors_are_packed_every_time() -> None:
    case = OperatorCase("generic")
    with torch.inference_mode():
        lora = ExpertLora(down=LoraPair(torch.randn(EXPERTS, 4, 41), torch.randn(EXPERTS, 70, 4), 1.0))
        first = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora)
        assert lora.down is not None
        lora.down.b.zero_()
        second = apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=lora)
        plain = apply_experts(case.backend, case.hidden, case.ids, case.weights)
    assert torch.equal(second, plain) and not torch.equal(first, plain)


def test_rows_with_different_adapters_in_one_call(isa: str) -> None:
    case = OperatorCase(isa, tokens=60)
    loras = [make_lora(case, LORA_FORMS[name], seed) for seed, name in enumerate(("split", "shared", "down", "split"))]
    adapters = [packed_adapter(case.store, lora) for lora in loras]
    which = torch.randint(-1, 4, (60,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    hidden, weights = case.hidden.detach(), case.weights.detach()
    mixed = case.store.forward(hidden, case.ids, weights, adapter=which, adapters=adapters)
    for index in range(-1, 4):
        rows = which == index
        alone = [] if index < 0 else [adapters[index]]
        single = case.store.forward(hidden, case.ids, weights, adapters=alone)
        assert torch.equal(mixed[rows], single[rows])


def test_wrong_factors_are_refused_by_name() -> None:
    case = OperatorCase("generic")
    good = make_lora(case, LORA_FORMS["split"])
    assert good.gate is not None and good.up is not None and good.down is not None
    with pytest.raises(ValueError, match="up_a"):
        bad = replace(good, up=replace(good.up, a=good.up.a[:, :, :-1]))
        apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=bad)
    with pytest.raises(ValueError, match="down_b"):
        bad = replace(good, down=replace(good.down, b=good.down.b[:, :-1]))
        apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=bad)
    with pytest.raises(TypeError, match="gate_b"):
        bad = replace(good, gate=replace(good.gate, b=good.gate.b.detach().int()))
        apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=bad)
    with pytest.raises(InputError, match="gate_up with"):
        apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=replace(good, gate_up=good.gate))
    with pytest.raises(InputError, match="no factor"):
        apply_experts(case.backend, case.hidden, case.ids, case.weights, lora=ExpertLora())
    with pytest.raises(ValueError, match="gate_rank"):
        OperatorCase("generic", gated=False).store.new_adapter(gate_rank=4)
    with pytest.raises(ValueError, match="shared"):
        case.store.new_adapter(gate_rank=4, up_rank=8, shared=True)
    foreign = OperatorCase("generic").store.new_adapter(down_rank=4)
    with pytest.raises(ValueError, match="another layer"):
        case.store.forward(case.hidden, case.ids, case.weights, adapters=[foreign])
    with pytest.raises(ValueError, match="adapter: given 1 for token 3"):
        which = torch.tensor([0, -1, 0, 1] + [0] * 19, dtype=torch.int32)
        case.store.forward(case.hidden, case.ids, case.weights, adapter=which, adapters=[case.store.new_adapter()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (128, 131), (17, 64)])
def test_transpose_matches_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
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


def test_gradients_have_the_strides_of_their_factors() -> None:
    """B with the experts innermost: autograd takes the gradient without a copy."""
    store = ExpertStore(4, 64, 32)
    store.pack(gate_up=torch.randn(4, 64, 64) / 8, down=torch.randn(4, 64, 32) / 6)
    a, b = torch.randn(4, 8, 64, requires_grad=True), torch.randn(64, 8 * 4, requires_grad=True)
    lora = ExpertLora(gate_up=LoraPair(a, b.view(64, 8, 4).permute(2, 0, 1), 0.5))
    hidden, ids, weights = torch.randn(9, 64), torch.randint(4, (9, 2)), torch.rand(9, 2)
    apply_experts(LocalExperts(store), hidden, ids, weights, lora=lora).sum().backward()
    assert b.grad is not None and b.grad.is_contiguous() and b.grad.any()
    twin = torch.empty_like(b).copy_(b.detach()).requires_grad_()
    dense = twin.view(64, 8, 4).permute(2, 0, 1).contiguous()
    lora = ExpertLora(gate_up=LoraPair(a, dense, 0.5))
    apply_experts(LocalExperts(store), hidden, ids, weights, lora=lora).sum().backward()
    assert torch.equal(b.grad, twin.grad)


def test_gradients_do_not_depend_on_other_rows_where_k_is_cut(isa: str) -> None:
    """Few rows take hidden whole, 150 rows take it in chunks: LoRA's terms are added after all of it in both."""
    hidden_size, wide, rank = 3584, 16, 4
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    store = ExpertStore(1, hidden_size, wide, isa=isa)
    store.pack(gate=normal(1, wide, hidden_size), up=normal(1, wide, hidden_size), down=normal(1, hidden_size, wide))
    gate, up = (LoraPair(normal(1, rank, hidden_size), normal(1, wide, rank), 2.0) for _ in range(2))
    down = LoraPair(normal(1, rank, wide), normal(1, hidden_size, rank), 2.0)
    adapters = [packed_adapter(store, ExpertLora(gate=gate, up=up, down=down))]
    rows, grads = normal(150, hidden_size), normal(150, hidden_size)

    def backward(count: int) -> tuple[Tensor, Tensor]:
        ids, weights = torch.zeros(count, 1, dtype=torch.int64), torch.ones(count, 1)
        return store.backward(grads[:count], rows[:count], ids, weights, adapters=adapters)

    for all_rows, few_rows in zip(backward(150), backward(20), strict=True):
        assert torch.equal(all_rows[:20], few_rows)
