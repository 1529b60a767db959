"""`bench/llama_cpp.py` opens one GGUF file in both programs and compares them round by round; speed is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked import python

BENCH = Path(__file__).resolve().parents[2] / "bench"
PROGRAM = Path(__file__).resolve().parent / "stand_in" / "llama_speed.py"
CODE = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import llama_cpp; sys.exit(llama_cpp.main())"


def test_rounds_of_both_programs_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    words = ["--program", str(PROGRAM), "--shape", "tiny", "--layers", "1", "--vocabulary", "512", "--files", "BF16"]
    words += ["--streams", "1,2", "--prompts", "24", "--new", "3", "--rounds", "2", "--folder", str(tmp_path)]
    words += ["--top-k", "1"]
    done = python(CODE, *words, "--json", str(tmp_path / "document.json"))
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "document.json").read_text())["cells"] == actual["cells"]
    rows = [(cell["test"], cell["streams"], cell["bar"]) for cell in actual["cells"]]
    assert rows == [("tg3", 1, 1.0), ("tg3", 2, 1.1), ("pp24", 1, 2.0)]
    for cell in actual["cells"]:
        assert cell["peer_tokens_per_second"] == pytest.approx(1000)  # tokens of all streams
        assert len(cell["samples"]) == len(cell["peer_samples"]) <= 2
        assert cell["ratio"] == pytest.approx(cell["tokens_per_second"] / 1000, rel=1e-3)
        assert cell["met"] == (cell["ratio"] >= cell["bar"])
    assert actual["peer"]["features"] == "CPU : STAND_IN = 1"
    (config,) = tmp_path.glob("tiny-1-512/config.json")
    assert json.loads(config.read_text())["num_experts_per_tok"] == actual["model"]["top_k"] == 1


def test_more_experts_of_a_token_than_there_are_are_refused() -> None:
    done = python(CODE, "--program", str(PROGRAM), "--shape", "tiny", "--top-k", "1000")
    assert done.returncode == 2 and "--top-k: 1000" in done.stderr


def test_files_of_unknown_types_are_refused() -> None:
    done = python(CODE, "--program", str(PROGRAM), "--files", "Q5_1")
    assert done.returncode == 2 and "Q5_1, expected BF16, Q8_0, Q4_K_M" in done.stderr
