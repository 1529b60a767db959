"""`kt model`: the models of this machine by name, and what is done to a model's directory before anything is loaded.

`prepare` lets other programs open it. The registry behind the names is ktransformers.model_registry; removing a name
deletes no file unless `--files` asks for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.sizes import gigabytes
from ktransformers.errors import InputError

if TYPE_CHECKING:
    from ktransformers.model_registry import Entry

model = typer.Typer(name="model", help="The models of this machine.", no_args_is_help=True)


def names(incomplete: str) -> list[str]:
    """For shells."""
    from ktransformers.model_registry import complete

    return complete(incomplete)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="A name of `kt model list`, or a path.", autocompletion=names)]
Registered = Annotated[str, typer.Argument(help="A name of `kt model list`.", autocompletion=names)]


@model.callback()
def group() -> None:
    """The models of this machine."""


def document(entry: Entry) -> dict[str, Any]:
    """An entry with the facts of its files; the hashes of its files stay in the registry."""
    from ktransformers.model_registry import read_facts

    found = entry.to_json()
    found["files"] = len(entry.files)
    return found | {"exists": entry.exists} | (dataclasses.asdict(read_facts(entry.path)) if entry.exists else {})


def columns(rows: list[list[str]]) -> None:
    """Left-aligned, as wide as they must be."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def kind_of(found: dict[str, Any]) -> str:
    if not found["exists"]:
        return "gone"
    if found["format"] == "gguf":
        return "gguf"
    experts = f", {found['experts']} experts, top {found['top_k']}" if found["experts"] else ", dense"
    quantised = f", {found['quantised']}" if found["quantised"] else ""
    return f"{found['model_type'] or 'unknown'}{experts}{quantised}"


@model.command("list")
def list_models(
    moe: Annotated[bool, typer.Option("--moe", help="Only those with routed experts.")] = False,
    as_json: Json = False,
) -> None:
    """List the models that go by a name here."""
    from ktransformers.model_registry import all_models

    found = [document(entry) for entry in all_models()]
    found = [one for one in found if not moe or one.get("experts")]
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found:
        print("no model yet: `kt model download`, `kt model add DIR`, `kt model scan DIR` or `kt model make`")
    else:
        heads = [["NAME", "KIND", "SIZE", "PATH"]]
        columns(heads + [[one["name"], kind_of(one), gigabytes(one.get("bytes", 0)), one["path"]] for one in found])


@model.command()
def add(
    path: Annotated[Path, typer.Argument(help="A folder with config.json, or a .gguf file.")],
    name: Annotated[str | None, typer.Option(help="What to call it. [default: the folder's name]")] = None,
    repo: Annotated[str | None, typer.Option(help="The hub id that it came from.")] = None,
    hashes: Annotated[bool, typer.Option("--hash", help="Note the files' hashes, for `kt model verify`.")] = False,
    as_json: Json = False,
) -> None:
    """Give a model on this disk a name."""
    from ktransformers.model_registry import add as register

    origin: dict[str, Any] = {"source": "huggingface", "repo": repo} if repo else {}
    if hashes:
        origin["files"] = _measured(path)
    print_entry(register(path, name, **origin), as_json)


def _measured(path: Path) -> dict[str, Any]:
    import hashlib

    from ktransformers.model_registry import FileFacts, split_parts

    files = split_parts(path) if path.is_file() else [file for file in sorted(path.glob("*")) if file.is_file()]
    found = {}
    for file in files:
        with file.open("rb") as handle:
            found[file.name] = FileFacts(file.stat().st_size, hashlib.file_digest(handle, "sha256").hexdigest())
    return found


def print_entry(entry: Entry, as_json: bool) -> None:
    found = document(entry)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{entry.name}: {kind_of(found)}, {gigabytes(found.get('bytes', 0))}, {entry.path}")


