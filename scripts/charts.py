"""Charts of the README and the docs: SVG files under `docs/images` drawn from `bench/results/current`.

    python scripts/charts.py            # writes docs/images/*.svg
    python scripts/charts.py --check    # exit status 1 if a chart does not show what its documents hold
    python scripts/charts.py --png OUT  # also writes PNG files, to look at

A chart is two steps: a pure function from documents to `Panel`s (labels and numbers), and one that draws panels. The
panels are stored as JSON in the SVG's description, so `--check` compares numbers, not bytes, and needs no matplotlib:
files drawn by another version of it are the same chart. Text stays text and is mid-grey on a transparent ground, which
is legible on light and dark pages. The drawing has no date and fixed ids, so the same documents give the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "current"
IMAGES = ROOT / "docs" / "images"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"

GREY, GRID = "#7d8590", "#7d859040"
COLOURS = {"int4": "#2f81f7", "bf16": "#8cc4ff", "stock": "#d29922", "offload": "#a371f7"}
STREAMS = ("#9ecbff", "#56a8f5", "#1f6feb")
SHAPES = ("#2f81f7", "#3fb950", "#d29922", "#a371f7")
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.wspace": 0.04,
    "svg.hashsalt": "ktransformers",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlesize": 10.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
}
MODELS = {"qwen3-30b": "Qwen3-30B-A3B", "dsv2-lite": "DeepSeek-V2-Lite", "dsv3-slice": "DeepSeek-V3, 16 experts"}
MODELS |= {"qwen3-235b-slice": "Qwen3-235B-A22B, 32 experts"}


@dataclass(frozen=True)
class Series:
    label: str
    colour: str
    values: tuple[float | None, ...]  # one for each tick; None: not measured


@dataclass(frozen=True)
class Panel:
    title: str
    axis: str
    ticks: tuple[str, ...]
    series: tuple[Series, ...]
    digits: int = 2
    lines: bool = False  # else bars with their numbers
    level: float | None = None  # a reference line


@dataclass(frozen=True)
class Chart:
    name: str
    panels: tuple[Panel, ...]
    caption: str

    def numbers(self) -> dict[str, Any]:
        """What is stored in the file: everything but colours."""
        words = json.loads(json.dumps(asdict(self)))
        for panel in words["panels"]:
            for series in panel["series"]:
                del series["colour"]
        return dict(words)


Document = Mapping[str, Any]


def pick(cells: Sequence[Document], key: str, ticks: Sequence[object], by: str) -> tuple[float | None, ...]:
    """The value of `key` in the first cell at each tick, rounded to four digits."""
    values = {cell[by]: float(f"{cell[key]:.4g}") for cell in reversed(cells)}
    return tuple(values.get(tick) for tick in ticks)


def machine_of(document: Document) -> str:
    machine = document["machine"]
    gpu = machine.get("gpu", "").removeprefix("NVIDIA ")
    return f"{machine['cpus']} cores of a Xeon with AMX" + (f" and one {gpu}" if gpu else "")


def training(documents: Mapping[str, Document]) -> Chart:
    """Streamed experts in `train-e2e.json` compared with the stock model; a series that it lacks comes from
    its run `policies`, and the caption says so."""
    tokens = (512, 2048, 8192)
    wanted = [
        ("ktransformers, int4 experts in host memory", "int4", {"variant": "kt", "format": "int4:32"}),
        ("ktransformers, bf16 experts in host memory", "bf16", {"variant": "kt", "format": "bf16"}),
        ("stock model, wholly on the GPU", "stock", {"variant": "gpu"}),
        ("stock model, FSDP2 with CPU offload", "offload", {"variant": "fsdp"}),
    ]
    other = set()
    panels: dict[str, list[Series]] = {"step_s": [], "gpu_peak_gib": []}
    for label, colour, words in wanted:
        for name in ("train-e2e", "train-e2e#policies"):
            cells = [cell for cell in documents[name]["cells"] if words.items() <= cell.items()]
            streamed = [cell for cell in cells if cell.get("policy") == "stream"]
            if cells:
                break
        if cells and name != "train-e2e":
            other.add(label)
        for key, series in panels.items():
            values = pick(streamed or cells, key, tokens, "tokens")
            series.append(Series(label, COLOURS[colour], values))
    first = documents["train-e2e"]
    layers = first["cells"][0]["layers"]
    caption = f"{layers} layers of {MODELS['qwen3-30b']}, LoRA rank 8 on attention and experts, {machine_of(first)}"
    if other:
        caption += "; of another run: " + ", ".join(sorted(other))
    ticks = tuple(f"{count:,} tokens" for count in tokens)
    return Chart(
        "training",
        (
            Panel("Training step, seconds (lower is better)", "s", ticks, tuple(panels["step_s"])),
            Panel("Peak GPU memory, GiB (lower is better)", "GiB", ticks, tuple(panels["gpu_peak_gib"]), digits=1),
        ),
        caption,
    )


def decoding(documents: Mapping[str, Document]) -> Chart:
    document = documents["serve-graphs"]
    shares = sorted({cell["share"] for cell in document["cells"]})
    streams = sorted({cell["streams"] for cell in document["cells"]})
    series = []
    for count, colour in zip(streams, STREAMS, strict=False):
        cells = [cell for cell in document["cells"] if cell["streams"] == count]
        label = "1 stream" if count == 1 else f"{count} streams"
        series.append(Series(label, colour, pick(cells, "graph_tokens_per_s", shares, "share")))
    ticks = tuple("all on the CPU" if not share else f"{share:.0%} on the GPU" for share in shares)
    if shares[-1] == 1:
        ticks = (*ticks[:-1], "all on the GPU")
    bits = str(document["format"]).partition(":")[0]
    caption = f"{document['layers']} layers of {MODELS[document['shape']]}, experts in {bits}, {machine_of(document)}"
    panel = Panel(
        "Decoding, tokens/s of all streams by place of the experts (higher is better)",
        "tokens/s",
        ticks,
        tuple(series),
        digits=0,
    )
    return Chart("decoding", (panel,), caption)


def kernels(documents: Mapping[str, Document]) -> Chart:
    document = documents["moe"]
    rows = [cell for cell in document["cells"] if cell["mode"] == "forward"]
    tokens = sorted({cell["tokens"] for cell in rows})
    shapes = list(dict.fromkeys(cell["shape"] for cell in rows))
    faster, share = [], []
    for shape, colour in zip(shapes, SHAPES, strict=False):
        cells = [{**cell, "kt": cell["speedup"]["kt"]} for cell in rows if cell["shape"] == shape]
        faster.append(Series(MODELS[shape], colour, pick(cells, "kt", tokens, "tokens")))
        percent = [{**cell, "share": 100 * cell["share"]} for cell in cells]
        share.append(Series(MODELS[shape], colour, pick(percent, "share", tokens, "tokens")))
    ticks = tuple(f"{count:,}" for count in tokens)
    version = document["machine"]["peers"]["kt"].get("version", "")
    caption = f"forward of one layer in bf16, {machine_of(document)}; kt-kernel {version}".rstrip() + " in the same run"
    return Chart(
        "kernels",
        (
            Panel("Speedup over kt-kernel by batch tokens", "x", ticks, tuple(faster), 1, lines=True, level=1.0),
            Panel("Share of the roofline by batch tokens, %", "%", ticks, tuple(share), 0, lines=True, level=100.0),
        ),
        caption,
    )


CHARTS: tuple[Callable[[Mapping[str, Document]], Chart], ...] = (training, decoding, kernels)


def read(results: Path = RESULTS) -> list[Chart]:
    documents = {
        file.stem if name == "main" else f"{file.stem}#{name}": run
        for file in sorted(results.glob("*.json"))
        for name, run in json.loads(file.read_text())["runs"].items()
    }
    return [make(documents) for make in CHARTS]


def draw_panel(axes: Any, panel: Panel) -> None:
    places = range(len(panel.ticks))
    width = 0.84 / len(panel.series)
    for at, series in enumerate(panel.series):
        if panel.lines:
            axes.plot(places, series.values, marker="o", markersize=4, color=series.colour, label=series.label)
            continue
        shift = (at - (len(panel.series) - 1) / 2) * width
        here = [(place + shift, value) for place, value in zip(places, series.values, strict=True) if value is not None]
        bars = axes.bar([x for x, _ in here], [y for _, y in here], 0.92 * width, color=series.colour)
        bars.set_label(series.label)
        axes.bar_label(bars, [f"{y:.{panel.digits}f}" for _, y in here], padding=2, fontsize=8.5)
    if panel.level is not None:
        axes.axhline(panel.level, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    if panel.lines:
        axes.set_ylim(0, None)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    else:
        axes.set_yticks([])
        axes.margins(y=0.12)
    axes.set_xticks(list(places), panel.ticks)
    axes.tick_params(length=0)
    axes.set_title(panel.title, loc="left", color=GREY, fontweight="bold")


def figure_of(chart: Chart) -> Any:
    from matplotlib.figure import Figure

    columns = len(chart.panels)
    figure = Figure(figsize=(9.6 if columns > 1 else 7.2, 3.5), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one, panel in zip(axes, chart.panels, strict=True):
        one.patch.set_alpha(0)
        draw_panel(one, panel)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2 if len(labels) == 4 else len(labels), fontsize=9.5)
    figure.supxlabel("\n".join(textwrap.wrap(chart.caption, 130 if columns > 1 else 100)), fontsize=8.5, color=GREY)
    return figure


def draw(charts: Sequence[Chart], images: Path, png: Path | None) -> None:
    import matplotlib

    images.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for chart in charts:
            metadata = {"Date": None, "Description": json.dumps(chart.numbers())}
            figure_of(chart).savefig(images / f"{chart.name}.svg", format="svg", metadata=metadata)
            if png is not None:
                png.mkdir(parents=True, exist_ok=True)
                for ground, colour in (("light", "#ffffff"), ("dark", "#0d1117")):
                    figure = figure_of(chart)
                    figure.patch.set(alpha=1, facecolor=colour)
                    figure.savefig(png / f"{chart.name}-{ground}.png", dpi=110)


def stored(file: Path) -> Any:
    """The numbers that a chart was drawn from, or None."""
    if not file.is_file():
        return None
    description = ElementTree.parse(file).getroot().find(f".//{DESCRIPTION}")
    return None if description is None else json.loads(description.text or "null")


def stale(charts: Sequence[Chart], images: Path) -> list[str]:
    """Names of charts whose file is missing or shows other numbers."""
    return [chart.name for chart in charts if stored(images / f"{chart.name}.svg") != chart.numbers()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the numbers in the files, draw nothing")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write PNG files here, light and dark")
    args = parser.parse_args(argv)
    charts = read()
    if args.check:
        old = stale(charts, IMAGES)
        if old:
            sys.stderr.write(f"{', '.join(old)}: not what bench/results/current gives; run scripts/charts.py\n")
        return 1 if old else 0
    draw(charts, IMAGES, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
