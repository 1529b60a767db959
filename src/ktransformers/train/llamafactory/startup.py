"""Import hooks for LLaMA-Factory, installed at the start of Python by the `.pth` file of `kt llamafactory on`, if
USE_KT is set or the command line, or the file that it names, says `use_kt: true`. Processes that this one starts find
USE_KT set.

A hooked module is executed by its own loader and then passed to one of our functions, before any module that imports
from it continues: `from .misc import check_version` elsewhere already gets ours. Two modules of the fork of
transformers, which stock transformers lacks, are provided. This file imports nothing but the standard library, because
every Python process of LLaMA-Factory runs it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Module of LLaMA-Factory -> the file and function here that changes it.
HOOKED_MODULES = {
    "llamafactory.extras.misc": ("versions", "answer_checks"),
    "llamafactory.hparams.model_args": ("arguments", "extend_model_arguments"),
    "llamafactory.hparams.training_args": ("arguments", "extend_training_arguments"),
    "llamafactory.model.model_utils.checkpointing": ("training", "use_checkpoint_context"),
    "llamafactory.model.adapter": ("adapter", "adapt_experts"),
    "llamafactory.model.loader": ("loading", "load_packed_experts"),
    "llamafactory.train.sft.trainer": ("sharded", "shard_on_request"),
    "llamafactory.train.tuner": ("training", "check_runs"),
    "llamafactory.v1.launcher": ("versions", "refuse_v1"),
}
# Module of the fork of transformers -> the file and function here that it offers.
PROVIDED_MODULES = {
    "transformers.integrations.kt": ("configuration", "configure_kt"),
    "transformers.integrations.kt_artifacts": ("configuration", "prepare_kt_pretrained_config"),
}


def _function_of(place: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(f"{__package__}.{place[0]}"), place[1])


class HookedLoader:
    """The loader of a hooked module, which passes the executed module on."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _function_of(HOOKED_MODULES[module.__name__])(module)

    def __getattr__(self, name: str) -> Any:  # optional methods of loaders, such as get_source
        return getattr(self._loader, name)


class ProvidedLoader:
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        place = PROVIDED_MODULES[module.__name__]
        setattr(module, place[1], _function_of(place))


class ImportHook:
    """A meta path finder for the hooked and provided modules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in PROVIDED_MODULES:
            return ModuleSpec(name, ProvidedLoader())  # type: ignore[arg-type]
        if name not in HOOKED_MODULES:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = HookedLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


TRUE = ("true", "y", "1")  # what LLaMA-Factory takes for true in a variable
SAYS_USE_KT = re.compile(r"""(^|[{,])\s*(--)?["']?use_kt["']?\s*[:=]\s*["']?(true|yes|on|1)\b""", re.M | re.I)


def asks_for_kt(words: Sequence[str]) -> bool:
    """Whether a command line says `use_kt: true`, in a word of its own (use_kt=true, --use_kt true) or in a YAML or
    JSON file."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if SAYS_USE_KT.match(word) or (word.lstrip("-") == "use_kt" and following.lower() in TRUE):
            return True
        if word.endswith((".yaml", ".yml", ".json")):
            try:
                with open(word, encoding="utf-8") as file:
                    if SAYS_USE_KT.search(file.read()):
                        return True
            except (OSError, UnicodeDecodeError):  # LLaMA-Factory says so
                continue
    return False


def install() -> None:
    if not any(isinstance(finder, ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportHook())


if os.environ.get("USE_KT", "1" if asks_for_kt(sys.orig_argv) else "0").lower() in TRUE:
    os.environ["USE_KT"] = "1"
    install()
