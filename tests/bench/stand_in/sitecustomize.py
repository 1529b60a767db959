"""Finds the stand-in before the finder of an editable install can answer for its name with our own `kt_kernel`."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


class StandInFinder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "kt_kernel":
            return None
        return importlib.util.spec_from_file_location(name, Path(__file__).with_name("kt_kernel.py"))


sys.meta_path.insert(0, StandInFinder)  # type: ignore[arg-type]
