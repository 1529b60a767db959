"""`kt quant --rest`: quantized dense linear layers in a packed directory. What is loaded has the same
bits as codes that were packed directly; damaged, half-written and older directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ktransformers.checkpoint.packed import read_manifest, verify_packed
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.plan import Choice, Serving, open_shape, profile
from ktransformers.plan.memory import predict_memory
from ktransformers.quant import convert as conversion
from ktransformers.quant.plan import make_plan, parse_formats
from ktransformers.quant.report import read_report
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.weight import QuantizedWeight
from tests.support.gguf_models import gguf_fields, to_gguf
from tests.support.loaded_models import MLA, SIZES
from tests.support.packing import as_fp8
from tests.support.quantised_models import release
from tests.support.releases import KINDS, gptq_desc_act, write_gguf
from tests.support.tiny_models import build, logits, save


@pytest.fixture(autouse=True)
def _small_weights_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 12)


def pack_rest(source: Path, out: Path, rest: str, word: str = "keep") -> Any:
    return conversion.convert(make_plan(source, parse_formats(word), 2, rest=rest), out)


def codes_of(model: torch.nn.Module) -> dict[str, QuantizedWeight]:
    return {name: one for name, one in model.named_parameters() if isinstance(one, QuantizedWeight)}


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    model = build("qwen3_moe", hidden_size=128, head_dim=32, num_attention_heads=4)
    return as_fp8(save(model, tmp_path / "fp8"))


def test_kept_codes_are_mapped_and_have_the_bits_of_the_release(fp8: Path, tmp_path: Path) -> None:
    done = pack_rest(fp8, tmp_path / "out", "keep")
    assert done.whole and (tmp_path / "out" / "linears-00001-of-00001.safetensors").is_file()
    direct, mapped = (load_model(path, dtype=torch.float32, rest="keep") for path in (fp8, tmp_path / "out"))
    expected, actual = codes_of(direct), codes_of(mapped)
    assert actual.keys() == expected.keys() and len(actual) == 2 * 4
    for name, weight in actual.items():
        assert weight.spec == "fp8:128x128" and torch.equal(weight + 0, expected[name] + 0)
        assert weight.impl.linear.checksum() == expected[name].impl.linear.checksum()
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "out" / "linears-") in maps, "the codes were copied"
    assert torch.equal(logits(mapped), logits(direct))
    numbers = [load_model(path, dtype=torch.float32, rest="bf16") for path in (fp8, tmp_path / "out")]
    assert not codes_of(numbers[1]) and torch.equal(logits(numbers[0]), logits(numbers[1]))
    report = read_report(tmp_path / "out")
    assert {linear.name for linear in report.linears} == set(actual)
    assert all(linear.quality.kept and linear.quality.error == 0 for linear in report.linears)
    assert report.summary()["rest"]["kept"] == len(actual)
    assert pack_rest(fp8, tmp_path / "out", "keep").seconds == 0, "it was converted again"


@pytest.mark.parametrize("spec", ["int8", "int4:32"])
def test_encoded_linears_are_those_that_loading_encodes(spec: str, tmp_path: Path) -> None:
    source = save(build("qwen3_moe", hidden_size=128, head_dim=32, num_attention_heads=4), tmp_path / "model")
    pack_rest(source, tmp_path / "out", spec, "int8")
    encoded = codes_of(load_model(source, dtype=torch.float32, rest=spec))
    stored = codes_of(load_model(tmp_path / "out", dtype=torch.float32, rest="keep"))
    assert stored.keys() == encoded.keys() and encoded
    for name, weight in stored.items():
        assert torch.equal(weight + 0, encoded[name] + 0), name
    errors = [linear.quality.error for linear in read_report(tmp_path / "out").linears]
    assert all(1e-4 < error < 0.2 for error in errors)
    assert read_manifest(tmp_path / "out").rest == spec


def test_columns_in_order_of_activation_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = KINDS["gptq zeros"][2] | {"desc_act": True}
    monkeypatch.setitem(KINDS, "gptq desc_act", (gptq_desc_act, "uint4:32:f16", words))
    release(tmp_path / "gptq", "gptq desc_act", only=r"self_attn|shared_experts|layers\.0\.mlp")
    pack_rest(tmp_path / "gptq", tmp_path / "out", "keep")
    direct, mapped = (load_model(p, dtype=torch.float32, rest="keep") for p in (tmp_path / "gptq", tmp_path / "out"))
    assert any(one.impl.order is not None for one in codes_of(mapped).values())
    assert torch.equal(logits(mapped), logits(direct))


def test_damage_is_found(fp8: Path, tmp_path: Path) -> None:
    pack_rest(fp8, tmp_path / "out", "keep")
    manifest = read_manifest(tmp_path / "out")
    file = tmp_path / "out" / manifest.linears[0].file
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"linears-00001.*do not fit their checksum"):
        load_model(tmp_path / "out", dtype=torch.float32, rest="keep")
    with pytest.raises(InputError, match=r"linears-00001.*checksum"):
        verify_packed(tmp_path / "out")
    file.write_bytes(data[:-10])
    with pytest.raises(InputError, match=r"linears-00001.*does not open"):
        load_model(tmp_path / "out", dtype=torch.float32)


def test_half_written_directory_is_resumed(fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while a layer was written: the linear layers are kept. Another --rest is refused."""

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion._Conversion, "_convert_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        pack_rest(fp8, tmp_path / "out", "keep")
    monkeypatch.undo()
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 12)
    partial = tmp_path / "out.partial"
    linears = partial / "linears-00001-of-00001.safetensors"
    before = linears.stat().st_mtime_ns
    with pytest.raises(InputError, match="begun differently"):
        pack_rest(fp8, tmp_path / "out", "int8")
    assert pack_rest(fp8, tmp_path / "out", "keep").whole
    assert (tmp_path / "out" / linears.name).stat().st_mtime_ns == before, "it was written again"
    assert codes_of(load_model(tmp_path / "out", dtype=torch.float32, rest="keep"))


