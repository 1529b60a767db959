"""`kt bench` on a tiny model, through the HTTP of a real server: records, their public form and their comparison; speed
is not asserted. `kt microbench` finds its scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli import bench_record
from ktransformers.cli.bench import find_script, parse_counts
from ktransformers.ground.errors import InputError
from tests.support.cli import RunKt

SHORT = ("-p", "24", "-n", "3", "--streams", "1,2", "-r", "2")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    from tests.support.tiny_models import build, save

    directory = tmp_path_factory.mktemp("bench") / "tiny"
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, eos_token_id=2), directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[1] / "data" / "minimind_6400" / file, directory / file)
    return directory


def test_bench_of_a_folder_through_http(kt: RunKt, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    kt("model", "add", str(tiny), "--name", "little")
    files = ("-o", str(tmp_path / "out.json"), "--submit", str(tmp_path / "sent.json"))
    done = kt("bench", "little", *SHORT, "--json", *files, "--dtype", "float32")
    record = done.json
    assert bench_record.read_record(tmp_path / "out.json") == record
    model = record["model"]
    assert (model["type"], model["random"], model["layers"], model["format"]) == ("qwen3_moe", False, 2, "bf16")
    assert record["flags"] == ["--dtype", "float32"] and record["roofs"]["dram"] > 1e8
    assert [(row["prompt"], row["new"], row["streams"]) for row in record["rows"]] == [(24, 3, 1), (24, 3, 2)]
    for row in record["rows"]:
        assert all(len(row[name]) == 2 and min(row[name]) > 0 for name in ("prompt_rate", "decode_rate", "first_token"))
        assert row["prompt_roof"] > 0 and row["decode_roof"] > 0
    host = record["memory"]["host"]
    assert 0.8 < host["predicted"] / host["used"] < 1.5 and record["memory"]["gpus"] == []
    sent = (tmp_path / "sent.json").read_text()
    assert json.loads(sent)["rows"] == record["rows"] and json.loads(sent)["model"]["name"] == "qwen3_moe"
    assert str(tiny.parent) not in sent and "little" not in sent
    rows = kt("bench", "--compare", str(tmp_path / "out.json"), str(tmp_path / "sent.json"), "--json").json
    assert [row["test"] for row in rows] == ["pp24", "tg3 @ d24"] * 2 and {row["ratio"] for row in rows} == {1.0}


def record(**changes: Any) -> dict[str, Any]:
    row = {"prompt": 2048, "new": 128, "streams": 8, "prompt_roof": 400.0, "decode_roof": 20.0}
    row |= {"prompt_rate": [100.0, 300.0], "first_token": [2.0, 4.0], "decode_rate": [10.0, 10.0]}
    model = {"name": "qwen3-30b-a3b", "type": "qwen3_moe", "random": True, "layers": 4, "of_layers": 48, "linked": 2}
    model |= {"format": "int4", "expert_bytes": 1_400_000_000, "params": 3_700_000_000, "dense": "keep", "cache": "fp8"}
    document = {"bench": "kt", "version": 1, "model": model, "flags": [], "rows": [row], "refused": []}
    document |= {"machine": {"isa": "amx", "gpus": []}, "roofs": {"dram": 2e10, "tiles": 1e12, "link": 0}}
    return document | {"memory": {"host": {"predicted": 1_050_000_000, "used": 10**9}, "gpus": []}} | changes


def test_rows_have_rate_first_token_and_share_of_the_roof() -> None:
    prompt, decode = bench_record.table_lines(record(), record()["rows"][0])
    facts = "| qwen3-30b-a3b (qwen3_moe) | 1.40 GB int4 | 3.70 B | amx"
    assert prompt == f"{facts} | pp2048 | 8 | 200.00 ± 141.42 | 3.00 s | 50% |"
    assert decode == f"{facts} | tg128 @ d2048 | 8 | 10.00 ± 0.00 |  | 50% |"


def test_footer_says_what_was_measured_and_what_was_not() -> None:
    refused = [{"prompt": 131072, "new": 128, "streams": 8, "lacking": {"gpu0": 10**10}}]
    lines = bench_record.footer(record(refused=refused), "random weights; linked: 48 layers map 2")
    assert lines[0] == ("random weights; linked: 48 layers map 2; experts in int4, dense weights keep, KV cache in fp8")
    assert lines[1] == "host: 1.00 GB used, 1.05 GB predicted (+5.0%)"
    assert lines[-1] == "not measured: prompts of 131072, 8 streams: 10.0 GB of gpu0 missing"


def test_public_record_has_no_paths_names_or_keys() -> None:
    flags = ["--api-key", "secret", "--kv-disk", "/home/me/cache", "--rest", "int4:32", "--host=10.0.0.7"]
    model = record()["model"] | {"random": False, "name": "my-folder"}
    sent = bench_record.public(record(flags=flags, model=model, extra="me"))
    assert sent["flags"] == ["--kv-disk", "--rest", "int4:32"] and sent["model"]["name"] == "qwen3_moe"
    assert "extra" not in sent


def test_records_are_compared_by_cell(kt: RunKt, tmp_path: Path) -> None:
    other = record()
    other["rows"][0]["decode_rate"] = [15.0]
    rows = bench_record.compare(record(), other)
    assert [(row["test"], row["streams"], row["ratio"]) for row in rows] == [
        ("pp2048", 8, 1),
        ("tg128 @ d2048", 8, 1.5),
    ]
    assert bench_record.comparison_table(rows).splitlines()[-1] == "| tg128 @ d2048 | 8 | 10.00 | 15.00 | 1.50 |"
    with pytest.raises(InputError, match="without a cell in common"):
        bench_record.compare(record(), record(rows=[]))
    (tmp_path / "other.json").write_text(json.dumps(record(version=9)))
    assert "version 1" in kt("bench", "--compare", *[str(tmp_path / "other.json")] * 2).error


def test_invalid_bench_arguments_are_refused(kt: RunKt, tiny: Path) -> None:
    assert parse_counts("prompts", "512, 2k,128k") == [512, 2048, 131072]
    assert "512,2k,32k" in kt("bench", str(tiny), "-p", "many").error
    assert "512,2k,32k" in kt("bench", str(tiny), "--streams", "0").error
    assert "is on this machine" in kt("bench", str(tiny), "--layers", "1").error
    assert "unrecognized arguments: --nothing" in kt("bench", str(tiny), "--nothing").error
    assert "1 to 48" in kt("bench", "qwen3-30b", "--layers", "99").error
    assert "did you mean qwen3-30b" in kt("bench", "qwen3-30bb").error
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
