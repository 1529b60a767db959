"""A `.gguf` file as a model's directory: config.json, the tokenizer and links to the file, made once per file.

Everything that opens a model takes a directory: transformers for tokenizer and configuration, the planner, the reader
of adapters. A GGUF file holds the same facts in its header. The directory is made in the folder of the registry of
models, under a name with a hash of the file's path, size and time, so that a file that was replaced gets a new one;
weights are linked, never copied. A file that lies alone with its config.json needs none: its folder is the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.dense import TOKENIZER_FILES
from ktransformers.checkpoint.gguf_tokenizer import tokenizer_files
from ktransformers.checkpoint.rest import copy_small_files
from ktransformers.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from ktransformers.checkpoint.sources import open_source
from ktransformers.checkpoint.sources.gguf import gguf_files
from ktransformers.checkpoint.sources.gguf_header import read_header
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists
from ktransformers.ground.settings import data_folder

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
ORIGIN_FILE = "kt_gguf.json"  # names the file that a directory was made for


def is_gguf_file(path: Path) -> bool:
    return path.suffix == ".gguf" and path_exists(path) and path.is_file()


def is_gguf_directory(directory: Path) -> bool:
    """Whether the weights of a model's directory are GGUF."""
    safetensors = any((directory / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))
    return not safetensors and any(directory.glob("*.gguf"))


def model_directory(path: Path) -> Path:
    """The directory of a model that is given as a directory or as a GGUF file."""
    if not is_gguf_file(path):
        return path
    files, folder = gguf_files(path), path.parent
    own_config = (folder / "config.json").is_file()
    own_tokenizer = own_config and any((folder / name).is_file() for name in TOKENIZERS)
    if own_tokenizer and is_gguf_directory(folder) and set(folder.glob("*.gguf")) == set(files):
        return folder
    facts = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    directory = data_folder() / "gguf" / f"{files[0].stem}-{digest}"
    if not (directory / ORIGIN_FILE).is_file():
        _make_directory(directory, files, own_config=own_config, own_tokenizer=own_tokenizer)
    return directory


def _make_directory(directory: Path, files: list[Path], *, own_config: bool, own_tokenizer: bool) -> None:
    """Under another name first: two commands may start at once, and one may be killed."""
    config = _embedded_config(files[0]) if not own_config else None
    tokenizer = {} if own_tokenizer else tokenizer_files(str(files[0]), read_header(files[0]).fields)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        if config is None:
            shutil.copyfile(files[0].parent / "config.json", partial / "config.json")
        else:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if own_tokenizer:
            copy_small_files(files[0].parent, partial, only=TOKENIZER_FILES)
        for name, text in tokenizer.items():
            (partial / name).write_text(text)
        for file in files:
            (partial / file.name).symlink_to(file.resolve())
        (partial / ORIGIN_FILE).write_text(json.dumps({"file": str(files[0].resolve())}) + "\n")
        if not (directory / ORIGIN_FILE).is_file():
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(partial, directory)
    except OSError:
        if not (directory / ORIGIN_FILE).is_file():  # another command may have made it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _embedded_config(file: Path) -> dict[str, Any]:
    config = open_source(file).config()
    if config is None:
        raise InputError(str(file), "experts alone", "a whole model", "pass them with --kt-weight-path")
    return config


def given_file(directory: Path) -> Path:
    """The GGUF file that a directory was made for; any other directory itself."""
    try:
        return Path(json.loads((directory / ORIGIN_FILE).read_text())["file"])
    except FileNotFoundError:
        return directory
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            str(directory / ORIGIN_FILE), f"a damaged file ({error})", "JSON", "delete the folder"
        ) from error
