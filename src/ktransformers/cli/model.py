"""`kt model`: the registered models of this machine, and operations on a model's directory before it is loaded.

`prepare` makes a directory that other programs can open. The registry is ktransformers.ground.model_registry; removing
a name deletes no file unless `--files` is given."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.options import Json, print_result
from ktransformers.cli.progress import drawn_reports
from ktransformers.ground import progress
from ktransformers.ground.errors import InputError
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.ground.model_registry import Entry, KnownModel

HASHED_BYTES = 4 * 2**20  # between two reports
model = typer.Typer(name="model", help="The models of this machine.", no_args_is_help=True)


def complete_names(incomplete: str) -> list[str]:
    """Shell completion of model names."""
    from ktransformers.ground.model_registry import complete

    return complete(incomplete)


Name = Annotated[str, typer.Argument(help="A name of `kt model list`, or a path.", autocompletion=complete_names)]
Registered = Annotated[str, typer.Argument(help="A name of `kt model list`.", autocompletion=complete_names)]


@model.callback()
def model_group() -> None:
    """The models of this machine."""


def entry_document(entry: Entry) -> dict[str, Any]:
    """An entry with facts about its files; their hashes stay in the registry."""
    from ktransformers.ground.model_registry import read_facts

    fields = entry.to_json()
    fields["files"] = len(entry.files)
    return fields | {"exists": entry.exists} | (dataclasses.asdict(read_facts(entry.path)) if entry.exists else {})


def column_lines(rows: list[list[str]]) -> list[str]:
    """Left-aligned columns, each as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe_kind(fields: dict[str, Any]) -> str:
    if not fields["exists"]:
        return "gone"
    if fields["format"] == "gguf":
        return "gguf"
    experts = f", {fields['experts']} experts, top {fields['top_k']}" if fields["experts"] else ", dense"
    quantised = f", {fields['quantised']}" if fields["quantised"] else ""
    return f"{fields['model_type'] or 'unknown'}{experts}{quantised}"


@model.command("list")
def list_models(
    moe: Annotated[bool, typer.Option("--moe", help="Only those with routed experts.")] = False, as_json: Json = False
) -> None:
    """List the registered models."""
    from ktransformers.ground.model_registry import all_models

    documents = [entry_document(entry) for entry in all_models()]
    documents = [entry for entry in documents if not moe or entry.get("experts")]
    rows = [
        [entry["name"], describe_kind(entry), gigabytes(entry.get("bytes", 0)), entry["path"]] for entry in documents
    ]
    lines = column_lines([["NAME", "KIND", "SIZE", "PATH"], *rows])
    none = "no model yet: `kt run smollm2-moe` makes a small one; or `kt model download`, `add DIR`"
    print_result(documents, lines if documents else [none], as_json)


@model.command()
def known(as_json: Json = False) -> None:
    """List released models that have a short name: hub ids, and the memory to serve each."""
    from ktransformers.ground.model_registry import known_models

    documents = [_known_document(entry) for entry in known_models()]
    rows = [["NAME", "HOST MEMORY", "IN INT4", "GPU", "FORMATS", "HUB ID"]]
    for entry in documents:
        needed = entry["memory"]
        memory = ["-" if needed is None else gigabytes(needed[word]) for word in ("host", "host_int4", "gpu")]
        repo = next(iter(entry["releases"].values())) + (" (not served)" if entry["unserved"] else "")
        rows.append([entry["name"], *memory, ", ".join(entry["releases"]), repo])
    lines = column_lines(rows)
    lines.append(
        "memory as `kt plan` has it for one sequence of 8192 tokens; -: it is planned once config.json is here"
    )
    lines += [
        f"{entry['name']} is trained, and `kt serve` refuses it: {entry['unserved']}"
        for entry in documents
        if entry["unserved"]
    ]
    print_result(documents, lines, as_json)


