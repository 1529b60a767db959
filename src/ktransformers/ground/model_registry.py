"""Models on this machine by name: a registry of added or downloaded models, and folders to search.

`resolve` maps what a user typed to a path: an existing path is used as it is, then registered names and their hub ids,
then the folders of `paths.models` (FOLDER/NAME or FOLDER/OWNER/NAME); a short name of `known_models.json` becomes the
hub id that it stands for; anything else is returned unchanged, for a hub.
The registry is `models.json` under XDG_DATA_HOME, changed under a lock. A registered model stays where it is; removing
it deletes files only on request. Nothing here reads tensors, so shell completion can use it.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import fcntl
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists, read_json_object, short, validate, write_json

REGISTRY_VERSION = 1  # of models.json
# The name that `checkpoint.small_model` makes a model for.
MADE_MODEL = "smollm2-moe"
NAME_PATTERN = re.compile(r"[\w][\w.+-]*")
EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
HUB_CACHE_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")  # a model folder in the hub's cache


@dataclass(frozen=True)
class FileFacts:
    """Facts about a file from the hub, or measured when the model was added."""

    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None  # git blob id, for small files


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
    """Facts about a model on disk, from config.json and file sizes."""

    format: str  # safetensors, gguf, or none for config.json only
    bytes: int
    model_type: str | None = None
    experts: int | None = None  # routed experts per layer; None for dense models and GGUF
    top_k: int | None = None
    quantised: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """A released model that has a short name."""

    name: str
    aliases: tuple[str, ...]
    type: str  # family of transformers that computes it
    shape: str | None  # of `ktransformers.plan`, None: not shipped
    releases: Mapping[str, str]  # format of the experts -> hub id; the first is what the name stands for
    unserved: str = ""  # why `kt serve` refuses it

    @property
    def repo(self) -> str:
        return next(iter(self.releases.values()))

    def format_of(self, name: str) -> str:
        """The format of a release by hub id, of the first by any other name."""
        formats = (word for word, repo in self.releases.items() if repo.lower() == name.lower())
        return next(formats, next(iter(self.releases)))


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """The models of `known_models.json`, in its order."""
    text = (resources.files("ktransformers.ground") / "known_models.json").read_text()
    return tuple(KnownModel(**entry | {"aliases": tuple(entry["aliases"])}) for entry in json.loads(text)["models"])


def known_model(name: str) -> KnownModel | None:
    """The known model of a short name or a hub id."""
    lowered = name.lower()
    for known in known_models():
        if lowered in (known.name, *known.aliases, *(repo.lower() for repo in known.releases.values())):
            return known
    return None


def known_names() -> list[str]:
    """Short names and their aliases, and the model that is made on this machine."""
    return [MADE_MODEL, *(name for known in known_models() for name in (known.name, *known.aliases))]


def did_you_mean(given: str, names: Sequence[str]) -> str:
    """`did you mean a or b?`; empty if no name is near."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), by_lower, 3)
    return f"did you mean {' or '.join(by_lower[name] for name in near)}?" if near else ""


def name_hint(given: str) -> str:
    """What to do about a name that no model on this machine has."""
    if known_model(given) is not None:
        return f"`kt model download {given}` fetches it"
    names = [*complete(""), *known_names()]
    listed = "`kt model list` and `kt model known` list the names"
    return did_you_mean(given, names) or listed


def registry_file() -> Path:
    from ktransformers.ground.settings import data_folder

    return data_folder() / "models.json"


def entries() -> list[Entry]:
    """Registered models, sorted by name."""
    file = registry_file()
    if not file.exists():
        return []
    remedy = "delete it; `kt model add` makes a new one"
    document = read_json_object(file, "the registry of models", remedy=remedy)
    if document.get("version") != REGISTRY_VERSION:
        given = f"version {short(document.get('version'))}"
        raise InputError(str(file), given, f"version {REGISTRY_VERSION}", "update ktransformers, or " + remedy)
    stored = validate(_stored_registry(), document, str(file), remedy)
    return sorted(stored.models, key=lambda entry: entry.name.lower())


@functools.cache
def _stored_registry() -> Any:
    """The form of models.json; built on first use, because pydantic takes a while to import."""
    from pydantic import create_model

    return create_model("_StoredRegistry", models=(list[Entry], ...))


@contextlib.contextmanager
def _locked_entries() -> Iterator[list[Entry]]:
    """The entries, written back if the block succeeds; concurrent commands wait for the lock."""
    file = registry_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / ".models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        registered = entries()
        yield registered
        registered.sort(key=lambda entry: entry.name.lower())
        write_json(file, {"version": REGISTRY_VERSION, "models": [entry.to_json() for entry in registered]})


def is_model(path: Path) -> bool:
    """Whether the path is a Hugging Face directory with a config, or a GGUF file."""
    if path.is_dir():
        return (path / "config.json").is_file()
    return path.is_file() and path.suffix == ".gguf"


def default_name(path: Path) -> str:
    """The folder's name; the model's name for a snapshot in the hub's cache, the file's for a GGUF."""
    for part in path.parts:
        if cached := HUB_CACHE_FOLDER.fullmatch(part):
            return cached["name"]
    name = path.stem if path.suffix == ".gguf" else path.name
    return re.sub(r"[^\w.+-]+", "-", re.sub(r"-00001-of-\d{5}$", "", name)).lstrip("-.+") or "model"


