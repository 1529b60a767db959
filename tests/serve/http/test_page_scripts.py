"""The scripts of the page, run by node where there is one: markdown of answers, charts, metrics; and its policy.

An answer is untrusted. What a model writes becomes text and a few harmless elements, whatever it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformers.serve.http.page import FOLDER, SCRIPTS, page_document, page_headers, page_script

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here")
HARMLESS = {
    *("p", "br", "strong", "em", "del", "code", "pre", "a", "ul", "ol", "li", "blockquote", "hr", "table", "thead"),
    *("tbody", "tr", "th", "td", "h1", "h2", "h3", "h4", "h5", "h6", "div", "span", "button"),
}


def run(function: str, *arguments: Any) -> tuple[Any, float]:
    """What a function of the page returns, and its seconds."""
    assert NODE is not None
    words = [NODE, str(Path(__file__).with_name("page_scripts.js")), function]
    words += [str(FOLDER / name) for name in ("markdown.js", "charts.js", "server.js")]
    done = subprocess.run(words, input=json.dumps(arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result["made"], float(result["seconds"])


def drawn(text: str) -> list[Any]:
    """The elements that an answer becomes."""
    made, _ = run("(text) => nodes(markdown(text))", text)
    return list(made)


def elements(tree: list[Any]) -> Iterator[dict[str, Any]]:
    for node in tree:
        if isinstance(node, dict):
            yield node
            yield from elements(node["children"])


def text_of(tree: list[Any]) -> str:
    return "".join(node if isinstance(node, str) else text_of(node["children"]) for node in tree)


def outline(tree: list[Any]) -> list[Any]:
    """Tags and texts without attributes and without the bar above code."""
    made: list[Any] = []
    for node in tree:
        if isinstance(node, str):
            made.append(node)
        elif node["tag"] == "div":  # the bar and the code
            made += outline(node["children"][1:])
        else:
            made.append([node["tag"], *outline(node["children"])])
    return made


@needs_node
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid(name: str) -> None:
    assert NODE is not None
    done = subprocess.run([NODE, "--check", str(FOLDER / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_node
def test_markdown_of_an_answer() -> None:
    text = "\n".join(
        [
            *(
                "# Title *x*",
                "",
                "A **bold** and _slanted_ word, `a*b*c`, ~~gone~~, snake_case_name, 2 * 3 * 4.",
                "second line",
            ),
            *("", "- one", "- two", "  1. inner", "  2. more", "- three", "", "> quoted", "> **on**", "", "---", ""),
            *("| a | b |", "|---|:-:|", "| 1 | `2` |", "", "```python", "if a < b:  # **not bold**", "    f()", "```"),
            *("", "See [docs](https://example.org/a_b) or https://example.org/x."),
        ]
    )
    tree = drawn(text)
    assert outline(tree) == [
        ["h1", "Title ", ["em", "x"]],
        [
            *(
                "p",
                "A ",
                ["strong", "bold"],
                " and ",
                ["em", "slanted"],
                " word, ",
                ["code", "a*b*c"],
                ", ",
                ["del", "gone"],
            ),
            *(", snake_case_name, 2 * 3 * 4.", ["br"], "second line"),
        ],
        ["ul", ["li", "one"], ["li", "two", ["ol", ["li", "inner"], ["li", "more"]]], ["li", "three"]],
        ["blockquote", ["p", "quoted", ["br"], ["strong", "on"]]],
        ["hr"],
        ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]], ["tbody", ["tr", ["td", "1"], ["td", ["code", "2"]]]]],
        ["pre", ["code", "if a < b:  # **not bold**\n    f()"]],
        ["p", "See ", ["a", "docs"], " or ", ["a", "https://example.org/x"], "."],
    ]
    links = [node["attributes"] for node in elements(tree) if node["tag"] == "a"]
    assert [link["href"] for link in links] == ["https://example.org/a_b", "https://example.org/x"]
    assert all("noopener" in link["rel"] for link in links)
    unfinished = outline(drawn("Look:\n```js\nlet a = '<b>';\n"))
    assert unfinished == [["p", "Look:"], ["pre", ["code", "let a = '<b>';\n"]]], "a fence that is being streamed"


@needs_node
@pytest.mark.parametrize(
    "attack",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "**<svg onload=alert(1)>**",
        "```\n</code></pre><script>alert(1)</script>\n```",
        "`<iframe src=javascript:alert(1)>`",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "![x](https://example.org/tracker.png)",
        '[x](https://example.org/"onmouseover="alert(1))',
        "| <b onclick=x> |\n|---|\n| <style>*{display:none}</style> |",
        "# <a href=javascript:x>y</a>",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "- <form action=//x>\n> <input autofocus onfocus=alert(1)>",
        '```"><img src=x onerror=alert(1)>\ncode\n```',
        "[<img src=x onerror=alert(1)>](https://example.org)",
    ],
)
def test_answers_are_never_markup(attack: str) -> None:
    tree = drawn(attack)
    for node in elements(tree):
        assert node["tag"] in HARMLESS
        assert set(node["attributes"]) <= {"href", "target", "rel", "start"}
        assert re.match(r"(?i)(https?://|mailto:)", node["attributes"].get("href", "https://"))
    written = re.findall(r"<\w+[^>]*>|&lt;", attack)
    assert all(part in text_of(tree) for part in written), "it is shown as it was written"


@needs_node
def test_hostile_answers_take_linear_time() -> None:
    """Marks that never close, deep quotes and lists, long lines: no answer stops the page."""
    generator = random.Random(0)
    noise = "".join(generator.choice("*_`~[]()!>-# \n1.|\\ab") for _ in range(20_000))
    cases = [noise, "*a " * 20_000, "[" * 20_000, "`" * 20_001, "_" * 20_000 + "a", ">" * 5_000 + "x"]
    cases += ["[](" * 10_000, "- " * 5_000 + "x", "|" * 20_000 + "\n" + "|-" * 5_000, "http://" * 5_000, "**" * 10_000]
    cases += ["[" * 20_000 + "](" + " x" * 5_000 + ")", "[](" * 10_000 + " " * 20_000 + ")"]
    cases += ["\n".join(" " * depth + "- x" for depth in range(300)), "~~~" * 5_000, "h" * 50_000]
    for case in cases:
        made, seconds = run("(text) => nodes(markdown(text)).length", case)
        assert made >= 1 and seconds < 5, (case[:20], seconds)


@needs_node
def test_charts_draw_numbers_only() -> None:
    series = [{"name": "<b>loss", "points": [[1, 3.0], [2, None], [3, 1.0]]}, {"name": "eval", "points": [[3, 2.0]]}]
    svg, _ = run("lineChart", "loss", series)
    tags = [node["tag"] for node in elements([svg])]
    assert tags.count("polyline") == 1 and tags.count("circle") == 1
    (line,) = [node for node in elements([svg]) if node["tag"] == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in line["attributes"]["points"].split()]
    assert len(points) == 2 and points[0][1] < points[1][1], "3 is above 1"
    assert "<b>loss" in text_of([svg]) and "no values yet" in text_of([run("lineChart", "loss", [])[0]])
    thinned = run("thin", [[step, step] for step in range(10_001)])[0]
    assert len(thinned) <= 601 and thinned[0] == [0, 0] and thinned[-1] == [10_000, 10_000] and run("thin", [])[0] == []
    assert run("(a, b) => ticks(a, b)", 0.1, 0.93)[0] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert run("(list) => list.map(tickText)", [0, 1e-4, 0.25, 1500, 2e6])[0] == ["0", "1e-4", "0.25", "1500", "2e6"]


@needs_node
def test_metrics_become_speed_and_memory() -> None:
    text = (
        '# HELP x\nkt_new_tokens_total 10\nkt_gpu_memory_bytes{gpu="0"} 24e9\nkt_gpu_memory_free_bytes{gpu="0"} 6e9\n'
    )
    text += "process_resident_memory_bytes 2000000000\nkt_host_memory_bytes 8e9\nkt_host_memory_available_bytes 5e9\n"
    text += "kt_cache_tokens 100\nkt_cache_limit_tokens 400\nkt_cache_busy_tokens 50\n"
    values, _ = run("parseMetrics", text)
    assert values["kt_new_tokens_total"] == 10
    rows, _ = run("memoryRows", values)
    assert [(row["name"], row["value"] / row["limit"]) for row in rows] == [
        *(("this process", 0.25), ("host, all", 0.375), ("GPU 0", 0.75), ("KV cache", 0.25))
    ]
    assert rows[0]["text"] == "2.00 GB of 8.00 GB"
    samples = [{"time": 1000 * second, "values": {"n": count}} for second, count in ((0, 0), (2, 50), (4, 60), (6, 5))]
    assert run("rates", samples, "n")[0] == [[-4, 25], [-2, 5]], "a restarted server has no negative rate"
    assert run("adapterName", "/saves/my run/")[0] == "my-run"


def test_policy_allows_this_script_alone() -> None:
    page, policy = page_document(), page_headers()["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script == page_script() and page.count("<script") == 1, "no script ends the element early"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert not re.search(r"\son\w+=", re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)), (
        "no handlers in markup"
    )
    for parser in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert parser not in script, parser
    ids = re.findall(r'id="([\w-]+)"', page.replace(script, ""))
    assert len(ids) == len(set(ids)) and set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= set(ids)
