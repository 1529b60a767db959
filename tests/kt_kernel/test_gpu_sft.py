"""`kt_kernel.sft` with tensors on a GPU: the SFT wrapper by copies and under CUDA graphs, and a wrapped model."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from kt_kernel import sft
from kt_kernel.sft import KTConfig
from tests.support.kt_layers import H, batch, error
from tests.support.kt_sft_layers import CLOSE, SftLayer, reference_pass, sft_layer
from tests.support.tiny_models import build, tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a KTConfig writes OMP_NUM_THREADS."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def grad_output(count: int) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(9)).bfloat16()


def inference(layer: SftLayer, given: tuple[Tensor, ...], stream: int) -> Tensor:
    layer.wrapper.submit_forward_inference(*given, stream)
    return layer.wrapper.sync_forward_inference(stream)  # type: ignore[no-any-return]


@pytest.mark.parametrize("submitted", [False, True])
def test_passes_on_a_gpu_are_those_of_the_cpu(submitted: bool) -> None:
    layer = sft_layer()
    given, grad_out = batch(24), grad_output(24)
    out = layer.wrapper.forward(*given)
    grads = layer.wrapper.backward(grad_out)
    lora_grads = {name: grad.clone() for name, grad in layer.grads.items()}
    on_gpu = tuple(tensor.cuda() for tensor in given)
    if submitted:
        layer.wrapper.submit_forward(*on_gpu)
        gpu_out = layer.wrapper.sync_forward()
        layer.wrapper.submit_backward_async(grad_out.cuda())
        gpu_grads = layer.wrapper.sync_backward()
    else:
        gpu_out = layer.wrapper.forward(*on_gpu)
        gpu_grads = layer.wrapper.backward(grad_out.cuda())
    assert gpu_out.is_cuda and all(grad.is_cuda for grad in gpu_grads)
    assert torch.equal(gpu_out.cpu(), out)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(gpu_grads, grads, strict=True))
    assert all(torch.equal(layer.grads[name], grad) for name, grad in lora_grads.items())
    host = layer.wrapper.forward(*on_gpu, save_for_backward=False, output_device="cpu")
    assert torch.equal(host, out)


def test_inference_with_lora_is_captured_in_a_graph() -> None:
    layer = sft_layer()
    stream = torch.cuda.Stream()
    static = tuple(tensor.cuda() for tensor in batch(4))
    with torch.cuda.stream(stream):
        inference(layer, static, stream.cuda_stream)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = inference(layer, static, stream.cuda_stream)
    for seed in (1, 2, 3):
        given = batch(4, seed)
        for target, source in zip(static, given, strict=True):
            target.copy_(source)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected, _ = reference_pass(layer, *given, grad_output(4))
        assert error(captured.cpu(), expected) < CLOSE
    layer.lora["up_lora_b"].mul_(-2)
    layer.wrapper.update_lora_weights()
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = reference_pass(layer, *batch(4, 3), grad_output(4))
    assert error(captured.cpu(), expected) < CLOSE, "a replay uses changed LoRA"


@pytest.mark.parametrize("gpu_experts", [0, 3])
def test_wrapped_model_trains_with_everything_else_on_the_gpu(gpu_experts: int) -> None:
    losses: list[list[float]] = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model: Any = build("qwen3_moe")
        settings = KTConfig(kt_activation_policy={"cpu": "retain"}, kt_num_gpu_experts=gpu_experts)
        sft.wrap_moe_layers_with_kt_wrapper(model, settings)
        if device == "cuda":
            sft.move_non_experts_to_gpu(model, device="cuda:0")
            assert hasattr(model, "_kt_placement") == bool(gpu_experts)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
        torch.manual_seed(1)
        sft.kt_adapt_peft_lora(model)
        model.enable_input_require_grads()
        options = {"use_reentrant": False, "context_fn": sft.get_activation_checkpoint_context_fn()}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.train()
        inside = [parameter for parameter in model.parameters() if parameter.requires_grad]
        experts = sft.get_kt_lora_params(model)
        assert all(parameter.device.type == "cpu" for parameter in experts)
        optimizer = torch.optim.SGD([*inside, *experts], lr=0.5)
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=tokens().to(device), labels=tokens().to(device)).loss
            loss.backward()
            optimizer.step()
            sft.update_kt_lora_pointers(model)
            seen.append(float(loss))
        assert all(parameter.grad is not None for parameter in experts)
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1][-1] < losses[1][0]
