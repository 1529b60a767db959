"""bf16 weights that are multiplied in float32: products and gradients against float64, models against their float32
copies, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ktransformers.ground import system
from ktransformers.ground.errors import InputError, KTError
from ktransformers.modeling.linear import linears
from ktransformers.nn import load_model
from ktransformers.quantized import dense_layers, widened
from ktransformers.quantized.dense_layers import check_products
from ktransformers.quantized.widened import WidenedWeight
from tests.support.peft_models import adapt, gradients
from tests.support.tiny_models import build, save, tokens

OUTPUTS, COLUMNS = 300, 96
LARGE = {"hidden_size": 512, "vocab_size": 512}  # of a tiny model, so that its matrices are large enough


def weight_of(dtype: torch.dtype, outputs: int = OUTPUTS, columns: int = COLUMNS) -> WidenedWeight:
    generator = torch.Generator().manual_seed(1)
    return WidenedWeight(torch.randn(outputs, columns, generator=generator).bfloat16(), dtype)


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "PANEL", 64 * COLUMNS)  # several panels, the last one short


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore:.*bf16.*")
@pytest.mark.parametrize("rows", [1, 5, 12, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_match_float64(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    weight, bias = weight_of(dtype), torch.randn(OUTPUTS, dtype=dtype)
    x, grad = torch.randn(2, rows, COLUMNS).to(dtype).requires_grad_(), torch.randn(2, rows, OUTPUTS).to(dtype)
    out = F.linear(x, nn.Parameter(weight, requires_grad=False), bias=bias)
    out.backward(grad)
    assert out.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    exact = x.detach().double() @ weight.stored.double().t() + bias.double()
    exact_grad = grad.double() @ weight.stored.double()
    stock = x.detach().clone().requires_grad_()
    stock_out = F.linear(stock, weight.stored.to(dtype), bias)
    stock_out.backward(grad)
    assert stock.grad is not None
    limit = 1e-6 if dtype == torch.float32 else 2.5e-3
    for actual, of_torch, expected in ((out, stock_out, exact), (x.grad, stock.grad, exact_grad)):
        assert error(actual, expected) < limit
        assert error(actual, expected) < 1.5 * error(of_torch, expected) + 1e-7, "less exact than torch"


def test_trained_weights_get_their_gradient() -> None:
    weight = nn.Parameter(weight_of(torch.float32), requires_grad=True)
    x = torch.randn(7, COLUMNS)
    F.linear(x, weight).sum().backward()
    assert weight.grad is not None and torch.allclose(weight.grad, x.sum(0).expand(OUTPUTS, -1), atol=1e-4)


def test_views_multiply_as_slices_of_a_float32_weight() -> None:
    """The operations of TRL's loss over the vocabulary, part by part."""
    torch.manual_seed(0)
    weight, x = weight_of(torch.float32), torch.randn(11, COLUMNS)
    plain = weight.stored.float()
    part, whole = weight[50:170].to(torch.float32), torch.empty(11, 200)
    assert isinstance(part, WidenedWeight) and isinstance(part.t(), WidenedWeight)
    tile = torch.mm(x, part.t(), out=whole[:, :120])
    torch.testing.assert_close(tile, x @ plain[50:170].t())
    assert tile.data_ptr() == whole.data_ptr()
    sums = torch.ones(11, COLUMNS)
    torch.testing.assert_close(sums.addmm_(tile, part.float()), 1 + tile @ plain[50:170], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(torch.addmm(torch.ones(11, 120), x, part.t(), beta=2), 2 + tile)
    ids = torch.tensor([[3, 299], [0, 3]])
    assert torch.equal(F.embedding(ids, weight), plain[ids])
    assert torch.equal(weight * 2, plain * 2) and weight.dtype == torch.float32


def test_loss_over_the_vocabulary_is_that_of_float32_weights() -> None:
    from trl.kernels import ChunkedLogProbFunction  # type: ignore[attr-defined]

    torch.manual_seed(0)
    weight, labels = weight_of(torch.float32), torch.randint(0, OUTPUTS, (9,))
    results = []
    for head in (weight, weight.stored.float()):
        x = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(2)).requires_grad_()
        losses = ChunkedLogProbFunction.apply(x, head, None, labels, 1.0, 128, None, 1.0, ("log_probs",))[0]
        losses.sum().backward()
        results.append((losses.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_writing_is_refused_and_copies_are_ordinary() -> None:
    layer = nn.Linear(COLUMNS, OUTPUTS, bias=False)
    layer.weight = nn.Parameter(weight_of(torch.float32), requires_grad=False)
    with pytest.raises(InputError, match="a deep copy of the module"):
        layer.weight.data += 1
    with pytest.raises(InputError, match="writes into it"):
        torch.add(torch.ones(OUTPUTS, COLUMNS), 1, out=layer.weight.data)
    twin = copy.deepcopy(layer)
    assert type(twin.weight) is nn.Parameter and torch.equal(twin.weight, weight_of(torch.float32).stored.float())
    with pytest.raises(InputError, match="assignment"):
        layer.weight.data = torch.zeros(OUTPUTS, COLUMNS)


def test_saved_weight_is_an_ordinary_tensor(tmp_path: Path) -> None:
    torch.save({"weight": weight_of(torch.float32)}, tmp_path / "weights.pt")
    read = torch.load(tmp_path / "weights.pt")["weight"]
    assert type(read) is Tensor and torch.equal(read, weight_of(torch.float32).stored.float())


def test_module_in_another_dtype_computes_in_that() -> None:
    layer = nn.Linear(COLUMNS, OUTPUTS)
    layer.weight = nn.Parameter(weight_of(torch.float32), requires_grad=False)
    x = torch.randn(3, COLUMNS, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x)
    layer.to(torch.float64)
    exact = F.linear(x, weight_of(torch.float32).stored.double(), layer.bias)
    assert layer.weight.dtype == torch.float64 and torch.allclose(layer(x), exact, rtol=1e-12, atol=1e-12)
    out = layer.to(torch.bfloat16)(x.bfloat16())
    assert out.dtype == layer.weight.dtype == torch.bfloat16
    assert layer.to("meta").weight.is_meta


def test_wrong_product_is_refused_by_the_name_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    check_products("q_proj.weight", weight_of(torch.float32))
    check_products("q_proj.weight", weight_of(torch.bfloat16))
    for name in ("linear_product", "product"):
        right = getattr(dense_layers, name)
        with monkeypatch.context() as patch:
            patch.setattr(dense_layers, name, lambda x, stored, right=right: right(x, stored) * 1.01)
            with pytest.raises(KTError, match=r"q_proj\.weight: .* differs from torch's by 0.0\d"):
                check_products("q_proj.weight", weight_of(torch.float32))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(build("qwen3_moe", **LARGE).bfloat16(), folder)
    return folder


def widened_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, WidenedWeight)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_model_has_one_copy_of_its_weights_and_the_same_results(
    dtype: torch.dtype, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[str, Any] = {}
    for word in ("float32", "widened"):
        monkeypatch.setattr(system, "forced_dense_products", word)
        models[word] = load_model(directory, dtype=dtype)
    got, want = models["widened"], models["float32"]
    assert not widened_names(want) and {name.split(".")[-2] for name in widened_names(got)} >= {"q_proj", "lm_head"}
    assert got.dtype == dtype and all(p.dtype == dtype for p in got.parameters() if p.is_floating_point())
    exact = load_model(directory, dtype=torch.float32)
    with torch.no_grad():
        reference, logits = exact(tokens()).logits, got(tokens()).logits
        of_torch = want(tokens()).logits
    assert error(logits, reference.double()) < max(1e-6, 1.1 * error(of_torch, reference.double()))
    grads = []
    for model in (want, got):
        tuned = adapt(model, target_modules=["q_proj", "o_proj"])
        grads.append(gradients(tuned))
    for name, expected in grads[0].items():
        assert expected.norm() > 0
        assert error(grads[1][name], expected.double()) < (1e-4 if dtype == torch.float32 else 0.1), name


def test_decoding_uses_the_core_with_float32_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "widened")
    model = load_model(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(tokens(1, 4)).logits
        assert linears().apply(model) == len(widened_names(model) - {"model.embed_tokens.weight"})
        for _ in range(2):  # the first pass finds layers with the same input
            torch.testing.assert_close(model(tokens(1, 4)).logits, expected, rtol=1e-4, atol=1e-5)


def test_float32_checkpoint_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "widened")
    save(build("qwen3_moe", **LARGE), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    assert not widened_names(model)
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight)


def test_other_defaults_of_torch_do_not_matter(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "widened")
    model = load_model(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens()).logits
        torch.set_default_dtype(torch.bfloat16)
        try:
            check_products("weight", weight_of(torch.float32))
            assert torch.equal(model(tokens()).logits, expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_tied_head_and_embedding_stay_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", "widened")
    save(build("qwen3_moe", tie_word_embeddings=True, **LARGE).bfloat16(), tmp_path)
    model: Any = load_model(tmp_path, dtype=torch.float32)
    assert isinstance(model.lm_head.weight, WidenedWeight) and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(("ratio", "products"), [(0.4, "bfloat16"), (1.7, "widened"), (60.0, "widened")])
def test_arithmetic_follows_the_measurement(ratio: float, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_torch_bf16_time_ratio", lambda: ratio)
    assert system.dense_products() == products
    assert system.bf16_is_fast("cpu") is (products == "bfloat16") and system.bf16_is_fast("cuda")


def test_measurement_is_repeatable() -> None:
    """Whatever else runs on the machine; near the limit either choice is right."""
    ratios = []
    for _ in range(3):
        system._torch_bf16_time_ratio.cache_clear()
        ratios.append(system._torch_bf16_time_ratio())
    choices = {ratio <= system.MAX_BF16_RATIO for ratio in ratios}
    assert len(choices) == 1 or all(0.5 < ratio / system.MAX_BF16_RATIO < 2 for ratio in ratios), ratios


def test_measurement_where_cpu_time_has_coarse_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.time, "thread_time", lambda: 0.01)
    system._torch_bf16_time_ratio.cache_clear()
    assert system._torch_bf16_time_ratio() > 0
    system._torch_bf16_time_ratio.cache_clear()
