"""GGUF files, written by the tests and read back: single or split, experts stacked or separate; the values of the gguf
package, or an error that names the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from ktransformers.checkpoint import ExpertShape
from ktransformers.checkpoint.sources import open_source
from ktransformers.ground.errors import InputError
from tests.support.expert_sources import MODULE, numbers, same
from tests.support.releases import write_gguf

E = 3
GGUF_SHAPE = ExpertShape(E, 256, 512)


def gguf_layer(kinds: dict[str, str], stacked: bool = True) -> tuple[dict[str, tuple[Any, str]], dict[str, Tensor]]:
    import gguf

    generator = numpy.random.default_rng(0)
    tensors: dict[str, tuple[Any, str]] = {}
    expected = {}
    for role, kind in kinds.items():
        n, k = (256, 512) if role == "down" else (512, 256)
        values = generator.standard_normal((E, n, k)).astype(numpy.float32)
        quantised = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            data = values if kind == "F32" else values.astype(numpy.float16)
            expected[role] = torch.from_numpy(data.astype(numpy.float32))
        else:
            try:
                data = gguf.quants.quantize(values, quantised)
            except NotImplementedError:  # any bytes, but no numbers beyond what float16 scales allow
                block = gguf.GGML_QUANT_SIZES[quantised][1]
                data = generator.integers(0, 60, (E, n, k // 256 * block), dtype=numpy.uint8)
            expected[role] = torch.from_numpy(gguf.quants.dequantize(data, quantised))
        if stacked:
            tensors[f"blk.0.ffn_{role}_exps.weight"] = (data, kind)
        else:
            tensors |= {f"blk.0.ffn_{role}.{expert}.weight": (data[expert], kind) for expert in range(E)}
    return tensors, expected


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"},
        {"gate": "F16", "up": "F32", "down": "Q8_0"},
        {"gate": "MXFP4", "up": "MXFP4", "down": "IQ4_XS"},
        {"gate": "IQ2_XXS", "up": "Q3_K", "down": "BF16"},
    ],
)
def test_gguf_source_matches_the_gguf_package(kinds: dict[str, str], stacked: bool, tmp_path: Path) -> None:
    """Tensors of different types; the values are those of the gguf package."""
    pytest.importorskip("gguf")
    tensors, expected = gguf_layer(kinds, stacked)
    file = tmp_path / "model.gguf"
    write_gguf(file, "qwen3moe", {}, tensors)
    source = open_source(tmp_path)
    layer = source.layer(MODULE, GGUF_SHAPE)
    plain = {"F16": "bf16", "F32": "bf16", "BF16": "bf16"}
    assert layer.formats == {role: plain.get(kind, kind.lower()) for role, kind in kinds.items()}
    same(numbers(layer), expected)
    assert source.files == [file] and source.expert_roots == ["model.layers.0.mlp"]
    assert source.rest() == []


def test_split_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tensors, expected = gguf_layer({"gate": "Q8_0", "up": "Q8_0", "down": "Q5_0"})
    for part, name in enumerate(tensors, 1):
        write_gguf(tmp_path / f"m-{part:05}-of-00003.gguf", "qwen3moe", {"split.count": 3}, {name: tensors[name]})
    (tmp_path / "mmproj-m.gguf").write_bytes(b"a vision tower")
    for path in (tmp_path, tmp_path / "m-00002-of-00003.gguf"):
        same(numbers(open_source(path).layer(MODULE, GGUF_SHAPE)), expected)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(InputError, match=r"m-00003-of-00003\.gguf: given no such file, expected all 3 parts"):
        open_source(tmp_path)


def test_unsupported_gguf_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tensors, _ = gguf_layer({"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"})
    file = tmp_path / "a.gguf"
    write_gguf(file, "qwen3moe", {}, tensors)
    intact = file.read_bytes()
    with pytest.raises(
        InputError, match=r"ffn_gate_exps\.weight: given shape \[3, 512, 256\], expected \[3, 160, 256\]"
    ):
        open_source(file).layer(MODULE, ExpertShape(E, 256, 160))
    with pytest.raises(InputError, match=r"layers\.7\.mlp\.experts: given neither blk\.7\.ffn_gate_exps\.weight nor"):
        open_source(file).layer("model.layers.7.mlp.experts", GGUF_SHAPE)
    file.write_bytes(intact[:-1000])
    with pytest.raises(InputError, match=r"ffn_down_exps\.weight: given .* bytes in .*/a\.gguf, .* not complete"):
        open_source(file)
    for end in (3, 20, 90, 200):
        file.write_bytes(intact[:end])
        with pytest.raises(InputError, match=r"a\.gguf: given a file that does not open"):
            open_source(file)
    file.write_bytes(intact)
    write_gguf(tmp_path / "b.gguf", "qwen3moe", {}, tensors)
    with pytest.raises(InputError, match=r"several models \(a\.gguf, b\.gguf\)"):
        open_source(tmp_path)
    write_gguf(tmp_path / "b.gguf", "unheard", {}, {"token_embd.weight": (numpy.zeros((2, 32), numpy.float32), "F32")})
    with pytest.raises(InputError, match=r"architecture 'unheard', expected one of llama"):
        open_source(tmp_path / "b.gguf").rest()
    write_gguf(tmp_path / "b.gguf", "qwen3moe", {}, {"blk.0.odd.weight": (numpy.zeros((2, 32), numpy.float32), "F32")})
    with pytest.raises(InputError, match=r"blk\.0\.odd\.weight: given a tensor without a known place"):
        open_source(tmp_path / "b.gguf").rest()
