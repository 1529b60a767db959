"""`kt model download` and `kt model verify`: a model from a hub onto this disk; whether what lies there is whole."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import entry_of, names
from ktransformers.cli.sizes import gigabytes
from ktransformers.errors import InputError

if TYPE_CHECKING:
    from ktransformers.checkpoint.hub import Downloaded, Progress
    from ktransformers.checkpoint.verify import Verified
    from ktransformers.model_registry import Entry

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SOURCES = ("huggingface", "modelscope")


@contextmanager
def bar(title: str, quiet: bool) -> Iterator[Progress | None]:
    """Bytes on stderr, only where somebody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    shown = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*shown, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as made:
        task = made.add_task(title, total=None)
        yield lambda done, total: made.update(task, completed=done, total=total)


def download(
    repo: Annotated[str | None, typer.Argument(help="A hub id: OWNER/NAME.")] = None,
    local_dir: Annotated[
        Path | None, typer.Option("--local-dir", "-d", help="Where to put it. [default: NAME in paths.downloads]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call it. [default: NAME]")] = None,
    source: Annotated[
        str | None, typer.Option("--source", "-s", help="huggingface or modelscope. [default: download.source]")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only files like this; again for more.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No files like this; again for more.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Files at a time. [default: download.workers]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be fetched.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a model and give it a name; run it again, and it goes on where it stopped."""
    from ktransformers import model_registry, settings

    wanted = ask.for_text("REPO", repo, "hub id (OWNER/NAME)", "a hub id such as allenai/OLMoE-1B-7B-0125", as_json)
    if wanted.count("/") != 1 or not all(wanted.split("/")):
        raise InputError("REPO", repr(wanted), "a hub id: OWNER/NAME")
    chosen, given = settings.read(), wanted.partition("/")[2]
    hub = source or chosen.download.source
    if hub not in SOURCES:
        raise InputError("source", repr(hub), f"one of {', '.join(SOURCES)}")
    home = Path(chosen.paths.downloads).expanduser() if chosen.paths.downloads else settings.data_folder() / "models"
    target = (local_dir.expanduser() if local_dir else home / (name or given)).absolute()
    if hub == "huggingface":
        found = _huggingface(
            wanted, target, revision, include or [], exclude or [], workers or chosen.download.workers, dry_run, as_json
        )
    elif dry_run:
        raise InputError("dry-run", "with modelscope", "huggingface", "its client cannot list alone")
    else:
        from ktransformers.checkpoint.hub import from_modelscope

        found = from_modelscope(wanted, target, revision, include or [], exclude or [])
    if found is None:
        return
    listing = found.listing
    entry = model_registry.add(
        found.model, name or given, replace_same=True, source=hub, repo=wanted, revision=listing.revision,
        files=dict(listing.files),
    )  # fmt: skip
    from ktransformers.checkpoint.verify import verify as check

    _say(entry, found, check(found.model, entry.files, hashes=False), as_json)


def _endpoint() -> str | None:
    """A mirror of the hub; None: the hub itself."""
    from ktransformers import settings

    return os.environ.get("HF_ENDPOINT") or settings.read().download.endpoint


def _huggingface(
    repo: str,
    target: Path,
    revision: str | None,
    include: list[str],
    exclude: list[str],
    workers: int,
    dry_run: bool,
    as_json: bool,
) -> Downloaded | None:
    """None where files were only listed."""
    from ktransformers.checkpoint import hub

    endpoint = _endpoint()
    listing = hub.select_files(hub.list_files(repo, revision, endpoint), include, exclude)
    if not dry_run:
        with bar(repo, as_json) as progress:
            return hub.download(listing, target, endpoint=endpoint, workers=workers, progress=progress)
    if as_json:
        files = {name: known.size for name, known in listing.files.items()}
        print(json.dumps({"repo": repo, "revision": listing.revision, "bytes": listing.size, "files": files}, indent=2))
    else:
        for name, known in listing.files.items():
            print(f"{gigabytes(known.size or 0):>12}  {name}")
        print(f"{gigabytes(listing.size):>12}  in {len(listing.files)} files, at {listing.revision}, into {target}")
    return None


def _say(entry: Entry, found: Downloaded, checked: Verified, as_json: bool) -> None:
    if as_json:
        said: dict[str, Any] = {"name": entry.name, "path": str(entry.path), "repo": entry.repo}
        said |= {"revision": entry.revision, "bytes": found.listing.size, "fetched": found.fetched, "kept": found.kept}
        print(json.dumps(said | {"resumed": found.resumed, "check": checked.to_json()}, indent=2))
    else:
        resumed = f", {gigabytes(found.resumed)} of them from an earlier run" if found.resumed else ""
        print(f"{entry.name}: {gigabytes(found.listing.size)}{resumed}, {found.kept} files were here: {entry.path}")
        _print_findings(checked)
    if not checked.whole:
        raise typer.Exit(1)


def verify(
    model: Annotated[
        str | None, typer.Argument(help="A name or a path. [default: all registered]", autocompletion=names)
    ] = None,
    hashes: Annotated[bool, typer.Option("--hash/--no-hash", help="Also compute hashes, where they are known.")] = True,
    hub: Annotated[
        bool, typer.Option("--hub", help="Ask the hub for the hashes of a model that came from it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that a model is whole: headers, index, sizes, hashes."""
    from ktransformers import model_registry
    from ktransformers.checkpoint.verify import verify as check

    entries = [entry_of(model)] if model else model_registry.entries()
    if not entries:
        raise InputError("MODEL", "nothing, and no model is registered", "a name or a path")
    results: list[Verified] = []
    for entry in entries:
        known = dict(entry.files)
        if hub:
            known |= _published(entry)
        progress = (
            None if as_json or not sys.stderr.isatty() else lambda file: print(f"hash of {file}", file=sys.stderr)
        )
        found = check(entry.path, known, hashes=hashes, progress=progress)
        results.append(found)
        if not as_json:
            state = "whole" if found.whole else "damaged"
            without = f", {found.unknown} weight files without a known hash" if found.unknown else ""
            counted = f"{found.files} files, {found.tensors} tensors, {gigabytes(found.bytes)}"
            print(f"{entry.name}: {state}; {counted}, {found.hashed} hashes compared{without}")
            _print_findings(found)
    if as_json:
        shown = [{"name": entry.name, **found.to_json()} for entry, found in zip(entries, results, strict=True)]
        print(json.dumps(shown[0] if model else shown, indent=2))
    if not all(found.whole for found in results):
        raise typer.Exit(1)


def _published(entry: Entry) -> dict[str, Any]:
    """Of those files that are here: what was left out of the download is not missing."""
    from ktransformers.checkpoint.hub import list_files

    if not entry.repo or entry.source == "modelscope":
        raise InputError("hub", f"{entry.name}, which names no id", "a model of the hub", "`kt model edit --repo ID`")
    listing = list_files(entry.repo, entry.revision, _endpoint())
    return {name: known for name, known in listing.files.items() if (entry.path / name).is_file()}


def _print_findings(found: Verified) -> None:
    for one in found.findings:
        print(f"  {one.level:<8} {one.file}: {one.text}" + (f"; {one.fix}" if one.fix else ""))
