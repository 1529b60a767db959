"""Memory of a gigabyte of packed experts: the packed bytes and a small constant, through forward and backward."""

from __future__ import annotations

import json

from tests.support.forked import python

SCRIPT = """
import json, torch
from ktransformers.nn import ExpertStore

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10

hidden, intermediate, experts, tokens = 2048, 768, 38, 16
torch.ones(64, 64) @ torch.ones(64, 64)
gate, up = (torch.randn(1, intermediate, hidden).bfloat16() for _ in range(2))
down = torch.randn(1, hidden, intermediate).bfloat16()
x, grad = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
ids, weights = torch.randint(0, experts, (tokens, 4)), torch.rand(tokens, 4)
ExpertStore(1, 64, 64)
before = anonymous()
stores = [ExpertStore(experts, hidden, intermediate) for _ in range(3)]
for store in stores:
    for e in range(experts):
        store.pack(gate=gate, up=up, down=down, first_expert=e)
    out = store.forward(x, ids, weights)
    store.backward(grad, x, ids, weights)
after = anonymous()
packed = sum(store.packed_bytes for store in stores)
parameters = 3 * 3 * experts * hidden * intermediate
print(json.dumps({"packed": packed, "grown": after - before, "parameters": parameters}))
"""


def test_memory_of_a_gigabyte_of_experts_is_bounded() -> None:
    done = python(SCRIPT)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)
    assert actual["packed"] > 1 << 30
    assert actual["grown"] < 1.1 * actual["packed"]
    assert 2.0 <= actual["grown"] / actual["parameters"] < 2.2