@model.command()
def scan(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Where to look. [default: the folders of `kt model path-list`]")
    ] = None,
    min_size: Annotated[float, typer.Option(min=0, help="Leave out models of fewer GB.")] = 0.0,
    max_depth: Annotated[int, typer.Option(min=1, help="Folders below each that are looked into.")] = 6,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Look for models below folders and give them names."""
    from ktransformers import model_registry

    places = folders or model_registry.search_folders()
    if not places:
        raise InputError("folders", "none", "a folder to look into", "`kt model path-add DIR` sets one for good")
    missing = [str(place) for place in places if not place.expanduser().is_dir()]
    if missing:
        raise InputError("folders", ", ".join(missing), "folders that exist")
    paths = [
        path for place in places for path in model_registry.scan(place.expanduser(), max_depth, int(min_size * 1e9))
    ]
    made = [] if dry_run else model_registry.register_scanned(paths)
    if as_json:
        print(json.dumps({"found": [str(path) for path in paths], "added": [document(one) for one in made]}, indent=2))
        return
    for path in paths if dry_run else []:
        print(path)
    for entry in made:
        print_entry(entry, False)
    print(f"{len(paths)} found, {len(made)} of them new")


@model.command()
def info(name: Name, as_json: Json = False) -> None:
    """Say what a model is: family, experts, numbers, files, where it came from."""
    from ktransformers.checkpoint.verify import verify

    entry = entry_of(name)
    found = document(entry)
    checked = verify(entry.path, hashes=False)
    found |= {"tensors": checked.tensors, "numbers": checked.numbers, "dtypes": checked.dtypes}
    found |= {"shape": _shape(entry.path), "findings": [dataclasses.asdict(one) for one in checked.findings]}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [("name", entry.name), ("path", str(entry.path)), ("kind", kind_of(found))]
    if entry.repo:
        rows.append(("from", f"{entry.repo} at {entry.revision or 'an unknown revision'} ({entry.source})"))
    size = gigabytes(found["bytes"])
    rows.append(("weights", f"{size} in {checked.files} files, {checked.tensors} tensors, {checked.numbers:,} numbers"))
    rows.append(("dtypes", ", ".join(f"{kind} {count:,}" for kind, count in sorted(checked.dtypes.items()))))
    shape = found["shape"]
    if shape:
        rows.append(("layers", f"{shape['layers']}, {shape['expert_layers']} with experts; hidden {shape['hidden']}"))
        rows.append(("experts", f"{shape['experts']} of width {shape['intermediate']}, top {shape['top_k']}"))
        rows.append(("context", f"{shape['context']} tokens, vocabulary {shape['vocabulary']}"))
    rows += [(one.level, f"{one.file}: {one.text}") for one in checked.findings]
    columns([[label, value] for label, value in rows])


def _shape(path: Path) -> dict[str, Any] | None:
    """Of a Mixture of Experts; None of anything else."""
    from ktransformers.plan import open_shape

    try:
        shape = open_shape(str(path))
    except InputError:
        return None
    wanted = ("layers", "expert_layers", "hidden", "intermediate", "experts", "top_k", "context", "vocabulary")
    return {word: getattr(shape, word) for word in wanted}


def entry_of(given: str) -> Entry:
    """A model by name, or by path without one."""
    from ktransformers.model_registry import Entry, default_name, find, is_model

    path = Path(given).expanduser()
    if is_model(path):
        known = find(given) if "/" not in given else None
        return known or Entry(default_name(path.absolute()), path.absolute())
    found = find(given)
    if found is None:
        raise InputError("model", repr(given), "a name of `kt model list`, a model's folder, or a .gguf file")
    return found


@model.command()
def rm(
    name: Registered,
    files: Annotated[bool, typer.Option("--files", help="Delete the model's files as well.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Forget a model's name; its files stay unless --files says otherwise."""
    from ktransformers import model_registry

    entry = model_registry.get(name)
    if files and entry.exists:
        size = gigabytes(model_registry.read_facts(entry.path).bytes)
        ask.for_consent(f"delete {entry.path} ({size})?", yes, quiet=as_json)
        _delete(entry.path)
    model_registry.remove(entry.name)
    if as_json:
        print(json.dumps({"removed": entry.name, "path": str(entry.path), "deleted": files}))
    else:
        print(f"{entry.name} is forgotten; {entry.path} is {'deleted' if files else 'untouched'}")


