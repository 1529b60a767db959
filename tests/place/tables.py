"""The table of shipped models in docs/plan.md: `python -m tests.place.tables` prints it, a test compares.

Training is what the KTransformers guide measured: batches of 512 tokens, 8192 a step, rank 8 on attention and experts.
Serving is one sequence with a context of 8192. Memory depends on the machine only in the width of panels; the profile
is the one with tiles. A single GPU stands for the sum over several.
"""

from __future__ import annotations

import sys

from ktransformers.plan import Choice, ModelShape, Serving, Training, open_shape, profile, shipped_shapes
from ktransformers.plan.memory import predict_memory

WORKS = {"train": Training(tokens=512, tokens_per_step=8192, sequence=512, rank=8), "serve": Serving()}
HEAD = ("model", "work", "GPU", "host, bf16", "host, int8", "host, int4", "published GPU + host")


def published(model: ModelShape, work: str) -> str:
    figures = [figure for figure in model.published if figure["work"] == work]
    return "; ".join(
        f"{figure['gpu_gb']:g} + {figure['host_gb']:g}" if figure.get("host_gb") else f"{figure['gpu_gb']:g} + ?"
        for figure in figures
    )


def rows() -> list[str]:
    machine = profile("dual-xeon-4090")
    found = []
    for name in shipped_shapes():
        model = open_shape(name)
        for word, work in WORKS.items():
            sizes = [predict_memory(model, work, Choice(weights, 1), machine) for weights in ("bf16", "int8", "int4")]
            cells = [name, word, f"{sizes[0].gpu_bytes[0] / 1e9:.1f}"]
            cells += [f"{size.host_bytes / 1e9:.0f}" for size in sizes]
            found.append(f"| {' | '.join([*cells, published(model, word) or 'none'])} |")
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join((f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD), *rows())) + "\n")
