"""Charts are SVG that an XML parser reads, with every value inside of the frame and every name escaped."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ktransformers.ground.charts import (
    MAX_POINTS,
    Bar,
    Interval,
    Series,
    bar_chart,
    format_tick,
    grid,
    interval_chart,
    line_chart,
    smooth,
    thin,
    ticks,
)
from ktransformers.ground.report import (
    Cell,
    aligned,
    chart,
    code,
    folded,
    heading,
    listed,
    markdown,
    page,
    paragraph,
    sample,
    table,
)
from ktransformers.ground.training_charts import compared_panels, curve, read_log, run_panels, run_picture

HOSTILE = "<script>alert('x')</script>\"&"


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.findall(".//{*}text")]


def drawn(svg: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The points of each curve."""
    lines = [line.attrib["points"].split() for line in svg.findall(".//{*}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_curves_stay_inside_and_keep_their_order() -> None:
    generator = random.Random(0)
    points = [(float(step), 3.0 - step / 100 + generator.gauss(0, 0.1)) for step in range(1, 200)]
    svg = parse(line_chart("loss", [Series("a", points), Series("b", points[::2])], 400, 240, "step"))
    first, second = drawn(svg)
    assert len(first) == 199 and len(second) == 100
    assert all(52 <= x <= 388 and 30 <= y <= 206 for x, y in first + second)
    highest, lowest = max(points, key=lambda point: point[1]), min(points, key=lambda point: point[1])
    assert first[points.index(highest)][1] < first[points.index(lowest)][1], "larger values are higher"
    assert {"loss", "step", "a", "b"} <= set(texts(svg))


def test_values_that_are_no_numbers_are_left_out() -> None:
    svg = parse(line_chart("norm", [Series("n", [(1, math.nan), (2, 1.0), (3, math.inf), (4, 2.0)])]))
    assert [len(line) for line in drawn(svg)] == [2]
    assert "no values yet" in texts(parse(line_chart("loss", [Series("n", [])])))
    dot = parse(line_chart("loss", [Series("n", [(1, 0.0)])]))
    assert len(dot.findall(".//{*}circle")) == 1 and drawn(dot) == []
    flat = parse(line_chart("lr", [Series("n", [(1, 1e-4), (2, 1e-4)])]))
    assert [len(line) for line in drawn(flat)] == [2]


def test_long_curves_are_thinned() -> None:
    points = [(float(step), float(step)) for step in range(10_001)]
    assert len(thin(points)) <= MAX_POINTS + 1 and thin(points)[-1] == points[-1] and thin(points)[0] == points[0]
    assert thin([]) == []


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.1, 0.9), (-3, 7), (1e-5, 1e-4), (0, 12_345), (2.99, 3.01), (5, 5), (1e-14, 3e-14)]
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float) -> None:
    values = ticks(low, high)
    assert values[0] <= low and values[-1] >= high and len(values) <= 8
    assert values == sorted(set(values)) and all(len(format_tick(value)) <= 8 for value in values)
    assert ticks(0.0, 5e-324) == [0.0], "a range that cannot be divided"
    assert [format_tick(value) for value in (0.0, 1e-4, 5e-5, 0.25, 1500.0, 2e6)] == [
        *("0", "1e-4", "5e-5", "0.25", "1500", "2e6")
    ]


def test_bars_are_to_scale_and_an_overflow_is_marked() -> None:
    bars = [Bar("GPU", [("experts", 6.0), ("cache", 2.0)], limit=16.0), Bar("host", [("experts", 40.0)], limit=32.0)]
    svg = parse(bar_chart("memory", bars, lambda value: f"{value:.0f} GB"))
    rects = [rect for rect in svg.findall(".//{*}rect") if rect.attrib["height"] == "20"]
    widths = [float(rect.attrib["width"]) for rect in rects]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01) and widths[2] == pytest.approx(
        2 * (widths[0] + widths[1]), rel=0.01
    )
    frames = [rect.attrib["stroke"] for rect in rects if rect.attrib["fill"] == "none"]
    assert frames[0] != frames[1], "32 of 40 is another colour than 8 of 16"
    assert rects[0].attrib["fill"] == rects[3].attrib["fill"], "a name has one colour"
    assert {"8 GB", "40 GB", "GPU", "host", "experts", "cache"} <= set(texts(svg))
    parse(bar_chart("nothing", []))


def test_names_are_escaped() -> None:
    for svg in (
        line_chart(HOSTILE, [Series(HOSTILE, [(1, 2)]), Series("b", [(1, 3)])], x_label=HOSTILE),
        bar_chart(HOSTILE, [Bar(HOSTILE, [(HOSTILE, 1.0)], 2.0, HOSTILE)]),
        interval_chart(HOSTILE, [Interval(HOSTILE, 1, 0, 2, HOSTILE, "#111")], [(HOSTILE, "#111")], HOSTILE),
    ):
        assert "<script" not in svg and HOSTILE in texts(parse(svg))
    cell = Cell(HOSTILE, HOSTILE, HOSTILE, "gain")
    blocks = [heading(HOSTILE), paragraph(HOSTILE, HOSTILE), listed([HOSTILE]), code([HOSTILE]), chart("<svg/>")]
    blocks += [table([HOSTILE, "b"], [[HOSTILE, cell], [HOSTILE]]), sample(HOSTILE, [(HOSTILE, HOSTILE)])]
    html = page(HOSTILE, [*blocks, folded(HOSTILE, blocks)])
    assert "<script" not in html and "<figure class='chart'><svg/></figure>" in html


