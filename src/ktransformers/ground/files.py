"""Small files: JSON and YAML are read within bounds and text is written atomically; and locks that exclude a second
process from a directory.

A file that was downloaded or edited may be anything: no text, nested ten thousand levels, an alias that contains
itself, a number of a million digits. The readers answer each with an InputError that names the file and the line, and
`validate` does the same for a field of a document, by its path. A YAML document is counted with its aliases followed,
because a page of aliases of aliases is a terabyte for the first reader that walks it.

Writes go to a temporary name, are synced and renamed, and the directory is synced. Large outputs (shards, adapters,
directories) are written by their own modules, which use `sync` too. The system releases a lock when its process ends,
however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import reprlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ktransformers.ground.errors import InputError

ModelT = TypeVar("ModelT")
MAX_JSON_BYTES = 256 << 20  # the index of a thousand layers of a thousand experts is smaller
MAX_YAML_BYTES = 256 << 10  # seconds of parsing; recipes, rules and tasks have a few kilobytes
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_YAML_VALUES = 1_000_000  # with aliases followed
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
# Recipes that come with the package; their names begin with `examples/`.
RECIPES = Path(__file__).resolve().parent.parent / "train" / "recipes"


def short(value: object) -> str:
    """A value for a message, of at most a few hundred characters whatever it is."""
    try:
        return _SHORT.repr(value)[:400]
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, a value that contains itself
        return f"a {type(value).__name__}"


def shorten(path: str | Path) -> str:
    """A path for a message: the end of a long one."""
    text = str(path)
    return text if len(text) <= 400 else f"...{text[-400:]}"


def find_example(path: str | Path) -> Path:
    """The path, or if there is no such file, the package's recipe of this name (`examples/train_lora/NAME.yaml`)."""
    given = Path(path)
    folder, _, name = given.as_posix().partition("examples/")
    shipped = RECIPES / name
    return shipped if not folder and name and not path_exists(given) and is_file(shipped) else given


def path_exists(path: str | Path) -> bool:
    """Whether there is such a file or directory. A name from a request or a file may be no path at all: a component of
    more than 255 characters, a NUL, a user's folder (`~name`) that does not exist."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def is_file(path: str | Path) -> bool:
    """As `Path.is_file`, for a name that may be no path at all."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, expected: str, *, limit: int = MAX_JSON_BYTES, remedy: str = "") -> str:
    """A text in UTF-8 of at most `limit` bytes; `expected` says in errors what the file should be."""
    file = Path(path)
    try:
        size = file.stat().st_size
        if size > limit:
            raise InputError(str(file), f"{size} bytes", f"{expected} of at most {limit} bytes", remedy)
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(str(file), "no such file", expected, remedy) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{file}, line {line}", f"a byte that is not UTF-8 ({error.reason})", expected, remedy
        ) from None
    except OSError as error:
        raise InputError(
            str(file), f"a file that does not open ({error.strerror or error})", expected, remedy
        ) from None


def parse_json(text: str, where: str, expected: str = "JSON", remedy: str = "") -> Any:
    """`where` names the file, or the place in it, that the text is from."""
    try:
        document = json.loads(text)
        if may_have_surrogates(text):
            check_text(document, where, remedy)
        return document
    except json.JSONDecodeError as error:
        place = where if error.lineno == 1 and ", line " in where else f"{where}, line {error.lineno}"
        raise InputError(place, f"no JSON ({error.msg} at column {error.colno})", expected, remedy) from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of levels
        raise InputError(where, f"what JSON does not hold ({error})", expected, remedy) from None


def may_have_surrogates(text: str) -> bool:
    """Whether the source has an escape (`\\ud800`) that is text only as half of a pair."""
    return SURROGATE.search(text) is not None


