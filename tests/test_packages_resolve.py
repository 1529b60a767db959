"""The bounds of pyproject.toml against what is tested: every package that the wheel or an extra requires is pinned in
constraints.txt at a version within its bounds, the pins satisfy each other's requirements, and the oldest versions of
docs/install.md are the lower bounds."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_PINNED = {
    "modelscope": "a second hub; no test downloads from it",
    "tensorboard": "a logger; tests/train/test_report_to.py runs where it is installed",
    "mlflow": "likewise",
    "ray": "several nodes; tests of it run where it is installed",
    "swanlab": "a logger that transformers calls; no test has it",
    "wandb": "likewise",
}


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def required(*extras: str) -> list[Requirement]:
    """What `pip install ktransformers[extras]` asks for, extras of extras included."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        for text in EXTRAS[extra]:
            requirement = Requirement(text)
            if requirement.name == PROJECT["name"]:
                texts += [str(one) for one in required(*sorted(requirement.extras))]
            else:
                texts.append(text)
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("extra", EXTRAS)
def test_pins_are_within_the_bounds(extra: str) -> None:
    pinned = pins()
    for requirement in required(extra):
        name = canonicalize_name(requirement.name)
        if name in NOT_PINNED:
            assert name not in pinned
            continue
        assert name in pinned, f"{requirement} of [{extra}] is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement}, constraints.txt has {pinned[name]}"


def test_pins_satisfy_each_other() -> None:
    """By the metadata of the installed packages: what pip finds for [sft] works with what else is pinned."""
    pinned, wrong, seen = pins(), [], set()
    waiting = [(PROJECT["name"], str(one)) for one in required("sft")]
    while waiting:
        user, text = waiting.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if user == "torch" and name not in pinned:
            continue  # setuptools, and packages for the GPU that depend on the build of torch
        if name not in pinned or not requirement.specifier.contains(pinned[name], prereleases=True):
            wrong.append(f"{user} requires {requirement}, constraints.txt has {pinned.get(name)}")
        elif name not in seen:
            seen.add(name)
            waiting += [(name, one) for one in importlib.metadata.requires(name) or []]
    assert wrong == []
    assert {"torch", "transformers", "tokenizers", "trl", "datasets", "starlette"} <= seen


def versions_of_the_page(row: str) -> dict[str, Version]:
    page = (ROOT / "docs" / "install.md").read_text()
    (head,) = re.findall(r"(?m)^\| \| (torch \|.*) \|$", page)
    (line,) = re.findall(rf"(?m)^\| {re.escape(row)}[^|]*\| (.*) \|$", page)
    versions = dict(zip(head.lower().split(" | "), map(Version, line.split(" | ")), strict=True))
    assert versions.keys() == {"torch", "transformers", "peft", "trl", "gguf"}
    return versions


def test_oldest_versions_of_the_page_are_the_lower_bounds() -> None:
    oldest = versions_of_the_page("oldest tested for `kt train`")
    bounds: dict[str, Version] = {}
    for requirement in required("train", "gguf"):
        for one in requirement.specifier:
            assert one.operator == ">=", "a bound above is for a version that is known not to work; add it to the page"
            bounds[requirement.name] = max(Version(one.version), bounds.get(requirement.name, Version("0")))
    assert {name: bounds[name].release[:2] for name in oldest} == {
        name: version.release[:2] for name, version in oldest.items()
    }


def test_newest_versions_of_the_page_are_the_pins() -> None:
    newest = versions_of_the_page("newest tested: all tests")
    assert newest == {name: pins()[name] for name in newest}


def test_extras_of_the_page_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "install.md").read_text().split("\n## Extras\n")[1]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", page)) == set(EXTRAS)
