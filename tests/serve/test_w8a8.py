"""`kt serve --kt-w8a8`: an int8 or int4 model is served with 8-bit activations and reports it; other formats and
training are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ktransformers.checkpoint.encoder import encode
from ktransformers.cli.main import app
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.w8a8 import use_w8a8
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.quantized import weight as quantized_weight
from ktransformers.serve.flags import parse
from ktransformers.serve.loading import open_service
from ktransformers.serve.placement import options_of
from ktransformers.serve.target import resolve_target
from ktransformers.train.keys import UNSUPPORTED_KEYS

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


def line(directory: Path, *words: str) -> list[str]:
    return [str(directory), "--device", "cpu", "--max-total-tokens", "256", *words]


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_served_model_reports_w8a8(format: str, model_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / format
    done = CliRunner().invoke(app, ["quant", str(model_directory), "--format", format, "-o", str(out)])
    assert done.exit_code == 0, done.output
    lines = list[str]()
    service = open_service(parse(line(out, "--kt-w8a8")), resolve_target(str(out)), lines.append)
    assert service.approximations == {"kt_w8a8": True}
    assert any("8-bit activations" in one and "approximation" in one for one in lines)
    modules: dict[str, Any] = dict(expert_modules(service.engine.forward.model))
    layers = [module.kt.store for module in modules.values()]
    assert layers and all(store.w8a8 for store in layers)
    model, tokens = load_model(out), torch.arange(80).view(1, -1) % 50
    with torch.no_grad():
        exact, exact_single = model(tokens).logits, model(tokens[:, :1]).logits
        assert use_w8a8(model) == (len(layers), 0)
        rounded, single = model(tokens).logits, model(tokens[:, :1]).logits
    off = (rounded - exact).float().norm() / exact.float().norm()
    assert 0 < off < 0.1
    assert not torch.equal(single, exact_single), "one token is not rounded"
    with pytest.raises(InputError, match="gradients"):
        model(inputs_embeds=torch.randn(1, 4, model.config.hidden_size, dtype=model.dtype, requires_grad=True))
    assert use_w8a8(model, False) == (len(layers), 0)


def test_a_coded_embedding_is_no_linear_layer(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is only looked up."""
    out = load_model(model_directory, formats="int8")
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 10)
    count = quantized_weight.quantize_linears(out, "int8")
    assert count
    embedding: Any = out.get_input_embeddings()
    codes = encode(embedding.weight.detach().float(), "int8")
    embedding.weight = torch.nn.Parameter(quantized_weight.quantized_weight(codes, out.dtype), requires_grad=False)
    assert use_w8a8(out)[1] == count and not embedding.weight.impl.linear.w8a8


def test_w8a8_refuses_other_formats_by_name(model_directory: Path) -> None:
    with pytest.raises(InputError, match=r"w8a8.*experts.*bf16.*kt quant --format int8"):
        open_service(parse(line(model_directory, "--kt-w8a8")), resolve_target(str(model_directory)), print)
    with pytest.raises(InputError, match="without packed experts"):
        use_w8a8(torch.nn.Linear(2, 2))


def test_w8a8_is_accepted_in_inference_yaml_only(model_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "infer.yaml"
    file.write_text(f"model_name_or_path: {model_directory}\nkt_config:\n  kt_w8a8: true\n")
    assert options_of(parse([str(file)]), resolve_target(str(file))).kt_w8a8
    assert not options_of(parse([str(model_directory)]), resolve_target(str(model_directory))).kt_w8a8
    assert "training" in UNSUPPORTED_KEYS["kt_w8a8"].remedy
