"""Line, bar and interval charts as SVG text, without a plotting package: of a training run and in reports.

A training run redraws its picture at every logging step, so a chart is built as a string in about a millisecond. All
colours are readable on a light and on a dark background, because an SVG file cannot follow the page around it. Text is
escaped here: names come from users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

VERDICT_COLOURS = {"gain": "#1a7f4b", "loss": "#b3362b", "even": "#8a8f98"}
RUN_COLOURS = ("#8a8f98", "#2f6fb0", "#c77d1e", "#6d4ea3", "#1a7f4b", "#b3362b")  # the first run is the base
SERIES_COLOURS = (*RUN_COLOURS[1:], "#2a9d9a", "#c2568d", "#8a8f98")
TEXT, RULE = "#7d848e", "#9aa1ab"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif"
MAX_POINTS = 600  # of a drawn curve; longer ones are thinned
CHARACTER_WIDTH = 6.3  # of 11 px text, on average


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    colour: str = ""  # empty: by its position
    faint: bool = False  # the measured curve behind a smoothed one


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: segments side by side, and what they are compared with."""

    label: str
    segments: Sequence[tuple[str, float]]  # (name, value)
    limit: float | None = None  # drawn as a frame around the room that there is
    note: str = ""  # after the bar; empty: the sum


@dataclass(frozen=True)
class Interval:
    """One row of an interval chart: a value as a dot on the line from `low` to `high`."""

    label: str
    value: float
    low: float
    high: float
    note: str  # at the right edge
    colour: str
    faint: bool = False  # a part of the row above


def format_tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.6g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover the range."""
    rough = (high - low) / max(count - 1, 1)
    if rough <= 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _around(value: float) -> list[float]:
    """Ticks for a curve that does not change."""
    half = abs(value) / 2 or 1.0
    return [value - half, value, value + half]


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average whose decay grows with the length of the curve. NaN and infinities are left as they
    are and have no weight in the average."""
    decay = 0.9 * (2 / (1 + math.exp(-0.05 * len(values))) - 1)
    smoothed, last = [], next(filter(math.isfinite, values), 0.0)
    for value in values:
        if math.isfinite(value):
            last = decay * last + (1 - decay) * value
        smoothed.append(last if math.isfinite(value) else value)
    return smoothed


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS finite points, the last one included."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    stride = -(-len(finite) // MAX_POINTS) if finite else 1
    return [*finite[:-1:stride], *finite[-1:]]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, colour: str = TEXT) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = RULE, opacity: float = 0.35) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-opacity="{opacity}"/>'
    )


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(label)}" font-family="{FONT}">\n{body}\n</svg>\n'
    )


def _legend(names: Sequence[tuple[str, str]], left: float, top: float, width: float) -> tuple[list[str], float]:
    """Coloured names in rows, and the height that they take. `names`: (name, colour)."""
    parts, x, y = [], left, top
    for name, colour in names:
        advance = 22 + CHARACTER_WIDTH * len(name)
        if x > left and x + advance > left + width:
            x, y = left, y + 16
        parts.append(f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="10" height="10" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 14, y + 1, name))
        x += advance
    return parts, (y - top + 18 if names else 0.0)


def _coloured(series: Sequence[Series]) -> list[tuple[Series, str]]:
    return [(one, one.colour or SERIES_COLOURS[index % len(SERIES_COLOURS)]) for index, one in enumerate(series)]


def line_chart(title: str, series: Sequence[Series], width: float = 420, height: float = 240, x_label: str = "") -> str:
    """Curves over a common axis; without points the chart says so. A single point is drawn as a dot."""
    curves = [(one, thin(one.points), colour) for one, colour in _coloured(series)]
    named = [(one.name, colour) for one, points, colour in curves if one.name and points and not one.faint]
    legend, legend_height = _legend(named, 52, 38, width - 64) if len(named) > 1 else ([], 0.0)
    top, bottom, left, right = 30 + legend_height, height - (34 if x_label else 22), 52.0, width - 12
    parts = [_text(left, 18, title, size=13), *legend]
    everything = [point for _, points, _ in curves for point in points]
    if not everything:
        parts.append(_text((left + right) / 2, (top + bottom) / 2, "no values yet", "middle"))
        return _svg(width, height, parts, title)
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    rows = ticks(min(ys), max(ys)) if max(ys) > min(ys) else _around(min(ys))
    low, high = min(rows), max(rows)
    first, last = min(xs), max(xs)
    across = (right - left) / ((last - first) or 1.0)
    up = (bottom - top) / ((high - low) or 1.0)
    for value in rows:
        y = bottom - (value - low) * up
        parts += [_line(left, y, right, y), _text(left - 6, y + 4, format_tick(value), "end")]
    are_whole = all(x == int(x) for x in xs)  # steps
    for value in ticks(first, last):
        if first <= value <= last and (value == int(value) or not are_whole):
            parts.append(_text(left + (value - first) * across, bottom + 15, format_tick(value), "middle"))
    if x_label:
        parts.append(_text((left + right) / 2, bottom + 29, x_label, "middle"))
    for one, points, colour in curves:
        path = " ".join(f"{left + (x - first) * across:.1f},{bottom - (y - low) * up:.1f}" for x, y in points)
        opacity, stroke = (0.35, 1.2) if one.faint else (1.0, 1.8)
        if len(points) == 1:
            across_text, _, up_text = path.partition(",")
            parts.append(f'<circle cx="{across_text}" cy="{up_text}" r="3" fill="{colour}" fill-opacity="{opacity}"/>')
        elif points:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{stroke}" '
                f'stroke-opacity="{opacity}" stroke-linejoin="round"/>'
            )
    return _svg(width, height, parts, title)


