"""Versions that `use_kt: true` accepts in LLaMA-Factory, and its own checks as they are answered."""

from __future__ import annotations

import types
from typing import Any

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.train.llamafactory import versions


def check(llamafactory: str, **packages: str) -> None:
    installed = {name.replace("_", "-"): version for name, version in packages.items()}
    versions.check_window(llamafactory, installed.get)


@pytest.mark.parametrize(
    ("llamafactory", "transformers"),
    [("0.9.5", "5.6.0"), ("0.9.6.dev0", "5.7.0"), ("0.9.6.dev0", "5.8.0"), ("0.9.6", "5.8.1")],
)
@pytest.mark.parametrize("peft", ["0.19.1", "0.20.0"])
def test_tested_versions_are_accepted(llamafactory: str, transformers: str, peft: str) -> None:
    check(llamafactory, transformers=transformers, peft=peft)


@pytest.mark.parametrize(
    ("llamafactory", "transformers", "peft", "found"),
    [
        ("0.9.5", "5.8.0", "0.20.0", "transformers 5.8.0"),
        ("0.9.6.dev0", "5.6.0", "0.20.0", "transformers 5.6.0"),
        ("0.9.6.dev0", "5.17.0", "0.20.0", "transformers 5.17.0"),
        ("0.9.5", "5.6.0", "0.18.1", "peft 0.18.1"),
        ("0.9.5", "5.6.0", "0.19.0", "peft 0.19.0"),
        ("0.9.6.dev0", "5.8.0", "0.21.2", "peft 0.21.2"),
        ("0.9.4", "5.6.0", "0.20.0", r"LLaMA-Factory 0\.9\.4"),
        ("0.9.7", "5.8.0", "0.20.0", r"LLaMA-Factory 0\.9\.7"),
    ],
)
def test_other_versions_are_refused_with_what_was_found(
    llamafactory: str, transformers: str, peft: str, found: str
) -> None:
    with pytest.raises(InputError, match=f"use_kt: given {found}, expected LLaMA-Factory"):
        check(llamafactory, transformers=transformers, peft=peft)


def test_missing_package_is_refused() -> None:
    with pytest.raises(InputError, match="given peft not installed"):
        check("0.9.5", transformers="5.6.0")


def test_forks_are_refused() -> None:
    with pytest.raises(InputError, match=r"transformers-kt 5\.6\.0\.post6 in this environment.*pip uninstall"):
        check("0.9.5", transformers="5.6.0", peft="0.20.0", transformers_kt="5.6.0.post6")


@pytest.fixture
def misc(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`llamafactory.extras.misc` with its checks recorded, in an environment that is accepted."""
    asked: list[Any] = []
    module = types.SimpleNamespace(
        asked=asked,
        check_version=lambda requirement, mandatory=False: asked.append((requirement, mandatory)),
        check_dependencies=lambda: asked.append("dependencies"),
    )
    monkeypatch.setattr(versions, "llamafactory_version", lambda: "0.9.5")
    monkeypatch.setattr(versions, "check_window", lambda version: asked.append(f"window of {version}"))
    versions.answer_checks(module)
    return module


@pytest.mark.parametrize("name", ["kt-kernel", "transformers-kt==5.6.0.post6", "accelerate-kt", "peft-kt", "trl-kt"])
def test_names_of_kt_are_answered_by_the_window(name: str, misc: Any) -> None:
    misc.check_version(name, mandatory=True)
    assert misc.asked == ["window of 0.9.5"]


def test_other_names_are_those_of_llamafactory(misc: Any) -> None:
    misc.check_version("datasets>=2.16.0,<=4.0.0")
    misc.check_version("deepspeed", mandatory=True)
    assert misc.asked == [("datasets>=2.16.0,<=4.0.0", False), ("deepspeed", True)]


def test_dependencies_with_use_kt_are_those_of_the_stock_packages(misc: Any) -> None:
    misc.check_dependencies(use_kt=True)
    misc.check_dependencies()
    assert misc.asked == ["window of 0.9.5", "dependencies", "dependencies"]


def test_new_trainer_is_refused() -> None:
    with pytest.raises(InputError, match="USE_V1: given 1 with USE_KT=1"):
        versions.refuse_v1(types.ModuleType("llamafactory.v1.launcher"))
