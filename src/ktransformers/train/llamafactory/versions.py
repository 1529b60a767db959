"""The versions of LLaMA-Factory, transformers and PEFT that work together with us, and the answers to LLaMA-Factory's
own version checks.

With `use_kt: true` both releases ask `importlib.metadata` for distributions of kt-kernel and of forks, and 0.9.6
refuses the stock packages. These lookups are answered here, in LLaMA-Factory's process and for these names only; every
other requirement is still checked by LLaMA-Factory. In place of the pins of the forks stands `WINDOWS`, the
combinations that `make test-llamafactory` runs. DISABLE_VERSION_CHECK does not widen them: older versions of PEFT give
expert LoRA other shapes or leave experts out, and other releases have other internals.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ktransformers.ground.errors import InputError

FORKS = ("transformers-kt", "accelerate-kt", "peft-kt", "trl-kt")
ANSWERED = {"kt-kernel", *FORKS}


@dataclass(frozen=True)
class Window:
    llamafactory: SpecifierSet
    packages: Mapping[str, SpecifierSet]

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {versions}" for name, versions in self.packages.items())
        return f"LLaMA-Factory {self.llamafactory} with {listed}"


PEFT = SpecifierSet(">=0.19.1,<0.21")  # 0.19.0 exchanges inputs and outputs of expert LoRA
WINDOWS = (
    Window(SpecifierSet("==0.9.5"), {"transformers": SpecifierSet("==5.6.0"), "peft": PEFT}),
    Window(SpecifierSet(">=0.9.6.dev0,<0.9.7"), {"transformers": SpecifierSet(">=5.7.0,<5.9"), "peft": PEFT}),
)


def installed_version(name: str) -> str | None:
    """None: not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def llamafactory_version() -> str:
    """Of the code that runs; its distribution has another name in some releases."""
    return str(importlib.import_module("llamafactory.extras.env").VERSION)


def check_window(llamafactory: str, version_of: Callable[[str], str | None] = installed_version) -> Window:
    """The window that these versions are in; outside all of them an error that says what was found."""
    for name in FORKS:
        if (version := version_of(name)) is not None:
            remedy = f"`pip uninstall {name}`, then install the stock package again, whose files it replaced"
            raise InputError("use_kt", f"{name} {version} in this environment", "the stock packages", remedy)
    for window in WINDOWS:
        if not window.llamafactory.contains(llamafactory, prereleases=True):
            continue
        for name, versions in window.packages.items():
            found = version_of(name)
            if found is None or not versions.contains(found, prereleases=True):
                remedy = f'`pip install "{name}{versions}"`'
                raise InputError("use_kt", f"{name} {found or 'not installed'}", str(window), remedy)
        return window
    raise InputError("use_kt", f"LLaMA-Factory {llamafactory}", " or ".join(map(str, WINDOWS)))


def answer_checks(misc: Any) -> None:
    """Replace `check_version` and `check_dependencies` in `llamafactory.extras.misc`."""
    stock_check_version, stock_check_dependencies = misc.check_version, misc.check_dependencies

    def check_version(requirement: str, mandatory: bool = False) -> None:
        if Requirement(requirement).name in ANSWERED:
            check_window(llamafactory_version())
        else:
            stock_check_version(requirement, mandatory=mandatory)

    def check_dependencies(use_kt: bool = False) -> None:
        if use_kt:
            check_window(llamafactory_version())
        stock_check_dependencies()  # of the stock packages

    misc.check_version, misc.check_dependencies = check_version, check_dependencies


def refuse_v1(launcher: ModuleType) -> None:
    raise InputError("USE_V1", "1 with USE_KT=1", "one of them", "the new trainer of LLaMA-Factory has no use_kt")
