"""A program that ends with a placement still in its hands: nothing of the native core is reported as leaked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from tests.place.test_gpu_engine import SMALL, inputs, make_store, placed
from tests.place.test_residents import tiny
from ktransformers.nn.lora_factors import factors_of
from ktransformers.nn.store import NO_DROPOUT
from ktransformers.place import attach

model = tiny()
placement = attach(model, policy="resident", device="cpu")
placement.place_residents(count=2)
given = inputs(SMALL, "cpu")
store = make_store(SMALL, biased=True)
place = placed(store, "cpu", "auto", 16)
out = place(given.hidden, given.ids, given.weights, factors_of(given.lora), NO_DROPOUT, True)  # its graph as well
assert placement.layers and out.requires_grad
del out
"""


def test_nothing_is_left_behind() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr, done.stderr