def _known_document(entry: KnownModel) -> dict[str, Any]:
    """A known model with the memory that it needs at least: experts in host memory as released and in int4, streamed
    to a GPU with the rest."""
    from ktransformers.plan import Choice, Serving, open_shape, profile
    from ktransformers.plan.formats import counted_as
    from ktransformers.plan.memory import predict_memory

    fields = dataclasses.asdict(entry) | {"memory": None}
    if entry.shape is None:
        return fields
    shape, machine = open_shape(entry.repo), profile("amx16-h200")
    released, small = (
        predict_memory(shape, Serving(), Choice(word, 1, policy="stream"), machine)
        for word in (counted_as(shape.stored), "int4")
    )
    memory = {"host": released.host_bytes, "host_int4": small.host_bytes, "gpu": released.gpu_bytes[0]}
    return fields | {"memory": memory}


@model.command()
def add(
    path: Annotated[Path, typer.Argument(help="A folder with config.json, or a .gguf file.")],
    name: Annotated[str | None, typer.Option(help="Name to register it under. [default: the folder's name]")] = None,
    repo: Annotated[str | None, typer.Option(help="The hub id that it came from.")] = None,
    hashes: Annotated[bool, typer.Option("--hash", help="Store the files' hashes, for `kt model verify`.")] = False,
    as_json: Json = False,
) -> None:
    """Register a model that is on this disk."""
    from ktransformers.ground.model_registry import add as register

    origin: dict[str, Any] = {"source": "huggingface", "repo": repo} if repo else {}
    if hashes:
        with drawn_reports(quiet=as_json):
            origin["files"] = _hash_files(path)
    entry = register(path, name, **origin)
    fields = entry_document(entry)
    line = f"{entry.name}: {describe_kind(fields)}, {gigabytes(fields.get('bytes', 0))}, {entry.path}"
    print_result(fields, [line], as_json)


def _hash_files(path: Path) -> dict[str, Any]:
    import hashlib

    from ktransformers.ground.model_registry import FileFacts, split_parts

    files = split_parts(path) if path.is_file() else [file for file in sorted(path.glob("*")) if file.is_file()]
    hashes, done, total = {}, 0, sum(file.stat().st_size for file in files)
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as handle:
            while block := handle.read(HASHED_BYTES):
                digest.update(block)
                done += len(block)
                progress.report("Hashing", done, total, "bytes")
        hashes[file.name] = FileFacts(file.stat().st_size, digest.hexdigest())
    return hashes


@model.command()
def info(name: Name, as_json: Json = False) -> None:
    """Show a model: family, experts, parameters, files, origin."""
    from ktransformers.checkpoint.verify import verify

    entry = find_entry(name)
    fields = entry_document(entry)
    checked = verify(entry.path, hashes=False)
    fields |= {"tensors": checked.tensors, "numbers": checked.numbers, "dtypes": checked.dtypes}
    fields |= {
        "shape": _shape_document(entry.path),
        "findings": [dataclasses.asdict(finding) for finding in checked.findings],
    }
    rows = [("name", entry.name), ("path", str(entry.path)), ("kind", describe_kind(fields))]
    if entry.repo:
        rows.append(("from", f"{entry.repo} at {entry.revision or 'an unknown revision'} ({entry.source})"))
    size = gigabytes(fields["bytes"])
    rows.append(("weights", f"{size} in {checked.files} files, {checked.tensors} tensors, {checked.numbers:,} numbers"))
    rows.append(("dtypes", ", ".join(f"{kind} {count:,}" for kind, count in sorted(checked.dtypes.items()))))
    shape = fields["shape"]
    if shape:
        rows.append(("layers", f"{shape['layers']}, {shape['expert_layers']} with experts; hidden {shape['hidden']}"))
        rows.append(("experts", f"{shape['experts']} of width {shape['intermediate']}, top {shape['top_k']}"))
        rows.append(("context", f"{shape['context']} tokens, vocabulary {shape['vocabulary']}"))
    rows += [(finding.level, f"{finding.file}: {finding.text}") for finding in checked.findings]
    print_result(fields, column_lines([[label, value] for label, value in rows]), as_json)


def _shape_document(path: Path) -> dict[str, Any] | None:
    """The shape of a Mixture of Experts; None: the planner cannot read it."""
    from ktransformers.plan import open_shape

    try:
        shape = open_shape(str(path))
    except InputError:
        return None
    wanted = ("layers", "expert_layers", "hidden", "intermediate", "experts", "top_k", "context", "vocabulary")
    return {word: getattr(shape, word) for word in wanted}


