"""Sizes for people: gigabytes, or megabytes below 50 MB, in the decimal units of disks and GPUs.

Two digits after the point below ten and one above, so that small models show a difference and columns stay narrow.
"""

from __future__ import annotations


def gigabytes(size: float) -> str:
    scaled, unit = (size / 1e9, "GB") if size >= 5e7 else (size / 1e6, "MB")
    return f"{scaled:.{2 if scaled < 9.995 else 1}f} {unit}"


def table_line(table: dict[str, int]) -> str:
    """Purposes and their sizes, the largest first; what is too small to matter is left out."""
    shown = sorted(((size, name) for name, size in table.items() if size >= 5e6), reverse=True)
    return ", ".join(f"{name} {gigabytes(size)}" for size, name in shown)
