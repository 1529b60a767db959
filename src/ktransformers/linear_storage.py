"""Words of `rest` and `--rest`: how linear layers outside of the experts are stored. Any other word is a format."""

from __future__ import annotations

KEEP = "keep"
# Of a GPU's memory that numbers may take before `keep` keeps codes there. Models so small have small layers, whose
# products take about as long in codes as in bf16, and prompts are slower with codes (docs/log.md).
NUMBERS_SHARE = 0.2
AS_RELEASED = (KEEP, "bf16")  # in the codes of the files, or decoded: these encode nothing
SHORT = {"fp8": "fp8:128x128", "int4": "int4:32"}  # formats without their blocks or groups


def rest_word(word: str) -> str:
    """`rest` as it is used: a format with its blocks or groups."""
    return SHORT.get(word, word)
