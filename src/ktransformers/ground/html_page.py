"""The look of every report: a self-contained HTML page for light and dark mode, printable.

`table` and `sample` escape their text, because an answer is untrusted HTML; `render` takes finished HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CSS = """
:root { color-scheme: light dark; --ink: #1d2127; --soft: #5d646e; --rule: #e2e5e9; --card: #f7f8f9; --paper: #fff;
  --gain: #1a7f4b; --loss: #b3362b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a3aab4; --rule: #343941; --card: #1f2329;
  --paper: #16191d; --gain: #4cc38a; --loss: #ef7a6d; } figure:not(.chart) { background: #fff; border-radius: 8px; } }
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


def render(title: str, parts: Sequence[str]) -> str:
    """`parts`: HTML of the body, in order."""
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{CSS}</style></head><body>\n{body}\n</body></html>\n"
    )


def chart(svg: str) -> str:
    """A figure with a chart of `charts.py`, whose colours suit both backgrounds."""
    return f"<figure class='chart'>{svg}</figure>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Plain text cells; the first `left` columns are aligned to the left."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index < left else ''}>{escape(cell)}</{tag}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table></div>"


def sample(asked: str, answers: Sequence[tuple[str, str]]) -> str:
    """A question with its answers side by side; `answers`: (name, text)."""
    boxes = "".join(f"<div><b>{escape(name)}</b>{escape(text)}</div>" for name, text in answers)
    return f"<div class='sample'><p class='asked'>{escape(asked)}</p><div class='answers'>{boxes}</div></div>"
