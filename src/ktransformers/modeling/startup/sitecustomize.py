"""Startup hook of `kt with` for third-party programs: Python imports a module named sitecustomize when it starts.

The hook only installs an import watcher. After transformers' model code has been imported, and PEFT if its import has
begun, it imports `ktransformers.modeling.quantizer`, which registers "kt" with transformers and patches PEFT for expert
LoRA. That is not done at startup because most processes of a program (launchers, data workers) never load a model. The
folder is on PYTHONPATH, so child processes inherit it; it is not a package and imports nothing of ktransformers by
itself.

A program whose Python lacks ktransformers fails when it imports transformers, because transformers alone would only
warn of an unknown method "kt", load the experts as plain parameters and train without the kernels.
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

STARTUP_DIRECTORY = Path(__file__).resolve().parent
WATCHED_MODULES = ("transformers.modeling_utils", "peft")


class WatchedLoader:
    """A loader that notifies the watcher when its module has been executed."""

    def __init__(self, loader: Any, watcher: ImportWatcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._watcher.importing.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            self._watcher.importing.discard(module.__name__)
        self._watcher.import_done(module.__name__)

    def __getattr__(self, name: str) -> Any:  # optional methods of loaders, such as get_source
        return getattr(self._loader, name)


class ImportWatcher:
    """A meta path finder for the watched modules; calls `register` once all of them that were begun are imported."""

    def __init__(self) -> None:
        self.importing: set[str] = set()
        self._imported: set[str] = set()
        self._registered = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in WATCHED_MODULES:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = WatchedLoader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def import_done(self, name: str) -> None:
        self._imported.add(name)
        if not self._registered and WATCHED_MODULES[0] in self._imported and not self.importing:
            self._registered = True
            register()


def register() -> None:
    if importlib.util.find_spec("ktransformers") is None:
        raise ImportError(
            f"kt with: {sys.executable} has no ktransformers; install it there, or run the program of its own"
        )
    importlib.import_module("ktransformers.modeling.quantizer")


def _run_shadowed_sitecustomize() -> None:
    """Run the sitecustomize module that this one shadows on sys.path, if there is one."""
    paths = [path for path in sys.path if Path(path or ".").resolve() != STARTUP_DIRECTORY]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, ImportWatcher())
_run_shadowed_sitecustomize()
