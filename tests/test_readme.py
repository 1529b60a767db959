"""The README's table of what fits where, held to the planner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktransformers.ground.linear_storage import KEEP
from ktransformers.plan import Choice, Serving, Training, open_shape, profile
from ktransformers.plan.memory import predict_memory

README = Path(__file__).resolve().parents[1] / "README.md"
MODELS = {
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "DeepSeek-V3, R1": "deepseek-v3",
    "Kimi-K2": "kimi-k2",
}
SERVING = Serving(context=8192, sequences=1)
TRAINING = Training(tokens=2048, tokens_per_step=2048, sequence=2048, rank=8)


def row(title: str) -> str:
    """Gigabytes: host memory, GPU memory to serve, GPU memory to train."""
    shape, machine = open_shape(MODELS[title]), profile("amx16-h200")
    cells = []
    for what, works in (("host", (SERVING,)), ("gpu", (SERVING, TRAINING))):
        for work in works:
            sizes = []
            for name in ("int4", "bf16"):
                memory = predict_memory(shape, work, Choice(name, 1, policy="stream", linear_format=KEEP), machine)
                sizes.append((memory.host_bytes if what == "host" else memory.gpu_bytes[0]) / 1e9)
            cells.append(f"{sizes[0]:.0f} ({sizes[1]:.0f})")
    return f"| {title} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize("title", MODELS)
def test_a_row_is_what_the_planner_says(title: str) -> None:
    (line,) = re.findall(rf"^\| {re.escape(title)} \|.*$", README.read_text(), re.MULTILINE)
    assert line == row(title)
