"""GGUF files that are well-formed and wrong: counts, offsets, types and scales that no converter writes."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ktransformers.checkpoint.encoded import GGUF_BLOCKS
from ktransformers.checkpoint.sources import open_source
from ktransformers.checkpoint.sources.gguf import HALF_SCALES, SEPARATE, _check_scales
from ktransformers.checkpoint.sources.gguf_header import BLOCKS, FORMATS, GGUFTensor, read_header
from ktransformers.ground.errors import InputError
from ktransformers.quant.origin import Origin
from tests.support.releases import write_gguf
from tests.test_damaged_files import GGUF_SHAPE, gguf_fields, gguf_tensors, read_gguf_model

gguf = pytest.importorskip("gguf")
PREFIX = "qwen3moe."


def write(folder: Path, tensors: dict[str, tuple[Any, str]] | None = None, **changes: Any) -> Path:
    """The file, with keys of the architecture changed; None leaves one out."""
    fields = gguf_fields() | {PREFIX + key.replace("__", "."): value for key, value in changes.items()}
    present = {key: value for key, value in fields.items() if value is not None}
    write_gguf(folder / "m.gguf", "qwen3moe", present, gguf_tensors() if tensors is None else tensors)
    return folder / "m.gguf"


def patch(file: Path, old: bytes, new: bytes) -> None:
    """One place of the header, of the same length."""
    data = file.read_bytes()
    assert len(old) == len(new) and data.count(old) == 1
    file.unlink()
    file.write_bytes(data.replace(old, new))


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """How the header writes a tensor."""
    text = name.encode()
    sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    head = struct.pack("<Q", len(text)) + text + struct.pack("<I", len(shape)) + sizes
    return head + struct.pack("<IQ", kind, offset)


def offset_of(file: Path, name: str) -> int:
    """Relative to the data, as the header has it."""
    tensors = read_header(file).tensors
    return next(tensor.offset for tensor in tensors if tensor.name == name) - tensors[0].offset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 2**31}, r"m\.gguf: qwen3moe\.block_count: given 2147483648, and tensors of 1 layers"),
        ({"block_count": 2}, r"qwen3moe\.block_count: given 2, and tensors of 1 layers"),
        ({"block_count": 0}, r"qwen3moe\.block_count: given 0, expected an integer from 1"),
        ({"block_count": "x"}, r"qwen3moe\.block_count: given 'x'"),
        ({"block_count": None}, r"no qwen3moe\.block_count in it"),
        ({"attention__head_count": 0}, r"qwen3moe\.attention\.head_count: given 0, expected an integer from 1"),
        ({"attention__head_count": [2, 2]}, r"qwen3moe\.attention\.head_count: given \[2, 2\]"),
        ({"attention__head_count_kv": 0}, r"qwen3moe\.attention\.head_count_kv: given 0"),
        ({"expert_count": 2**31}, r"m\.gguf: num_experts: given 2147483648, expected an integer from 0 to 65536"),
        ({"embedding_length": 2**31}, r"m\.gguf: hidden_size: given 2147483648"),
        ({"rope__freq_base": float("nan")}, r"qwen3moe\.rope\.freq_base: given nan, expected a number"),
    ],
)
def test_absurd_keys_are_refused_at_once(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path, **changes)
    start = time.monotonic()
    with pytest.raises(InputError, match=message):
        Origin(file)  # as `kt quant` opens it
    assert time.monotonic() - start < 10


def test_file_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"m\.gguf: given no tensors in it"):
        Origin(write(tmp_path, tensors={}))


@pytest.mark.parametrize("shift", [-32, 32, 1, -4])
def test_overlapping_and_misaligned_tensors_are_refused(shift: int, tmp_path: Path) -> None:
    file = write(tmp_path)
    name, shape = "blk.0.ffn_up_exps.weight", (2, 64, 32)
    offset = offset_of(file, name)
    patch(file, entry(name, shape, 8, offset), entry(name, shape, 8, offset + shift))
    with pytest.raises(
        InputError, match=rf"ffn_up_exps\.weight: given offset {offset + shift} in .*, expected {offset}"
    ):
        open_source(file)


def test_bytes_of_another_type_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path)
    name, shape = "blk.0.ffn_gate_exps.weight", (2, 64, 32)
    offset = offset_of(file, name)
    patch(file, entry(name, shape, 8, offset), entry(name, shape, 2, offset))  # q8_0 as q4_0
    with pytest.raises(InputError, match=r"ffn_up_exps\.weight: given offset .* a type is not that of its bytes"):
        open_source(file)


SAME_SIZE = [
    (one, other) for one in HALF_SCALES for other in HALF_SCALES if one != other and BLOCKS[one] == BLOCKS[other]
]


@pytest.mark.parametrize(("written", "read"), SAME_SIZE)
def test_bytes_of_another_type_of_the_same_size_are_refused(written: str, read: str) -> None:
    """Sizes do not tell them apart, but the scale of one lies where the other has codes, one in 32 of which is no
    number as a half float. q4_0 and iq4_nl have the same layout, so that only the header tells them apart."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (2000, BLOCKS[written][1]), dtype=torch.uint8, generator=generator)
    for offset in HALF_SCALES[written]:
        blocks[:, offset + 1] = 0x1C  # a small finite number
    tensor = GGUFTensor("blk.0.ffn_up_exps.weight", read, (2000, BLOCKS[read][0]), Path("m.gguf"), 0, blocks.numel())
    if {written, read} == {"q4_0", "iq4_nl"}:
        _check_scales(tensor, blocks)
        return
    with pytest.raises(InputError, match=rf"ffn_up_exps\.weight: given {read} with scales that are NaN or infinite"):
        _check_scales(tensor, blocks)


