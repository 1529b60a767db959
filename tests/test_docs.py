"""Pages that name code are held to the code: paths in ARCHITECTURE.md and CONTRIBUTING.md exist, names in the first
occur in the source, its glossary gives the file that defines each word, its tables of context variables,
substitutions and layers are complete, and the version is the same in the package, the changelog and CITATION.cff.
Links between pages lead to files and headings that exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import yaml

from ktransformers import __version__
from tests.test_layers import GROUND, PACKAGE, RANK, ROOT

FOLDERS = (ROOT, PACKAGE, ROOT / "csrc", ROOT / "csrc" / "kernels", ROOT / "csrc" / "bindings")  # that paths begin in
SOURCES = ("src", "csrc", "cmake")
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cmake"}
NOT_IN_A_CHECKOUT = ("build/", "NAME")  # outputs of a build, and paths with a placeholder
IS_PATH = re.compile(r"[\w.-]+(/[\w.-]*)+|[\w-]+\.(py|h|cpp|cmake|md|yaml|toml|txt|cff|json)")
IS_NAME = re.compile(r"_*[A-Za-z]\w*((\.|::)\w+)*(\(\))?")
PLAIN = re.compile(r"```.*?```", re.DOTALL)
DEFINITION = r"(?m)^\s*(?:(?:class|def|struct|using) {0}\b|enum class {0}\b|(?:[\w:<>]+ )*{0}(?:: [^=\n]+)? = )"
SUBSTITUTION = r"(?m)^(?:(\w+)[^=\n]* = Substitution\(|def (\w+)\(.*-> Substitution\[)"


def in_backticks(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", PLAIN.sub("", (ROOT / page).read_text()))


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the tables of a section, without their header lines."""
    section = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for number, row in enumerate(cells) if not row[0].startswith("---") and number > 0]


@functools.cache
def words() -> frozenset[str]:
    files = (file for folder in SOURCES for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES)
    texts = [file.read_text() for file in files] + [(ROOT / "Makefile").read_text()]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def exists(path: str) -> bool:
    return any((folder / path).exists() for folder in FOLDERS)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_on_the_page_exist(page: str) -> None:
    paths = [text for text in in_backticks(page) if IS_PATH.fullmatch(text) and not text.startswith(("/", "."))]
    paths = [path for path in paths if not any(part in path for part in NOT_IN_A_CHECKOUT)]
    assert len(paths) > 10
    assert [path for path in paths if not exists(path)] == []


def test_names_in_architecture_occur_in_the_source() -> None:
    texts = in_backticks("ARCHITECTURE.md")
    names = [text for text in texts if IS_NAME.fullmatch(text) and not IS_PATH.fullmatch(text)]
    assert len(names) > 100
    assert [name for name in names if not set(re.findall(r"\w+", name)) <= words()] == []


def test_glossary_names_the_definition_of_each_word() -> None:
    glossary = rows("ARCHITECTURE.md", "Glossary")
    assert len(glossary) >= 25
    wrong = []
    for word, _, place in glossary:
        name, path = re.fullmatch(r"`(\w+)` in `(\S+)`", place).groups()  # type: ignore[union-attr]
        file = next((folder / path for folder in FOLDERS if (folder / path).is_file()), None)
        if file is None or not re.search(DEFINITION.format(name), file.read_text()):
            wrong.append(f"{word}: {place}")
    assert wrong == []


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, hyphens for spaces, no other punctuation."""
    headings = re.findall(r"(?m)^#+ (.+)$", PLAIN.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PLAIN.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(f"{page.name}: {link}")
    return broken


def test_links_between_pages_lead_somewhere(tmp_path: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "results" / "README.md"]
    assert [link for page in pages for link in broken_links(page)] == []
    (tmp_path / "page.md").write_text("# A `b`'s c\n[x](#a-bs-c) [y](#d) [z](other.md)\n")
    assert broken_links(tmp_path / "page.md") == ["page.md: #d", "page.md: other.md"]


def test_every_context_variable_is_in_the_table() -> None:
    defined = {
        (name, file.relative_to(PACKAGE).as_posix())
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r"(?m)^(\w+): ContextVar\[", file.read_text())
    }
    listed = {(row[0].strip("`"), row[1].strip("`")) for row in rows("ARCHITECTURE.md", "Context variables")}
    assert listed == defined


def test_every_substitution_is_in_the_table() -> None:
    defined = {
        (name, file.relative_to(PACKAGE).as_posix())
        for file in PACKAGE.rglob("*.py")
        for names in re.findall(
            r"(?m)^(?:(\w+)[^=\n]* = Substitution\(|def (\w+)\(.*-> Substitution\[)", file.read_text()
        )
        for name in names
        if name
    }
    listed = {tuple(re.findall(r"`(\S+?)`", row[3])) for row in rows("ARCHITECTURE.md", "Substitutions")}
    assert len(defined) == 10 and defined <= listed
    assert all(re.search(DEFINITION.format(name), (PACKAGE / path).read_text()) for name, path in listed)


def test_layers_on_the_page_are_those_that_are_checked() -> None:
    listed = {row[0]: set(re.findall(r"`([\w/]+)`", row[1])) for row in rows("ARCHITECTURE.md", "Layers")}
    ranks = {str(rank): {part for part in RANK if RANK[part] == rank} for rank in set(RANK.values())}
    assert listed == ranks | {"ground": {GROUND}}


def test_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__
    newest = re.search(r"(?m)^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text())
    assert newest is not None and newest[1] == __version__


def test_changed_modules_of_the_changelog_exist() -> None:
    """Right-hand sides of the table of moved modules."""
    moved = rows("CHANGELOG.md", "0.2.0, unreleased")
    paths = [module.removeprefix("ktransformers.") for row in moved for module in re.findall(r"`(\S+?)`", row[1])]
    assert paths
    missing = [path for path in paths if not any(PACKAGE.glob(f"{path.replace('.', '/')}*"))]
    assert missing == []


def test_a_wrong_name_is_noticed() -> None:
    assert not exists("nn/no_such_file.py")
    assert "no_such_function" not in words()
    text = Path(__file__).read_text()
    assert re.search(DEFINITION.format("DEFINITION"), text)
    assert not re.search(DEFINITION.format("UNDEFINED"), text)
