"""`bench/kt_wrapper.py` on a tiny layer, with our own `kt_kernel` in place of kt-kernel: both processes answer, and a
method with 8-bit activations is timed beside the one without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_methods_are_timed_beside_the_peers(tmp_path: Path) -> None:
    peer, out = tmp_path / "peer", tmp_path / "wrapper.json"
    peer.mkdir()
    for name in ("kt_kernel", "ktransformers"):
        (peer / name).symlink_to(ROOT / "src" / name)
    words = [sys.executable, str(ROOT / "bench" / "kt_wrapper.py"), "--tiny", "--peer-site", str(peer)]
    words += ["--methods", "AMXINT8_W8A8,FP8", "--tokens", "1,3", "--threads", "1", "--layers", "1"]
    run = subprocess.run(
        [*words, "--rounds", "1", "--seconds", "0.01", "--out", str(out)], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    results = {result["method"]: result for result in json.loads(out.read_text())["results"]}
    for result in results.values():
        assert [cell["tokens"] for cell in result["cells"] if not cell["graph"]] == [1, 3]
        assert all(cell["ratio"] > 0 for cell in result["cells"])
    errors = results["AMXINT8_W8A8"]["error"]
    assert 1.2 * errors["kt-kernel"] < errors["ours"] < 0.05
    assert results["FP8"]["error"]["ours"] == results["FP8"]["error"]["kt-kernel"] < 0.01
