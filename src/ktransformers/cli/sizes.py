"""Sizes for people: gigabytes, or megabytes below 50 MB, in the decimal units of disks and GPUs.

Two digits after the point below ten and one above, so that small models show a difference and columns stay narrow.
"""

from __future__ import annotations


def gigabytes(size: float) -> str:
    scaled, unit = (size / 1e9, "GB") if size >= 5e7 else (size / 1e6, "MB")
    return f"{scaled:.{2 if scaled < 9.995 else 1}f} {unit}"
