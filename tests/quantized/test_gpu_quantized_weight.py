"""Linear layers in codes on a GPU: a quantised release keeps its bits there, with the numbers of the CPU's codes;
products, gradients, LoRA and CUDA graphs are those of the decoded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.placeholder import Placeholder
from ktransformers.nn import load_model
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.host_rows import HostRows
from ktransformers.quantized.weight import GpuPacked, QuantizedWeight
from tests.support.coded_models import codes_of, with_numbers
from tests.support.packing import as_fp8
from tests.support.quantised_models import release
from tests.support.tiny_models import build, save

cuda = pytest.mark.gpu
TOKENS = torch.tensor([[(7 * at + 3) % 90 for at in range(24)]])


@pytest.fixture(autouse=True)
def _small_weights_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 12)
    monkeypatch.setattr("ktransformers.modeling.load.NUMBERS_SHARE", 0.0)  # also where numbers would fit


def fp8(folder: Path) -> Path:
    sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4}
    save(build("qwen3_moe", vocab_size=640, **sizes), folder)
    return as_fp8(folder)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@cuda
@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq"])
def test_a_release_keeps_its_bits(kind: str, tmp_path: Path) -> None:
    release(tmp_path, kind)
    on_cpu = load_model(tmp_path, dtype=torch.bfloat16, rest="keep", widen=False)
    model = load_model(tmp_path, dtype=torch.bfloat16, rest="keep", device="cuda:0")
    kept = codes_of(model)
    table = kept.pop("model.embed_tokens.weight")
    assert isinstance(table.impl, HostRows) and table.impl.rows.is_pinned() and table.device.type == "cuda"
    assert all(one.device.type == "cuda" and isinstance(one.impl, GpuPacked) for one in kept.values())
    assert any("kv_b_proj" in name for name in kept), "absorbed matrices have codes on a GPU"
    others = [one for one in model.parameters() if not isinstance(one, Placeholder)]
    assert {parameter.device.type for parameter in others} == {"cuda"}
    for name, one in codes_of(on_cpu).items():
        assert torch.equal(kept[name].decoded(0, one.shape[0]).cpu(), one.decoded(0, one.shape[0])), name
    with torch.no_grad():
        actual = model(TOKENS.cuda()).logits
        expected = with_numbers(model)(TOKENS.cuda()).logits
    assert relative(actual, expected) < 2e-2


@cuda
def test_formats_are_encoded_on_the_way(tmp_path: Path) -> None:
    save(build("qwen3_moe", vocab_size=640, hidden_size=128, head_dim=32, num_attention_heads=4), tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, rest="int4:32", device="cuda:0")
    weight = codes_of(model)["model.layers.0.self_attn.q_proj.weight"]
    stored = load_model(tmp_path, dtype=torch.bfloat16, widen=False).get_parameter(
        "model.layers.0.self_attn.q_proj.weight"
    )
    expected = quantized_weight.quantized_weight(encode(stored.detach(), "int4:32"), torch.bfloat16)
    assert torch.equal(weight.decoded(0, weight.shape[0]).cpu(), expected.decoded(0, weight.shape[0]))
    assert "lm_head.weight" in codes_of(model)


@cuda
def test_gradients_of_lora_are_those_of_the_decoded_model(tmp_path: Path) -> None:
    def gradients(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights="gaussian"))
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
        peft(TOKENS.cuda(), labels=TOKENS.cuda()).loss.backward()
        return {name: one.grad for name, one in peft.named_parameters() if one.grad is not None}

    folder = fp8(tmp_path)
    actual, expected = (
        gradients(change(load_model(folder, dtype=torch.bfloat16, rest="keep", device="cuda:0")))
        for change in (lambda model: model, with_numbers)
    )
    assert actual.keys() == expected.keys() and len(actual) == 16
    for name, grad in actual.items():
        assert relative(grad, expected[name]) < 5e-2, name


@cuda
@pytest.mark.parametrize("spec", ["int8", "fp8:128x128", "q8_0"])
def test_embeddings_are_looked_up_in_a_graph(spec: str) -> None:
    torch.manual_seed(0)
    weight = quantized_weight.quantized_weight(encode(torch.randn(300, 256), spec), torch.bfloat16)
    moved, ids = weight.to("cuda:0"), torch.tensor([3, 299, 64, 3], device="cuda:0")
    rows = nn.functional.embedding(ids, moved)
    assert torch.equal(rows.cpu(), nn.functional.embedding(ids.cpu(), weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nn.functional.embedding(ids, moved)
    ids.copy_(torch.tensor([1, 2, 150, 31]))
    graph.replay()
    assert torch.equal(out.cpu(), nn.functional.embedding(ids.cpu(), weight))


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_embedding_in_host_memory_is_looked_up_in_a_graph(dtype: torch.dtype) -> None:
    model = build("qwen3_moe", vocab_size=640).to(dtype)
    table = model.get_input_embeddings().weight.detach().clone()
    assert quantized_weight.keep_embedding_on_host(model)
    model.get_input_embeddings().to("cuda:0")
    embedding, ids = model.get_input_embeddings(), torch.tensor([[3, 639, 64, 3]], device="cuda:0")
    assert torch.equal(embedding(ids).cpu(), table[ids.cpu()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = embedding(ids)
    ids.copy_(torch.tensor([[1, 2, 150, 31]]))
    graph.replay()
    assert torch.equal(out.cpu(), table[ids.cpu()])
    embedding.weight.impl.check(embedding.weight)


@cuda
def test_codes_move_between_devices() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 96, bias=False).bfloat16()
    quantized_weight.quantize_linear("layer", layer, "int4:32")
    numbers = layer.weight.decoded(0, 96)  # type: ignore[attr-defined]
    moved = layer.to("cuda:0")
    assert moved.weight.device.type == "cuda" and isinstance(moved.weight, QuantizedWeight)
    back = moved.to("cpu").weight
    assert isinstance(back, QuantizedWeight) and torch.equal(back.decoded(0, 96), numbers)
