"""`kt bench` on a tiny model: tables and documents, speed is not asserted; `kt microbench` finds its scripts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ktransformers.cli.bench import find_script
from ktransformers.ground.errors import InputError
from tests.support.cli import RunKt

SHORT = ("-r", "2", "-p", "24", "-n", "3")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    from tests.support.tiny_models import build, save

    directory = tmp_path_factory.mktemp("bench") / "tiny"
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, eos_token_id=2), directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[1] / "data" / "minimind_6400" / file, directory / file)
    return directory


def test_bench_document_has_results(kt: RunKt, tiny: Path, tmp_path: Path) -> None:
    kt("model", "add", str(tiny), "--name", "little")
    files = ("-o", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    done = kt("bench", "little", *SHORT, "-d", "0,10", "--json", *files)
    document = done.json
    assert json.loads((tmp_path / "out.json").read_text()) == document
    assert (document["model"], document["model_type"], document["sequences"]) == ("little", "qwen3_moe", 1)
    assert document["params"] > 9e5 and document["threads"] >= 1 and document["machine"]["cpus"] >= 1
    assert [test["test"] for test in document["tests"]] == ["pp24", "tg3", "tg3 @ d10"]
    for test in document["tests"]:
        assert len(test["samples_ts"]) == 2 and all(rate > 0 for rate in test["samples_ts"])
        assert math.isclose(test["avg_ts"], sum(test["samples_ts"]) / 2)
    page = (tmp_path / "out.html").read_text()
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    bars = [[text.text for text in chart.findall("{*}text")] for chart in charts]
    assert [texts[0] for texts in bars] == ["prefill, tokens/s", "decode, tokens/s"]
    decoded = document["tests"][2]
    assert bars[1][3] == "tg3 @ d10" and bars[1][4] == f"{decoded['avg_ts']:.2f} ± {decoded['stddev_ts']:.2f}"
    assert page.count("<tr>") == 1 + 3 and "pp24" in page


def test_bench_prints_table_csv_and_jsonl(kt: RunKt, tiny: Path) -> None:
    table = kt("bench", str(tiny), *SHORT, "--sequences", "2").out.splitlines()
    assert table[0] == "| model | size | params | variant | threads | test | t/s |" and len(table) == 4
    assert "tiny (qwen3_moe)" in table[2] and "pp24 x 2" in table[2] and "±" in table[3]
    rows = kt("bench", str(tiny), *SHORT, "-f", "csv").out.splitlines()
    assert rows[0].startswith("model,model_type,size") and len(rows) == 3
    records = [json.loads(line) for line in kt("bench", str(tiny), *SHORT, "-f", "jsonl").out.splitlines()]
    assert [record["n_gen"] for record in records] == [0, 3]


def test_invalid_bench_arguments_are_refused(kt: RunKt, tiny: Path) -> None:
    assert "128,512" in kt("bench", str(tiny), "-p", "many").error
    assert "a number above 0" in kt("bench", str(tiny), "-p", "0", "-n", "0").error
    assert "md, csv, json, jsonl" in kt("bench", str(tiny), "-f", "xml").error
    assert "kt model list" in kt("bench").error


def test_bench_scripts_are_found(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    assert (
        find_script("moe") == root / "bench" / "moe.py"
        and find_script("train-step") == root / "bench" / "train_step.py"
    )
    package = tmp_path / "site-packages" / "ktransformers"
    with pytest.raises(InputError, match=r"not in this installation.*source distribution.*bench/moe\.py"):
        find_script("moe", package)
    (package / "bench").mkdir(parents=True)
    (package / "bench" / "moe.py").touch()
    assert find_script("moe", package) == package / "bench" / "moe.py"
    with pytest.raises(InputError, match="moe, train-step"):
        find_script("attention")


def test_microbench_passes_options_on(kt: RunKt, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(words: list[str], **options: Any) -> Any:
        seen.append(words)
        return subprocess.CompletedProcess(words, len(seen) - 1, "a table\n" + '{"bench": "moe"}\n')

    monkeypatch.setattr(subprocess, "run", run)
    done = kt("microbench", "moe", "--shapes", "tiny", "-b", "1,4", "--seconds", "0.1", "--quick", "--json")
    assert done.json == {"bench": "moe"}
    assert seen[0][0] == sys.executable and seen[0][1].endswith("bench/moe.py")
    assert seen[0][2:] == ["--shapes", "tiny", "--tokens", "1,4", "--seconds-per-cell", "0.1", "--quick"]
    assert kt("microbench", "train-step").code == 1  # the bench's own status
    assert seen[1][1].endswith("bench/train_step.py") and len(seen[1]) == 2