@pytest.mark.parametrize("alignment", [0, 3, 1, 2**31])
def test_alignment_is_checked(alignment: int, tmp_path: Path) -> None:
    file = write(tmp_path)
    fields = gguf_fields() | {"general.alignment": 64}
    write_gguf(file, "qwen3moe", fields, gguf_tensors())
    key = b"general.alignment" + struct.pack("<I", 4)
    patch(file, key + struct.pack("<I", 64), key + struct.pack("<I", alignment))
    with pytest.raises(InputError, match=rf"general\.alignment: given {alignment} in .*m\.gguf"):
        open_source(file)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        tensors = gguf_tensors()
        data = tensors["blk.0.ffn_down_exps.weight"][0].copy()
        data[1, 3, 34:36] = numpy.array([value], numpy.float16).view(numpy.uint8)  # of the second block of a row
        tensors["blk.0.ffn_down_exps.weight"] = (data, "Q8_0")
        write(tmp_path, tensors)
        with pytest.raises(InputError, match=r"ffn_down_exps\.weight: given q8_0 with scales that are NaN or infinite"):
            read_gguf_model(tmp_path)
    tensors = gguf_tensors()
    tensors["blk.0.attn_norm.weight"][0][3] = numpy.nan
    write(tmp_path, tensors)
    with pytest.raises(InputError, match=r"attn_norm\.weight: given f32 with numbers that are NaN"):
        read_gguf_model(tmp_path)


def test_every_block_type_has_its_scales_checked() -> None:
    """The half floats are where the gguf package reads them: NaN there makes a block of NaN."""
    types = {row["name"] for row in FORMATS.values()}
    assert set(HALF_SCALES) == types == set(GGUF_BLOCKS) | set(SEPARATE)
    nan = numpy.array([numpy.nan], numpy.float16).view(numpy.uint8)
    for name, offsets in HALF_SCALES.items():
        size = BLOCKS[name][1]
        kind = gguf.GGMLQuantizationType[name.upper()]
        for offset in offsets:
            block = numpy.full((1, size), 0x11, numpy.uint8)
            assert numpy.isfinite(gguf.quants.dequantize(block, kind)).all(), name
            block[0, offset : offset + 2] = nan
            assert not numpy.isfinite(gguf.quants.dequantize(block, kind)).any(), (name, offset)


@pytest.mark.parametrize(("kind", "size"), [("mxfp4", 17), ("iq1_m", 56)])
def test_scales_apart_from_the_table(kind: str, size: int) -> None:
    from ktransformers.checkpoint.sources.gguf import _check_scales
    from ktransformers.checkpoint.sources.gguf_header import GGUFTensor

    tensor = GGUFTensor("t", kind, (1, BLOCKS[kind][0]), Path("f.gguf"), 0, size)
    block = torch.full((1, 1, size), 0x11, dtype=torch.uint8)
    _check_scales(tensor, block)
    block[..., 0 if kind == "mxfp4" else slice(48, None)] = 255
    if kind == "iq1_m":
        decoded = gguf.quants.dequantize(block[0].numpy(), gguf.GGMLQuantizationType.IQ1_M)
        assert not numpy.isfinite(decoded).all()
    with pytest.raises(InputError, match="NaN or infinite"):
        _check_scales(tensor, block)


def test_good_file_is_read(tmp_path: Path) -> None:
    file = write(tmp_path)
    read_gguf_model(tmp_path)
    assert open_source(file).layer("model.layers.0.mlp.experts", GGUF_SHAPE).formats["up"] == "q8_0"
    assert len(Origin(file).layers) == 1