def find_entry(given: str) -> Entry:
    """The registry entry of a name, or a new one for a path."""
    from ktransformers.ground.model_registry import Entry, default_name, find, is_model, name_hint

    path = Path(given).expanduser()
    if is_model(path):
        registered = find(given) if "/" not in given else None
        return registered or Entry(default_name(path.absolute()), path.absolute())
    entry = find(given)
    if entry is None:
        expected = "a name of `kt model list`, a model's folder, or a .gguf file"
        raise InputError("model", repr(given), expected, name_hint(given))
    return entry


@model.command()
def rm(
    name: Registered,
    files: Annotated[bool, typer.Option("--files", help="Delete the model's files as well.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Unregister a model; its files stay without --files."""
    from ktransformers.ground import model_registry

    entry = model_registry.get(name)
    if files and entry.exists:
        size = gigabytes(model_registry.read_facts(entry.path).bytes)
        ask.for_consent(f"delete {entry.path} ({size})?", yes, quiet=as_json)
        _delete(entry.path)
    model_registry.remove(entry.name)
    line = f"{entry.name} is forgotten; {entry.path} is {'deleted' if files else 'untouched'}"
    print_result({"removed": entry.name, "path": str(entry.path), "deleted": files}, [line], as_json)


def _delete(path: Path) -> None:
    """Delete a model's folder, or the parts of a GGUF; of a symbolic link only the link."""
    import shutil

    from ktransformers.ground.model_registry import split_parts

    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        for part in split_parts(path):
            part.unlink(missing_ok=True)


@model.command()
def refresh(as_json: Json = False) -> None:
    """Unregister models whose files no longer exist."""
    from ktransformers.ground import model_registry

    removed = [model_registry.remove(entry.name) for entry in model_registry.entries() if not entry.exists]
    lines = [f"{entry.name} is forgotten; {entry.path} is gone" for entry in removed]
    lines.append(f"{len(model_registry.entries())} models are registered")
    print_result({"removed": [entry.name for entry in removed]}, lines, as_json)


@model.command("path-list")
def path_list(as_json: Json = False) -> None:
    """List the folders that are searched for models."""
    print_paths(as_json)


@model.command("path-add")
def path_add(
    folder: Annotated[Path, typer.Argument(help="A folder of models: FOLDER/NAME or FOLDER/OWNER/NAME.")],
    as_json: Json = False,
) -> None:
    """Search a folder for models; their folders' names are their names."""
    from ktransformers.ground import settings

    directory = folder.expanduser().absolute()
    if not directory.is_dir():
        raise InputError("folder", str(folder), "a folder that exists")
    folders = list(settings.read().paths.models)
    if str(directory) not in folders:
        settings.set_value("paths.models", [*folders, str(directory)])
    print_paths(as_json)


@model.command("path-remove")
def path_remove(
    folder: Annotated[Path, typer.Argument(help="One of `kt model path-list`.")], as_json: Json = False
) -> None:
    """Stop searching a folder."""
    from ktransformers.ground import settings

    folders, directory = list(settings.read().paths.models), str(folder.expanduser().absolute())
    if directory not in folders:
        raise InputError("folder", str(folder), "one of `kt model path-list`")
    settings.set_value("paths.models", [other for other in folders if other != directory] or None)
    print_paths(as_json)


def print_paths(as_json: bool) -> None:
    from ktransformers.ground import model_registry

    folders = [str(folder) for folder in model_registry.search_folders()]
    print_result(folders, folders or ["no folder yet: `kt model path-add DIR`"], as_json)


@model.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="A local Hugging Face directory, or its name.", autocompletion=complete_names)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory to write; it must not exist.")],
    experts: Annotated[
        Path | None, typer.Option(help="Where the experts come from, if not SOURCE: GGUF or kt-kernel's files.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a directory of links that any program opens with packed experts."""
    from ktransformers.ground.model_registry import resolve
    from ktransformers.modeling.prepare import prepare as write

    with drawn_reports(quiet=as_json):
        prepared = write(resolve(source), out, experts)
    lines = [f"{prepared.directory}: {prepared.model_type}, {prepared.links} links to {prepared.source}"]
    if prepared.quantised is not None:
        lines.append(f"the source is quantised with {prepared.quantised}, which is recorded in config.json")
    print_result(dataclasses.asdict(prepared), lines, as_json)
