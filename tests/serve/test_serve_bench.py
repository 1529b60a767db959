"""`bench/serve.py` runs, prints its table and ends with one JSON document; no speed is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SHORT = ["--shape", "tiny", "--layers", "1", "--prompt", "8", "--new", "3", "--repetitions", "1", "--rank", "2"]


def bench(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, BENCH / "serve.py", *SHORT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def test_in_process() -> None:
    found = bench("--engine", "--streams", "1,2", "--adapters", "0,2")
    cells = [(cell["test"], cell["streams"], cell["adapters"]) for cell in found["cells"]]
    assert cells == [(test, streams, count) for test in ("pp8", "tg3") for streams, count in ((1, 0), (2, 0), (2, 2))]
    assert all(cell["tokens_per_second"] > 0 and 0 < cell["expert_share"] < 1 for cell in found["cells"])


@pytest.mark.slow
def test_over_http_beside_transformers() -> None:
    pytest.importorskip("fastapi")
    peer = f"transformers={sys.executable}"
    found = bench("--streams", "2", "--adapters", "0", "--dtype", "float32", "--device", "cpu", "--peers", peer)
    assert [cell["contender"] for cell in found["cells"]] == ["kt http"] * 2 + ["transformers float32"] * 2
    assert all(cell["tokens_per_second"] > 0 for cell in found["cells"])
