"""CONTRIBUTING.md's worked example of a weight format: its rows are in the sources as printed, no other file of the
product names the format, and every table has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ktransformers import _core
from ktransformers.checkpoint import decode, encode
from ktransformers.checkpoint.encoded import format_of
from ktransformers.checkpoint.recode import check_target
from ktransformers.nn import ExpertStore
from ktransformers.plan.formats import counted_as
from ktransformers.quantized.gpu import layout
from ktransformers.quantized.gpu.dequantize import decode_plain
from tests.support.formats import SPECS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
NAME = "mxint4"
# "In `path`:", an empty line, a block of code.
EXAMPLES = re.findall(r"In\s`([^`]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)

example = pytest.mark.skipif(
    NAME not in {row["name"] for row in _core.formats()}, reason="the example is in builds with KT_TESTS alone"
)


def files_that_name(word: str, *folders: str) -> set[str]:
    files = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".h", ".cpp", ".py"))
    named = re.compile(rf"\b{word}\b")
    return {file.relative_to(ROOT).as_posix() for file in files if named.search(file.read_text())}


def test_rows_of_the_example_are_in_the_sources() -> None:
    assert [path for path, _ in EXAMPLES] == ["csrc/kernels/format_table.h", "tests/support/formats.py"]
    for path, code in EXAMPLES:
        assert NAME in code and code in (ROOT / path).read_text(), path


def test_no_other_file_names_the_example() -> None:
    assert files_that_name(NAME, "src", "csrc") == {EXAMPLES[0][0]}
    assert files_that_name(NAME, "tests") == {EXAMPLES[1][0], "tests/test_contributing.py"}


def test_paths_on_the_page_exist() -> None:
    paths = re.findall(r"`((?:csrc|src|tests|docs)/[\w/.]+)`", PAGE)
    assert paths and all((ROOT / path).is_file() for path in paths)


def test_every_shipped_format_is_on_its_page() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    names = {row["name"] for row in _core.formats()} - {NAME}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", page)] == []


@example
def test_example_is_in_every_table() -> None:
    assert NAME in SPECS
    assert counted_as(NAME) == "int4"
    encoded = format_of(NAME)
    assert (encoded.code_dtype, encoded.scale_dtype) == (torch.uint8, torch.uint8)
    assert (encoded.per_byte, encoded.span, encoded.multiple) == (2, 32, 32)
    strip = layout.format_of(NAME)
    assert (strip.planes, strip.span, strip.fields) == ((4,), 32, (layout.Field("u8"),))
    check_target("--format", NAME)


@example
def test_example_computes_on_every_variant(isa: str) -> None:
    torch.manual_seed(0)
    experts, hidden, intermediate = 2, 64, 96
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    matrices = {name: encode(torch.randn(experts, *shape), NAME) for name, shape in shapes.items()}
    store = ExpertStore(experts, hidden, intermediate, isa=isa, formats=NAME)
    store.pack(**matrices)
    plain = ExpertStore(experts, hidden, intermediate, isa=isa)
    plain.pack(**{name: decode(matrix) for name, matrix in matrices.items()})
    x, ids, weights = torch.randn(5, hidden).bfloat16(), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    want = plain.forward(x, ids, weights)
    assert torch.equal(store.forward(x, ids, weights, needs_grad=True), want)
    assert torch.allclose(store.forward(x, ids, weights), want, rtol=0.02, atol=0.02 * float(want.abs().max()))
    grad = torch.randn(5, hidden).bfloat16()
    for ours, theirs in zip(store.backward(grad, x, ids, weights), plain.backward(grad, x, ids, weights), strict=True):
        assert torch.equal(ours, theirs)
    sizes = layout.geometry(experts, hidden, intermediate, True, store.formats)
    out = torch.empty(sizes.down.out_rows, sizes.down.columns, dtype=torch.bfloat16)
    decode_plain(store.memory()["down"].view(experts, -1)[1], sizes.down, out)
    assert torch.equal(out, store.decode("down", 1))
