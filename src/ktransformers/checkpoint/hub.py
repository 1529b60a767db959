"""Resumable download of a model from a hub: lists files, checks disk space, downloads in parallel, verifies hashes.

huggingface_hub lists the files and receives the bytes, with retries. Into which file they go is decided here, because
its own downloads discard an incomplete file when their process ends, and shards have gigabytes. Incomplete files are
kept in `.kt-partial`, named by a hash, and resumed with range requests: in the same run after a lost connection, in the
next one after a kill. ModelScope's own client, if installed, resumes by itself. `fetch_snapshot`
downloads into huggingface_hub's cache instead, for a model that is named by its id.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ktransformers.ground import progress
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.files import sync, try_lock, write_json
from ktransformers.ground.model_registry import FileFacts

PARTIAL_DIRECTORY = ".kt-partial"
RECORD_FILE = ".kt-files.json"  # hashes of the files that were downloaded into a folder
CHUNK_BYTES = 1 << 20
MAX_DIRECT_BYTES = 50_000_000_000  # the hub serves larger files only through huggingface_hub's own transfer
# Pickles run code when they are opened; the others are copies of the weights in formats that are not read.
DEFAULT_EXCLUDES = (
    *("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data"),
    *("original/*", "metal/*", "onnx/*", "openvino/*", "consolidated*", ".gitattributes"),
)

Progress = Callable[[int, int], None]  # bytes on disk, bytes in total


@dataclass(frozen=True)
class Listing:
    repo: str
    revision: str  # the commit
    files: Mapping[str, FileFacts]

    @property
    def size(self) -> int:
        return sum(facts.size or 0 for facts in self.files.values())


@dataclass(frozen=True)
class Downloaded:
    directory: Path
    listing: Listing
    fetched: int  # files
    kept: int  # files that were already complete
    resumed: int  # bytes of incomplete files from an earlier run

    @property
    def model(self) -> Path:
        """The directory, or the first GGUF file if there is no config.json."""
        weights = sorted(name for name in self.listing.files if name.endswith(".gguf"))
        return self.directory / weights[0] if weights and "config.json" not in self.listing.files else self.directory


def list_files(repo: str, revision: str | None = None, endpoint: str | None = None) -> Listing:
    """The files of a repository on the hub, with sizes and hashes."""
    from huggingface_hub import HfApi

    api: Any = HfApi(endpoint=endpoint)
    try:
        commit = str(api.model_info(repo, revision=revision).sha)
        entries = list(api.list_repo_tree(repo, recursive=True, revision=commit))
    except Exception as error:  # huggingface_hub's errors have no common class
        raise _hub_error(repo, error) from error
    files = {}
    for entry in entries:
        if not hasattr(entry, "size"):  # a folder
            continue
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts:
            raise InputError(repo, f"the file name {entry.path!r}", "names inside the model's folder")
        sha256 = entry.lfs.sha256 if entry.lfs is not None else None
        files[entry.path] = FileFacts(entry.size, sha256, None if sha256 else entry.blob_id)
    return Listing(repo, commit, files)


def _hub_error(repo: str, error: Exception) -> InputError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    remedy = "check the network, or name a mirror with HF_ENDPOINT or `kt config set download.endpoint URL`"
    if status in (401, 403, 404):
        remedy = "check the id; a private or gated model needs HF_TOKEN, or `hf auth login`"
    return InputError("repo", f"{repo} ({reason})", "a model that the hub gives", remedy)


def select_files(listing: Listing, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Listing:
    """The files to download: those of `include`, or all but pickles and copies in other formats."""

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    names = list(listing.files)
    tensors = any(name.endswith(".safetensors") for name in names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if include:
        names = [name for name in names if matches(name, include)]
    else:
        names = [name for name in names if not matches(name, DEFAULT_EXCLUDES) and not (tensors and name in ggufs)]
        models = {name.partition("-0000")[0] for name in ggufs}
        if not tensors and len(models) > 1:
            some = ", ".join(sorted(models)[:6])
            raise InputError(
                "include", f"nothing, and {len(models)} models: {some}", "a pattern", "--include '*Q4_K_M*'"
            )
    names = [name for name in names if not matches(name, exclude)]
    if not any(name.endswith((".safetensors", ".gguf")) for name in names) and not include:
        raise InputError("repo", f"{listing.repo}, without safetensors or GGUF", "a model", "pickles are never loaded")
    if not names:
        raise InputError("include", ", ".join(include), f"a pattern of files in {listing.repo}")
    return Listing(listing.repo, listing.revision, {name: listing.files[name] for name in names})


def download(
    listing: Listing, target: Path, *, endpoint: str | None = None, workers: int = 8, progress: Progress | None = None
) -> Downloaded:
    """Download every file of the listing into `target`; files with the right hash are kept."""
    target.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(target):
        run = _Download(listing, target, endpoint, progress)
        missing = run.missing()
        run.check_disk_space(missing)
        with ThreadPoolExecutor(workers, thread_name_prefix="kt-download") as pool:
            running = [pool.submit(run.fetch, name) for name in missing]
            try:
                for done in as_completed(running):
                    done.result()
            except BaseException:
                run.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        shutil.rmtree(target / PARTIAL_DIRECTORY, ignore_errors=True)
        sync(target)
    return Downloaded(target, listing, len(missing), len(listing.files) - len(missing), run.resumed)


@contextlib.contextmanager
def _exclusive_lock(target: Path) -> Iterator[None]:
    """Excludes a second download into the same folder, which would overwrite the incomplete files."""
    lock = os.open(target, os.O_RDONLY)
    try:
        if not try_lock(lock):
            given, expected = f"{target}, into which another download is running", "a folder without a running download"
            raise InputError("directory", given, expected, "wait for it, or pass another --local-dir")
        yield
    finally:
        os.close(lock)


class _Stopped(Exception):
    """Another file of the same download has failed."""


class _Download:
    """One call of `download`; `fetch` runs in several threads."""

    def __init__(self, listing: Listing, target: Path, endpoint: str | None, progress: Progress | None) -> None:
        self._listing, self._target, self._endpoint = listing, target, endpoint
        self._progress, self._lock, self._bytes_done = progress, threading.Lock(), 0
        self.stop, self.resumed = threading.Event(), 0
        self._record: dict[str, str | None] = _read_record(target / RECORD_FILE)

    def missing(self) -> list[str]:
        """Files to download, largest first."""
        names = []
        for name, facts in self._listing.files.items():
            if self._is_complete(name, facts):
                self._record[name] = _expected_hash(facts)
                self._add_progress((self._target / name).stat().st_size)
            else:
                names.append(name)
        return sorted(names, key=lambda name: -(self._listing.files[name].size or 0))

    def _is_complete(self, name: str, facts: FileFacts) -> bool:
        """A new revision has other weights in files of the same size, so a file without a record is hashed."""
        file = self._target / name
        if not file.is_file() or file.stat().st_size != (facts.size or file.stat().st_size):
            return False
        return self._record.get(name) == _expected_hash(facts) or not hash_is_wrong(file, facts)

    def _record_hash(self, name: str) -> None:
        with self._lock:
            self._record[name] = _expected_hash(self._listing.files[name])
            write_json(self._target / RECORD_FILE, self._record)

    def check_disk_space(self, missing: list[str]) -> None:
        needed = sum(self._listing.files[name].size or 0 for name in missing)
        needed -= sum(part.stat().st_size for part in (self._target / PARTIAL_DIRECTORY).glob("*.part"))
        free = shutil.disk_usage(self._target).free
        if needed > free:
            given = f"{self._target} with {free / 1e9:.1f} GB free"
            raise InputError("directory", given, f"{needed / 1e9:.1f} GB", "pass --local-dir on a larger disk")

    def _add_progress(self, count: float) -> None:
        with self._lock:
            self._bytes_done += int(count)
            if self._progress is not None:
                self._progress(self._bytes_done, self._listing.size)

    def fetch(self, name: str) -> None:
        """Download one file, verify its hash and move it to its final name."""
        facts = self._listing.files[name]
        destination = self._target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            if (facts.size or 0) > MAX_DIRECT_BYTES:
                self._fetch_by_hub_client(name, facts)
            else:
                self._fetch_part(name, facts, destination)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                given = f"a disk that cannot be written ({error.strerror})"
                raise InputError(str(destination), given, "a writable disk with free space") from error
            raise
        self._record_hash(name)

    def _fetch_by_hub_client(self, name: str, facts: FileFacts) -> None:
        from huggingface_hub import hf_hub_download

        options: Any = {"revision": self._listing.revision, "local_dir": self._target, "endpoint": self._endpoint}
        hf_hub_download(self._listing.repo, name, **options)
        self._add_progress(facts.size or 0)

    def _fetch_part(self, name: str, facts: FileFacts, destination: Path) -> None:
        """Append what is missing to the incomplete file, and give it its name if its hash is right."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined,unused-ignore]

        key = hashlib.sha256(f"{name} {_expected_hash(facts)}".encode()).hexdigest()[:32]
        part = self._target / PARTIAL_DIRECTORY / f"{key}.part"
        part.parent.mkdir(exist_ok=True)
        url = hf_hub_url(self._listing.repo, name, revision=self._listing.revision, endpoint=self._endpoint)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        # Unbuffered, so that a process that is killed leaves what it has received.
        with part.open("ab", buffering=0) as file:
            size = file.tell()
            if size > (facts.size or 0):
                size = file.truncate(0)
            with self._lock:
                self.resumed += size
            self._add_progress(size)
            bar = self._bar_class()
            options: Any = {"resume_size": size, "headers": headers, "expected_size": facts.size, "tqdm_class": bar}
            try:
                http_get(url, file, displayed_filename=name, **options)
            except (_Stopped, InputError):
                raise KTError("the download was stopped") from None
            except Exception as error:  # the classes depend on huggingface_hub's HTTP client
                if isinstance(error, OSError) and error.errno:
                    raise
                raise _download_error(name, error) from error
        if hash_is_wrong(part, facts):
            part.unlink()
            raise KTError(f"{name}: the downloaded file has another hash than the hub says; run the command again")
        sync(part)
        part.replace(destination)

    def _bar_class(self) -> Any:
        """What http_get reports to: bytes received, fewer than none if it begins again."""
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        download = self

        class Counted(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*args, **(options | {"disable": True}))

            def update(self, count: float | None = 1) -> None:
                if download.stop.is_set():
                    raise _Stopped
                download._add_progress(count or 0)

        return Counted


