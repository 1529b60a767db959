"""Text of a report's values: numbers, intervals, changes and verdicts, shared by Markdown, HTML and the terminal."""

from __future__ import annotations

from ktransformers.evaluate.compare import Line, TaskComparison
from ktransformers.evaluate.statistic import Difference, Estimate

SIGNIFICANCE_NOTE = "\\* p < 0.05, \\*\\* p < 0.01, paired bootstrap against {first}; intervals are 95 %."
MAX_SAMPLE_CHARS = 700  # of a sample answer
# The columns in which results of fine-tuning are usually published, one row per model.
SCORE_COLUMNS = {
    **{f"bleu-{order}": f"BLEU-{order}" for order in range(1, 5)},
    **{f"rouge-{name}": f"ROUGE-{name.upper()}" for name in "12l"},
    "accuracy": "Accuracy",
    "accuracy_generated": "Accuracy (generated)",
    "judge": "Judge",
}


def format_number(value: float, line: Line) -> str:
    return f"{value:.1f}" if line.per_cent else f"{value:.2f}"


def score_table(task: TaskComparison, runs: tuple[str, ...]) -> list[list[str]]:
    """Headings, then one row per run; empty without a metric that has such a column."""
    lines = [line for line in task.lines if line.metric in SCORE_COLUMNS]
    lines.sort(key=lambda line: list(SCORE_COLUMNS).index(line.metric))
    if not lines:
        return []
    rows = [[run, *(f"{line.runs[index].value:.2f}" for line in lines)] for index, run in enumerate(runs)]
    return [[task.task, *(SCORE_COLUMNS[line.metric] for line in lines)], *rows]


def metric_name(line: Line) -> str:
    return line.metric if line.more_is_better else f"{line.metric} ↓"


def value_text(estimate: Estimate, line: Line) -> str:
    value, low, high = (format_number(number, line) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def change_text(difference: Difference, line: Line) -> str:
    return f"{'+' if difference.value >= 0 else '−'}{format_number(abs(difference.value), line)}{difference.mark}"


def verdict(difference: Difference) -> str:
    """gain, loss or even; even if the difference is not significant."""
    return "even" if not difference.mark else "gain" if difference.gain else "loss"


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else f"{text[:MAX_SAMPLE_CHARS]}…"
