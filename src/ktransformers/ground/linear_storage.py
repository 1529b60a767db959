"""Words of `rest` and `--rest`: how dense (non-expert) linear layers are stored. Any other word is a format."""

from __future__ import annotations

KEEP = "keep"
# The share of a GPU's memory that dense weights may take before `keep` keeps quantized ones there. Models so small have
# small layers, whose products take about as long quantized as in bf16, and prompts are slower quantized (docs/log.md).
NUMBERS_SHARE = 0.2
# Where putting two bit planes together (Q3_K, Q5_K, Q6_K) takes longer than reading bf16, weights are dequantized: on
# two Neoverse-N1 cores 6.8 ms for 67 million weights in Q6_K, 5.5 in bf16 and 3.5 in Q4_K (docs/log.md).
ONE_PLANE_VARIANTS = ("neon",)
AS_RELEASED = (KEEP, "bf16")  # as quantized in the files, or dequantized: these quantize nothing
SHORT = {"fp8": "fp8:128x128", "int4": "int4:32"}  # formats without their blocks or groups


def rest_word(word: str) -> str:
    """`rest` as it is used: a format with its blocks or groups."""
    return SHORT.get(word, word)