def check_text(document: Any, where: str, remedy: str = "") -> None:
    """Refuse half of a surrogate pair, which no file and no tokenizer takes as text."""
    try:
        json.dumps(document, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise InputError(where, "half of a surrogate pair (\\ud800 to \\udfff)", "text", remedy) from None


def read_json(path: str | Path, expected: str = "JSON", *, remedy: str = "") -> Any:
    return parse_json(read_text(path, expected, remedy=remedy).removeprefix("\ufeff"), str(path), expected, remedy)


def read_json_object(path: str | Path, expected: str = "a JSON object", *, remedy: str = "") -> dict[str, Any]:
    document = read_json(path, expected, remedy=remedy)
    if not isinstance(document, dict):
        raise InputError(str(path), f"a JSON {type(document).__name__}", expected, remedy)
    return document


def parse_yaml(text: str, where: str, expected: str = "YAML", remedy: str = "") -> Any:
    import yaml

    try:
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else f"{where}, line {mark.line + 1}"
        raise InputError(place, f"no YAML ({error.problem or error.context})", expected, remedy) from None
    except yaml.YAMLError as error:
        raise InputError(where, f"no YAML ({' '.join(str(error).split())})", expected, remedy) from None
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        # The constructors of dates, numbers and tagged values raise what Python raises.
        raise InputError(where, f"no YAML ({type(error).__name__}: {error})", expected, remedy) from None
    values, pending = 0, [document]
    while pending:
        value = pending.pop()
        values += 1
        if values > MAX_YAML_VALUES:
            raise InputError(
                where, f"more than {MAX_YAML_VALUES} values once its aliases are followed", expected, remedy
            )
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    if may_have_surrogates(text):
        check_text(document, where, remedy)
    return document


def read_yaml(path: str | Path, expected: str = "YAML", *, remedy: str = "") -> Any:
    return parse_yaml(read_text(path, expected, limit=MAX_YAML_BYTES, remedy=remedy), str(path), expected, remedy)


def read_yaml_mapping(path: str | Path, expected: str = "lines of `key: value`", *, remedy: str = "") -> dict[str, Any]:
    document = read_yaml(path, expected, remedy=remedy)
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise InputError(str(path), f"a YAML {type(document).__name__}", f"a mapping, {expected}", remedy)
    return document


def read_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """`key=value` with a YAML value; `a.b=value` sets a key of a nested mapping."""
    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, sign, value = argument.partition("=")
        *path, last = key.strip().removeprefix("--").split(".")
        if not sign or not last or not all(path):
            raise InputError("argument", repr(argument), "key=value, as in seed=3 or eval.limit=8")
        try:
            parsed = parse_yaml(value, key)
        except InputError:  # a text with characters that mean something in YAML
            parsed = value
        inner = overrides
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InputError("argument", repr(argument), f"{part} either as a value or as a mapping")
        inner[last] = parsed
    return overrides


def merge_mappings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; the second wins, key by key of mappings that both have."""
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge_mappings(result[key], value) if both else value
    return result


def validate(model: type[ModelT], value: Any, where: str, remedy: str = "") -> ModelT:
    """The value as a pydantic model or a dataclass; an error names the first wrong field after `where`."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_context=False, include_url=False)[0]
        path = ".".join(str(part)[:80] for part in first["loc"])
        expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise InputError(f"{where}: {path}" if path else where, short(first.get("input")), expected, remedy) from None


def sync(path: Path) -> None:
    """Flushes a file, or a directory's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def walk_folders(roots: Iterable[Path], depth: int, limit: int) -> Iterator[tuple[Path, list[str]]]:
    """Folders at most `depth` below the roots with the names of their files, none twice; hidden ones and those of
    checkpoints are left out, and links to folders are not followed. Below each root the search ends after `limit`
    folders, so that it is quick in a large directory too and the roots after that one are searched."""
    seen = set[Path]()
    for root in roots:
        for count, (current, folders, names) in enumerate(os.walk(root)):
            directory = Path(current)
            if count >= limit:
                break
            folders[:] = sorted(name for name in folders if not name.startswith((".", "checkpoint-", "__")))
            if len(directory.relative_to(root).parts) >= depth:
                folders.clear()
            if directory not in seen:
                seen.add(directory)
                yield directory, names


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def try_lock(handle: int) -> bool:
    """Locks an open file for this process without waiting; False if another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LockedError(Exception):
    """Another process holds the lock; `holder` is what it wrote of itself."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def exclusive_lock(path: Path) -> Iterator[int]:
    """Creates and locks the file `path`, yields its descriptor and removes the file; raises LockedError.

    The file is removed while it is locked, so a process that opened it before may lock a file that has no name any
    more; such a process opens the path again.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not try_lock(handle):
                raise LockedError(os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process")
            if _names(path, handle):
                break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield handle
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _names(path: Path, handle: int) -> bool:
    """Whether `path` is the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
