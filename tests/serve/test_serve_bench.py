"""`bench/serve.py` runs, prints its table and ends with one JSON document; speed is not asserted."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import python

BENCH = Path(__file__).resolve().parents[2] / "bench"
SHORT = ["--shape", "tiny", "--layers", "1", "--prompt", "8", "--new", "3", "--repetitions", "1", "--rank", "2"]


def harness(*words: str) -> dict[str, Any]:
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import serve; sys.exit(serve.main())"
    done = python(code, *SHORT, *words)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def test_bench_in_process() -> None:
    actual = harness("--engine", "--streams", "1,2", "--adapters", "0,2")
    cells = [(cell["test"], cell["streams"], cell["adapters"]) for cell in actual["cells"]]
    assert cells == [(test, streams, count) for test in ("tg3", "pp8") for streams, count in ((1, 0), (2, 0), (2, 2))]
    assert all(cell["tokens_per_second"] > 0 and 0 < cell["expert_share"] < 1 for cell in actual["cells"])


@pytest.mark.parametrize("adapters", [0, 2])
def test_graph_bench_compares_with_eager(adapters: int) -> None:
    """On a CPU a step is computed eagerly where a GPU replays it."""
    words = ["--shape", "tiny", "--layers", "2", "--vocabulary", "128", "--device", "cpu", "--policy", "resident"]
    words += ["--shares", "0,0.5", "--streams", "2", "--prompt", "8", "--chunk", "8", "--seconds", "0.1"]
    words += ["--adapters", str(adapters)]
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import serve_graphs; sys.exit(serve_graphs.main())"
    done = python(code, *words)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    assert [(cell["share"], cell["captured"]) for cell in actual["cells"]] == [(0.0, True), (0.5, True)]
    assert all(cell["graph_tokens_per_s"] > 0 and cell["roof_tokens_per_s"] > 0 for cell in actual["cells"])
    assert [row["tokens"] for row in actual["prompts"]] == [8, 8] and actual["adapters"] == adapters


def test_bench_of_cache_tiers_compares_with_computing() -> None:
    words = ["--shape", "tiny", "--layers", "2", "--vocabulary", "128", "--device", "cpu"]
    words += ["--prompt", "128", "--chunk", "64", "--rounds", "1"]
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import kv_tiers; sys.exit(kv_tiers.main())"
    done = python(code, *words)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    assert actual["prompt"] == 128 and len(actual["rounds"]) == 1
    assert actual["rounds"][0]["read_bytes"] == 2 * actual["block_bytes"]
    assert min(actual["host_times_faster"], actual["disk_times_faster"], actual["copy_of_link"]) > 0


@pytest.mark.slow
def test_bench_over_http_compares_with_transformers() -> None:
    pytest.importorskip("fastapi")
    peer = f"transformers={sys.executable}"
    actual = harness("--streams", "2", "--adapters", "0", "--dtype", "float32", "--device", "cpu", "--peers", peer)
    assert [cell["contender"] for cell in actual["cells"]] == ["kt http"] * 2 + ["transformers float32"] * 2
    assert all(cell["tokens_per_second"] > 0 for cell in actual["cells"])
    assert [row["bar"] for row in actual["ratios"]] == [None, None] and "transformers" in actual["peers"][
        "transformers"
    ]


def module(name: str) -> Any:
    sys.path.insert(0, str(BENCH))
    sys.path.insert(0, str(BENCH / "peers"))
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[:2]


def cell(contender: str, test: str, streams: int, rate: float, adapters: int = 0) -> dict[str, Any]:
    words = {"contender": contender, "test": test, "streams": streams, "tokens_per_second": rate}
    return words | {"adapters": adapters, "expert_share": 0.5 if contender.startswith("kt") else None}


def test_ratios_are_computed() -> None:
    ours = [cell("kt engine", "tg128", 1, 70), cell("kt engine", "tg128", 8, 300), cell("kt engine", "tg128", 8, 1, 4)]
    peers = [cell("transformers bfloat16", "tg128", 8, 160), cell("llama.cpp BF16", "tg128", 1, 100)]
    peers += [cell("llama.cpp BF16", "tg128", 8, 300), cell("llama.cpp Q4_K", "tg128", 1, 140)]
    actual = module("serve_ratios").ratios(ours + peers)
    assert [(row["ratio"], row["bar"], row["met"]) for row in actual] == [
        (pytest.approx(1.875), 2.0, False),
        (pytest.approx(0.7), 0.7, True),
        (pytest.approx(1.0), 1.0, True),
        (pytest.approx(0.5), 0.7, False),
    ]
    actual = module("serve_ratios").ratios([*ours, cell("kt engine Q4_K", "tg128", 1, 120), *peers])
    assert [row["ours"] for row in actual] == ["kt engine"] * 3 + ["kt engine Q4_K"]


def test_gguf_file_equals_checkpoint(tmp_path: Path) -> None:
    """The file for llama.cpp has every tensor: stacked experts in bf16, norms and routers in float32."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    created = module("serve_model").make_model(tmp_path / "model", module("shapes").SHAPES["tiny"], 1)
    file = tmp_path / "bf16.gguf"
    module("serve_gguf").write_gguf(created, file)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    checkpoint = module("serve_gguf").Checkpoint(created)
    assert len(tensors) == 3 + 9 + 3
    stacked = np.asarray(tensors["blk.0.ffn_down_exps.weight"].data).view(np.uint16)
    for expert in (0, 5):
        assert (stacked[expert] == checkpoint.read(f"model.layers.0.mlp.experts.{expert}.down_proj.weight")).all()
    router = np.asarray(tensors["blk.0.ffn_gate_inp.weight"].data)
    bits = checkpoint.read("model.layers.0.mlp.gate.weight").astype(np.uint32) << 16
    assert router.dtype == np.float32 and (router == bits.view(np.float32)).all()
