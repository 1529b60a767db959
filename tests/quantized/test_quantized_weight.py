"""Linear layers whose weights are codes: products and gradients against decoded weights, what PEFT and torch see, and
which layers of a model are encoded."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.checkpoint.encoded import GGUF_BLOCKS, Encoded, decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.mapped import read_only_tensor
from ktransformers.checkpoint.matrix import SPELLED, TensorRef, recognise
from ktransformers.checkpoint.quantisation import accept
from ktransformers.ground.errors import InputError
from ktransformers.ground.pool import default_pool
from ktransformers.modeling.linear import linears
from ktransformers.nn import load_model
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.gpu.head_products import HeadRows
from ktransformers.quantized.host_rows import HostRows
from ktransformers.quantized.weight import QuantizedWeight, describe_quantized, quantize_linears
from tests.support.gguf_blocks import random_blocks
from tests.support.quantised_models import release
from tests.support.releases import gptq_desc_act
from tests.support.tiny_models import build, save

SPECS = ["int8", "int4:32", "int4:128", "fp8:128x128", "fp8:row", "mxfp4", "nvfp4", "mxfp8"]


class Layers(nn.Module):
    def __init__(self, rows: int = 200, columns: int = 256) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows)
        self.small = nn.Linear(columns, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x))


def coded(spec: str, dtype: torch.dtype = torch.float32, rows: int = 200) -> tuple[Any, Tensor]:
    """A layer, and its weight as the codes have it."""
    torch.manual_seed(0)
    layers = Layers(rows).to(dtype)
    exact = encode(layers.linear.weight.detach(), spec)
    assert quantize_linears(layers, spec) == 1 and isinstance(layers.linear.weight, QuantizedWeight)
    assert not isinstance(layers.small.weight, QuantizedWeight)
    assert describe_quantized(layers).startswith(f"1 quantized dense linear layers ({spec}")
    numbers = decode(exact)[0]
    return layers, numbers if dtype == torch.float32 else numbers.bfloat16()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_match_decoded_weights(spec: str, dtype: torch.dtype) -> None:
    """Few rows and many, outputs that fill no block. In float32 weights are not rounded, and activations have 16 bits
    beside codes of integers; in bf16 weights are rounded in products of many rows."""
    layers, weight = coded(spec, dtype)
    for rows in (1, 2, 7, 33, 130, 600):
        x = torch.randn(rows, 256).to(dtype)
        with torch.no_grad():
            actual = layers(x)
        expected = x.double() @ weight.double().T + layers.linear.bias.detach().double()
        assert actual.dtype == dtype and actual.shape == (rows, 200)
        limit = 1e-4 if dtype == torch.float32 else 6e-3
        assert float((actual.double() - expected).norm() / expected.norm()) < limit
    assert layers(torch.empty(0, 256, dtype=dtype)).shape == (0, 200)


@pytest.mark.parametrize("spec", ["int8", "int4:32", "fp8:128x128"])
def test_every_variant_multiplies(isa: str, spec: str) -> None:
    torch.manual_seed(0)
    matrix = encode(torch.randn(70, 2304), spec)  # K in several pieces where tiles are decoded
    core = _core.CodedLinear(default_pool(), 70, 2304, spec, isa)
    core.pack(matrix.packable)
    rounded, weight = torch.empty(70, 2304, dtype=torch.bfloat16), torch.empty(70, 2304)
    core.decode(0, rounded)
    core.decode(0, weight)
    assert torch.equal(weight, decode(matrix)[0]) and torch.equal(rounded, weight.bfloat16())
    for rows in (1, 20, 40):
        x, out = torch.randn(rows, 2304), torch.full((rows, 70), torch.nan)
        core.forward(x, out)
        expected = x.double() @ weight.double().T
        assert float((out.double() - expected).norm() / expected.norm()) < 6e-3


@pytest.mark.parametrize("spec", SPECS)
def test_a_row_has_the_same_bits_in_every_batch(spec: str) -> None:
    """In float32 a token of a prompt is computed as it is alone; the FP8 kernel for one row adds in another order."""
    layers, _ = coded(spec)
    x, eight_bit_floats = torch.randn(70, 256), spec.startswith(("fp8", "mxfp8"))
    with torch.no_grad():
        together = layers(x)
        for row in (0, 5, 17, 69):
            alone = layers(x[row : row + 1])[0]
            torch.testing.assert_close(alone, together[row], rtol=0, atol=1e-5 if eight_bit_floats else 0)


def test_gradient_of_the_input() -> None:
    layers, weight = coded("int8")
    x = torch.randn(9, 256, requires_grad=True)
    grad = torch.randn(9, 200)
    layers(x).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ weight, rtol=1e-5, atol=1e-5)
    assert layers.linear.weight.grad is None
    none = torch.empty(2, 0, 256, requires_grad=True)
    layers(none).sum().backward()
    assert none.grad is not None and none.grad.shape == (2, 0, 256)


def test_decoded_rows_are_those_of_the_whole_matrix() -> None:
    layers, weight = coded("int4:32", rows=300)
    core = layers.linear.weight.impl.linear
    for first, count in ((64, 100), (10, 7), (299, 1)):
        part = torch.empty(count, 256)
        core.decode(first, part)
        assert torch.equal(part, weight[first : first + count])
    rows = torch.tensor([299, 0, 31, 32, 0, 150])
    for dtype in (torch.float32, torch.bfloat16):
        gathered = torch.empty(6, 256, dtype=dtype)
        core.gather(rows, gathered)
        assert torch.equal(gathered, weight[rows].to(dtype))
    with pytest.raises(ValueError, match="out"):
        core.decode(0, torch.empty(10, 255, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="rows"):
        core.gather(torch.tensor([300]), torch.empty(1, 256))


def test_blocks_of_another_are_used_in_place() -> None:
    layers, weight = coded("int4:32", rows=300)
    core = layers.linear.weight.impl.linear
    blocks = read_only_tensor(core.memory())
    other = _core.CodedLinear(default_pool(), 300, 256, "int4:32")
    with pytest.raises(ValueError, match="blocks"):
        other.adopt(blocks[:-64])
    other.adopt(blocks)
    assert other.checksum() == core.checksum()
    x = torch.randn(3, 256)
    outs = torch.empty(3, 300), torch.empty(3, 300)
    core.forward(x, outs[0])
    other.forward(x, outs[1])
    assert torch.equal(*outs)
    with pytest.raises(RuntimeError, match="memory of another"):
        matrix = encode(weight, "int4:32")
        other.pack(matrix.packable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_decode_the_rows_that_they_look_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = encode(torch.randn(500, 256), "q8_0")
    embedding = nn.Embedding(500, 256, padding_idx=0)
    embedding.weight = nn.Parameter(quantized_weight.quantized_weight(matrix, dtype), requires_grad=False)
    ids = torch.tensor([[3, 499, 3], [31, 32, 0]])
    assert torch.equal(embedding(ids), decode(matrix)[0].to(dtype)[ids])
    assert embedding(torch.empty(0, dtype=torch.int64)).shape == (0, 256)
    embedding.requires_grad_(True)
    with pytest.raises(InputError, match="have no gradient"):
        embedding(ids)


@pytest.mark.parametrize("spec", GGUF_BLOCKS)
def test_every_type_of_gguf(spec: str) -> None:
    """K and IQ types too: numbers as the `gguf` package decodes them, products of a few rows and of more."""
    pytest.importorskip("gguf")
    codes = torch.from_numpy(random_blocks(spec, (1, 70), 512, np.random.default_rng(0)))
    matrix = Encoded(spec, codes, None, columns=512)
    weight, numbers = quantized_weight.quantized_weight(matrix, torch.float32), decode(matrix)[0]
    assert torch.equal(weight + 0, numbers)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 512)
        expected = x.double() @ numbers.double().T
        assert float((F.linear(x, weight).double() - expected).norm() / expected.norm()) < 2e-4


def test_columns_in_another_order() -> None:
    """GPTQ with desc_act: products, gradients and rows are those of the matrix."""
    parts, value = gptq_desc_act(96, 256, 3)
    refs = {ending: TensorRef(ending, SPELLED[part.dtype], tuple(part.shape)) for ending, part in parts.items()}
    words = {"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": False}
    matrix = recognise(refs, 96, 256, accept("config.json", words)).build(lambda name, e8m0=False: parts[name])
    assert isinstance(matrix, Encoded) and matrix.order is not None
    weight = quantized_weight.quantized_weight(matrix, torch.float32)
    assert torch.equal(weight + 0, value) and torch.equal(F.embedding(torch.tensor([5]), weight), value[5:6])
    x = torch.randn(7, 256, requires_grad=True)
    out = F.linear(x, weight)
    torch.testing.assert_close(out, x @ value.T, rtol=1e-3, atol=1e-3)
    grad = torch.randn(7, 96)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ value, rtol=1e-5, atol=1e-5)


def test_torch_sees_an_ordinary_weight() -> None:
    layers, weight = coded("int8")
    held = layers.linear.weight
    assert held.shape == (200, 256) and held.dtype == torch.float32 and not held.requires_grad
    assert torch.equal(held + 0, weight.float())
    assert isinstance(held.to(torch.bfloat16), QuantizedWeight) and held.detach().spec == "int8"
    torch.testing.assert_close(F.linear(torch.eye(256), held).T, weight.float(), rtol=1e-2, atol=1e-4)
    other: Any = torch.zeros(200, 256)
    for write in (lambda: held.mul_(2), lambda: torch.mul(other, 2, out=held), lambda: setattr(held, "data", other)):
        with pytest.raises(InputError, match="it is frozen, stored in int8"):
            write()
    assert torch.equal(held + 0, weight.float())


def test_parts_in_inference_mode() -> None:
    """Stock modules may slice or transpose a weight instead of calling the layer."""
    layers, weight = coded("int8")
    held = layers.linear.weight
    with torch.inference_mode():
        assert torch.equal(held[32:40], weight[32:40].float()) and torch.equal(held.t(), weight.float().t())
        assert isinstance(held.detach(), QuantizedWeight) and isinstance(held.data, QuantizedWeight)


def test_other_dtypes() -> None:
    """Those that the kernels do not take are multiplied by torch, with a copy of the weight."""
    layers, weight = coded("int8")
    x = torch.randn(3, 256)
    for dtype in (torch.float16, torch.float64):
        layers.to(dtype)
        assert isinstance(layers.linear.weight, QuantizedWeight) and layers.linear.weight.dtype == dtype
        expected = x.to(dtype).double() @ weight.double().T + layers.linear.bias.detach().double()
        actual = layers(x.to(dtype))
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.detach().double(), expected, rtol=1e-2, atol=1e-2)


def test_copies_and_files_have_ordinary_weights() -> None:
    layers, weight = coded("int8")
    copied = copy.deepcopy(layers)
    assert type(copied.linear.weight) is nn.Parameter and torch.equal(copied.linear.weight, weight.float())
    file = io.BytesIO()
    torch.save(layers.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["linear.weight"], weight.float())
    model: Any = get_peft_model(layers, LoraConfig(r=4, target_modules=["small"], modules_to_save=["linear"]))
    model(torch.randn(2, 256)).sum().backward()
    assert model.base_model.model.linear.modules_to_save["default"].weight.grad is not None


def test_saving_a_stock_model_is_refused(tmp_path: Path) -> None:
    model = build("qwen3_moe", hidden_size=256, vocab_size=512)
    assert quantize_linears(model, "int8")
    with pytest.raises(InputError, match="without dense storage, expected a dense weight; save the adapter"):
        model.save_pretrained(tmp_path)


def test_a_gradient_of_the_weight_is_refused() -> None:
    """It would be missing without a word."""
    layers, _ = coded("int8")
    layers.requires_grad_(True)
    with pytest.raises(InputError, match="have no gradient"):
        layers(torch.randn(2, 256))
    with torch.no_grad():
        assert layers(torch.randn(2, 256)).shape == (2, 200)


def test_lora_trains_over_codes_as_over_decoded_weights() -> None:
    """Stock PEFT; the gradients of its factors."""

    def gradients(encoded: bool) -> list[Tensor]:
        layers, weight = coded("int8")
        if not encoded:
            layers.linear.weight = nn.Parameter(weight.float(), requires_grad=False)
        torch.manual_seed(1)
        model = get_peft_model(layers, LoraConfig(r=4, target_modules=["linear"], init_lora_weights="gaussian"))
        torch.manual_seed(2)
        model(torch.randn(6, 256)).square().sum().backward()
        return [parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None]

    found, expected = gradients(True), gradients(False)
    assert len(found) == len(expected) == 2
    for one, two in zip(found, expected, strict=True):
        assert float((one - two).norm()) <= 2e-4 * float(two.norm())


def test_layers_that_are_encoded() -> None:
    """Attention, the matrix that latent attention absorbs included, dense and shared MLPs and the head; not routers."""
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 256, "kv_lora_rank": 256, "v_head_dim": 64}
    model = build("deepseek_v3", hidden_size=256, vocab_size=512, **sizes)
    quantize_linears(model, "int8")
    names = {name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)}
    assert "lm_head.weight" in names and any("shared_experts" in name for name in names)
    assert any("kv_b_proj" in name for name in names)
    assert not any(".gate." in name or "embed" in name for name in names)
    linears().apply(model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, QuantizedWeight):
            assert not isinstance(module.forward, functools.partial), "the kernel for bf16 would read codes"


@pytest.mark.parametrize("rows", [3, quantized_weight.HEAD_ROWS + 1])
@pytest.mark.parametrize("in_order", [True, False])
def test_products_of_heads(in_order: bool, rows: int) -> None:
    """Over columns and along rows, few rows of x with codes and many with decoded ones; columns of codes in the order
    of the weight, or in one of their own, as GPTQ's."""
    torch.manual_seed(0)
    matrix, heads = encode(torch.randn(5 * 48, 128), "int4:32"), 5
    order = None if in_order else torch.randperm(128)
    weight = quantized_weight.quantized_weight(dataclasses.replace(matrix, order=order), torch.float32)
    numbers = (weight + 0).view(heads, 48, -1).double()
    for part, along_rows in ((HeadRows(0, 20, 48), True), (HeadRows(20, 28, 48), False)):
        own = numbers[:, part.first : part.first + part.count]
        x = torch.randn(heads, rows, part.count if along_rows else weight.shape[1])
        wanted = torch.bmm(x.double(), own if along_rows else own.transpose(1, 2))
        larger = torch.full((heads, rows, wanted.shape[2] + 8), 7.0)
        weight.multiply_heads(x, part, along_rows=along_rows, out=larger[..., :-8])
        assert torch.equal(larger[..., :-8], weight.multiply_heads(x, part, along_rows=along_rows))
        assert bool((larger[..., -8:] == 7).all())
        assert float((larger[..., :-8].double() - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "afmoe", "gemma4_text", "zaya"])
