"""`kt model check`: the report and the exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.cli import RunKt
from tests.support.tiny_models import build, save

TOKENIZER = Path(__file__).parents[1] / "data" / "minimind_6400"


def test_command_writes_a_report_and_ends_with_1_for_a_fault(kt: RunKt, tmp_path: Path) -> None:
    release = tmp_path / "tiny"
    save(build("qwen3_moe", vocab_size=6400, eos_token_id=2), release)
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, release / file.name)
    done = kt("model", "check", str(release), "--layers", "1", "-o", str(tmp_path / "report.json"))
    assert done.code == 0 and [line.split()[0] for line in done.out.splitlines()] == ["ok"] * 6
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == [] and report["model"]["model_type"] == "qwen3_moe" and str(tmp_path) not in str(report)
    next(release.glob("*.safetensors")).write_bytes(b"broken")
    broken = kt("model", "check", str(release), "--json")
    assert broken.code == 1 and broken.json["faults"] and [one["name"] for one in broken.json["checks"]] == ["files"]
