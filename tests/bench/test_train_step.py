"""The training bench runs, prints a table and ends with the JSON document; no speed is judged here.

kt-kernel is no dependency of ours and exists for x86 only, so its peer is driven against a stand-in that trains the
layer with torch's autograd from the same raw addresses. Gradients that differ from ours would come back as notes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
MODES = ["forward", "forward_lora", "backward", "backward_lora", "backward_lora_recompute"]
SHORT = ["--shapes", "tiny", "--isa", "generic", "--layers", "2", "--seconds-per-cell", "0.03"]
EXPERT = 3 * 512 * 256  # parameters of one expert of the tiny shape
FACTORS = 3 * 8 * (512 + 256)  # and of its LoRA

KT_STAND_IN = """
import ctypes
import os
import sys
import torch
import torch.nn.functional as F

__version__ = "stand-in"
FACTORS = [f"{matrix}_lora_{factor}" for matrix in ("gate", "up", "down") for factor in "ab"]
BROKEN = os.environ.get("STAND_IN_BROKEN")
if BROKEN and "--private" in sys.argv:
    raise ImportError("no wheel for this CPU")


def tensor(address, dtype, *shape):
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=dtype).view(shape)


class WorkerPoolConfig:
    pass


class CPUInfer:
    def __init__(self, config):
        self.backend_ = object()

    def submit(self, task):
        task()

    def sync(self):
        pass


class MOESFTConfig:
    def __init__(self, experts, top_k, hidden, intermediate):
        self.sizes = experts, hidden, intermediate


class AMXBF16_SFT_MOE:
    def __init__(self, config):
        (e, h, i), c = config.sizes, config
        self.config, self.saved = config, None
        assert c.authoritative_optimizer_grads and not c.full_weight_grad and c.max_cache_depth == 1
        assert c.share_backward_bb is ("--private" not in sys.argv) and c.lora_rank == 8
        r, self.scale = c.lora_rank, c.lora_alpha / c.lora_rank
        self.shapes = [(e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)]

    def load_weights_task(self):
        def run():
            (e, h, i), c = self.config.sizes, self.config
            shapes = {"gate_proj": (e, i, h), "up_proj": (e, i, h), "down_proj": (e, h, i)}
            self.base = [tensor(getattr(c, n), torch.bfloat16, *s).float() for n, s in shapes.items()]

        return run

    def linear(self, rows, place, expert):
        a, b = (self.lora[2 * place + n][expert] for n in (0, 1))
        return F.linear(rows, self.base[place][expert]) + self.scale * F.linear(F.linear(rows, a), b)

    def forward_sft_task(self, count, top_k, ids, weights, hidden, out, save):
        def run():
            t, h = int(tensor(count, torch.int32, 1)), self.config.sizes[1]
            assert t <= self.config.max_len and save and self.saved is None
            lora = [tensor(getattr(self.config, n), torch.bfloat16, *s) for n, s in zip(FACTORS, self.shapes)]
            self.lora = [factor.float().requires_grad_() for factor in lora]
            x = tensor(hidden, torch.bfloat16, t, h).float().requires_grad_()
            w = tensor(weights, torch.float32, t, top_k).clone().requires_grad_()
            chosen = tensor(ids, torch.int64, t, top_k)
            result = torch.zeros(t, h)
            for expert in chosen.unique().tolist():
                rows, slots = (chosen == expert).nonzero(as_tuple=True)
                inner = F.silu(self.linear(x[rows], 0, expert)) * self.linear(x[rows], 1, expert)
                y = self.linear(inner, 2, expert) * w[rows, slots][:, None]
                result = result.index_add(0, rows, y)
            tensor(out, torch.bfloat16, t, h).copy_(result.detach())
            self.saved = x, w, result

        return run

    def backward_task(self, grad_out, grad_hidden, *rest):
        *factors, grad_weights, gate, up, down = rest
        assert len(factors) == 6 and (gate, up, down) == (0, 0, 0)

        def run():
            (x, w, result), self.saved = self.saved, None
            above = tensor(grad_out, torch.bfloat16, *x.shape).float()
            gx, gw, *own = torch.autograd.grad(result, [x, w, *self.lora], above)
            tensor(grad_hidden, torch.bfloat16, *x.shape).copy_(gx)
            tensor(grad_weights, torch.float32, *w.shape).copy_(gw)
            for address, grad in zip(factors, own):
                tensor(address, torch.bfloat16, *grad.shape).copy_(grad * (2 if BROKEN else 1))

        return run


class moe:
    MOESFTConfig, AMXBF16_SFT_MOE = MOESFTConfig, AMXBF16_SFT_MOE


kt_kernel_ext = sys.modules[__name__]
"""


def run_bench(*options: str, env: dict[str, str] | None = None, status: int = 0) -> tuple[list[str], dict[str, Any]]:
    """Lines of the table, and the document of the last line."""
    command = [sys.executable, str(BENCH / "train_step.py"), *SHORT, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    return table, json.loads(last)


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


def test_table_and_document(tmp_path: Path) -> None:
    table, document = run_bench("--tokens", "3", "--json", str(tmp_path / "step.json"))
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


def test_peers_get_the_same_gradients(tmp_path: Path) -> None:
    (tmp_path / "kt_kernel.py").write_text(KT_STAND_IN)
    env = {"KT_PEER_PYTHONPATH": str(tmp_path)}
    peers = [f"kt={sys.executable}", f"kt_private={sys.executable}"]
    _, document = run_bench("--tokens", "20", "--peers", *peers, env=env)
    cells = check(document, [20])
    assert "notes" not in document, document["notes"]
    facts = document["machine"]["peers"]
    assert (facts["kt"]["backward"], facts["kt_private"]["backward"]) == ("shared buffer", "private copy")
    for (_, mode), cell in cells.items():
        assert cell["peers"].keys() == ({"kt", "kt_private"} if mode in ("forward_lora", "backward_lora") else set())
        assert all(ms > 0 for ms in cell["peers"].values())
    assert document["memory"][0]["peers"].keys() == {"kt", "kt_private"}


def test_peers_that_fail_or_differ_are_told(tmp_path: Path) -> None:
    """Here `kt` gives LoRA gradients twice too large, and `kt_private` does not start."""
    (tmp_path / "kt_kernel.py").write_text(KT_STAND_IN)
    env = {"KT_PEER_PYTHONPATH": str(tmp_path), "STAND_IN_BROKEN": "1"}
    peers = [f"kt_private={sys.executable}", f"kt={sys.executable}"]
    _, document = run_bench("--tokens", "20", "--peers", *peers, env=env, status=1)
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
def test_wrong_options_are_explained(options: list[str], words: list[str]) -> None:
    done = subprocess.run([sys.executable, str(BENCH / "train_step.py"), *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)