def _delete(path: Path) -> None:
    """A model's folder, or the parts of a GGUF; never a link's target."""
    import shutil

    from ktransformers.model_registry import split_parts

    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        for part in split_parts(path):
            part.unlink(missing_ok=True)


@model.command()
def edit(
    name: Registered,
    new_name: Annotated[str | None, typer.Option("--name", help="Another name.")] = None,
    path: Annotated[Path | None, typer.Option(help="Where it lies now.")] = None,
    repo: Annotated[str | None, typer.Option(help="The hub id that it came from.")] = None,
    as_json: Json = False,
) -> None:
    """Change what is noted of a model."""
    from ktransformers import model_registry

    changes: dict[str, Any] = {} if new_name is None else {"name": new_name}
    changes |= {} if path is None else {"path": path.expanduser().absolute()}
    changes |= {} if repo is None else {"repo": repo, "source": "huggingface"}
    if not changes:
        raise InputError("options", "none", "--name, --path or --repo")
    print_entry(model_registry.edit(name, **changes), as_json)


@model.command()
def refresh(as_json: Json = False) -> None:
    """Forget the names of models that are gone from the disk."""
    from ktransformers import model_registry

    gone = [model_registry.remove(entry.name) for entry in model_registry.entries() if not entry.exists]
    if as_json:
        print(json.dumps({"removed": [entry.name for entry in gone]}))
        return
    for entry in gone:
        print(f"{entry.name} is forgotten; {entry.path} is gone")
    print(f"{len(model_registry.entries())} models are registered")


@model.command("path-list")
def path_list(as_json: Json = False) -> None:
    """List the folders whose models go by the names of their folders."""
    print_paths(as_json)


@model.command("path-add")
def path_add(
    folder: Annotated[Path, typer.Argument(help="A folder of models: FOLDER/NAME or FOLDER/OWNER/NAME.")],
    as_json: Json = False,
) -> None:
    """Let the models in a folder go by the names of their folders."""
    from ktransformers import settings

    place = folder.expanduser().absolute()
    if not place.is_dir():
        raise InputError("folder", str(folder), "a folder that exists")
    known = list(settings.read().paths.models)
    if str(place) not in known:
        settings.set_value("paths.models", [*known, str(place)])
    print_paths(as_json)


@model.command("path-remove")
def path_remove(
    folder: Annotated[Path, typer.Argument(help="One of `kt model path-list`.")], as_json: Json = False
) -> None:
    """Look into a folder no more."""
    from ktransformers import settings

    known, place = list(settings.read().paths.models), str(folder.expanduser().absolute())
    if place not in known:
        raise InputError("folder", str(folder), "one of `kt model path-list`")
    settings.set_value("paths.models", [one for one in known if one != place] or None)
    print_paths(as_json)


def print_paths(as_json: bool) -> None:
    from ktransformers import model_registry

    found = [str(folder) for folder in model_registry.search_folders()]
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join(found) or "no folder yet: `kt model path-add DIR`")


@model.command()
def prepare(
    source: Annotated[str, typer.Argument(help="A local Hugging Face directory, or its name.", autocompletion=names)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory to write; it must not exist.")],
    experts: Annotated[
        Path | None, typer.Option(help="Where the experts come from, if not SOURCE: GGUF or kt-kernel's files.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a directory of links that any program opens with packed experts."""
    from ktransformers.model_registry import resolve
    from ktransformers.nn.prepare import prepare as write

    found = write(resolve(source), out, experts)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    print(f"{found.directory}: {found.model_type}, {found.links} links to {found.source}")
    if found.quantised is not None:
        print(f"the source is quantised with {found.quantised}, which is recorded in config.json")
