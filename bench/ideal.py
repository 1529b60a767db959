"""A lower bound of a training step's time: DRAM, PCIe, the CPU's tiles and the GPU all at their full rates at once,
without synchronisation.

Rates are bare loops of the same run: memory by plain reads, tiles by products over panels in L2, the link by copies of
pinned memory, the GPU by a large product. A step reads the experts' bytes from memory once forward and once
backward; the share x of them that the GPU computes crosses the link as often; the rest is multiplied by the
tiles. `ideal` takes the x that minimises the time of the slowest of the four. It counts no launches, no optimiser and
no softmax, so no program reaches it; a measured step over it says what is left to gain.
"""

from __future__ import annotations

from typing import Any

from e2e_models import Recipe

from ktransformers.plan.roofs import Roofs
from ktransformers.quantized.gpu.layout import geometry

STREAMED = ("stream", "stream_all")  # all experts cross the link, forward and back
AGAIN = 5 / 3  # products of backward on the GPU over forward's: gate and up once more, then as many as forward


def ideal(recipe: Recipe, cell: dict[str, Any], rates: Roofs) -> dict[str, Any]:
    """Seconds of a measured cell's step, and of each of the four at the share that was chosen."""
    words, layers, tokens = recipe.config, cell["layers"], cell["tokens"]
    hidden, wide, top = words["hidden_size"], words["moe_intermediate_size"], words["num_experts_per_tok"]
    sparse = layers - words.get("first_k_dense_replace", 0)
    expert = geometry(1, hidden, wide, True, dict.fromkeys(("gate", "up", "down"), cell["format"])).expert_bytes
    experts = words.get("num_experts") or words["n_routed_experts"]
    elsewhere = 1 - cell.get("residents", 0) / experts  # than on the GPU
    size = 2 * sparse * cell["pieces"] * cell["touched"] * expert * elsewhere
    wide_lora = 2 * recipe.rank * (2 * hidden + 3 * wide)
    forward = 2.0 * tokens * top * sparse * (3 * hidden * wide + wide_lora / 2)
    back = 2.0 * tokens * top * sparse * (3 * hidden * wide + wide_lora)
    head = words.get("head_dim") or hidden // words["num_attention_heads"]
    rows = words["num_attention_heads"] * head * 2 + words["num_key_value_heads"] * head * 2
    # Attention forward, again and back; the head forward and back.
    rest = 2.0 * tokens * (layers * hidden * rows * 3 + 2 * hidden * recipe.vocabulary)

    def at(share: float) -> dict[str, float]:
        return {
            "dram": size / rates.dram,
            "pcie": share * size / rates.link if rates.link else 0.0,
            "tiles": (1 - share) * (forward + back) / rates.tiles,
            "gpu": (share * forward * (1 + AGAIN) + rest) / rates.gpu if rates.gpu else 0.0,
        }

    streamed, on_cpu = cell["policy"] in STREAMED, cell["policy"] == "cpu"
    shares = [0.0] if on_cpu or not rates.link else [1.0] if streamed else [step / 100 for step in range(101)]
    best = min(shares, key=lambda share: max(at(share).values()))
    return {"seconds": max(at(best).values()), "share": best, **at(best)}
