"""`kt plan --html`: memory by place, for every GPU and the host, as bars against what is there, and the plan's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ktransformers.cli.sizes import gigabytes
from ktransformers.ground import report
from ktransformers.ground.charts import Bar, bar_chart

if TYPE_CHECKING:
    from ktransformers.plan import Plan

MIN_SHARE = 0.02  # of a place's memory, that is named in the chart; the rows name all
Rows = Sequence[tuple[str, str]]


def _bar(label: str, table: Mapping[str, int], available: int, lacking: int) -> Bar:
    total = sum(table.values())
    segments = [(name, float(size)) for name, size in table.items() if size >= MIN_SHARE * total]
    segments.sort(key=lambda segment: -segment[1])
    segments.append(("other", total - sum(size for _, size in segments)))
    missing = f", {gigabytes(lacking)} missing" if lacking else ""
    note = f"{gigabytes(total)} of {gigabytes(available)}{missing}"
    return Bar(label, segments, float(available), note)


def memory_charts(plan: Plan) -> list[str]:
    """One chart for the GPUs and one for the host, each with its own scale. A place that has less than the plan takes
    is framed in red, and the missing size is named."""
    memory, machine, lacking = plan.nearest.memory, plan.machine, plan.nearest.lacking
    gpus = [
        _bar(f"GPU {index}", table, machine.gpus[index].memory, lacking.get(f"gpu{index}", 0))
        for index, table in enumerate(memory.gpus)
    ]
    host = [_bar("host", memory.host, machine.memory, lacking.get("host", 0))]
    titles = (
        ("memory of the GPUs; the frame is what is there", gpus),
        ("host memory; the frame is what is there", host),
    )
    return [bar_chart(title, bars, gigabytes) for title, bars in titles if bars]


def plan_page(model: str, machine: str, plans: Mapping[str, tuple[Plan, Rows]]) -> str:
    """`plans`: train, serve -> the plan and its rows as the terminal shows them."""
    blocks = [report.paragraph(machine)]
    for name, (plan, rows) in plans.items():
        blocks.append(report.heading(f"{name}: {'fits' if plan.best is not None else 'does not fit'}"))
        blocks += [*map(report.chart, memory_charts(plan)), report.table(["", ""], rows, left=2)]
    return report.page(f"Plan of {model}", blocks)
