"""The training bench runs, prints a table and ends with the JSON document; no speed is judged here.

kt-kernel's peer is driven against a stand-in that trains the layer with torch's autograd from the same raw addresses.
Gradients that differ from ours would come back as notes.
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
MODES = ["forward", "forward_lora", "backward", "backward_lora", "backward_lora_recompute"]
STAND_IN = Path(__file__).resolve().parent / "stand_in"  # for kt-kernel
SHORT = ["--shapes", "tiny", "--isa", "generic", "--layers", "2", "--seconds-per-cell", "0.03"]
EXPERT = 3 * 512 * 256  # parameters of one expert of the tiny shape
FACTORS = 3 * 8 * (512 + 256)  # and of its LoRA


def check(document: dict[str, Any], tokens: list[int]) -> dict[tuple[int, str], dict[str, Any]]:
    """The schema, and that exactly these were measured; the cells by tokens and mode."""
    assert document["bench"] == "train_step" and document["rank"] == 8
    wanted = [(0, "repack"), *((count, mode) for count in tokens for mode in MODES)]
    assert [(cell["tokens"], cell["mode"]) for cell in document["cells"]] == wanted
    for cell in document["cells"]:
        assert (cell["shape"], cell["isa"], cell["format"]) == ("tiny", "generic", "bf16")
        assert 0 < cell["ms"] < math.inf and 0 < cell["roof_ms"] < math.inf and cell["reps"] >= 1
        assert cell["share"] == pytest.approx(cell["roof_ms"] / cell["ms"], rel=1e-4)
        assert cell["speedup"].keys() == cell["peers"].keys()
    (memory,) = document["memory"]
    assert memory["layers"] == 2 and 2 <= memory["packed_bytes_per_parameter"] < 2.1
    assert memory["resident_bytes_per_parameter"] > 1  # of layers this small the allocator has some pages at hand
    return {(cell["tokens"], cell["mode"]): cell for cell in document["cells"]}


def test_table_and_document(run_script: Run, tmp_path: Path) -> None:
    table, document = run_script("train_step", *SHORT, "--tokens", "3", "--json", str(tmp_path / "step.json"))
    cells = check(document, [3])
    assert document == json.loads((tmp_path / "step.json").read_text())
    assert any("bytes per parameter" in line for line in table)
    heads, *rows = (line.split() for line in table if line.startswith(("shape", "tiny")))
    assert heads[:5] == ["shape", "tokens", "isa", "mode", "ms"]
    assert [row[3] for row in rows] == ["repack", *MODES]

    pair = 2 * 3 * 2  # multiply and add, tokens, experts of each
    operations = {
        "forward": pair * EXPERT,
        "forward_lora": pair * (EXPERT + FACTORS),
        "backward": pair * EXPERT,
        "backward_lora": pair * (EXPERT + 2 * FACTORS),
        "backward_lora_recompute": pair * (EXPERT + 2 * FACTORS + 2 * (EXPERT + FACTORS) / 3),
    }
    for mode, count in operations.items():
        cell = cells[3, mode]
        assert cell["tflops"] == pytest.approx(count / cell["ms"] / 1e9, rel=1e-4)
        assert cell["gbs"] == pytest.approx(cell["unique_experts"] * 2 * EXPERT / cell["ms"] / 1e6, rel=1e-4)
        assert not cell["peers"]
    for mode, plain in (("forward_lora", "forward"), ("backward_lora", "backward")):
        ratio = cells[3, mode]["ms"] / cells[3, plain]["ms"]
        assert cells[3, mode]["lora_cost"] == pytest.approx(ratio - 1, abs=1e-4)
    ratio = cells[3, "backward_lora"]["ms"] / cells[3, "forward_lora"]["ms"]
    assert cells[3, "backward_lora"]["over_forward"] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.slow
def test_peers_get_the_same_gradients(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(STAND_IN))
    peers = [f"kt={sys.executable}", f"kt_private={sys.executable}"]
    _, document = run_bench("train_step", *SHORT, "--tokens", "20", "--peers", *peers)
    cells = check(document, [20])
    assert "notes" not in document, document["notes"]
    facts = document["machine"]["peers"]
    assert (facts["kt"]["backward"], facts["kt_private"]["backward"]) == ("shared buffer", "private copy")
    for (_, mode), cell in cells.items():
        assert cell["peers"].keys() == ({"kt", "kt_private"} if mode in ("forward_lora", "backward_lora") else set())
        assert all(ms > 0 for ms in cell["peers"].values())
    assert document["memory"][0]["peers"].keys() == {"kt", "kt_private"}


@pytest.mark.slow
def test_peers_that_fail_or_differ_are_told(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here `kt` gives LoRA gradients twice too large, and `kt_private` does not start."""
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("STAND_IN_BROKEN", "1")
    peers = [f"kt_private={sys.executable}", f"kt={sys.executable}"]
    _, document = run_bench("train_step", *SHORT, "--tokens", "20", "--peers", *peers, status=1)
    cells = check(document, [20])
    gone, *notes = document["notes"]
    assert gone.startswith("kt_private: ended early") and "no wheel for this CPU" in gone
    assert [note.split(" of norm")[0] for note in notes] == [
        f"tiny, 20 tokens, kt: gradient of {matrix}_{factor}" for matrix in ("gate", "up", "down") for factor in "ab"
    ]
    assert cells[20, "backward_lora"]["peers"].keys() == {"kt"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shapes", "huge"], ["huge", "qwen3-30b"]),
        (["--peers", "kt_private"], ["kt_private=/path/to/python"]),
        (["--peers", "torch"], ["torch", "kt_private"]),
        (["--tokens", "0"], ["--tokens"]),
    ],
)
def test_wrong_options_are_explained(
    options: list[str], words: list[str], refused: Callable[[str, list[str]], str]
) -> None:
    said = refused("train_step", options)
    assert all(word in said for word in words)
