"""The models on this machine by name: a registry of those that were added or downloaded, and folders to look into.

`resolve` is the one way from what a user typed to a path: what exists on disk is taken as it is, then registered names
and the hub ids they came from, then the folders of `paths.models` (a model lying at FOLDER/NAME or FOLDER/OWNER/NAME);
anything else goes back unchanged, for hubs to know. The registry is `models.json` under XDG_DATA_HOME, changed under a
lock. A registered model stays where it is; removing it from the registry deletes no file unless that is asked for.
Nothing here reads tensors, so shells may complete names with it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ktransformers.errors import InputError
from ktransformers.files import write_json

REGISTRY_VERSION = 1  # of models.json
NAME_PATTERN = re.compile(r"[\w][\w.+-]*")
EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
HUB_CACHE_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")  # a folder of the hub's cache
LATER_GGUF_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # parts of a split GGUF but the first


@dataclass(frozen=True)
class FileFacts:
    """What a hub said of a file, or what was measured when the model was added."""

    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None  # of small files: git's blob id


@dataclass(frozen=True)
class Entry:
    name: str
    path: Path
    source: str | None = None  # huggingface or modelscope
    repo: str | None = None
    revision: str | None = None
    added: str = ""
    files: Mapping[str, FileFacts] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True)
class Facts:
    """Of a model on disk, read from config.json and the sizes of its files."""

    format: str  # safetensors, gguf, or none: a config.json alone
    bytes: int
    model_type: str | None = None
    experts: int | None = None  # routed, of one layer; None: a dense model, or a GGUF
    top_k: int | None = None
    quantised: str | None = None


def registry_file() -> Path:
    from ktransformers.settings import data_folder

    return data_folder() / "models.json"


def entries() -> list[Entry]:
    """In order of their names."""
    file = registry_file()
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["version"] != REGISTRY_VERSION:
            raise InputError(
                str(file), f"version {document['version']}", f"version {REGISTRY_VERSION}", "update ktransformers"
            )
        found = [_entry(fields) for fields in document["models"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            str(file), f"a damaged registry ({error})", "JSON", "delete it; `kt model scan` fills a new one"
        ) from error
    return sorted(found, key=lambda entry: entry.name.lower())


def _entry(fields: Mapping[str, Any]) -> Entry:
    files = {name: FileFacts(**known) for name, known in fields.get("files", {}).items()}
    return Entry(**{**fields, "path": Path(fields["path"]), "files": files})


@contextlib.contextmanager
def _locked_entries() -> Iterator[list[Entry]]:
    """The entries, written back when the block ends well; two commands at once take turns."""
    file = registry_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / ".models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = entries()
        yield found
        found.sort(key=lambda entry: entry.name.lower())
        write_json(file, {"version": REGISTRY_VERSION, "models": [entry.to_json() for entry in found]})


def is_model(path: Path) -> bool:
    """A Hugging Face directory with a config, or a GGUF file."""
    if path.is_dir():
        return (path / "config.json").is_file()
    return path.is_file() and path.suffix == ".gguf"


def default_name(path: Path) -> str:
    """The folder's name; a hub cache's snapshot is called after its model, a GGUF after its file."""
    for part in path.parts:
        if cached := HUB_CACHE_FOLDER.fullmatch(part):
            return cached["name"]
    word = path.stem if path.suffix == ".gguf" else path.name
    return re.sub(r"[^\w.+-]+", "-", re.sub(r"-00001-of-\d{5}$", "", word)).lstrip("-.+") or "model"


def add(path: str | Path, name: str | None = None, *, replace_same: bool = False, **origin: Any) -> Entry:
    """Register a model that is on disk. `origin`: source, repo, revision, files of an Entry."""
    place = Path(path).expanduser().absolute()
    if not is_model(place):
        raise InputError("path", f"{path}", "a folder with config.json, or a .gguf file")
    name = name or default_name(place)
    if not NAME_PATTERN.fullmatch(name):
        raise InputError("name", repr(name), "letters, digits and . _ + -, without a slash", "pass --name")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = Entry(name, place, added=now, **origin)
    with _locked_entries() as found:
        for at, other in enumerate(found):
            if other.name.lower() == name.lower():
                if other.path != place and other.exists and not replace_same:
                    raise InputError("name", name, "a name that is free", f"{other.path} has it; pass --name")
                found[at] = made
                break
        else:
            found.append(made)
    return made


def remove(name: str) -> Entry:
    entry = get(name)
    with _locked_entries() as found:
        found.remove(entry)
    return entry


def edit(name: str, /, **changes: Any) -> Entry:
    """A new name, path or origin for a registered model."""
    entry = get(name)
    made = replace(entry, **changes)
    if not NAME_PATTERN.fullmatch(made.name):
        raise InputError("name", repr(made.name), "letters, digits and . _ + -, without a slash")
    if not is_model(made.path):
        raise InputError("path", str(made.path), "a folder with config.json, or a .gguf file")
    with _locked_entries() as found:
        found.remove(entry)
        if any(other.name.lower() == made.name.lower() for other in found):
            raise InputError("name", made.name, "a name that is free")
        found.append(made)
    return made


def get(name: str) -> Entry:
    """A registered model."""
    known = entries()
    for entry in known:
        if name.lower() in (entry.name.lower(), (entry.repo or entry.name).lower()):
            return entry
    listed = ", ".join(entry.name for entry in known) or "none yet: `kt model add` and `kt model scan` make some"
    raise InputError("model", repr(name), "a registered model", f"registered are {listed}")


def search_folders() -> list[Path]:
    from ktransformers.settings import read

    return [Path(folder).expanduser() for folder in read().paths.models]


def models_in_folders() -> list[Entry]:
    """Models that lie in the folders of `paths.models`, registered or not."""
    found: dict[str, Entry] = {}
    for folder in search_folders():
        for pattern in ("*/config.json", "*/*/config.json"):
            for config in sorted(folder.glob(pattern)):
                place = config.parent
                if not any(part.startswith(".") for part in place.relative_to(folder).parts):
                    found.setdefault(default_name(place).lower(), Entry(default_name(place), place.absolute()))
    return list(found.values())


def all_models() -> list[Entry]:
    """Registered ones, then those of the folders that no registered one hides."""
    known = entries()
    names, places = {entry.name.lower() for entry in known}, {entry.path.resolve() for entry in known}
    others = [
        entry for entry in models_in_folders() if entry.name.lower() not in names and entry.path.resolve() not in places
    ]
    return sorted([*known, *others], key=lambda entry: entry.name.lower())


def find(given: str) -> Entry | None:
    """The model that goes by this name or hub id here; None where there is none."""
    word = given.lower()
    for entry in entries():
        if word in (entry.name.lower(), (entry.repo or "").lower()):
            if not entry.exists:
                raise InputError(
                    "model",
                    f"{given}, registered at {entry.path}, which is gone",
                    "a model that is there",
                    f"`kt model rm {entry.name}` forgets it",
                )
            return entry
    if "/" in given or not NAME_PATTERN.fullmatch(given):
        return None
    return next((entry for entry in models_in_folders() if entry.name.lower() == word), None)


def resolve(given: str) -> str:
    """A path for a name of this machine; anything else as it was given."""
    if given and not Path(given).expanduser().exists():
        entry = find(given)
        if entry is not None:
            return str(entry.path)
    return given


def portable_name(given: str) -> str:
    """What to note of a model for others, who do not know the names of this machine: its hub id, or its path."""
    if "/" in given or not given or Path(given).expanduser().exists():
        return given
    entry = find(given)
    if entry is None:
        return given
    return entry.repo if entry.repo and entry.source == "huggingface" else str(entry.path)


def complete(incomplete: str) -> list[str]:
    """Names that begin so, for shells; a broken registry completes nothing."""
    try:
        names = [entry.name for entry in all_models()]
    except (InputError, OSError):
        return []
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, empty where there is none or it cannot be read."""
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_facts(path: Path) -> Facts:
    if path.is_file():
        parts = [path, *split_parts(path)[1:]]
        return Facts("gguf", sum(part.stat().st_size for part in parts if part.is_file()))
    config = read_config(path)
    words: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    shards = list(path.glob("*.safetensors"))
    quantised = config.get("quantization_config") or words.get("quantization_config") or {}
    return Facts(
        "safetensors" if shards else "none",
        sum(shard.stat().st_size for shard in shards),
        config.get("model_type"),
        next((int(words[key]) for key in EXPERT_COUNT_KEYS if words.get(key)), None),
        next((int(words[key]) for key in TOP_K_KEYS if words.get(key)), None),
        quantised.get("quant_method") if isinstance(quantised, dict) else None,
    )