def bar_chart(title: str, bars: Sequence[Bar], unit: Callable[[float], str] = format_tick, width: float = 860) -> str:
    """Horizontal bars. All share one scale, from 0 to the largest value or limit; a name has one colour in all bars."""
    names = list(dict.fromkeys(name for bar in bars for name, value in bar.segments if value > 0))
    colours = {name: SERIES_COLOURS[index % len(SERIES_COLOURS)] for index, name in enumerate(names)}
    legend, legend_height = _legend(list(colours.items()), 12, 40, width - 24) if len(names) > 1 else ([], 0.0)
    sums = [sum(value for _, value in bar.segments) for bar in bars]
    notes = [bar.note or unit(total) for bar, total in zip(bars, sums, strict=True)]
    left = 20 + CHARACTER_WIDTH * max([len(bar.label) for bar in bars], default=4)
    right = width - 16 - CHARACTER_WIDTH * max([len(note) for note in notes], default=4)
    most = max([*sums, *(bar.limit or 0.0 for bar in bars)], default=0.0) or 1.0
    scale, top = (right - left) / most, 32 + legend_height
    parts = [_text(12, 18, title, size=13), *legend]
    for index, (bar, total, note) in enumerate(zip(bars, sums, notes, strict=True)):
        y = top + 30 * index
        parts.append(_text(left - 8, y + 15, bar.label, "end"))
        x = left
        for name, value in bar.segments:
            if value > 0:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(value * scale, 0.5):.1f}" height="20" '
                    f'fill="{colours[name]}"><title>{escape(f"{name}: {unit(value)}")}</title></rect>'
                )
                x += value * scale
        if bar.limit is not None:
            colour = RULE if total <= bar.limit else VERDICT_COLOURS["loss"]
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{bar.limit * scale:.1f}" height="20" fill="none" '
                f'stroke="{colour}" stroke-width="1.5"><title>{escape(unit(bar.limit))}</title></rect>'
            )
        parts.append(_text(left + max(total, bar.limit or 0.0) * scale + 8, y + 15, note))
    return _svg(width, top + 30 * len(bars) + 8, parts, title)


def interval_chart(
    title: str, rows: Sequence[Interval], names: Sequence[tuple[str, str]] = (), x_label: str = "", width: float = 860
) -> str:
    """Rows over a common axis that begins or ends with 0 or contains it. `names`: (name, colour) of the legend."""
    legend, legend_height = _legend(names, 12, 40, width - 24)
    left = 24 + CHARACTER_WIDTH * max([len(row.label) for row in rows], default=4)
    right = width - 24 - CHARACTER_WIDTH * max([len(row.note) for row in rows], default=4)
    top, bottom = 32 + legend_height, 32 + legend_height + 22 * len(rows)
    ends = [0.0, *(end for row in rows for end in (row.value, row.low, row.high) if math.isfinite(end))]
    marks = ticks(min(ends), max(ends)) if max(ends) > min(ends) else _around(0.0)
    across = (right - left) / (max(marks) - min(marks))

    def at(value: float) -> float:
        return left + (value - min(marks)) * across

    parts = [_text(12, 18, title, size=13), *legend]
    for mark in marks:
        parts += [_line(at(mark), top, at(mark), bottom, opacity=0.35 if mark else 1.0)]
        parts += [_text(at(mark), bottom + 15, format_tick(mark), "middle")]
    for index, row in enumerate(rows):
        y = top + 22 * index + 11
        stroke, radius = (1.4, 2.5) if row.faint else (2.4, 4.0)
        parts += [_text(left - 10, y + 4, row.label, "end"), _text(right + 10, y + 4, row.note, colour=row.colour)]
        if all(map(math.isfinite, (row.value, row.low, row.high))):
            ends_of_line = f'x1="{at(row.low):.1f}" y1="{y:.1f}" x2="{at(row.high):.1f}" y2="{y:.1f}"'
            parts.append(f'<line {ends_of_line} stroke="{row.colour}" stroke-width="{stroke}" stroke-linecap="round"/>')
            parts.append(f'<circle cx="{at(row.value):.1f}" cy="{y:.1f}" r="{radius}" fill="{row.colour}"/>')
    if x_label:
        parts.append(_text((left + right) / 2, bottom + 31, x_label, "middle"))
    return _svg(width, bottom + (40 if x_label else 24), parts, title)


def grid(charts: Sequence[str], columns: int, width: float, height: float, label: str) -> str:
    """Charts of one size in one file."""
    parts = [
        chart.replace("<svg ", f'<svg x="{index % columns * width:.0f}" y="{index // columns * height:.0f}" ', 1)
        for index, chart in enumerate(charts)
    ]
    return _svg(columns * width, -(-len(charts) // columns) * height, parts, label)
