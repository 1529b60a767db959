"""What `kt with` puts into a Python program that is not ours: Python imports a module of this name when it starts.

Nothing happens then but that two imports are watched. Once transformers' model code and PEFT are both there, or no
longer on their way, `ktransformers.nn.quantizer` is imported, which makes "kt" known to transformers and expert LoRA
known to PEFT. It is not done at the start because most processes of a program (launchers, data workers) never load a
model. This folder is on PYTHONPATH, so children inherit it. It is no package and imports nothing of ours by itself.

The surprising decision: a program whose Python lacks ktransformers fails when it imports transformers. Without us
transformers only warns of a method "kt" that it does not know, loads the experts as plain parameters and trains on,
which is not what was asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
WATCHED = ("transformers.modeling_utils", "peft")


class Watched:
    """A loader that tells when its module has been executed."""

    def __init__(self, loader: Any, door: Door) -> None:
        self._loader = loader
        self._door = door

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._door.under_way.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            self._door.under_way.discard(module.__name__)
        self._door.arrived(module.__name__)

    def __getattr__(self, name: str) -> Any:  # what else a loader can do, such as naming its source
        return getattr(self._loader, name)


class Door:
    """Finds the watched modules by the other finders, and registers when all that were begun are there."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self._there: set[str] = set()
        self._open = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = Watched(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def arrived(self, name: str) -> None:
        self._there.add(name)
        if not self._open and WATCHED[0] in self._there and not self.under_way:
            self._open = True
            register()


def register() -> None:
    if importlib.util.find_spec("ktransformers") is None:
        raise ImportError(
            f"kt with: {sys.executable} has no ktransformers; install it there, or run the program of its own"
        )
    importlib.import_module("ktransformers.nn.quantizer")


def _other() -> None:
    """The sitecustomize that Python would have found without us, if there is one."""
    places = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Door())
_other()
