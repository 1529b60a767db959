"""`kt model download` and `kt model verify`: download a model from a hub; check that its files are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import complete_names, find_entry
from ktransformers.cli.options import Json, print_result
from ktransformers.cli.progress import drawn_reports, progress_bar
from ktransformers.ground.errors import InputError
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.checkpoint.hub import Downloaded, Listing
    from ktransformers.checkpoint.verify import Verified
    from ktransformers.ground.model_registry import Entry

SOURCES = ("huggingface", "modelscope")


def download(
    repo: Annotated[str | None, typer.Argument(help="A hub id, OWNER/NAME, or a name of `kt model known`.")] = None,
    local_dir: Annotated[
        Path | None, typer.Option("--local-dir", "-d", help="Where to put it. [default: NAME in paths.downloads]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name to register it under. [default: NAME]")] = None,
    source: Annotated[
        str | None, typer.Option("--source", "-s", help="huggingface or modelscope. [default: download.source]")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only files that match this pattern; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="No files that match this pattern; may be repeated.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Concurrent downloads. [default: download.workers]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be downloaded.")] = False,
    as_json: Json = False,
) -> None:
    """Download a model and register it; run it again to resume."""
    from ktransformers.checkpoint import hub as client
    from ktransformers.checkpoint.verify import verify as check
    from ktransformers.ground import model_registry, settings

    repo_id = ask.for_text("REPO", repo, "hub id (OWNER/NAME)", "a hub id such as allenai/OLMoE-1B-7B-0125", as_json)
    known = model_registry.known_model(repo_id)
    if known is not None and "/" not in repo_id:
        repo_id = known.repo
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise InputError("REPO", repr(repo_id), "a hub id: OWNER/NAME", model_registry.name_hint(repo_id))
    config, default_name = settings.read(), repo_id.partition("/")[2]
    hub = source or config.download.source
    if hub not in SOURCES:
        raise InputError("source", repr(hub), f"one of {', '.join(SOURCES)}")
    home = Path(config.paths.downloads).expanduser() if config.paths.downloads else settings.data_folder() / "models"
    target = (local_dir.expanduser() if local_dir else home / (name or default_name)).absolute()
    if hub == "huggingface":
        endpoint = _endpoint()
        listing = client.select_files(client.list_files(repo_id, revision, endpoint), include or [], exclude or [])
        if dry_run:
            _print_listing(listing, target, as_json)
            return
        files_at_once = workers or config.download.workers
        with progress_bar(repo_id, quiet=as_json, unit="bytes") as bar:
            downloaded = client.download(listing, target, endpoint=endpoint, workers=files_at_once, progress=bar)
    elif dry_run:
        raise InputError("dry-run", "with modelscope", "huggingface", "its client cannot list alone")
    else:
        downloaded = client.from_modelscope(repo_id, target, revision, include or [], exclude or [])
    origin: dict[str, Any] = {"source": hub, "repo": repo_id, "revision": downloaded.listing.revision}
    origin["files"] = dict(downloaded.listing.files)
    entry = model_registry.add(downloaded.model, name or default_name, replace_same=True, **origin)
    _print_download(entry, downloaded, check(downloaded.model, entry.files, hashes=False), as_json)


def _endpoint() -> str | None:
    """URL of a mirror of the hub; None: the hub itself."""
    from ktransformers.ground import settings

    return os.environ.get("HF_ENDPOINT") or settings.read().download.endpoint


def _print_listing(listing: Listing, target: Path, as_json: bool) -> None:
    files = {name: file.size for name, file in listing.files.items()}
    lines = [f"{gigabytes(size or 0):>12}  {name}" for name, size in files.items()]
    lines.append(f"{gigabytes(listing.size):>12}  in {len(files)} files, at {listing.revision}, into {target}")
    document = {"repo": listing.repo, "revision": listing.revision, "bytes": listing.size, "files": files}
    print_result(document, lines, as_json)


def _print_download(entry: Entry, downloaded: Downloaded, checked: Verified, as_json: bool) -> None:
    listing, kept = downloaded.listing, downloaded.kept
    document: dict[str, Any] = {"name": entry.name, "path": str(entry.path)}
    document |= {"repo": entry.repo, "revision": entry.revision}
    document |= {"bytes": listing.size, "fetched": downloaded.fetched, "kept": kept, "resumed": downloaded.resumed}
    resumed = f", {gigabytes(downloaded.resumed)} of them from an earlier run" if downloaded.resumed else ""
    line = f"{entry.name}: {gigabytes(listing.size)}{resumed}, {kept} files were here: {entry.path}"
    print_result(document | {"check": checked.to_json()}, [line, *_finding_lines(checked)], as_json)
    if not checked.whole:
        raise typer.Exit(1)


def verify(
    model: Annotated[
        str | None, typer.Argument(help="A name or a path. [default: all registered]", autocompletion=complete_names)
    ] = None,
    hashes: Annotated[bool, typer.Option("--hash/--no-hash", help="Also compute hashes, where they are known.")] = True,
    hub: Annotated[
        bool, typer.Option("--hub", help="Ask the hub for the hashes of a model that came from it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that a model is whole: headers, index, sizes, hashes."""
    from ktransformers.checkpoint.verify import verify as check
    from ktransformers.ground import model_registry

    entries = [find_entry(model)] if model else model_registry.entries()
    if not entries:
        raise InputError("MODEL", "nothing, and no model is registered", "a name or a path")
    results: list[Verified] = []
    for entry in entries:
        hashes_known = dict(entry.files)
        if hub:
            hashes_known |= _hub_hashes(entry)
        with drawn_reports(quiet=as_json):
            result = check(entry.path, hashes_known, hashes=hashes)
        results.append(result)
        state = "whole" if result.whole else "damaged"
        without = f", {result.unknown} weight files without a known hash" if result.unknown else ""
        counted = f"{result.files} files, {result.tensors} tensors, {gigabytes(result.bytes)}"
        line = f"{entry.name}: {state}; {counted}, {result.hashed} hashes compared{without}"
        if not as_json:
            print("\n".join([line, *_finding_lines(result)]))
    if as_json:
        documents = [{"name": entry.name, **result.to_json()} for entry, result in zip(entries, results, strict=True)]
        print(json.dumps(documents[0] if model else documents, indent=2))
    if not all(result.whole for result in results):
        raise typer.Exit(1)


def _hub_hashes(entry: Entry) -> dict[str, Any]:
    """Of those files that are here: what was left out of the download is not missing."""
    from ktransformers.checkpoint.hub import list_files

    if not entry.repo or entry.source == "modelscope":
        raise InputError("hub", f"{entry.name}, which names no id", "one of the hub", "`kt model add PATH --repo ID`")
    listing = list_files(entry.repo, entry.revision, _endpoint())
    return {name: file for name, file in listing.files.items() if (entry.path / name).is_file()}


def _finding_lines(result: Verified) -> list[str]:
    fixes = [f"; {finding.fix}" if finding.fix else "" for finding in result.findings]
    found = zip(result.findings, fixes, strict=True)
    return [f"  {finding.level:<8} {finding.file}: {finding.text}{fix}" for finding, fix in found]