def split_parts(path: Path) -> list[Path]:
    """All files of a GGUF that may be split: NAME-00001-of-00003.gguf and so on."""
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not found:
        return [path]
    count = int(found[2])
    return [path.with_name(f"{found[1]}-{number:05}-of-{found[2]}.gguf") for number in range(1, count + 1)]


def scan(folder: Path, depth: int = 6, least: int = 0) -> list[Path]:
    """Models below `folder`: directories with config.json and weights, and GGUF files, of `least` bytes or more. What
    lies inside a model (checkpoints, adapters) is not looked into."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder, followlinks=False):
        here = Path(root)
        if "config.json" in files and any(name.endswith(".safetensors") for name in files):
            folders.clear()
            found.append(here)
            continue
        found += [here / name for name in files if name.endswith(".gguf") and not LATER_GGUF_PART.search(name)]
        if len(here.relative_to(folder).parts) >= depth:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return sorted(path for path in found if read_facts(path).bytes >= least)


def register_scanned(paths: Sequence[Path]) -> list[Entry]:
    """Those that are new; a name that is taken gets the name of the folder above in front."""
    known = entries()
    places, names = {entry.path.resolve() for entry in known}, {entry.name.lower() for entry in known}
    made = []
    for path in paths:
        if path.resolve() in places:
            continue
        name = default_name(path)
        cached = next(
            (HUB_CACHE_FOLDER.fullmatch(part) for part in path.parts if HUB_CACHE_FOLDER.fullmatch(part)), None
        )
        if name.lower() in names:
            above = cached["owner"] if cached else path.absolute().parent.name
            name = re.sub(r"[^\w.+-]+", "-", f"{above}-{name}").lstrip("-.+")
        number, wanted = 2, name
        while name.lower() in names:
            name, number = f"{wanted}-{number}", number + 1
        origin: dict[str, Any] = (
            {"source": "huggingface", "repo": f"{cached['owner']}/{cached['name']}"} if cached else {}
        )
        made.append(add(path, name, **origin))
        names.add(name.lower())
        places.add(path.resolve())
    return made
