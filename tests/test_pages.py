"""docs/numbers.md and docs/models/*.md are what scripts/pages.py makes of the records and the planner."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICK = "v2-lite"


def load_pages() -> Any:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module
    spec.loader.exec_module(module)
    return module


PAGES = load_pages()


def test_numbers_are_those_of_the_records() -> None:
    assert (ROOT / "docs" / "numbers.md").read_text() == PAGES.numbers_page()


@pytest.mark.parametrize(
    "page",
    [page if page.name == QUICK else pytest.param(page, marks=pytest.mark.slow) for page in PAGES.PAGES],
    ids=lambda page: page.name,
)
def test_model_page_is_what_the_planner_says(page: Any) -> None:
    assert (ROOT / "docs" / "models" / f"{page.name}.md").read_text() == PAGES.model_page(page)


def test_there_is_a_page_for_each_model_and_no_other() -> None:
    assert {file.stem for file in (ROOT / "docs" / "models").glob("*.md")} == {page.name for page in PAGES.PAGES}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "bench" / "results" / "machines").glob("*.json")), ids=lambda file: file.name
)
def test_records_are_public(file: Path) -> None:
    record = PAGES.read_record(file)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9.-]+\.json", file.name) and record["rows"]
    assert not re.search(r"/(home|work|root|tmp|Users)/|\w@\w", json.dumps(record))


def test_commands_of_pages_are_commands() -> None:
    from typer.main import get_command

    from ktransformers.cli.main import app

    text = (ROOT / "docs" / "models" / f"{QUICK}.md").read_text()
    for words in (line.split() for line in re.findall(r"^kt (.*)$", text, re.MULTILINE)):
        command: Any = get_command(app)
        while hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command = command.commands[words.pop(0)]
    recipes = re.findall(r"examples/(\S+\.yaml)", text)
    assert recipes and all((ROOT / "examples" / recipe).is_file() for recipe in recipes)
