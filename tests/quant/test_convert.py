"""Conversion to packed directories: every format against packing the source directly, and loading the result."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ktransformers.checkpoint.encoded import Encoded, decode
from ktransformers.checkpoint.packed import read_manifest
from ktransformers.checkpoint.recode import KEEP, recode
from ktransformers.checkpoint.verify import verify
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.quant.plan import estimate, make_plan, parse_formats
from ktransformers.quant.report import read_report
from tests.support.formats import ROWS, SPECS
from tests.support.loaded_models import training_logits
from tests.support.packing import as_fp8, contents, edit, expert_modules_with_stores, pack, repack, tiny
from tests.support.releases import kt_parts, write_gguf, write_kt_tree
from tests.support.tiny_models import logits

FORMATS = [spec for spec, row in ROWS.items() if spec in SPECS and row.columns in (0, 16, 32, 64, 128)]


def largest_error(spec: str) -> float:
    """Frobenius, on Gaussian matrices of 64 columns, whose groups are often incomplete: what a format of so many bits
    can do, and no more."""
    return 1.8 * ROWS[spec].error


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("word", FORMATS)
def test_packed_directory_matches_direct_packing(word: str, source: Path, tmp_path: Path) -> None:
    """Logits equal bit for bit those of the same matrices encoded and packed without files."""
    done = pack(source, tmp_path / "out", word)
    assert done.whole and done.directory == tmp_path / "out"
    want = load_model(source, dtype=torch.float32)
    repack(want, dict.fromkeys(("gate", "up", "down"), word))
    got = load_model(tmp_path / "out", dtype=torch.float32)
    assert [module.kt.store.formats["down"] for module in expert_modules_with_stores(got)] == [word, word]
    assert torch.equal(logits(got), logits(want))
    for layer in done.report.layers:
        for matrix in layer.matrices.values():
            assert (matrix.source, matrix.format, matrix.kept) == ("bf16", word, False)
            assert 1e-4 < matrix.error < largest_error(word)


def test_keep_format_by_load_model_and_from_pretrained(source: Path, tmp_path: Path) -> None:
    done = pack(source, tmp_path / "out", KEEP)
    want = logits(load_model(source, dtype=torch.float32))
    assert torch.equal(logits(load_model(tmp_path / "out", dtype=torch.float32, pages="prefault", verify=True)), want)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(plain), want)
    assert plain.config.to_dict()["quantization_config"]["quant_method"] == "kt"
    # Its experts beside another directory's rest, as `kt_weight_path` names them.
    assert torch.equal(logits(load_model(source, experts=tmp_path / "out", dtype=torch.float32)), want)
    # The source is float32, and bf16 numbers: rounding moved nothing.
    assert {matrix.error for layer in done.report.layers for matrix in layer.matrices.values()} == {0.0}
    with pytest.raises(InputError, match="precision: given f32, expected bf16: these experts are packed in it"):
        load_model(tmp_path / "out", precision="f32")


@pytest.mark.parametrize(
    ("family", "word"),
    [("gpt_oss", "int4"), ("nemotron_h", "int8"), ("granitemoe", "int4"), ("deepseek_v3", "fp8:row")],
)
def test_layouts_of_model_families(family: str, word: str, tmp_path: Path) -> None:
    """Biases with interleaved and transposed tensors; no gate; other names of fused tensors; a dense first layer."""
    origin = tiny(tmp_path / "model", family)
    done = pack(origin, tmp_path / "out", word)
    want, got = (load_model(tmp_path / name, dtype=torch.float32) for name in ("model", "out"))
    for new, old in zip(expert_modules_with_stores(got), expert_modules_with_stores(want), strict=True):
        for role in new.kt.store.formats:
            for expert in range(old.kt.store.num_experts):
                exact = recode(old.kt.store.decode(role, expert)[None], new.kt.store.formats[role], role).matrix
                assert isinstance(exact, Encoded)
                assert torch.equal(new.kt.store.decode(role, expert), decode(exact)[0].bfloat16())
        for name in ("gate_up_bias", "down_bias"):
            assert (name in new.kt.store.memory()) == (name in old.kt.store.memory())
            if name in new.kt.store.memory():
                assert torch.equal(new.kt.store.memory()[name], old.kt.store.memory()[name])
    noise = (logits(got) - logits(want)).norm() / logits(want).norm()
    assert 0 < noise < 0.5
    assert done.report.summary()["down"]["layers"] == len(expert_modules_with_stores(got))


def test_mixed_formats_and_odd_sizes(tmp_path: Path) -> None:
    origin = tiny(tmp_path / "model", moe_intermediate_size=40, hidden_size=72)
    done = pack(origin, tmp_path / "out", "int4", group=64, down="int8")
    assert {layer.matrices["down"].format for layer in done.report.layers} == {"int8"}
    got, want = (load_model(tmp_path / name, dtype=torch.float32) for name in ("out", "model"))
    repack(want, {"gate": "int4:64", "up": "int4:64", "down": "int8"})
    assert torch.equal(logits(got), logits(want))


@pytest.mark.parametrize("word", [KEEP, "bf16", "int4"])
def test_fp8_attention_is_written_as_bf16(word: str, tmp_path: Path) -> None:
    """The result does not need the quantisation method of the source."""
    origin = as_fp8(tiny(tmp_path / "model", hidden_size=192, moe_intermediate_size=160))
    done = pack(origin, tmp_path / "out", word)
    words = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert words["packed"]["source"]["quant_method"] == "fp8" and "source" not in words
    assert read_manifest(tmp_path / "out").source.quantisation == words["packed"]["source"]
    tensors = contents(tmp_path / "out")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert not any("scale_inv" in name for name in tensors)
    want, got = (load_model(tmp_path / name, dtype=torch.float32) for name in ("model", "out"))
    for matrix in done.report.layers[0].matrices.values():
        assert matrix.source == "fp8:128x128" and matrix.kept == (word == KEEP)
    if word == "int4":
        assert 0.02 < (logits(got) - logits(want)).norm() / logits(want).norm() < 0.6
    else:  # training computes with the bf16 values of fp8
        assert torch.equal(training_logits(got), training_logits(want))


def test_experts_from_another_source(tmp_path: Path) -> None:
    """Non-expert weights from a directory, experts from GGUF or kt-kernel files, in their formats."""
    gguf = pytest.importorskip("gguf")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 3, "num_hidden_layers": 1}
    full = tiny(tmp_path / "model", **sizes)
    matrices = {"gate": (256, 128, "Q4_0"), "up": (256, 128, "Q8_0"), "down": (128, 256, "Q5_1")}
    tensors: dict[str, tuple[Any, str]] = {}
    for seed, (role, (rows, columns, kind)) in enumerate(matrices.items()):
        numbers = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(seed)).numpy()
        data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
        tensors[f"blk.0.ffn_{role}_exps.weight"] = (data, kind)
        for expert in range(3):
            parts, _ = kt_parts(rows, columns, role, "INT4", 2, 3 * seed + expert)
            write_kt_tree(tmp_path / "tree", 0, expert, role, "INT4", parts)
    write_gguf(tmp_path / "experts.gguf", "qwen3moe", {}, tensors)
    for name, formats in (("experts.gguf", ["q4_0", "q8_0", "q5_1"]), ("tree", None)):
        done = pack(full, tmp_path / f"{name}-packed", KEEP, experts=tmp_path / name)
        actual = [matrix.format for matrix in done.report.layers[0].matrices.values()]
        assert formats is None or actual == formats
        assert all(matrix.kept for matrix in done.report.layers[0].matrices.values())
        want = load_model(full, experts=tmp_path / name, dtype=torch.float32)
        assert torch.equal(logits(load_model(done.directory, dtype=torch.float32)), logits(want))


def test_transformers_alone_fails_at_packed_experts(tmp_path: Path) -> None:
    """Without ktransformers, transformers raises at the experts instead of initialising them randomly."""
    families = ["qwen3_moe", "gpt_oss", "granitemoe"]
    for family in families:
        pack(tiny(tmp_path / family, family), tmp_path / f"{family}-packed", "int8")
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ktransformers":
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
for directory in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except RuntimeError as error:
        assert "size" in str(error), error
        print("refused")
    else:
        print("loaded")
assert "ktransformers" not in sys.modules
"""
    command = [sys.executable, "-c", code, *(str(tmp_path / f"{family}-packed") for family in families)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * len(families), done.stderr


def test_layers_converted_in_several_calls(tmp_path: Path) -> None:
    origin, out = tiny(tmp_path / "model", num_hidden_layers=3), tmp_path / "out"
    first = pack(origin, out, "int8", layers={2})
    assert not first.whole and not out.exists() and first.directory == tmp_path / "out.partial"
    assert [layer.number for layer in first.report.layers] == [2]
    second = pack(origin, out, "int8", layers={0, 2})
    assert second.kept_layers == 1 and not second.whole
    with pytest.raises(InputError, match=r"begun differently \(formats"):
        pack(origin, out, "int4")
    with pytest.raises(InputError, match="layers: given 3, expected layers with experts, 0 to 2"):
        pack(origin, out, "int8", layers={3})
    last = pack(origin, out, "int8")
    assert last.whole and last.kept_layers == 2 and out.is_dir() and not first.directory.exists()
    assert [layer.number for layer in last.report.layers] == [0, 1, 2]
    pack(origin, tmp_path / "at once", "int8")
    one, other = contents(out), contents(tmp_path / "at once")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    again = pack(origin, out, "int8")  # finished: nothing is done twice
    assert again.whole and again.seconds == 0 and again.report == read_report(out) == last.report
    with pytest.raises(InputError, match="out: given something that exists"):
        pack(origin, out, "int4")


def test_changed_source_is_not_resumed(tmp_path: Path) -> None:
    origin, out = tiny(tmp_path / "model"), tmp_path / "out"
    pack(origin, out, "int8", layers={0})
    tiny(tmp_path / "model")  # the same names and sizes, written anew
    with pytest.raises(InputError, match="begun differently"):
        pack(origin, out, "int8")


def test_unsupported_sources_are_refused(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out", "int8")
    with pytest.raises(InputError, match="given a packed directory, expected the checkpoint"):
        pack(tmp_path / "out", tmp_path / "again", "int4")
    with pytest.raises(InputError, match=r"nowhere: given no directory with a config\.json"):
        pack(tmp_path / "nowhere", tmp_path / "again", "int4")
    odd = tiny(tmp_path / "odd", moe_intermediate_size=40)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.experts: down: given 40 columns, expected a multiple of 32"):
        pack(odd, tmp_path / "again", "mxfp4")
    assert not list(tmp_path.glob("again*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("int5",), "format: given int5|format: given 'int5'"),
        (("q4_k",), "a format that can be read and not written"),
        (("int4", 33), "a multiple of 32"),
        (("int8", 64), "group: given 64 with int8, expected it with int4"),
        (("int8", None, "q9"), "'q9'"),
    ],
)
def test_unsupported_formats_are_refused(words: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_formats(*words)  # type: ignore[arg-type]


def test_plan_and_estimate(source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, parse_formats("int8"), 2)
    assert [layer.file for layer in plan.layers] == ["packed-00000.safetensors", "packed-00001.safetensors"]
    assert 0 < estimate(plan) < 60
    pack(source, tmp_path / "out", "int8")
    packed = sum(sum(layer.bytes.values()) for layer in read_manifest(tmp_path / "out").layers)
    assert packed == sum(layer.packed_bytes for layer in plan.layers)
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert plan.out_bytes < written < plan.out_bytes + 5 * 4096 * len(plan.layers) + 16384


def test_verify_reads_checksums_of_the_manifest(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out, "int8")
    actual = verify(out)
    assert actual.whole and actual.hashed == 3 and actual.unknown == 0
    assert [finding.text for finding in actual.findings] == ["no tokenizer file"]  # no tokenizer in a tiny model
    data = bytearray((out / "packed-00001.safetensors").read_bytes())
    data[-5000] ^= 1
    (out / "packed-00001.safetensors").write_bytes(data)
    assert verify(out, hashes=False).whole and not verify(out).whole
    edit(out, quantization_config={"quant_method": "kt"})
    assert not verify(out, hashes=False).whole


@pytest.mark.parametrize("target", ["bf16", "int8", "int4:32", "mxfp8", "nvfp4"])
def test_recoding_in_blocks_of_rows_is_exact(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and error equal those of recoding the matrix at once."""
    torch.manual_seed(0)
    from ktransformers.checkpoint.encoder import encode

    plain = torch.randn(1, 300, 256)
    source = encode(plain, "fp8:128x128")
    whole = recode(source, target, "a")
    monkeypatch.setattr("ktransformers.checkpoint.recode.MAX_CHUNK_NUMBERS", 1)
    parts = recode(source, target, "a")
    one, other = whole.matrix, parts.matrix
    if isinstance(one, Encoded):
        assert isinstance(other, Encoded) and torch.equal(one.qweight, other.qweight)
        assert one.scales is not None and other.scales is not None and torch.equal(one.scales, other.scales)
        numbers = decode(one)
    else:
        assert isinstance(other, torch.Tensor) and torch.equal(one, other)
        numbers = one.float()
    exact = decode(source).double()
    error = (numbers.bfloat16().double() - exact).norm() / exact.norm()
    assert math.isclose(math.sqrt(parts.moved / parts.norm), error.item(), rel_tol=1e-5)
    kept = recode(source, KEEP, "a")
    assert kept.matrix is source and kept.kept and kept.moved == 0


def test_bf16_in_12_bits_has_the_logits_of_the_source(source: Path, tmp_path: Path) -> None:
    done = pack(source, tmp_path / "out", "bf16:12")
    got, want = (load_model(path, dtype=torch.float32) for path in (tmp_path / "out", source))
    assert [module.kt.store.formats["up"] for module in expert_modules_with_stores(got)] == ["bf16:12"] * 2
    assert torch.equal(logits(got), logits(want)) and torch.equal(training_logits(got), training_logits(want))
    assert {matrix.error for layer in done.report.layers for matrix in layer.matrices.values()} == {0.0}


@pytest.mark.parametrize("role", ["up", "down"])
def test_a_matrix_that_12_bits_cannot_hold_is_packed_as_bf16(role: str, tmp_path: Path) -> None:
    origin = tiny(tmp_path / "model")
    numbers = load_file(origin / "model.safetensors")
    fused = "down_proj" if role == "down" else "gate_up_proj"
    for name, tensor in numbers.items():
        if "layers.1." in name and "experts" in name and (role in name or fused in name):
            wild = torch.empty(tensor.shape).uniform_(-60, 60, generator=torch.Generator().manual_seed(0))
            numbers[name] = wild.exp().bfloat16().to(tensor.dtype)
    save_file(numbers, origin / "model.safetensors", {"format": "pt"})
    done = pack(origin, tmp_path / "out", "bf16:12")
    inner, outer = ("bf16:12", "bf16") if role == "down" else ("bf16", "bf16:12")
    expected = [dict.fromkeys(("gate", "up", "down"), "bf16:12"), {"gate": inner, "up": inner, "down": outer}]
    assert [layer.formats for layer in read_manifest(tmp_path / "out").layers] == expected
    assert [layer.matrices["down"].format for layer in done.report.layers] == ["bf16:12", outer]
    got, want = (load_model(path, dtype=torch.float32) for path in (tmp_path / "out", origin))
    for new, old in zip(expert_modules_with_stores(got), expert_modules_with_stores(want), strict=True):
        assert new.kt.store.formats in expected
        for matrix in new.kt.store.formats:
            for expert in range(old.kt.store.num_experts):
                assert torch.equal(new.kt.store.decode(matrix, expert), old.kt.store.decode(matrix, expert))
    assert pack(origin, tmp_path / "out", "bf16:12").kept_layers == 2  # it is whole, and nothing is written again
