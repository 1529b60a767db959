"""`bench/kt_wrapper.py` on a tiny layer, with our own `kt_kernel` in place of kt-kernel: both processes answer, and a
method with 8-bit activations is timed beside the one without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers import _core

ROOT = Path(__file__).resolve().parents[2]


def run_bench(peer: Path, methods: str, out: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "bench" / "kt_wrapper.py"), "--tiny", "--peer-site", str(peer)]
    words += ["--methods", methods, "--tokens", "1,3", "--threads", "1", "--layers", "1"]
    words += ["--rounds", "1", "--seconds", "0.01", "--out", str(out)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_methods_are_timed_beside_the_peers(tmp_path: Path) -> None:
    peer, out = tmp_path / "peer", tmp_path / "wrapper.json"
    (peer / "ktransformers").mkdir(parents=True)
    for entry in (ROOT / "src" / "ktransformers").iterdir():
        (peer / "ktransformers" / entry.name).symlink_to(entry)
    core = peer / "ktransformers" / Path(_core.__file__).name
    if not core.exists():  # an editable install has it elsewhere
        core.symlink_to(_core.__file__)
    (peer / "kt_kernel").symlink_to(ROOT / "src" / "kt_kernel")
    run = run_bench(peer, "AMXINT8_W8A8,FP8", out)
    assert run.returncode == 0, run.stderr
    results = {result["method"]: result for result in json.loads(out.read_text())["results"]}
    for result in results.values():
        assert [cell["tokens"] for cell in result["cells"] if not cell["graph"]] == [1, 3]
        assert all(cell["ratio"] > 0 for cell in result["cells"])
    errors = results["AMXINT8_W8A8"]["error"]
    assert 1.2 * errors["kt-kernel"] < errors["ours"] < 0.05
    assert results["FP8"]["error"]["ours"] == results["FP8"]["error"]["kt-kernel"] < 0.01


def test_our_own_package_is_not_timed_as_the_peer(tmp_path: Path) -> None:
    """A folder without a kt_kernel: an import that falls back to ours is no peer."""
    run = run_bench(tmp_path, "AMXINT8", tmp_path / "wrapper.json")
    cells = json.loads((tmp_path / "wrapper.json").read_text())["results"][0]["cells"]
    assert cells and all(cell["kt-kernel"] is None for cell in cells), cells
    assert "kt_kernel" in run.stderr