def test_linear_layers_within_routers_are_not_encoded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1)
    model = build(family)
    beside = [name for name, module in model.named_modules() if type(module) is nn.Linear and ".mlp.gate." in name]
    beside += [name for name, module in model.named_modules() if type(module) is nn.Linear and ".router." in name]
    assert beside and quantize_linears(model, "int8")
    assert not any(isinstance(model.get_submodule(name).weight, QuantizedWeight) for name in beside)


def test_indexers_are_not_encoded() -> None:
    """They choose keys, as routers choose experts."""
    model = build("deepseek_v32", hidden_size=256, q_lora_rank=128, index_n_heads=4, index_head_dim=128)
    quantize_linears(model, "int8")
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)]
    assert names and not any("indexer" in name for name in names)


def test_wrong_arguments_are_refused() -> None:
    pool = default_pool()
    with pytest.raises(ValueError, match="format"):
        _core.CodedLinear(pool, 32, 32, "bf16")
    with pytest.raises(InputError, match="rest"):
        quantize_linears(Layers(), "iq2_xs")
    core = _core.CodedLinear(pool, 64, 64, "int8")
    with pytest.raises(RuntimeError, match="not packed"):
        core.forward(torch.zeros(1, 64), torch.zeros(1, 64))
    matrix = encode(torch.randn(64, 64), "int8")
    core.pack(matrix.packable)
    with pytest.raises(ValueError, match="x"):
        core.forward(torch.zeros(1, 32), torch.zeros(1, 64))
    with pytest.raises(TypeError, match="out"):
        core.forward(torch.zeros(1, 64), torch.zeros(1, 64).bfloat16())


