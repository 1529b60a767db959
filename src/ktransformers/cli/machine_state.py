"""What is on this machine for a menu or a question: models, adapters and trainings below the working directory and the
folders of models, recipes, running servers.

Everything is read from names and small files; a search ends after a bounded number of folders, so that a question comes
at once in a large home directory too.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, read_yaml_mapping, walk_folders
from ktransformers.ground.training_charts import LOG_FILE, last_step

SEARCH_DEPTH, SEARCHED_FOLDERS = 4, 3000
ADAPTER_FILE = "adapter_config.json"
RECIPE_KEYS, LOOP_KEYS = {"model_name_or_path", "output_dir"}, {"run", "model", "train"}


@dataclass(frozen=True)
class FoundRun:
    """A training output or another adapter."""

    path: Path
    base: str | None  # of the adapter
    changed: float
    trained: bool  # by `kt train`, so that it has a log
    progress: str  # of a training without an adapter yet

    @property
    def note(self) -> str:
        on = f"on {Path(self.base).name}, " if self.base else ""
        return f"{on}{self.progress}{age(time.time() - self.changed)}"


def age(seconds: float) -> str:
    """`now`, `5 min ago`, `3 h ago`, `2 days ago`."""
    if seconds < 90:
        return "now"
    if seconds < 5400:
        return f"{round(seconds / 60)} min ago"
    return f"{round(seconds / 3600)} h ago" if seconds < 48 * 3600 else f"{round(seconds / 86400)} days ago"


def shorten(path: Path) -> str:
    """Relative to the working directory if it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def search_roots() -> list[Path]:
    from ktransformers.ground.model_registry import search_folders

    return [Path.cwd(), *(folder for folder in search_folders() if folder.is_dir())]


def find_runs() -> list[FoundRun]:
    """Trainings and adapters, the newest first."""
    runs = []
    for directory, files in walk_folders(search_roots(), SEARCH_DEPTH, SEARCHED_FOLDERS):
        if ADAPTER_FILE in files or LOG_FILE in files:
            with contextlib.suppress(OSError):  # a dangling link, or removed meanwhile
                runs.append(_read_run(directory, files))
    return sorted(runs, key=lambda run: run.changed, reverse=True)


def find_adapters() -> list[FoundRun]:
    return [run for run in find_runs() if (run.path / ADAPTER_FILE).is_file()]


def _read_run(directory: Path, files: list[str]) -> FoundRun:
    base, progress = None, ""
    if ADAPTER_FILE in files:
        try:
            base = read_json_object(directory / ADAPTER_FILE).get("base_model_name_or_path")
        except InputError:
            base = None
    elif LOG_FILE in files:
        progress = _last_step(directory)
    file = directory / (LOG_FILE if LOG_FILE in files else ADAPTER_FILE)
    return FoundRun(directory, str(base) if base else None, file.stat().st_mtime, LOG_FILE in files, progress)


def _last_step(directory: Path) -> str:
    """`step 40 of 100, ` of a training that has not ended."""
    step, steps = last_step(directory)
    return f"step {step} of {steps}, " if steps else ""


def find_recipes() -> tuple[list[Path], list[Path]]:
    """YAML files of `kt train` and of `kt loop` in the working directory and the folders in it."""
    recipes, loops = list[Path](), list[Path]()
    for file in sorted([*Path.cwd().glob("*.y*ml"), *Path.cwd().glob("*/*.y*ml")])[:SEARCHED_FOLDERS]:
        try:
            keys = set(read_yaml_mapping(file))
        except (InputError, OSError):
            continue
        if keys >= LOOP_KEYS:
            loops.append(file)
        elif keys >= RECIPE_KEYS:
            recipes.append(file)
    return recipes, loops
