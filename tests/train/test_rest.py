"""Training with linear layers outside of the experts in codes: what is computed is what is served and merged, and the
weights never exist as numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from ktransformers.adapters.manifest import read_manifest
from ktransformers.adapters.merge_packed import merge_packed
from ktransformers.checkpoint.encoder import encode
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.weight import QuantizedWeight
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.flags import parse
from ktransformers.serve.scheduler.forward import Chunk, make_forward
from ktransformers.serve.target import as_trained, resolve_target
from tests.support.coded_models import codes_of, with_numbers
from tests.support.memory import resident
from tests.support.packing import as_fp8
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER, recipe
from tests.support.training_runs import run

TOKENS = torch.tensor([[(7 * at + 3) % 90 for at in range(24)]])


@pytest.fixture(autouse=True)
def _small_weights_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 12)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4}
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, **sizes), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return as_fp8(folder)


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights="gaussian")
    peft = get_peft_model(model, config)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(len(name))
            parameter.data.normal_(std=0.05)
    return peft


def test_gradients_are_those_of_the_decoded_model(fp8: Path) -> None:
    """Through every coded layer of the model, to the LoRA factors of the first."""

    def gradients(model: Any) -> dict[str, Tensor]:
        peft = adapted(model)
        peft(TOKENS, labels=TOKENS).loss.backward()
        return {name: one.grad for name, one in peft.named_parameters() if one.grad is not None}

    codes = load_model(fp8, dtype=torch.float32, rest="keep")
    assert len(codes_of(codes)) == 8
    actual = gradients(codes)
    expected = gradients(with_numbers(load_model(fp8, dtype=torch.float32, rest="keep")))
    assert actual.keys() == expected.keys() and len(actual) == 16
    for name, grad in actual.items():
        assert float((grad - expected[name]).norm()) <= 1e-2 * float(expected[name].norm()), name


def test_served_rows_have_the_bits_of_training(fp8: Path) -> None:
    """A linear layer computes the same bits with gradients, without them, in a batch and alone."""
    model = load_model(fp8, dtype=torch.float32, rest="keep")
    layer = model.get_submodule("model.layers.1.self_attn.o_proj")
    x = torch.randn(24, 128)
    trained = layer(x.clone().requires_grad_(True)).detach()
    with torch.inference_mode():
        served = layer(x)
        alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(trained, served)
    torch.testing.assert_close(alone, served, rtol=0, atol=1e-5)  # one row of fp8 is added in another order
    with torch.no_grad():
        expected = model(TOKENS).logits[0, -1]
    forward = make_forward(model)
    (answer,) = forward.run([Chunk(KVSlot.alone(64), TOKENS[0].tolist(), 0, None)])
    assert float((answer.logits - expected).norm() / expected.norm()) < 1e-3


def test_a_run_keeps_the_bits_and_says_so(fp8: Path, tmp_path: Path) -> None:
    """`rest: keep` is the default; a merged model has W + BA of the unrounded numbers, rounded once."""
    keys = recipe(fp8, tmp_path / "run", max_steps=2, lora_target="q_proj,o_proj")
    run(keys)
    assert read_manifest(tmp_path / "run")["rest"] == "keep"
    target = resolve_target(str(tmp_path / "run"))
    assert target.rest == "keep" and as_trained(parse(["M"]), target).rest == "keep"
    merge_packed(fp8, tmp_path / "run", tmp_path / "merged", unchecked=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(tmp_path / "run" / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name.removesuffix('.weight')}.lora_{one}.weight"] for one in "AB")
    released = codes_of(load_model(fp8, dtype=torch.float32, rest="keep"))[name] + 0
    expected = ((b @ a).mul_(2.0) + released).bfloat16()
    merged = load_file(tmp_path / "merged" / "model-00001-of-00001.safetensors")[name]
    assert torch.equal(merged, expected)


def test_a_run_in_few_bits_is_served_in_them(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    keys = recipe(model_of("qwen3_moe"), tmp_path / "run", max_steps=2, rest="int8", lora_target="q_proj")
    run(keys)
    assert read_manifest(tmp_path / "run")["rest"] == "int8"
    target = resolve_target(str(tmp_path / "run"))
    assert as_trained(parse(["M"]), target).rest == "int8"
    assert as_trained(parse(["M", "--rest", "bf16"]), target).rest == "bf16"
    with pytest.raises(InputError, match="rest: given iq2_xs"):
        run(keys | {"rest": "iq2_xs", "output_dir": str(tmp_path / "other")})
    with pytest.raises(InputError, match="int9"):
        run(keys | {"rest": "int9", "output_dir": str(tmp_path / "other")})


def test_weights_never_exist_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a matrix of 32 million weights, 16 MB in four bits and 128 in float32."""
    monkeypatch.setattr(quantized_weight, "PANEL", 1 << 20)
    spec, rows, columns = "int4:32", 8192, 4096
    matrix = encode(torch.randn(256, columns), spec).packable
    codes = tuple(None if part is None else part.repeat_interleave(rows // 256, 1) for part in matrix)
    from ktransformers import _core
    from ktransformers.ground.pool import default_pool

    core = _core.CodedLinear(default_pool(), rows, columns, spec)
    core.pack(codes)
    layer = nn.Linear(columns, 8, bias=False)
    layer.weight = nn.Parameter(
        quantized_weight.weight_from_core(core, spec, (rows, columns), torch.float32), requires_grad=False
    )
    x = torch.randn(4, columns, requires_grad=True)
    before = resident()
    peaks: list[int] = []
    decoded = QuantizedWeight.decoded

    def recorded(self: QuantizedWeight, first: int, last: int) -> Tensor:
        panel = decoded(self, first, last)
        peaks.append(resident() - before)
        assert panel.numel() <= 1 << 20, "the weight was decoded whole"
        return panel

    monkeypatch.setattr(QuantizedWeight, "decoded", recorded)
    layer(x).square().sum().backward()
    assert len(peaks) == 32 and max(peaks) < 48 << 20
    assert x.grad is not None