def test_a_copy_on_a_device_keeps_the_codes() -> None:
    """What `to` and `nn.Module.to` give the weight, with a device that this machine may lack."""
    weight = quantized_weight.quantized_weight(encode(torch.randn(64, 256), "int8"), torch.bfloat16)
    given = {"dtype": torch.bfloat16, "layout": torch.strided, "device": torch.device("cuda:0")}
    assert quantized_weight._moves_alone(given)
    assert not quantized_weight._moves_alone(given | {"device": torch.device("meta")})
    assert not quantized_weight._moves_alone(given | {"pin_memory": True})
    layer, other = torch.nn.Linear(256, 64, bias=False), weight.with_dtype(torch.float32)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer._apply(lambda _: other)
    assert isinstance(layer.weight, quantized_weight.QuantizedWeight) and layer.weight.dtype == torch.float32
    stranger = quantized_weight.quantized_weight(encode(torch.randn(64, 256), "int8"), torch.bfloat16)
    with pytest.raises(InputError, match=r"assignment to \.data"):
        layer.weight.data = stranger


def test_an_embedding_stays_in_host_memory() -> None:
    """Its table is that of a frozen weight wherever the model is moved; one that the head shares moves with it."""
    model = build("qwen3_moe", vocab_size=640)
    ids = torch.tensor([[3, 639, 64, 3]])
    expected = model.get_input_embeddings()(ids).detach()
    assert quantized_weight.keep_embedding_on_host(model, pin=False)
    held = model.get_input_embeddings().weight
    assert isinstance(held, QuantizedWeight) and isinstance(held.impl, HostRows) and not held.requires_grad
    assert torch.equal(model.get_input_embeddings()(ids), expected)
    moved = held.moved("meta")
    assert moved.device.type == "meta" and moved.impl.rows is held.impl.rows, "nothing is copied"
    assert torch.equal(held.decoded(3, 4)[0], expected[0, 0])
    assert quantized_weight.describe_quantized(model) == "", "no linear layer has codes"
    with pytest.raises(InputError, match="frozen"):
        held.add_(1)
    tied = build("qwen3_moe", vocab_size=640, tie_word_embeddings=True)
    assert not quantized_weight.keep_embedding_on_host(tied, pin=False)
    assert not isinstance(tied.get_input_embeddings().weight, QuantizedWeight)


