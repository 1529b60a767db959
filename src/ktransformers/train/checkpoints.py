"""Checkpoints of a run: a manifest with the checksum of every file, its verification, and the choice of the one to
resume from.

A checkpoint is staged, gets its manifest `kt_checkpoint.json` as the last file, is synced and renamed (`trainers.py`).
Before anything of it is loaded, every file is read and compared with the manifest. If the newest checkpoint is damaged
or incomplete, the newest whole one is taken and the others are renamed to `checkpoint-N.damaged`. A checkpoint without
optimizer, scheduler or random state cannot be resumed: the HF Trainer would go on with new ones and say nothing.
Checkpoints of versions without the manifest are accepted if their files can be parsed, with a note.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ktransformers import __version__
from ktransformers.checkpoint.tensorfile import read_layout, sha256
from ktransformers.ground.errors import InputError
from ktransformers.train.files import write_json
from ktransformers.train.recipe import TrainRecipe
from ktransformers.train.settings import TrainSettings

CHECKPOINT_MANIFEST_FILE = "kt_checkpoint.json"
CHECKPOINT_MANIFEST_VERSION = 1
STATE_FILES = ("optimizer.pt", "scheduler.pt")
REQUIRED_FILES = ("trainer_state.json", "adapter_config.json", "adapter_model.safetensors", *STATE_FILES)
RUN_ID_FILE = ".kt_run_id"  # in the output directory, of a run under torchrun
HASH_THREADS = 4  # adapter and optimizer are most of the bytes; hashlib releases the GIL
TORCH_SUFFIXES = (".pt", ".pth")  # zip archives with a CRC-32 of every entry


class CheckpointFile(BaseModel):
    model_config = ConfigDict(frozen=True)

    bytes: int
    sha256: str


class CheckpointManifest(BaseModel):
    """kt_checkpoint.json"""

    model_config = ConfigDict(frozen=True)

    version: int
    made_by: str
    step: int
    processes: int
    recipe: TrainRecipe
    files: dict[str, CheckpointFile]


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _random_state_files(processes: int) -> list[str]:
    """The names that the HF Trainer gives to the random states of its processes."""
    return ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]


def write_checkpoint_manifest(folder: Path, step: int, recipe: TrainRecipe) -> None:
    """Written last: a folder with a manifest had all its files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKPOINT_MANIFEST_FILE)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = list(pool.map(sha256, paths))
    files = {
        str(path.relative_to(folder)): CheckpointFile(bytes=path.stat().st_size, sha256=digest)
        for path, digest in zip(paths, hashes, strict=True)
    }
    manifest = CheckpointManifest(
        version=CHECKPOINT_MANIFEST_VERSION,
        made_by=__version__,
        step=step,
        processes=process_count(),
        recipe=recipe,
        files=files,
    )
    write_json(folder / CHECKPOINT_MANIFEST_FILE, manifest.model_dump(mode="json"))


def read_checkpoint_manifest(folder: Path) -> CheckpointManifest | None:
    """None for a checkpoint of a version without manifests; raises InputError for a broken one."""
    file = folder / CHECKPOINT_MANIFEST_FILE
    if not file.is_file():
        return None
    try:
        return CheckpointManifest.model_validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            str(file), f"a manifest that cannot be read ({reason})", "the files of a checkpoint"
        ) from error


def list_checkpoints(output: Path) -> list[Path]:
    """checkpoint-N folders, oldest first."""
    folders = [path for path in output.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdigit()]
    return sorted(folders, key=lambda path: int(path.name[11:]))


def find_problem(folder: Path, *, resumed: bool = True) -> str | None:
    """What is wrong with a checkpoint, in words that follow its name; None if it is whole. With `resumed` it must have
    the state of optimizer, scheduler and random numbers."""
    try:
        manifest = read_checkpoint_manifest(folder)
        missing = _missing_state(folder, manifest) if resumed else None
        return missing or (_first_unreadable(folder) if manifest is None else _first_difference(folder, manifest))
    except InputError:
        return f"{CHECKPOINT_MANIFEST_FILE} cannot be read"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else 'a file'} cannot be read ({error.strerror})"


def _missing_state(folder: Path, manifest: CheckpointManifest | None) -> str | None:
    random_states = _random_state_files(process_count() if manifest is None else manifest.processes)
    missing = [name for name in (*REQUIRED_FILES, *random_states) if not (folder / name).is_file()]
    if not missing:
        return None
    listed = ", ".join(missing)
    only_model = set(STATE_FILES) <= set(missing)
    return f"{listed} missing" + (" (saved with save_only_model: true)" if only_model else "")


def _first_difference(folder: Path, manifest: CheckpointManifest) -> str | None:
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} missing"
        size = file.stat().st_size
        if size != expected.bytes:
            return f"{name} has {size} bytes, {expected.bytes} were written"
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = list(pool.map(sha256, [folder / name for name in manifest.files]))
    for (name, expected), digest in zip(manifest.files.items(), hashes, strict=True):
        if digest != expected.sha256:
            return f"{name} has another checksum than when it was written"
    return None


