"""Words that the pages, the code, the help and the errors do not use, because the field has better ones: quantized,
dense, dequantize, eager, compared with. Help texts and error messages are strings of the source, so reading its files
covers them. No class name of ours stands twice, but in packages that repeat another project's names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.test_layers import PACKAGE, ROOT

# What to write instead of each: quantized, quantized weight, dense, dense, quantized, dense (non-expert), eager.
FORBIDDEN = (
    "in codes",
    "coded weight",
    "with numbers",
    "as numbers",
    "in few bits",
    "outside of the experts",
    "kernel by kernel",
)
LIMITS = {"codes": 20, "beside": 20}  # whole words in the Python files of src
HISTORY = {"log.md", "CHANGELOG.md"}  # pages of what was
# Packages that have the class names of another project.
DOORS = ("kt_kernel/", "ktransformers/operators/", "ktransformers/serve/sglang/", "ktransformers/train/llamafactory/")


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in found if page.name not in HISTORY)


def sources() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def phrases(text: str) -> list[str]:
    """The forbidden phrases of a text, in which a line may end between two words of one."""
    plain = re.sub(r"[\s\"'#]+", " ", text).lower()
    return [phrase for phrase in FORBIDDEN if re.search(rf"\b{phrase}\b", plain)]


@pytest.mark.parametrize("files", [pages, sources], ids=["pages", "source"])
def test_no_file_has_a_forbidden_phrase(files: object) -> None:
    read = files()  # type: ignore[operator]
    assert len(read) > 30
    assert {str(file.relative_to(ROOT)): found for file in read if (found := phrases(file.read_text()))} == {}


def test_a_forbidden_phrase_is_noticed_across_lines() -> None:
    assert phrases("weights in\n    # codes") == ["in codes"]
    assert phrases('"launched kernel "\n    "by kernel"') == ["kernel by kernel"]
    assert phrases("an encoded weight, as written") == []


@pytest.mark.parametrize("word", LIMITS)
def test_a_word_is_rare(word: str) -> None:
    count = sum(len(re.findall(rf"\b{word}\b", file.read_text())) for file in sources())
    assert count <= LIMITS[word], f"{word} stands {count} times in src"


def class_names(text: str) -> list[str]:
    """Public classes of a module."""
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def test_no_class_name_stands_twice() -> None:
    files = defaultdict(list)
    for file in sources():
        path = file.relative_to(ROOT / "src").as_posix()
        if not path.startswith(DOORS):
            for name in class_names(file.read_text()):
                files[name].append(path)
    assert PACKAGE.is_dir() and len(files) > 300
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