GPUS = ("cuda:0", "cuda:3")  # of a map, whose layers need not be on the first ones


def test_a_format_for_several_gpus_needs_bfloat16(tmp_path: Path) -> None:
    save(build("qwen3_moe"), tmp_path)
    with pytest.raises(InputError, match=r"rest: given int8 with torch.float16 on cuda:0, cuda:3"):
        load_model(tmp_path, dtype=torch.float16, rest="int8", later_gpus=GPUS)


@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq"])
def test_a_release_is_loaded_in_its_bits_for_several_gpus(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, from where layers are moved: codes where numbers would take much of the GPUs, `kv_b_proj` and an
    embedding in host memory included; numbers otherwise."""
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 12)
    release(tmp_path, kind)
    asked: list[torch.device] = []

    def free(device: torch.device, size: int) -> int:
        asked.append(device)
        return size

    monkeypatch.setattr("ktransformers.modeling.load.free_bytes", functools.partial(free, size=1 << 10))
    model: Any = load_model(tmp_path, rest="keep", widen=False, later_gpus=GPUS)
    assert asked == [torch.device("cuda:0"), torch.device("cuda:3")], "where layers go"
    kept = {name: one for name, one in model.named_parameters() if isinstance(one, QuantizedWeight)}
    assert isinstance(kept.pop("model.embed_tokens.weight").impl, HostRows)
    assert any("kv_b_proj" in name for name in kept)
    on_cpu = load_model(tmp_path, rest="keep", widen=False)
    for name, one in on_cpu.named_parameters():
        if isinstance(one, QuantizedWeight):
            assert torch.equal(kept[name].decoded(0, one.shape[0]), one.decoded(0, one.shape[0])), name
    monkeypatch.setattr("ktransformers.modeling.load.free_bytes", functools.partial(free, size=1 << 40))
    plain = load_model(tmp_path, rest="keep", widen=False, later_gpus=GPUS)
    assert not any(isinstance(one, QuantizedWeight) for one in plain.parameters())
    encoded = load_model(tmp_path, rest="int8", widen=False, later_gpus=GPUS)
    assert any("kv_b_proj" in name for name, one in encoded.named_parameters() if isinstance(one, QuantizedWeight))
