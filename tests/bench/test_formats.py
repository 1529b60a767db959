"""The bench of formats runs, counts the bytes of the release, and tells how far results are from those of bf16 weights.

No speed is judged. kt-kernel's peers are driven against the stand-in, which rounds weights with one scale per row, so
their errors are known roughly.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[list[str], dict[str, Any]]]
BENCH = Path(__file__).resolve().parents[2] / "bench"
STAND_IN = Path(__file__).resolve().parent / "stand_in"  # for kt-kernel
SHORT = ["--shapes", "tiny", "--isa", "generic", "--layers", "2", "--seconds-per-cell", "0.02"]
EXPERT = 3 * 512 * 256  # parameters of one expert of the tiny shape
ROWS = 256 + 256 + 512  # of its three matrices
# Bytes of an expert as released: codes and scales.
BYTES = {
    "int8": EXPERT + 4 * ROWS,
    "int4:32": EXPERT / 2 + 2 * EXPERT / 32,
    "q4_k": EXPERT / 256 * 144,
    "bf16": 2 * EXPERT,
}
# Relative errors of the output that Gaussian weights give, generously.
ERRORS = {"int8": (0.004, 0.016), "int4:32": (0.05, 0.17), "bf16": (0.0002, 0.005)}


def test_every_format_on_its_own_bytes(run_bench: Run, tmp_path: Path) -> None:
    options = ["--formats", ",".join(BYTES), "--tokens", "1", "--train-tokens", "5"]
    table, document = run_bench("formats", *SHORT, *options, "--json", str(tmp_path / "formats.json"))
    assert document == json.loads((tmp_path / "formats.json").read_text())
    assert document["bench"] == "formats" and "notes" not in document
    modes = [(0, "pack"), (1, "forward"), (5, "forward_lora"), (5, "backward_lora")]
    measured = [(cell["format"], cell["tokens"], cell["mode"]) for cell in document["cells"]]
    assert measured == [(name, *mode) for name in BYTES for mode in modes]
    rows = [line.split() for line in table if line.startswith("tiny ")]
    assert [(row[1], row[4]) for row in rows] == [(name, mode) for name, _, mode in measured]
    for cell in document["cells"]:
        assert 0 < cell["ms"] < math.inf and not cell["peers"]
        assert cell["share"] == pytest.approx(cell["roof_ms"] / cell["ms"], rel=1e-4)
        touched = BYTES[cell["format"]] * cell.get("unique_experts", 8)
        assert cell["gbs"] == pytest.approx(touched / cell["ms"] / 1e6, rel=1e-4)
        assert ("error" in cell) == (cell["format"] != "q4_k" and cell["mode"] != "pack")
        if "error" in cell:
            low, high = ERRORS[cell["format"]]
            assert low < cell["error"] < high
    for memory, (name, size) in zip(document["memory"], BYTES.items(), strict=True):
        assert memory["format"] == name and memory["released_bytes"] == 2 * 8 * size
        assert 1 <= memory["packed_over_released"] < 1.1


def test_8_bit_activations_have_a_row_and_a_roof_of_their_own(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(STAND_IN))
    options = ["--formats", "int8,int8+w8a8", "--tokens", "1,64", "--train-tokens", ""]
    _, document = run_bench("formats", *SHORT, *options, "--peers", f"kt_int8={sys.executable}")
    cells = {(cell["format"], cell["tokens"]): cell for cell in document["cells"]}
    assert list(cells) == [(format, tokens) for format in ("int8", "int8+w8a8") for tokens in (0, 1, 64)]
    plain, rounded = cells["int8", 64], cells["int8+w8a8", 64]
    assert plain["error"] < 0.016 < 0.018 < rounded["error"] < 0.03
    assert "register_share" in plain and "register_share" not in rounded
    assert all(list(cell["peers"]) == ["kt_int8"] for cell in document["cells"])
    assert rounded["tile_tflops"] != pytest.approx(plain["tile_tflops"], rel=1e-3)


def test_int4_has_them_too_and_others_do_not(
    run_bench: Run, refused: Callable[[str, list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fp8:128x128", "mxfp8", "bf16"):
        assert "has no integer codes" in refused("formats", ["--formats", f"int8,{name}+w8a8"])
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(STAND_IN))
    options = ["--formats", "int4:32,int4:32+w8a8", "--tokens", "64", "--train-tokens", ""]
    table, document = run_bench("formats", *SHORT, *options, "--peers", f"kt_int4={sys.executable}")
    cells = {(cell["format"], cell["tokens"]): cell for cell in document["cells"]}
    plain, rounded = cells["int4:32", 64], cells["int4:32+w8a8", 64]
    assert plain["error"] < rounded["error"] < plain["error"] + 0.005
    assert all(list(cell["peers"]) == ["kt_int4"] for cell in document["cells"])
    assert any(line.startswith("tiny") and "int4:32+w8a8 " in line for line in table)


@pytest.mark.slow
def test_peers_stand_beside_their_format(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(STAND_IN))
    peers = [f"kt_int8={sys.executable}", f"kt_int4={sys.executable}"]
    options = ["--formats", "int8,int4:32", "--tokens", "2", "--train-tokens", "5"]
    _, document = run_bench("formats", *SHORT, *options, "--peers", *peers)
    assert "notes" not in document, document["notes"]
    facts = document["machine"]["peers"]
    assert (facts["kt_int8"]["kind"], facts["kt_int4"]["kind"]) == ("int8", "int4")
    beside = {"int8": "kt_int8", "int4:32": "kt_int4"}
    for cell in document["cells"]:
        name = beside[cell["format"]]
        assert list(cell["peers"]) == [name] and cell["peers"][name] > 0
        if cell["mode"] != "pack":
            # One scale per row errs less than kt-kernel, which also rounds activations, and more than groups do.
            low, high = {"int8": (0.008, 0.03), "int4:32": (0.17, 0.4)}[cell["format"]]
            assert low < cell["peer_errors"][name] < high
    for memory in document["memory"]:
        assert list(memory["peers"]) == [beside[memory["format"]]]


def test_made_up_blocks_are_sane(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(BENCH))
    from formats import BLOCK_SCALES, random_blocks

    from ktransformers.checkpoint.encoded import decode

    for name in BLOCK_SCALES:
        values = decode(random_blocks(name, 1, 32, 512)) * math.sqrt(512)
        assert 0.8 < float(values.std()) < 1.3 and abs(float(values.mean())) < 0.2, name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--formats", "int5"], ["int5", "int4:GROUP"]),
        (["--formats", "iq1_m"], ["iq1_m", "q4_k"]),
        (["--formats", ""], ["--formats", "mxfp4"]),
        (["--peers", "kt"], ["kt_int8"]),
        (["--train-tokens", "0"], ["--train-tokens"]),
    ],
)
def test_wrong_options_are_explained(
    options: list[str], words: list[str], refused: Callable[[str, list[str]], str]
) -> None:
    said = refused("formats", options)
    assert all(word in said for word in words)
