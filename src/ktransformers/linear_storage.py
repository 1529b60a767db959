"""Words of `rest` and `--rest`: how linear layers outside of the experts are stored. Any other word is a format."""

from __future__ import annotations

KEEP = "keep"
NUMBERS_SHARE = 0.5  # of a GPU's memory that numbers may take before `keep` keeps codes there: bf16 is faster still
AS_RELEASED = (KEEP, "bf16")  # in the codes of the files, or decoded: these encode nothing
