"""Reports as blocks: each is HTML of a self-contained page (light and dark, printable) and the same as Markdown.

Every text is escaped, because answers and names are untrusted; only `chart` takes markup, an SVG of `charts.py`, which
the page alone shows. A table cell is a text or a `Cell`; a row of one cell is a heading within the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ktransformers.ground.files import write_json, write_text

CSS = """
:root { color-scheme: light dark; --ink: #1d2127; --soft: #5d646e; --rule: #e2e5e9; --card: #f7f8f9; --paper: #fff;
  --gain: #1a7f4b; --loss: #b3362b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a3aab4; --rule: #343941; --card: #1f2329;
  --paper: #16191d; --gain: #4cc38a; --loss: #ef7a6d; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "Noto Sans CJK SC", sans-serif;
  color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem; }
p.soft, .soft { color: var(--soft); } code { font-size: .92em; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: baseline; }
th { font-weight: 600; color: var(--soft); font-size: .86rem; } th.left, td.left { text-align: left; }
td { white-space: nowrap; } td.left { white-space: normal; } tr.panel td { color: var(--soft); padding-top: 1rem; }
td small { color: var(--soft); } tr.main td { font-weight: 600; } tr.main td small { font-weight: 400; }
.gain { color: var(--gain); } .loss { color: var(--loss); } .even { color: var(--soft); }
figure { margin: 1rem 0; padding: .5rem; } figure svg { width: 100%; height: auto; }
.sample { background: var(--card); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0; }
.sample .asked { margin: 0 0 .6rem; white-space: pre-wrap; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; }
.answers > div { background: var(--paper); border: 1px solid var(--rule); border-radius: 6px; padding: .5rem .7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .92rem; }
.answers b { display: block; font-size: .8rem; color: var(--soft); margin-bottom: .2rem; }
details > summary { cursor: pointer; color: var(--soft); margin: .6rem 0; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Block:
    html: str
    markdown: str = ""


@dataclass(frozen=True)
class Cell:
    """A number with its interval and its change, which is a gain, a loss or even."""

    value: str
    interval: str = ""
    change: str = ""
    verdict: str = "even"

    def __str__(self) -> str:
        interval = f" [{self.interval}]" if self.interval else ""
        return self.value + interval + (f" ({self.change})" if self.change else "")

    @property
    def html(self) -> str:
        interval = f" <small>[{escape(self.interval)}]</small>" if self.interval else ""
        change = f" <span class='{self.verdict}'>{escape(self.change)}</span>" if self.change else ""
        return escape(self.value) + interval + change


Rows = Sequence[Sequence[str | Cell]]


def _cell(value: str | Cell) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def heading(text: str) -> Block:
    return Block(f"<h2>{escape(text)}</h2>", f"## {text}")


def paragraph(text: str, link: str = "") -> Block:
    """`link`: a file of the report, named after the text."""
    html = f" <a href='{escape(link)}'>{escape(link)}</a>" if link else ""
    return Block(f"<p class='soft'>{escape(text)}{html}</p>", _marked(text) + (f" `{link}`" if link else ""))


def listed(lines: Sequence[str]) -> Block:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return Block(f"<ul class='soft'>{items}</ul>", "\n".join(f"- {_marked(line)}" for line in lines))


def code(lines: Sequence[str]) -> Block:
    return Block("<pre>" + escape("\n".join(lines)) + "</pre>", "\n".join(["```", *lines, "```"]))


def chart(svg: str) -> Block:
    return Block(f"<figure class='chart'>{svg}</figure>")


def folded(title: str, blocks: Sequence[Block]) -> Block:
    """Blocks that a reader can fold away."""
    inner = "\n".join(block.html for block in blocks)
    html = f"<details open><summary>{escape(title)}</summary>{inner}</details>"
    return Block(html, "\n\n".join([f"{_marked(title)}:", *(block.markdown for block in blocks if block.markdown)]))


def sample(asked: str, answers: Sequence[tuple[str, str]]) -> Block:
    """A question with its answers side by side; `answers`: (name, text)."""
    boxes = "".join(f"<div><b>{escape(name)}</b>{escape(text)}</div>" for name, text in answers)
    html = f"<div class='sample'><p class='asked'>{escape(asked)}</p><div class='answers'>{boxes}</div></div>"
    quoted = [(name, "\n".join(f"> {line}" for line in text.splitlines())) for name, text in answers]
    asked_lines = "\n".join(f"> {line}" for line in asked.splitlines())
    return Block(html, "\n\n".join(f"**{name}**\n\n{text or '>'}" for name, text in [("asked", asked_lines), *quoted]))


def table(heads: Sequence[str], rows: Rows, left: int = 1, main: int | None = None) -> Block:
    """The first `left` columns are aligned to the left; row `main` is the important one."""

    def cells(tag: str, row: Sequence[str | Cell]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index < left else ''}>{_cell(cell).html}</{tag}>"
            for index, cell in enumerate(row)
        )

    def marked(cell: Cell) -> str:
        return f"**{_marked(str(cell))}**" if cell.verdict == "gain" else _marked(str(cell))

    html, lines = "", [heads, ["---"] * left + ["---:"] * (len(heads) - left)]
    for index, row in enumerate(rows):
        if len(row) == 1:
            html += f"<tr class='panel'><td class='left' colspan='{len(heads)}'>{escape(str(row[0]))}</td></tr>"
            lines.append([f"*{_marked(str(row[0]))}*", *[""] * (len(heads) - 1)])
        else:
            html += f"<tr{' class=main' if index == main else ''}>{cells('td', row)}</tr>"
            lines.append([marked(_cell(cell)) for cell in row])
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>"
    return Block(
        f"<div class='wide'><table>{head}<tbody>{html}</tbody></table></div>",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
    )


def aligned(heads: Sequence[str], rows: Rows, left: int = 1) -> list[str]:
    """The table as lines for a terminal."""
    texts = [heads, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts if len(row) > 1) for index in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(cells))

    return [line(row).rstrip() if len(row) > 1 else row[0] for row in texts]


def _marked(text: str) -> str:
    """With characters that Markdown would take as markup."""
    return re.sub(r"[*|]", r"\\\g<0>", text)


def page(title: str, blocks: Sequence[Block]) -> str:
    body = "\n".join(block.html for block in blocks)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{CSS}</style></head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n\n".join([f"# {title}", *(block.markdown for block in blocks if block.markdown)]) + "\n"


def write_report(folder: Path, title: str, blocks: Sequence[Block], document: dict[str, Any]) -> None:
    """`report.json`, `report.md` and `report.html` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", document)
    write_text(folder / "report.md", markdown(title, blocks))
    write_text(folder / "report.html", page(title, blocks))


def gigabytes(size: float) -> str:
    scaled, unit = (size / 1e9, "GB") if size >= 5e7 else (size / 1e6, "MB")
    return f"{scaled:.{2 if scaled < 9.995 else 1}f} {unit}"


def table_line(table: dict[str, int]) -> str:
    """Purposes and their sizes, the largest first; what is too small to matter is left out."""
    shown = sorted(((size, name) for name, size in table.items() if size >= 5e6), reverse=True)
    return ", ".join(f"{name} {gigabytes(size)}" for size, name in shown)
