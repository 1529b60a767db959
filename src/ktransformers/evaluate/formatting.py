"""Text of a report's values: numbers, intervals, changes and verdicts, shared by Markdown, HTML and the terminal."""

from __future__ import annotations

from ktransformers.evaluate.compare import Line
from ktransformers.evaluate.statistic import Difference, Estimate

SIGNIFICANCE_NOTE = "\\* p < 0.05, \\*\\* p < 0.01, paired bootstrap against {first}; intervals are 95 %."
MAX_SAMPLE_CHARS = 700  # characters of a sample answer


def format_number(value: float, line: Line) -> str:
    return f"{value:.1f}" if line.per_cent else f"{value:.2f}"


def metric_name(line: Line) -> str:
    return line.metric if line.more_is_better else f"{line.metric} ↓"


def value_text(found: Estimate, line: Line) -> str:
    return f"{format_number(found.value, line)} [{format_number(found.low, line)}, {format_number(found.high, line)}]"


def change_text(found: Difference, line: Line) -> str:
    return f"{'+' if found.value >= 0 else '−'}{format_number(abs(found.value), line)}{found.mark}"


def verdict(found: Difference) -> str:
    """gain, loss or even: even is everything that chance could do."""
    return "even" if not found.mark else "gain" if found.gain else "loss"


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else f"{text[:MAX_SAMPLE_CHARS]}…"
