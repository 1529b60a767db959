"""README.zh-CN.md says what README.md says: the same headings, commands, tables, numbers, code and links. The words of
a sentence may differ, which a test cannot compare."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PAGES = ("README.md", "README.zh-CN.md")


def page(name: str) -> str:
    """Without the link to the other language."""
    text = (ROOT / name).read_text()
    (other,) = set(PAGES) - {name}
    link = re.compile(rf"^\[[^]]+\]\({re.escape(other)}\)\n", re.MULTILINE)
    assert len(link.findall(text)) == 1, f"{name} links to {other}"
    return link.sub("", text)


@pytest.fixture(scope="module")
def texts() -> tuple[str, str]:
    return page(PAGES[0]), page(PAGES[1])


def code(text: str) -> list[str]:
    """Lines of the code blocks; what follows a `#` in shell commands is prose."""
    lines = [line for block in FENCE.findall(text) for line in block.splitlines()]
    return [re.sub(r"\s+# .*$", "", line) for line in lines]


def tables(text: str) -> list[list[str]]:
    """Cells of each row of a table."""
    rows = [line for line in FENCE.sub("", text).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d[\d.,]*\d|\d", FENCE.sub("", text)))


def test_headings(texts: tuple[str, str]) -> None:
    levels = [re.findall(r"(?m)^(#+) ", FENCE.sub("", text)) for text in texts]
    assert levels[0] == levels[1] and len(levels[0]) >= 8


def test_commands_and_code(texts: tuple[str, str]) -> None:
    assert code(texts[0]) == code(texts[1])
    assert "kt doctor" in code(texts[0])


def test_tables(texts: tuple[str, str]) -> None:
    english, chinese = map(tables, texts)
    assert [len(row) for row in english] == [len(row) for row in chinese]
    figures = [row for row in english if re.search(r"\d \(\d", " ".join(row))]
    assert len(figures) == 5 and all(row in chinese for row in figures)
    for one, other in zip(english, chinese, strict=True):
        assert re.findall(r"`[^`]+`", " ".join(one)) == re.findall(r"`[^`]+`", " ".join(other))


def test_numbers_in_the_text(texts: tuple[str, str]) -> None:
    english, chinese = map(numbers, texts)
    assert english == chinese and english["0.119"] == 1


def test_names_of_code(texts: tuple[str, str]) -> None:
    english, chinese = (Counter(re.findall(r"`([^`\n]+)`", FENCE.sub("", text))) for text in texts)
    assert english == chinese


def test_links(texts: tuple[str, str]) -> None:
    english, chinese = (re.findall(r"\]\(([^)]+)\)", text) for text in texts)
    assert english == chinese and all((ROOT / link.partition("#")[0]).exists() for link in chinese)
    labels = [re.findall(r"(?<!!)\[([^]]+)\]\(", text) for text in texts]
    assert labels[0] == labels[1]


def test_a_difference_is_noticed() -> None:
    text = page(PAGES[1])
    assert code(text.replace("kt doctor", "kt check")) != code(text)
    assert numbers(text.replace("0.119", "0.118")) != numbers(text)
    assert tables(text.replace("| 7 (7) |", "| 7 (8) |")) != tables(text)
