"""Random GGUF blocks: random bytes except the float16 scales, which are finite numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktransformers.checkpoint.encoded import GGUF_BLOCKS

# Where a block keeps them. IQ1_M has one in quarters, at the top of its last four words.
HALVES: dict[str, tuple[int, ...]] = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "tq1_0": (52,), "tq2_0": (64,),
    "iq1_s": (0,), "iq1_m": (), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,),
}  # fmt: skip
# Those that llama.cpp alone writes, and the ternary ones.
SMALL = ("tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")


def random_blocks(
    spec: str, shape: tuple[int, ...], columns: int, random: np.random.Generator, deviation: float = 0.01
) -> NDArray[np.uint8]:
    """`[*shape, bytes of a row]`; scales are normal with that deviation."""
    values, size = GGUF_BLOCKS[spec]
    blocks = random.integers(0, 256, (*shape, columns // values, size), dtype=np.uint8)

    def scale() -> NDArray[np.uint16]:
        return (random.standard_normal(blocks.shape[:-1]) * deviation).astype(np.float16).view(np.uint16)

    for at in HALVES[spec]:
        blocks[..., at : at + 2] = scale()[..., None].view(np.uint8)
    if spec == "iq1_m":
        whole = scale()
        for part in range(4):
            quarter = (whole >> (4 * part) & 15).astype(np.uint8)
            blocks[..., 49 + 2 * part] = blocks[..., 49 + 2 * part] & 15 | quarter << 4
    return blocks.reshape(*shape, -1)