def add(path: str | Path, name: str | None = None, *, replace_same: bool = False, **origin: Any) -> Entry:
    """Registers a model on disk. `origin`: source, repo, revision, files of an Entry."""
    model_path = Path(path).expanduser().absolute()
    if not is_model(model_path):
        raise InputError("path", f"{path}", "a folder with config.json, or a .gguf file")
    name = name or default_name(model_path)
    if not NAME_PATTERN.fullmatch(name):
        raise InputError("name", repr(name), "letters, digits and . _ + -, without a slash", "pass --name")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entry = Entry(name, model_path, added=now, **origin)
    with _locked_entries() as registered:
        for index, other in enumerate(registered):
            if other.name.lower() == name.lower():
                if other.path != model_path and other.exists and not replace_same:
                    raise InputError("name", name, "a name that is free", f"{other.path} has it; pass --name")
                registered[index] = entry
                break
        else:
            registered.append(entry)
    return entry


def remove(name: str) -> Entry:
    entry = get(name)
    with _locked_entries() as registered:
        registered.remove(entry)
    return entry


def get(name: str) -> Entry:
    """A registered model by name or hub id."""
    registered = entries()
    for entry in registered:
        if name.lower() in (entry.name.lower(), (entry.repo or entry.name).lower()):
            return entry
    listed = ", ".join(entry.name for entry in registered) or "none yet: `kt model add` makes some"
    raise InputError("model", repr(name), "a registered model", f"registered are {listed}")


def search_folders() -> list[Path]:
    from ktransformers.ground.settings import read

    return [Path(folder).expanduser() for folder in read().paths.models]


def models_in_folders() -> list[Entry]:
    """Models in the folders of `paths.models`, registered or not."""
    models: dict[str, Entry] = {}
    for folder in search_folders():
        for pattern in ("*/config.json", "*/*/config.json"):
            for config in sorted(folder.glob(pattern)):
                directory = config.parent
                if not any(part.startswith(".") for part in directory.relative_to(folder).parts):
                    models.setdefault(
                        default_name(directory).lower(), Entry(default_name(directory), directory.absolute())
                    )
    return list(models.values())


def all_models() -> list[Entry]:
    """Registered models, then those in folders that no registered one shadows."""
    registered = entries()
    names, paths = {entry.name.lower() for entry in registered}, {entry.path.resolve() for entry in registered}
    others = [
        entry for entry in models_in_folders() if entry.name.lower() not in names and entry.path.resolve() not in paths
    ]
    return sorted([*registered, *others], key=lambda entry: entry.name.lower())


def find(name: str) -> Entry | None:
    """The model with this name or hub id on this machine; None if there is none."""
    lowered = name.lower()
    known = known_model(name)
    for entry in entries():
        if lowered in (entry.name.lower(), (entry.repo or "").lower()) or _is_release(entry, known, name):
            if not entry.exists:
                raise InputError(
                    "model",
                    f"{name}, registered at {entry.path}, which does not exist",
                    "an existing model",
                    f"`kt model rm {entry.name}` removes it from the registry",
                )
            return entry
    if "/" in name or not NAME_PATTERN.fullmatch(name):
        return None
    return next((entry for entry in models_in_folders() if entry.name.lower() == lowered), None)


def _is_release(entry: Entry, known: KnownModel | None, name: str) -> bool:
    """Whether the entry is a download of what a short name stands for; a hub id stands for itself alone."""
    return known is not None and "/" not in name and entry.repo in known.releases.values()


def resolve(name: str) -> str:
    """The path of a model on this machine, or the hub id of a short name; any other string unchanged."""
    if name and not path_exists(name):
        entry = find(name)
        if entry is not None:
            return str(entry.path)
        return _hub_id(name)
    return name


def _hub_id(name: str) -> str:
    known = None if "/" in name else known_model(name)
    return name if known is None else known.repo


def portable_name(name: str) -> str:
    """How to refer to a model on other machines: its hub id, or its path."""
    if "/" in name or not name or path_exists(name):
        return name
    entry = find(name)
    if entry is None:
        return _hub_id(name)
    return entry.repo if entry.repo and entry.source == "huggingface" else str(entry.path)


def complete(incomplete: str) -> list[str]:
    """Names with this prefix, for shell completion; short names once a letter is given; empty if the registry is
    broken."""
    try:
        names = [entry.name for entry in all_models()]
    except (InputError, OSError):
        return []
    names += (
        [name for name in (MADE_MODEL, *(m.name for m in known_models())) if name not in names] if incomplete else []
    )
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, empty if missing or unreadable."""
    try:
        return read_json_object(path / "config.json")
    except InputError:
        return {}


def read_facts(path: Path) -> Facts:
    if path.is_file():
        parts = [path, *split_parts(path)[1:]]
        return Facts("gguf", sum(part.stat().st_size for part in parts if part.is_file()))
    config = read_config(path)
    text_config: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    shards = list(path.glob("*.safetensors"))
    quantised = config.get("quantization_config") or text_config.get("quantization_config") or {}
    return Facts(
        "safetensors" if shards else "none",
        sum(shard.stat().st_size for shard in shards),
        _text(config.get("model_type")),
        next((text_config[key] for key in EXPERT_COUNT_KEYS if _is_count(text_config.get(key))), None),
        next((text_config[key] for key in TOP_K_KEYS if _is_count(text_config.get(key))), None),
        _text(quantised.get("quant_method")) if isinstance(quantised, dict) else None,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def split_parts(path: Path) -> list[Path]:
    """All files of a GGUF that may be split: NAME-00001-of-00003.gguf and so on."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not match:
        return [path]
    count = int(match[2])
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, count + 1)]