def test_a_report_is_the_same_as_page_as_markdown_and_on_a_terminal() -> None:
    rows = [["a|b", "x", Cell("1.0", "0, 2")], ["more"], ["c", "y", Cell("3.0", change="+2.0*", verdict="gain")]]
    written = markdown("Title", [heading("Part"), table(["task", "", "score"], rows, left=2, main=2), chart("<svg/>")])
    assert written.splitlines() == [
        *("# Title", "", "## Part", "", "| task |  | score |", "| --- | --- | ---: |"),
        *("| a\\|b | x | 1.0 [0, 2] |", "| *more* |  |  |", "| c | y | **3.0 (+2.0\\*)** |"),
    ]
    assert aligned(["task", "", "score"], rows, left=2) == [
        *("task           score", "a|b   x   1.0 [0, 2]", "more", "c     y  3.0 (+2.0*)")
    ]
    html = page("Title", [table(["task", "", "score"], rows, left=2, main=2)])
    assert "<tr class=main>" in html and "<td colspan" not in html and "1.0 <small>[0, 2]</small>" in html
    assert "3.0 <span class='gain'>+2.0*</span>" in html and "<tr class='panel'><td class='left' colspan='3'>" in html
    assert sample("why?", [("base", "so\nso")]).markdown == "**asked**\n\n> why?\n\n**base**\n\n> so\n> so"


def test_intervals_are_on_one_axis_with_zero() -> None:
    rows = [Interval("a", 10.0, 5.0, 20.0, "+10.0", "#111"), Interval("b", math.nan, 0.0, 1.0, "?", "#222", faint=True)]
    rows.append(Interval("c", -10.0, -12.0, -8.0, "−10.0", "#333"))
    svg = parse(interval_chart("change", rows, [("base", "#111"), ("tuned", "#222")], "better"))
    dots = [(float(dot.attrib["cx"]), dot.attrib["fill"]) for dot in svg.findall(".//{*}circle")]
    assert [colour for _, colour in dots] == ["#111", "#333"], "a value that is none has no dot"
    spans = [line for line in svg.findall(".//{*}line") if line.get("stroke-linecap")]
    first, last = (([float(line.attrib[key]) for key in ("x1", "x2")]) for line in spans)
    assert first[0] < dots[0][0] < first[1] and last[0] < dots[1][0] < last[1] < first[0]
    assert {"change", "a", "b", "c", "?", "0", "base", "tuned", "better"} <= set(texts(svg))
    parse(interval_chart("nothing", []))


def test_panels_of_a_run_come_from_its_log(tmp_path: Path) -> None:
    lines = [
        {"current_steps": step, "loss": 3 / step, "lr": 1e-4, "grad_norm": 1.0, "throughput": 50.0 + step}
        for step in range(1, 31)
    ]
    lines.append({"current_steps": 30, "eval_loss": 0.5})
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"current_steps": 31, "lo'
    (tmp_path / "trainer_log.jsonl").write_text(text)
    read = read_log(tmp_path)
    assert read == lines, "an incomplete last line is left out"
    assert curve(read, "eval_loss") == [(30.0, 0.5)] and read_log(tmp_path / "nothing") == []
    picture = parse(run_picture(read))
    assert {"loss", "learning rate", "gradient norm", "tokens/s", "loss, smoothed", "eval loss"} <= set(texts(picture))
    assert len(picture.findall(".//{*}polyline")) == 5, "loss twice, the others once"
    assert len(run_panels([])) == 4
    compared = parse(compared_panels({"a": read, "b": read[:5]})[0])
    assert [len(line) for line in drawn(compared)] == [30, 5]


def test_smoothed_curve_is_between_the_values() -> None:
    values = [float(index % 2) for index in range(100)]
    smoothed = smooth(values)
    assert len(smoothed) == 100 and smoothed[0] == values[0] and 0.3 < smoothed[-1] < 0.7 and smooth([]) == []
    diverged = smooth([math.nan, 1.0, math.inf, 1.0])
    assert math.isnan(diverged[0]) and diverged[1:] == [1.0, math.inf, 1.0], "the curve goes on behind a gap"


def test_grid_places_charts_side_by_side() -> None:
    one = line_chart("a", [], 100, 50)
    svg = parse(grid([one, one, one], 2, 100, 50, "three"))
    places = [(inner.attrib["x"], inner.attrib["y"]) for inner in svg.findall("{*}svg")]
    assert places == [("0", "0"), ("100", "0"), ("0", "50")] and svg.attrib["viewBox"] == "0 0 200 100"