def _download_error(name: str, error: Exception) -> KTError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404, 416):
        return InputError(name, f"status {status} of the hub", "the file", "a gated model needs HF_TOKEN")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return KTError(f"{name}: the connection was lost ({reason}); the same command resumes the download")


def _expected_hash(facts: FileFacts) -> str | None:
    return facts.sha256 or facts.git_sha1


def _read_record(file: Path) -> dict[str, str | None]:
    """File -> hash; empty if the record is missing or unreadable, and then files are hashed again."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def hash_is_wrong(file: Path, facts: FileFacts, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
    """Whether the file has another sha256 than the one that is known, or another sha1 of git if only that is."""
    digest = hashlib.sha256() if facts.sha256 else hashlib.sha1(f"blob {facts.size}\0".encode(), usedforsecurity=False)
    with file.open("rb") as handle:
        while block := handle.read(CHUNK_BYTES):
            digest.update(block)
            on_bytes(len(block))
    return _expected_hash(facts) not in (None, digest.hexdigest())


def from_modelscope(
    repo: str, target: Path, revision: str | None = None, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Downloaded:
    """Download with ModelScope's client, which resumes incomplete files by itself."""
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise InputError("source", "modelscope", "its client installed", "pip install modelscope") from error
    before = {file for file in target.rglob("*") if file.is_file()}
    options: dict[str, Any] = {"revision": revision} if revision else {}
    options |= {"allow_patterns": list(include)} if include else {}
    try:
        snapshot_download(
            repo,
            local_dir=str(target),
            ignore_patterns=[*exclude] if include else [*DEFAULT_EXCLUDES, *exclude],
            **options,
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError("repo", f"{repo} ({reason})", "a model that ModelScope gives") from error
    after = [file for file in sorted(target.rglob("*")) if file.is_file() and not _hidden(file, target)]
    files = {file.relative_to(target).as_posix(): FileFacts(file.stat().st_size) for file in after}
    kept = sum(file in before for file in after)
    return Downloaded(target, Listing(repo, revision or "master", files), len(after) - kept, kept, 0)


def _hidden(file: Path, target: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(target).parts)


def bar_class(name: str) -> Any:
    """A tqdm that draws nothing and reports the bytes of a download. huggingface_hub counts them in two bars, received
    and written, of which it uses one or both: the larger counts. Bars of files are not shown."""
    from tqdm.auto import tqdm

    most = {"done": 0.0, "total": 0.0}

    class Reported(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            self.counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, count: float | None = 1) -> None:
            self.n += count or 0
            if self.counts_bytes and self.total:
                most["done"], most["total"] = max(most["done"], self.n), max(most["total"], self.total)
                progress.report(f"Downloading {name}", min(most["done"], most["total"]), most["total"], "bytes")

    return Reported


def fetch_snapshot(name: str, **options: Any) -> Path:
    """The directory of a hub id; `options` of `snapshot_download`."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, tqdm_class=bar_class(name.rpartition("/")[2]), **options))
