"""A program that exits with a live placement: nothing of the native core is reported as leaked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from tests.support.placed_experts import run, SMALL, make_inputs, make_store, place_store_on, tiny_packed_model
from ktransformers.experts.store import NO_DROPOUT
from ktransformers.place import attach

model = tiny_packed_model()
placement = attach(model, policy="resident", device="cpu")
placement.place_residents(count=2)
given = make_inputs(SMALL, "cpu")
store = make_store(SMALL, biased=True)
place = place_store_on(store, "cpu", "auto", 16)
out = run(place, given, given.lora)  # its graph as well
assert placement.layers and out.requires_grad
del out
"""


def test_exit_with_a_live_placement_leaks_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr, done.stderr
