"""The object of `KTMoEWrapper(mode="sft")` on the CPU, compared with a float32 reference of experts with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kt_kernel.methods import SFT_METHODS, SKIP_LORA
from kt_kernel.sft import KTAMXNotAvailableError, get_activation_checkpoint_context_fn
from kt_kernel.sft.amx import AMXSFTMoEWrapper
from kt_kernel.sft.base import BaseSFTMoEWrapper
from kt_kernel.sft.weights import BlockFP8ExpertWeights, RAWINT4ExpertWeights, load_experts_from_kt_weight_path
from ktransformers.checkpoint import Encoded, encode
from ktransformers.checkpoint.kt_codes import encode_rows
from ktransformers.ground.errors import InputError
from tests.support.kt_layers import INNER, E, H, K, batch, error, weights
from tests.support.kt_sft_layers import CLOSE, RANK, SftLayer, reference_pass, sft_layer, sft_wrapper


def grad_output(tokens: int, seed: int = 9) -> Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_matches(layer: SftLayer, tokens: int, ids: Tensor | None = None) -> None:
    hidden, drawn, scores = batch(tokens)
    routed = drawn if ids is None else ids
    grad_out = grad_output(tokens)
    out = layer.wrapper.forward(hidden, routed, scores)
    grad_hidden, grad_weights = layer.wrapper.backward(grad_out)
    expected, grads = reference_pass(layer, hidden, routed, scores, grad_out)
    assert out.dtype == torch.bfloat16 and grad_hidden.dtype == torch.bfloat16 and grad_weights.dtype == torch.float32
    assert error(out, expected) < CLOSE
    assert error(grad_hidden, grads["hidden"]) < CLOSE
    assert error(grad_weights, grads["weights"]) < CLOSE
    for name, grad in layer.grads.items():
        assert error(grad, grads[name]) < CLOSE, name


@pytest.mark.parametrize("method", SFT_METHODS)
def test_every_method_agrees_with_the_reference(method: str) -> None:
    layer = sft_layer(method)
    assert isinstance(layer.wrapper, AMXSFTMoEWrapper) and isinstance(layer.wrapper, BaseSFTMoEWrapper)
    assert_matches(layer, 12)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_batches_of_any_size(tokens: int) -> None:
    """40 tokens are more than chunked_prefill_size, 16."""
    assert_matches(sft_layer(), tokens)


def test_ids_that_are_no_experts_contribute_nothing() -> None:
    layer = sft_layer()
    hidden, ids, scores = batch(6)
    ids[0], ids[1, 1], ids[2, 0] = -1, E, E + 100
    assert_matches(layer, 6, ids)
    out = layer.wrapper.forward(hidden, ids, scores, save_for_backward=False)
    assert not out[0].any() and out[1].any()


def test_experts_of_the_gpu_are_skipped() -> None:
    assert_matches(sft_layer(num_gpu_experts=3), 12)
    with pytest.raises(InputError, match="num_gpu_experts"):
        sft_wrapper(num_gpu_experts=E + 1)


def test_dtypes_are_cast_and_leading_dimensions_kept() -> None:
    layer = sft_layer()
    hidden, ids, scores = batch(6)
    out = layer.wrapper.forward(hidden, ids, scores, save_for_backward=False)
    strided = (hidden.T.contiguous().T, ids.T.contiguous().T, scores.T.contiguous().T)
    assert torch.equal(layer.wrapper.forward(*strided, save_for_backward=False), out)
    shaped = (hidden.float().view(2, 3, H), ids.int().view(2, 3, K), scores.double().view(2, 3, K))
    assert torch.equal(layer.wrapper.forward(*shaped, save_for_backward=False), out.view(2, 3, H))
    for given, name in (((hidden[:, 1:], ids, scores), "hidden_states"), ((hidden, ids[:, :2], scores), "expert_ids")):
        with pytest.raises(InputError, match=name):
            layer.wrapper.forward(*given)


def test_saving_does_not_change_the_output_and_inputs_are_copied() -> None:
    layer = sft_layer()
    hidden, ids, scores = batch(5)
    plain = layer.wrapper.forward(hidden, ids, scores, save_for_backward=False)
    _, grads = reference_pass(layer, hidden, ids, scores, grad_output(5))
    assert torch.equal(layer.wrapper.forward(hidden, ids, scores), plain)
    hidden.zero_()
    ids.fill_(-1)
    grad_hidden, _ = layer.wrapper.backward(grad_output(5))
    assert error(grad_hidden, grads["hidden"]) < CLOSE


def test_submitted_passes_return_what_the_direct_ones_do() -> None:
    layer = sft_layer()
    given, grad_out = batch(9), grad_output(9)
    out = layer.wrapper.forward(*given)
    grads = layer.wrapper.backward(grad_out)
    lora_grads = {name: grad.clone() for name, grad in layer.grads.items()}
    changed = [tensor.clone() for tensor in given]
    layer.wrapper.submit_forward(*changed)
    for tensor in changed:  # it was read when the call returned
        tensor.zero_()
    with pytest.raises(RuntimeError, match="sync_forward"):
        layer.wrapper.submit_forward(*given)
    assert torch.equal(layer.wrapper.sync_forward(), out)
    layer.wrapper.submit_backward_repack()
    layer.wrapper.wait_backward_repack()
    overwritten = grad_out.clone()
    layer.wrapper.submit_backward_async(overwritten)
    overwritten.zero_()
    submitted = layer.wrapper.sync_backward()
    assert all(torch.equal(one, other) for one, other in zip(submitted, grads, strict=True))
    assert all(torch.equal(layer.grads[name], grad) for name, grad in lora_grads.items())
    for sync in (layer.wrapper.sync_forward, layer.wrapper.sync_backward):
        with pytest.raises(RuntimeError, match="submit"):
            sync()


def test_forward_passes_are_a_stack_of_the_given_depth() -> None:
    layer = sft_layer(max_cache_depth=2)
    first, second = batch(4, seed=1), batch(4, seed=2)
    expected = []
    for given in (first, second):
        layer.wrapper.forward(*given)
        expected.append(layer.wrapper.backward(grad_output(4))[0])
    with pytest.raises(RuntimeError, match="save_for_backward"):
        layer.wrapper.backward(grad_output(4))
    layer.wrapper.forward(*first)
    layer.wrapper.forward(*second)
    with pytest.raises(RuntimeError, match="max_cache_depth is 2"):
        layer.wrapper.forward(*first)
    with pytest.raises(InputError, match="grad_output"):
        layer.wrapper.backward(grad_output(5))
    assert torch.equal(layer.wrapper.backward(grad_output(4))[0], expected[1])
    assert torch.equal(layer.wrapper.backward(grad_output(4))[0], expected[0])


def backward_pass(layer: SftLayer, seed: int, scale: float = 1.0) -> None:
    layer.wrapper.forward(*batch(8, seed))
    layer.wrapper.backward(grad_output(8), optimizer_grad_scale=scale)


def test_gradient_buffers_are_overwritten_without_registered_parameters() -> None:
    layer = sft_layer()
    assert layer.wrapper.validate_authoritative_optimizer_grad_state() == "empty"
    backward_pass(layer, 1)
    once = {name: grad.clone() for name, grad in layer.grads.items()}
    backward_pass(layer, 2)
    backward_pass(layer, 1)
    assert all(torch.equal(grad, once[name]) for name, grad in layer.grads.items())
    backward_pass(layer, 1, scale=0.5)
    assert all(torch.equal(grad, once[name] / 2) for name, grad in layer.grads.items())


def test_registered_gradients_accumulate_until_they_are_released() -> None:
    layer = sft_layer()
    parameters = {name: nn.Parameter(tensor) for name, tensor in layer.lora.items()}
    for name, parameter in parameters.items():
        layer.wrapper.register_authoritative_optimizer_grad(name, parameter, layer.grads[name])
    assert layer.wrapper.validate_authoritative_optimizer_grad_state() == "closed"
    single = {}
    for seed in (1, 2):
        backward_pass(layer, seed)
        single[seed] = {name: grad.float() for name, grad in layer.grads.items()}
        layer.wrapper.release_authoritative_optimizer_grads()
        assert all(parameter.grad is None for parameter in parameters.values())
    backward_pass(layer, 1)
    assert layer.wrapper.validate_authoritative_optimizer_grad_state() == "open"
    backward_pass(layer, 2)
    for name, parameter in parameters.items():
        assert parameter.grad is not None and parameter.grad.data_ptr() == layer.grads[name].data_ptr()
        assert error(parameter.grad, single[1][name] + single[2][name]) < 4e-3
    backward_pass(layer, 1, scale=2.0)
    for name, parameter in parameters.items():
        assert error(parameter.grad, 3 * single[1][name] + single[2][name]) < 6e-3  # type: ignore[arg-type]


def test_replaced_or_missing_gradients_are_refused() -> None:
    layer = sft_layer(max_cache_depth=2)
    parameters = {name: nn.Parameter(tensor) for name, tensor in layer.lora.items()}
    for name, parameter in parameters.items():
        layer.wrapper.register_authoritative_optimizer_grad(name, parameter, layer.grads[name])
    backward_pass(layer, 1)
    kept = parameters["up_lora_a"].grad
    for grad in (None, torch.zeros_like(parameters["up_lora_a"])):
        parameters["up_lora_a"].grad = grad
        with pytest.raises(RuntimeError, match="all None or all the registered"):
            backward_pass(layer, 2)
    parameters["up_lora_a"].grad = kept
    assert layer.wrapper.validate_authoritative_optimizer_grad_state() == "open"
    with pytest.raises(InputError, match="a view of a gradient buffer"):
        layer.wrapper.register_authoritative_optimizer_grad("x", nn.Parameter(torch.ones(2)), torch.ones(2))


def test_changed_lora_counts_from_the_next_pass() -> None:
    layer = sft_layer()
    given = batch(6)
    before = layer.wrapper.forward(*given, save_for_backward=False)
    layer.lora["down_lora_b"].mul_(2)
    noticed = layer.wrapper.forward(*given, save_for_backward=False)
    assert not torch.equal(noticed, before)
    layer.lora["down_lora_b"].view(torch.int16).numpy()[:] = 0  # a write that torch does not see
    layer.wrapper.update_lora_weights()
    without = layer.wrapper.forward(*given, save_for_backward=False)
    assert not torch.equal(without, noticed)
    expected, _ = reference_pass(layer, *given, grad_output(6))
    assert error(without, expected) < CLOSE


def test_inference_with_lora_agrees_with_training() -> None:
    layer = sft_layer()
    given = batch(40)
    expected, _ = reference_pass(layer, *given, grad_output(40))
    layer.wrapper.submit_forward_inference(*given, 0)
    out = layer.wrapper.sync_forward_inference(0)
    assert error(out, expected) < CLOSE
    layer.lora["gate_lora_b"].mul_(-3)
    expected, _ = reference_pass(layer, *given, grad_output(40))
    layer.wrapper.submit_forward_inference(*given, None)
    assert error(layer.wrapper.sync_forward_inference(None), expected) < CLOSE
    with pytest.raises(RuntimeError, match="submit_forward_inference"):
        layer.wrapper.sync_forward_inference(0)


def test_skip_lora_computes_no_gradients_of_lora() -> None:
    layer = sft_layer(f"AMXBF16_SFT{SKIP_LORA}")
    hidden, ids, scores = batch(6)
    layer.wrapper.forward(hidden, ids, scores)
    grad_hidden, _ = layer.wrapper.backward(grad_output(6))
    _, grads = reference_pass(layer, hidden, ids, scores, grad_output(6))
    assert error(grad_hidden, grads["hidden"]) < CLOSE
    assert all(bool((grad == 7.0).all()) for grad in layer.grads.values())


def test_dropout_is_off_where_nothing_is_trained() -> None:
    dropped, plain = sft_layer(lora_dropout=0.5), sft_layer()
    given = batch(6)
    expected = plain.wrapper.forward(*given, save_for_backward=False)
    assert torch.equal(dropped.wrapper.forward(*given, save_for_backward=False), expected)
    dropped.wrapper.submit_forward_inference(*given, 0)
    assert error(dropped.wrapper.sync_forward_inference(0), expected) < CLOSE
    trained = dropped.wrapper.forward(*given)
    assert error(trained, expected) > 0.05


def test_backward_drops_what_forward_dropped() -> None:
    """Finite differences in the direction of the gradient, with the seed of the pass."""
    layer = sft_layer(lora_dropout=0.5)
    hidden, ids, scores = batch(6)
    grad_out = grad_output(6)
    torch.manual_seed(3)
    layer.wrapper.forward(hidden, ids, scores)
    grad = layer.wrapper.backward(grad_out)[0].float()
    step = 2.0 * grad / grad.norm()
    sides = []
    for sign in (1, -1):
        torch.manual_seed(3)
        sides.append(layer.wrapper.forward((hidden.float() + sign * step).bfloat16(), ids, scores).float())
        layer.wrapper.backward(grad_out)
    slope = float(((sides[0] - sides[1]) * grad_out.float()).sum() / 2)
    assert abs(slope / float((grad * step).sum()) - 1) < 0.05


class Experts(torch.autograd.Function):
    """A wrapper under autograd, as a program with its own function calls it: the first pass saves nothing, as under the
    policy cpu=recompute."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ids: Tensor, scores: Tensor, wrapper: Any, passes: list[Tensor]) -> Tensor:
        ctx.wrapper = wrapper
        ctx.save_for_backward(hidden[:0])  # unpacking it makes checkpointing run the recomputation before backward
        passes.append(wrapper.forward(hidden, ids, scores, save_for_backward=bool(passes)))
        return passes[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        grad_hidden, grad_weights = ctx.wrapper.backward(grads[0])
        return grad_hidden, None, grad_weights, None, None


def test_recomputation_of_a_checkpointed_block_drops_the_same() -> None:
    layer = sft_layer(lora_dropout=0.5)
    hidden, ids, scores = batch(6)
    passes: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        return Experts.apply(x * 1.0, ids, scores, layer.wrapper, passes)  # type: ignore[no-any-return, no-untyped-call]

    leaf = hidden.clone().requires_grad_()
    context_fn = get_activation_checkpoint_context_fn()
    checkpoint(block, leaf, use_reentrant=False, context_fn=context_fn).sum().backward()  # type: ignore[no-untyped-call]
    assert len(passes) == 2 and torch.equal(passes[0], passes[1])
    undropped = layer.wrapper.forward(hidden, ids, scores, save_for_backward=False)
    assert error(passes[0], undropped) > 0.05


def test_checkpoint_output_is_saved_once_and_poisoned_by_failure() -> None:
    wrapper = sft_wrapper()
    out = torch.ones(3, H)
    wrapper.validate_checkpoint_cache_empty()
    for use in (wrapper.get_checkpoint_output, wrapper.validate_checkpoint_output):
        with pytest.raises(RuntimeError, match="empty"):
            use()
    wrapper.cache_checkpoint_output(out)
    assert wrapper.checkpoint_cache_state.name == "READY" and torch.equal(wrapper.get_checkpoint_output(), out)
    wrapper.validate_checkpoint_output(out)
    with pytest.raises(RuntimeError, match="another batch"):
        wrapper.validate_checkpoint_output(out[:2])
    for use in (lambda: wrapper.cache_checkpoint_output(out), wrapper.validate_checkpoint_cache_empty):
        with pytest.raises(RuntimeError, match="ready"):
            use()
    wrapper.poison_checkpoint_output("a rank failed")
    with pytest.raises(RuntimeError, match="a rank failed"):
        wrapper.get_checkpoint_output()
    wrapper.clear_checkpoint_output()
    wrapper.validate_checkpoint_cache_empty()


@pytest.mark.parametrize(("method", "spec"), [("AMXBF16_SFT", "bf16"), ("INT8_SFT", "int8"), ("AMXINT4_SFT", "int4")])
def test_weights_come_from_files_with_a_map(method: str, spec: str, tmp_path: Path) -> None:
    """bf16 from a release, the others from kt-kernel's files, which the wrapper itself writes."""
    order = torch.arange(E).flip(0)
    tensors = dict(zip(("gate", "up", "down"), weights(), strict=True))
    if spec == "bf16":
        prefix = "model.layers.0.mlp.experts"
        single = {f"{prefix}.{e}.{role}_proj.weight": tensors[role][e].clone() for role in tensors for e in range(E)}
        save_file(single, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match="INT8_SFT"):
            sft_wrapper(method).save_backward_weights_from_tensors(*tensors.values(), None, str(tmp_path))
    else:
        sft_wrapper(method).save_backward_weights_from_tensors(*tensors.values(), None, str(tmp_path))
        assert any("_bwd_" in file.name for file in tmp_path.glob("_layer_0/_numa_0/*.kt"))
    wrapper = sft_wrapper(method, weight_path=str(tmp_path))
    wrapper.load_weights(order)
    assert {stored.partition(":")[0] for stored in wrapper.store.formats.values()} == {spec}
    expected = sft_wrapper(method)
    expected.load_weights_from_tensors(*tensors.values(), order)
    for role in tensors:
        assert torch.equal(wrapper.store.decode(role, 2), expected.store.decode(role, 2))
    if spec == "int8":
        read = load_experts_from_kt_weight_path(tmp_path, 0, E, H, INNER)
        up = encode_rows(tensors["up"], 8)
        assert isinstance(up, Encoded) and torch.equal(read.up, up.qweight)
        assert torch.equal(read.up_scale, up.scales)  # type: ignore[arg-type]


def test_native_formats_are_loaded_as_they_are_with_a_map() -> None:
    order = torch.arange(E).flip(0)
    by_role = dict(zip(("gate", "up", "down"), weights(), strict=True))
    fp8 = {role: encode(tensor, "fp8:128x128") for role, tensor in by_role.items()}
    parts = [list(encoded.qweight.view(torch.float8_e4m3fn)) for encoded in fp8.values()]
    scales = [list(encoded.scales) for encoded in fp8.values() if encoded.scales is not None]
    wrapper = sft_wrapper("AMXFP8_SFT")
    wrapper.load_block_fp8_weights(BlockFP8ExpertWeights(*parts, *scales), order)
    int4 = {role: encode(tensor, "int4:32") for role, tensor in by_role.items()}
    raw = sft_wrapper("RAWINT4_SFT")
    tensors = [encoded.qweight for encoded in int4.values()] + [encoded.scales for encoded in int4.values()]
    raw.load_rawint4_weights(RAWINT4ExpertWeights(*tensors), order)  # type: ignore[arg-type]
    mx = {role: encode(tensor, "mxfp4") for role, tensor in by_role.items()}
    exact = sft_wrapper("MXFP4_SFT")
    entries: dict[str, Any] = {role: list(encoded.qweight) for role, encoded in mx.items()}
    for role, encoded in mx.items():
        assert encoded.scales is not None
        powers = torch.exp2(encoded.scales.float() - 127).bfloat16()
        entries[f"{role}_scale"] = list(powers)
    exact.load_mxfp4_weights(entries, order)
    for given, method in ((wrapper, "AMXFP8_SFT"), (raw, "RAWINT4_SFT"), (exact, "MXFP4_SFT")):
        other = sft_wrapper(method)
        other.load_weights_from_tensors(*weights(), order)
        for role in ("gate", "up", "down"):
            assert torch.equal(given.store.decode(role, 1), other.store.decode(role, 1)), (method, role)
            assert error(given.store.decode(role, 1), by_role[role][E - 2]) < 0.2
    with pytest.raises(InputError, match="powers of two"):
        exact.load_mxfp4_weights(entries | {"up_scale": [torch.full((INNER, H // 32), 0.3)] * E})
    with pytest.raises(InputError, match="RAWINT4_SFT"):
        raw.load_block_fp8_weights(BlockFP8ExpertWeights(*parts, *scales))


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="train LoRA"):
        sft_wrapper(full_weight_grad=True)
    with pytest.raises(InputError, match="lora_rank"):
        sft_wrapper(lora_rank=0)
    with pytest.raises(InputError, match="lora_dropout"):
        sft_wrapper(lora_dropout=1.0)
    for method in ("AMXINT4_1_SFT", "BF16"):
        with pytest.raises(ValueError, match="AMXBF16_SFT"):
            sft_wrapper(method)
    wrapper = sft_wrapper()
    with pytest.raises(RuntimeError, match="load_weights"):
        wrapper.forward(*batch(2))
    with pytest.raises(RuntimeError, match="init_lora_weights"):
        wrapper.update_lora_weights()
    for call in (wrapper.init_full_weight_grad_buffers, wrapper.update_base_weights):
        with pytest.raises(KTAMXNotAvailableError, match="train LoRA"):
            call()
    layer = sft_layer()
    wrong = list(layer.lora.values())
    wrong[2] = wrong[2][:, :4]
    with pytest.raises(InputError, match=rf"up_lora_a.*\[{E}, {RANK}, {H}\]"):
        layer.wrapper.init_lora_weights(*wrong, *layer.grads.values())


def test_layer_without_lora_returns_the_other_gradients() -> None:
    wrapper = sft_wrapper()
    wrapper.load_weights_from_tensors(*weights())
    given = batch(5)
    zero = sft_layer()
    for name in ("gate_lora_b", "up_lora_b", "down_lora_b"):
        zero.lora[name].zero_()
    expected, grads = reference_pass(zero, *given, grad_output(5))
    assert error(wrapper.forward(*given), expected) < CLOSE
    assert error(wrapper.backward(grad_output(5))[0], grads["hidden"]) < CLOSE
