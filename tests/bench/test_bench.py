"""The benches run, print a table and end with the JSON document that others read; no speed is judged here.

kt-kernel's peer is driven against a stand-in that computes the layer in torch from the same raw addresses.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[list[str], dict[str, Any]]]
BENCH = Path(__file__).resolve().parents[2] / "bench"
CELL = {"shape": str, "tokens": int, "isa": str, "format": str, "mode": str, "ms": float, "roof_ms": float}
STAND_IN = Path(__file__).resolve().parent / "stand_in"  # for kt-kernel
SHORT = ["--shapes", "tiny", "--layers", "2", "--seconds-per-cell", "0.03"]


def check(document: dict[str, Any], cells: list[tuple[int, str]]) -> None:
    """The schema, and that exactly these (tokens, mode) were measured."""
    assert document["bench"] == "moe"
    assert {"cpu", "cpus", "threads", "torch", "python", "peers"} <= document["machine"].keys()
    assert [(cell["tokens"], cell["mode"]) for cell in document["cells"]] == cells
    for cell in document["cells"]:
        assert all(type(cell[key]) is kind for key, kind in CELL.items()), cell
        assert cell["shape"] == "tiny" and cell["format"] == "bf16"
        assert 0 < cell["ms"] < math.inf and 0 < cell["roof_ms"] < math.inf
        assert cell["share"] == pytest.approx(cell["roof_ms"] / cell["ms"], rel=1e-4)
        assert cell["speedup"].keys() == cell["peers"].keys()


def test_table_and_document(run_script: Run, tmp_path: Path) -> None:
    table, document = run_script("moe", *SHORT, "--tokens", "1,5", "--json", str(tmp_path / "moe.json"))
    check(document, [(0, "pack"), (1, "forward"), (5, "forward")])
    assert document == json.loads((tmp_path / "moe.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["moe.json"]
    heads, *rows = (line.split() for line in table if line.startswith(("shape", "tiny")))
    assert heads[:5] == ["shape", "tokens", "isa", "mode", "ms"]
    assert [(row[1], row[3]) for row in rows] == [("-", "pack"), ("1", "forward"), ("5", "forward")]
    forward = document["cells"][1]
    assert forward["unique_experts"] == 2 and forward["reps"] >= 3
    assert forward["gbs"] == pytest.approx(2 * 3 * 512 * 256 * 2 / forward["ms"] / 1e6, rel=1e-4)
    assert document["cells"][2]["tflops"] == pytest.approx(
        2 * 5 * 2 * 3 * 512 * 256 / document["cells"][2]["ms"] / 1e9, rel=1e-4
    )


def test_alternation(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.OPERATOR_BYTES", 1 << 22)
    table, document = run_bench("moe", *SHORT, "--tokens", "2", "--alternate")
    check(document, [(0, "pack"), (2, "forward"), (2, "alternate")])
    assert all(document["cells"][2][key] > 0 for key in ("alone_ms", "torch_ms", "torch_alone_ms"))
    assert any("alternating with torch" in line for line in table)


def test_peers_do_the_same_work(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # By PYTHONPATH alone; its sitecustomize.py lets it win over our own kt_kernel.
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(STAND_IN))
    _, document = run_bench("moe", *SHORT, "--tokens", "1,3", "--peers", f"kt={sys.executable}", "torch")
    check(document, [(0, "pack"), (1, "forward"), (3, "forward")])
    assert "notes" not in document, document["notes"]
    assert document["machine"]["peers"]["kt"]["threads"] >= 1
    assert document["cells"][0]["peers"].keys() == {"kt"}
    for cell in document["cells"][1:]:
        assert all(cell["peers"][name] > 0 for name in ("kt", "torch"))


def test_a_peer_that_fails_is_named(run_bench: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kt_kernel.py").write_text("raise ImportError('no wheel for this CPU')")
    shutil.copy(STAND_IN / "sitecustomize.py", tmp_path)
    monkeypatch.setenv("KT_PEER_PYTHONPATH", str(tmp_path))
    _, document = run_bench("moe", *SHORT, "--tokens", "1", "--peers", f"kt={sys.executable}", status=1)
    check(document, [(0, "pack"), (1, "forward")])
    assert "no wheel for this CPU" in document["notes"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shapes", "huge"], ["huge", "qwen3-30b"]),
        (["--peers", "kt"], ["kt=/path/to/python"]),
        (["--peers", "llama"], ["llama", "torch"]),
        (["--tokens", "0"], ["--tokens"]),
    ],
)
def test_wrong_options_are_explained(
    options: list[str], words: list[str], refused: Callable[[str, list[str]], str]
) -> None:
    said = refused("moe", options)
    assert all(word in said for word in words)


def test_work_leaves_nothing_in_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from shapes import SHAPES, make_work

    for shape in (SHAPES["tiny"], SHAPES["dsv2-lite"]):
        work = make_work(shape, 1, 2)
        for layer in (0, 1):
            dealt = [expert for where, ids in work.steps if where == layer for expert in ids.flatten().tolist()]
            dealt += dealt[: shape.experts]  # the permutation starts over
            for start in range(len(dealt) - shape.experts):
                assert len(set(dealt[start : start + shape.experts])) == shape.experts
    assert SHAPES["qwen3-30b"].layers() * SHAPES["qwen3-30b"].layer_bytes > 2e9


def test_checksums_of_a_first_copy(run_bench: Run) -> None:
    options = ["--device", "cpu", "--shape", "tiny", "--formats", "int4:32", "--experts", "1,8", "--rounds", "1"]
    table, document = run_bench("checksums", *options)
    assert [cell["experts"] for cell in document["cells"]] == [1, 8] and document["bench"] == "checksums"
    for cell in document["cells"]:
        assert all(cell[f"{name}_s"] > 0 for name in ("copy", "first", "again", "check"))
        assert cell["ratio"] == pytest.approx(cell["first_s"] / cell["copy_s"], rel=1e-4)
    assert any(line.startswith("format") for line in table)


def test_rates_of_encoding_and_packing(run_bench: Run) -> None:
    options = ["--shape", "tiny", "--formats", "bf16,int4:32,q4_k", "--threads", "2", "--rounds", "1"]
    table, document = run_bench("pack", *options)
    cells = document["cells"]
    assert [(cell["format"], cell["threads"]) for cell in cells] == [(spec, 2) for spec in ("bf16", "int4:32", "q4_k")]
    for cell in cells:
        assert ("encode_gbs" in cell) == (cell["format"] == "int4:32")
        assert all(cell[f"{name}_gbs"] > 0 for name in ("fresh", "again", "read"))
        assert cell["again_ratio"] == pytest.approx(cell["again_gbs"] / cell["read_gbs"], rel=1e-4)
    assert any(line.startswith("format") for line in table)


def test_request_path_with_and_without_workers(run_bench: Run) -> None:
    options = ["--workers", "1", "--requests", "4", "--parallel", "2", "--rounds", "1"]
    _, document = run_bench("request_path", *options)
    assert len(document["cells"]) == 3 and document["bench"] == "request_path"
    for cell in document["cells"]:
        assert cell["tokens"] > 5 and all(cell[key] > 0 for key in ("here_s", "worker_s", "workers_rate", "loop_s"))


@pytest.mark.slow
def test_recurrent_states(run_bench: Run) -> None:
    options = ["--device", "cpu", "--shape", "tiny", "--layers", "4", "--vocabulary", "128", "--seconds", "0"]
    _, document = run_bench("recurrent", *options, "--streams", "1,2")
    rows = [(row["way"], row["share"], row["streams"]) for row in document["steps"]]
    assert rows == [(way, share, n) for way in ("sequential", "batched") for share in (0.0, 1.0) for n in (1, 2)]
    assert all(
        row["tokens_per_s"] == pytest.approx(row["streams"] / row["seconds"], rel=1e-4) for row in document["steps"]
    )
    assert document["bytes_per_sequence"] == 3 * (128 * 4 * 2 + 4 * 16 * 16 * 4) and document["bytes_per_token"] == 128
