"""`KTMoEFunction`: gradients of a wrapper's experts by autograd, with and without checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kt_kernel.sft import KTAMXNotAvailableError, KTMoEFunction
from kt_kernel.sft.dist_utils import inside_checkpointed_block, sync_kt_lora_gradients
from tests.support.kt_layers import H, K, batch, error
from tests.support.kt_sft_layers import CLOSE, SftLayer, reference_pass, sft_layer


def call(layer: SftLayer, hidden: Tensor, ids: Tensor, scores: Tensor, *flags: Any) -> Tensor:
    """As kt-kernel's layers call it."""
    reference = torch.zeros(1, requires_grad=True)
    words = (layer.wrapper, reference, H, K, 0, True, True, [len(ids)], *flags)
    out: Tensor = KTMoEFunction.apply(hidden, ids, scores, *words)  # type: ignore[no-untyped-call]
    return out


def gradients(layer: SftLayer, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    hidden, ids, scores = batch(6)
    x, weights = hidden.view(2, 3, H).requires_grad_(), scores.bfloat16().requires_grad_()
    out = run(x, ids, weights)
    out.backward(torch.ones_like(out))
    assert x.grad is not None and weights.grad is not None and weights.grad.dtype == torch.bfloat16
    return {"out": out.detach(), "hidden": x.grad, "weights": weights.grad, **layer.grads}


def test_gradients_are_those_of_the_definition() -> None:
    layer = sft_layer()
    found = gradients(layer, lambda *given: call(layer, *given))
    hidden, ids, scores = batch(6)
    rounded = scores.bfloat16().float()
    out, expected = reference_pass(layer, hidden, ids, rounded, torch.ones(6, H).bfloat16())
    assert found["out"].shape == (2, 3, H) and error(found["out"].view(6, H), out) < CLOSE
    for name, grad in expected.items():
        assert error(found[name].view(grad.shape), grad) < CLOSE, name
    assert not layer.wrapper.saved


def test_recomputation_changes_nothing() -> None:
    plain = sft_layer()
    expected = gradients(plain, lambda *given: call(plain, *given))
    layer = sft_layer()
    run = gradients(layer, lambda *given: checkpoint(lambda *x: call(layer, *x), *given, use_reentrant=False))
    assert all(torch.equal(run[name], tensor) for name, tensor in expected.items()) and not layer.wrapper.saved


def test_a_recomputation_takes_the_retained_output(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, layer, passes = sft_layer(), sft_layer(), [True, False]
    expected = gradients(plain, lambda *given: call(plain, *given))
    computed = []
    forward = layer.wrapper.forward
    monkeypatch.setattr(layer.wrapper, "forward", lambda *given: computed.append(1) or forward(*given))

    def block(*given: Tensor) -> Tensor:
        first = passes.pop(0)
        return call(layer, *given, first, not first)

    run = gradients(layer, lambda *given: checkpoint(block, *given, use_reentrant=False))
    assert all(torch.equal(run[name], tensor) for name, tensor in expected.items())
    assert computed == [1] and not passes and not layer.wrapper.saved
    layer.wrapper.validate_checkpoint_cache_empty()


def test_passes_without_training_save_nothing_and_base_weights_are_refused() -> None:
    layer = sft_layer()
    hidden, ids, scores = batch(4)
    words = (layer.wrapper, None, H, K, 0, False, False, None)
    out = KTMoEFunction.apply(hidden, ids, scores, *words)  # type: ignore[no-untyped-call]
    assert torch.equal(out, layer.wrapper.forward(hidden, ids, scores, False)) and not layer.wrapper.saved
    with pytest.raises(KTAMXNotAvailableError, match="frozen"):
        call(layer, hidden, ids, scores, False, False, torch.zeros(1))


def test_names_of_dist_utils() -> None:
    assert callable(sync_kt_lora_gradients) and not inside_checkpointed_block()