def _first_unreadable(folder: Path) -> str | None:
    """Parses what a checkpoint without a manifest allows to be parsed."""
    for file in sorted(folder.iterdir()):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".safetensors":
                read_layout(file)
            elif file.suffix in TORCH_SUFFIXES:
                with zipfile.ZipFile(file) as archive:
                    if archive.testzip() is not None:
                        return f"{file.name} has another checksum than when it was written"
        except (ValueError, zipfile.BadZipFile) as error:  # InputError and JSONDecodeError are ValueErrors
            return f"{file.name} cannot be read ({str(error).splitlines()[0]})"
    return None


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts."""

    checkpoint: Path | None  # None: from the beginning
    start: str  # a line that says so
    named: bool = False  # the settings name this checkpoint by its path
    recipe: TrainRecipe | None = None  # of the checkpoint
    processes: int | None = None  # that saved it, None if it does not say
    damaged: tuple[Path, ...] = ()  # newer checkpoints that are not used
    notes: tuple[str, ...] = ()


def _resume_from(checkpoint: Path, start: str, problems: dict[Path, str], *, named: bool = False) -> ResumePoint:
    manifest = read_checkpoint_manifest(checkpoint)
    notes = [f"{path}: {problem}; it is not used" for path, problem in problems.items()]
    if manifest is None:
        notes.append(f"{checkpoint} has no {CHECKPOINT_MANIFEST_FILE}: its files and its recipe are not verified")
    recipe = None if manifest is None else manifest.recipe
    processes = None if manifest is None else manifest.processes
    if processes not in (None, process_count()):
        notes.append(
            f"{checkpoint} was saved by {processes} processes and goes on with {process_count()}: the rows of a step "
            "are the same, random numbers of dropout and noise are others"
        )
    return ResumePoint(checkpoint, start, named, recipe, processes, tuple(problems), tuple(notes))


def _newest_whole(output: Path, checkpoints: list[Path]) -> tuple[Path, dict[Path, str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones."""
    problems: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints):
        problem = find_problem(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems[checkpoint] = problem
    listed = "; ".join(f"{path.name}: {problem}" for path, problem in problems.items())
    raise InputError(
        "output_dir",
        f"{output} without a checkpoint that can be resumed ({listed})",
        "a whole checkpoint",
        "overwrite_output_dir: true starts over; adapter_name_or_path with another output_dir trains the adapter of a "
        "checkpoint further",
    )


def was_restarted(output: Path) -> bool:
    """Whether this is a restart (`torchrun --max-restarts`) of the run that has written its id into the directory."""
    file = output / RUN_ID_FILE
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) < 1 or not file.is_file():
        return False
    return file.read_text() == os.environ.get("TORCHELASTIC_RUN_ID", "")


def find_resume_point(settings: TrainSettings) -> ResumePoint:
    """The checkpoint that `resume_from_checkpoint` and `overwrite_output_dir` ask for, verified. A run that its
    launcher has started again goes on from its own last checkpoint, whatever it was asked to start from."""
    output, requested = Path(settings.output_dir), settings.run.resume_from_checkpoint
    checkpoints = list_checkpoints(output)
    if checkpoints and was_restarted(output):
        requested = True
    if isinstance(requested, str):
        if not (Path(requested) / "trainer_state.json").is_file():
            raise InputError("resume_from_checkpoint", requested, "a checkpoint-N folder, or true")
        problem = find_problem(Path(requested))
        if problem is not None:
            raise InputError("resume_from_checkpoint", f"{requested}: {problem}", "a whole checkpoint", "or true")
        return _resume_from(Path(requested), f"resumes from {requested}", {}, named=True)
    if requested:
        if not checkpoints:
            return ResumePoint(None, f"starts: no checkpoint in {output} yet")
        checkpoint, problems = _newest_whole(output, checkpoints)
        return _resume_from(checkpoint, f"resumes from {checkpoint}", problems)
    removal = f"starts over; {len(checkpoints)} checkpoints in {output} are removed" if checkpoints else "starts"
    if settings.run.overwrite_output_dir:
        return ResumePoint(None, removal)
    if checkpoints and requested is None:
        checkpoint, problems = _newest_whole(output, checkpoints)
        return _resume_from(checkpoint, f"resumes from {checkpoint}; overwrite_output_dir: true starts over", problems)
    if (output / "adapter_model.safetensors").exists():
        remedy = "or `kt train FILE overwrite_output_dir=true`, which replaces it"
        raise InputError("output_dir", f"{output}, which holds an adapter", "a new folder", remedy)
    return ResumePoint(None, removal)


def check_recipe(point: ResumePoint, output: str, recipe: TrainRecipe) -> list[str]:
    """Raises if the checkpoint was trained with another recipe. A checkpoint that is named by its path is resumed all
    the same, with a note."""
    differences = [] if point.recipe is None else point.recipe.differences(recipe)
    if not differences:
        return []
    listed = "; ".join(differences)
    if point.named:
        return [f"{point.checkpoint} was trained with another recipe and goes on with this one: {listed}"]
    raise InputError(
        "output_dir",
        f"{output}, which was trained with another recipe: {listed}",
        "the same recipe, or another directory",
        f"overwrite_output_dir: true starts over; resume_from_checkpoint: {point.checkpoint} goes on with the new one",
    )


def set_aside(damaged: tuple[Path, ...]) -> None:
    """Renames damaged checkpoints, so that save_total_limit does not count them and no program resumes from them."""
    for path in damaged:
        target = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
