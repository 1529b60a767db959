"""Training runs observed by the server: their logs for the page, and checkpoints of one as adapters.

`TrainingRuns` finds the trainings below some folders by their logs; a client names one of those and no other path.
`--watch DIR` polls a training output directory every second. A checkpoint is complete when it contains
trainer_state.json, which the Trainer writes last; it is served as `checkpoint-N`, and as `final` once kt_manifest.json
shows that the run has ended. A checkpoint that training deletes is unloaded. One that cannot be read is logged once and
tried again when it changes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ktransformers.adapters.manifest import MANIFEST_FILE as MANIFEST
from ktransformers.ground.errors import KTError
from ktransformers.ground.files import walk_folders
from ktransformers.ground.log import logger
from ktransformers.ground.training_charts import LOG_FILE, last_step
from ktransformers.serve.http.registry import Registry, UnknownModel

LOG = logger(__name__)
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
FINAL_NAME = "final"
POLL_SECONDS = 1.0
SEARCH_SECONDS = 5.0  # for which the trainings that were found are remembered
SEARCH_DEPTH, SEARCHED_FOLDERS, MAX_RUNS = 4, 2000, 100


class TrainingLog:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def lines_after(self, offset: int) -> dict[str, Any]:
        """Complete lines from byte `offset` on, and the next offset; a log that became shorter is read from 0."""
        lines: list[dict[str, Any]] = []
        file = self.directory / LOG_FILE
        size = file.stat().st_size if file.is_file() else 0
        offset = max(0, offset) if offset <= size else 0
        if size > offset:
            with file.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(2**20)
            complete = data[: data.rfind(b"\n") + 1]
            offset += len(complete)
            for raw in complete.splitlines():
                try:  # NaN and infinities of a diverged run are no JSON; without a value they are not drawn
                    line = json.loads(raw, parse_constant=lambda _: None)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    lines.append(line)
        return {"directory": str(self.directory), "lines": lines, "next": offset}


class TrainingRuns:
    """The trainings below `roots` and the watched one. `roots` is called for every search, because adapters that are
    loaded later have folders of their own."""

    def __init__(self, watched: Path | None = None, roots: Callable[[], Sequence[Path]] = tuple) -> None:
        self._watched, self._roots = watched.resolve() if watched else None, roots
        self._found: dict[str, Path] = {}  # name -> directory
        self._searched = -SEARCH_SECONDS
        self._lock = threading.Lock()

    def log_of(self, name: str | None) -> TrainingLog | None:
        """The log of a run by its name, of the watched one without a name; None: there is none."""
        directory = self._watched if name is None else self._search().get(name)
        return None if directory is None else TrainingLog(directory)

    def list(self) -> list[dict[str, Any]]:
        """The watched run first, then the newest."""
        runs = [_describe_run(name, directory) for name, directory in self._search().items()]
        runs.sort(key=lambda run: (run["directory"] != str(self._watched), -run["changed"]))
        return runs

    def _search(self) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._searched >= SEARCH_SECONDS:
                newest = sorted(find_trainings(self._roots()), key=_changed, reverse=True)
                folders = [*([self._watched] if self._watched else []), *newest]
                self._found = {_run_name(folder): folder for folder in folders[:MAX_RUNS]}
                self._searched = time.monotonic()
            return self._found


def find_trainings(roots: Sequence[Path]) -> list[Path]:
    """Folders with a training log, none twice; below each root a bounded number of folders is searched."""
    absolute = dict.fromkeys(root.resolve() for root in roots)
    return [folder for folder, names in walk_folders(absolute, SEARCH_DEPTH, SEARCHED_FOLDERS) if LOG_FILE in names]


def _run_name(directory: Path) -> str:
    """Relative to the working directory if it lies below."""
    absolute, here = directory.resolve(), Path.cwd().resolve()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _changed(directory: Path) -> float:
    try:
        return (directory / LOG_FILE).stat().st_mtime
    except OSError:  # nothing logged yet, or being deleted
        return 0.0


def _describe_run(name: str, directory: Path) -> dict[str, Any]:
    """`step` and `steps` of the last line; `adapter` is the directory once the run has one."""
    step, steps = last_step(directory)
    adapter = str(directory) if _has_adapter(directory) else None
    place = {"name": name, "directory": str(directory), "changed": _changed(directory)}
    return place | {"step": step, "steps": steps, "adapter": adapter}


class CheckpointWatch:
    """Polls in its own thread until `stop`."""

    def __init__(self, directory: Path, registry: Registry) -> None:
        self._directory, self._registry = directory, registry
        self._loaded_mtimes: dict[str, float] = {}  # name -> modification time of its file
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kt-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            try:
                self.poll()
            except OSError as error:  # a directory is being deleted
                LOG.warning("watching %s: %s", self._directory, error)
            self._stopped.wait(POLL_SECONDS)

    def poll(self) -> None:
        checkpoints = self._complete_checkpoints()
        for name, (directory, written) in checkpoints.items():
            if self._loaded_mtimes.get(name) == written:
                continue
            self._loaded_mtimes[name] = written
            try:
                self._registry.load(name, directory, replacing=True)
                LOG.info("serving %s as %s:%s", directory, self._registry.served, name)
            except (KTError, OSError) as error:
                LOG.warning("%s is not served: %s", directory, error)
        for name in set(self._loaded_mtimes) - set(checkpoints):
            del self._loaded_mtimes[name]
            try:
                self._registry.unload(name)
            except UnknownModel:
                continue

    def _complete_checkpoints(self) -> dict[str, tuple[Path, float]]:
        checkpoints: dict[str, tuple[Path, float]] = {}
        if not self._directory.is_dir():
            return checkpoints
        for directory in self._directory.iterdir():
            state = directory / "trainer_state.json"
            if CHECKPOINT_NAME.fullmatch(directory.name) and state.is_file() and _has_adapter(directory):
                checkpoints[directory.name] = (directory, state.stat().st_mtime)
        manifest = self._directory / MANIFEST
        if manifest.is_file() and _has_adapter(self._directory):
            checkpoints[FINAL_NAME] = (self._directory, manifest.stat().st_mtime)
        return checkpoints


def _has_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file() and (directory / "adapter_model.safetensors").is_file()