def test_directories_without_codes_stay_as_they_were(fp8: Path, tmp_path: Path) -> None:
    pack_rest(fp8, tmp_path / "out", "bf16")
    document = json.loads((tmp_path / "out" / "kt_packed.json").read_text())
    assert not {"rest", "linears"} & document.keys()
    assert not list((tmp_path / "out").glob("linears-*"))
    assert not codes_of(load_model(tmp_path / "out", dtype=torch.float32, rest="keep"))


def test_from_pretrained_says_what_opens_it(fp8: Path, tmp_path: Path) -> None:
    pack_rest(fp8, tmp_path / "out", "keep")
    with pytest.raises(InputError, match=r"quantized dense linear layers.*load_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_format_that_is_not_written_is_refused(fp8: Path) -> None:
    with pytest.raises(InputError, match="rest: given iq2_xs"):
        make_plan(fp8, parse_formats("keep"), rest="iq2_xs")


def check_plan(source: Path, out: Path) -> tuple[Any, Any]:
    """The shape that `kt plan` reads from a packed directory has the sizes of the model that is loaded from it."""
    plain, shape = open_shape(str(source)), open_shape(str(out))
    model = load_model(out, dtype=torch.float32, rest="keep")
    coded = codes_of(model).values()
    assert shape.quantized_weights == sum(weight.numel() for weight in coded) > 0
    assert shape.quantized_bytes == sum(weight.impl.bytes for weight in coded)
    rest = [weight.numel() for name, weight in model.named_parameters() if ".experts." not in name]
    assert shape.rest == pytest.approx(sum(rest), abs=20)
    for name in ("embedding", "tied", "rest_per_layer", "absorbed_numbers"):
        assert getattr(shape, name) == getattr(plain, name), name
    return shape, model


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_the_plan_counts_codes_of_linear_layers(family: str, tmp_path: Path) -> None:
    """Both layers of one model have latent attention, one of the other's: a server copies no keys of either."""
    source = save(build(family, **SIZES, **MLA | {"kv_lora_rank": 512, "q_lora_rank": None}), tmp_path / "model")
    pack_rest(source, tmp_path / "out", "int8", "int8")
    shape, model = check_plan(source, tmp_path / "out")
    assert sorted(map(repr, shape.linears)) == sorted(map(repr, open_shape(str(source)).linears))
    projections = [weight for name, weight in codes_of(model).items() if "kv_b_proj" in name]
    config = model.config
    keys = config.num_attention_heads * config.qk_nope_head_dim * config.kv_lora_rank
    assert shape.quantized_absorbed == shape.absorbed_numbers == keys * len(projections) > 0

    def planned(linear_format: str | None) -> int:
        choice = Choice("int8", linear_format=linear_format)
        return predict_memory(shape, Serving(), choice, profile("arm2")).host.get("absorbed keys", 0)

    assert [planned(one) for one in (None, "keep")] == [shape.rest_dtype_bytes * shape.absorbed_numbers, 0]


def test_the_plan_counts_codes_of_embedding_and_head(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = build("qwen3_moe", hidden_size=128, head_dim=32, num_attention_heads=4, moe_intermediate_size=64)
    tensors = to_gguf(model, "qwen3moe", dict.fromkeys(("gate", "up", "down"), "Q8_0"))
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = gguf.quants.quantize(tensors[name][0], gguf.GGMLQuantizationType.Q8_0), "Q8_0"
    source = save(model, tmp_path / "model")
    write_gguf(tmp_path / "model.gguf", "qwen3moe", gguf_fields(model.config, "qwen3moe"), tensors)
    pack_rest(tmp_path / "model.gguf", tmp_path / "out", "keep")
    _, packed = check_plan(source, tmp_path / "out")
    assert set(codes_of(packed)) == {"lm_head.weight", "model.embed_tokens.weight"}
