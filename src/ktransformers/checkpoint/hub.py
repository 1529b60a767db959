"""A model from a hub onto the disk: listed first, checked for room, fetched file by file, hashed while it arrives.

huggingface_hub gives the list, the addresses and the session with its token and proxies. The bytes are fetched here,
because it throws a half-fetched file away when its process ends, and a shard of five gigabytes deserves better: parts
are kept under the file's hash in `.kt-partial` and go on where they stopped, in this run after a lost connection or in
the next one after a kill. ModelScope's own client, where it is installed, resumes by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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

from ktransformers.errors import InputError, KTError
from ktransformers.files import sync, write_json
from ktransformers.model_registry import FileFacts

PARTIAL_DIRECTORY = ".kt-partial"
RECORD_FILE = ".kt-files.json"  # hashes of the files that were fetched into a folder
CHUNK_BYTES = 1 << 20
MAX_STALLED_ATTEMPTS = 5  # without a new byte
RETRY_SECONDS = 1.0  # seconds before the next one
TIMEOUT_SECONDS = 30.0  # seconds of silence
MAX_DIRECT_BYTES = 50_000_000_000  # bytes; the hub gives larger files through its own transfer only
# Pickles run code when they are opened; the rest repeats the weights in formats that nothing here reads.
DEFAULT_EXCLUDES = (
    *("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data"),
    *("original/*", "metal/*", "onnx/*", "openvino/*", "consolidated*", ".gitattributes"),
)

Progress = Callable[[int, int], None]  # bytes here, bytes in all


@dataclass(frozen=True)
class Listing:
    repo: str
    revision: str  # the commit
    files: Mapping[str, FileFacts]

    @property
    def size(self) -> int:
        return sum(known.size or 0 for known in self.files.values())


@dataclass(frozen=True)
class Downloaded:
    directory: Path
    listing: Listing
    fetched: int  # files
    kept: int  # files that were here already
    resumed: int  # bytes that an earlier run had fetched of unfinished files

    @property
    def model(self) -> Path:
        """The directory, or the first GGUF file where that is all there is."""
        weights = sorted(name for name in self.listing.files if name.endswith(".gguf"))
        return self.directory / weights[0] if weights and "config.json" not in self.listing.files else self.directory


def list_files(repo: str, revision: str | None = None, endpoint: str | None = None) -> Listing:
    """What the hub has under this id, with sizes and hashes."""
    from huggingface_hub import HfApi

    api: Any = HfApi(endpoint=endpoint)
    try:
        commit = str(api.model_info(repo, revision=revision).sha)
        entries = list(api.list_repo_tree(repo, recursive=True, revision=commit))
    except Exception as error:  # the hub's own errors come from many places
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
    """The files that are wanted: those of `include`, or all but pickles and copies in other formats."""

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    names = list(listing.files)
    tensors = any(name.endswith(".safetensors") for name in names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if include:
        names = [name for name in names if matches(name, include)]
    else:
        names = [name for name in names if not matches(name, DEFAULT_EXCLUDES) and not (tensors and name in ggufs)]
        kinds = {name.partition("-0000")[0] for name in ggufs}
        if not tensors and len(kinds) > 1:
            some = ", ".join(sorted(kinds)[:6])
            raise InputError(
                "include", f"nothing, and {len(kinds)} models: {some}", "a pattern", "--include '*Q4_K_M*'"
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
    """Every file of the listing into `target`; those that are there with the right hash are kept."""
    target.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(target):
        fetch = _Download(listing, target, endpoint, progress)
        missing = fetch.missing()
        fetch.check_room(missing)
        with ThreadPoolExecutor(workers, thread_name_prefix="kt-download") as pool:
            running = [pool.submit(fetch.file, name) for name in missing]
            try:
                for done in as_completed(running):
                    done.result()
            except BaseException:
                fetch.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        shutil.rmtree(target / PARTIAL_DIRECTORY, ignore_errors=True)
        sync(target)
    return Downloaded(target, listing, len(missing), len(listing.files) - len(missing), fetch.resumed)


@contextlib.contextmanager
def _exclusive_lock(target: Path) -> Iterator[None]:
    """Two downloads into one folder would write over each other's parts."""
    lock = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise InputError("directory", f"{target}, which another download fills", "a free one, or patience") from error
    finally:
        os.close(lock)


class _ConnectionLost(Exception):
    """The connection; worth another attempt."""


class _Download:
    def __init__(self, listing: Listing, target: Path, endpoint: str | None, progress: Progress | None) -> None:
        self._listing, self._target, self._endpoint = listing, target, endpoint
        self._progress, self._lock, self._here = progress, threading.Lock(), 0
        self.stop, self.resumed = threading.Event(), 0
        self._record: dict[str, str | None] = _read_record(target / RECORD_FILE)

    def missing(self) -> list[str]:
        found = []
        for name, known in self._listing.files.items():
            if self._is_here(name, known):
                self._record[name] = _expected_hash(known)
                self._arrived((self._target / name).stat().st_size)
            else:
                found.append(name)
        return sorted(found, key=lambda name: -(self._listing.files[name].size or 0))  # the long ones first

    def _is_here(self, name: str, known: FileFacts) -> bool:
        """A new revision has other weights in files of the same size, so what no record vouches for is hashed."""
        file = self._target / name
        if not file.is_file() or file.stat().st_size != (known.size or file.stat().st_size):
            return False
        return self._record.get(name) == _expected_hash(known) or not hash_is_wrong(file, known)

    def _note(self, name: str) -> None:
        with self._lock:
            self._record[name] = _expected_hash(self._listing.files[name])
            write_json(self._target / RECORD_FILE, self._record)

    def check_room(self, missing: list[str]) -> None:
        wanted = sum(self._listing.files[name].size or 0 for name in missing)
        wanted -= sum(part.stat().st_size for part in (self._target / PARTIAL_DIRECTORY).glob("*.part"))
        free = shutil.disk_usage(self._target).free
        if wanted > free:
            given = f"{self._target} with {free / 1e9:.1f} GB free"
            raise InputError("directory", given, f"{wanted / 1e9:.1f} GB", "pass --local-dir on a larger disk")

    def _arrived(self, count: int) -> None:
        with self._lock:
            self._here += count
            if self._progress is not None:
                self._progress(self._here, self._listing.size)

    def file(self, name: str) -> None:
        known = self._listing.files[name]
        destination = self._target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        if (known.size or 0) > MAX_DIRECT_BYTES:
            self._by_hub(name, known)
            self._note(name)
            return
        key = hashlib.sha256(f"{name} {_expected_hash(known)}".encode()).hexdigest()[:32]
        part = self._target / PARTIAL_DIRECTORY / f"{key}.part"
        part.parent.mkdir(exist_ok=True)
        try:
            self._whole(name, known, part)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise InputError(str(destination), f"a disk that refuses ({error.strerror})", "room") from error
            raise
        sync(part)
        part.replace(destination)
        self._note(name)

    def _by_hub(self, name: str, known: FileFacts) -> None:
        from huggingface_hub import hf_hub_download

        words: Any = {"revision": self._listing.revision, "local_dir": self._target, "endpoint": self._endpoint}
        hf_hub_download(self._listing.repo, name, **words)
        self._arrived(known.size or 0)

    def _whole(self, name: str, known: FileFacts, part: Path) -> None:
        """Until the part has every byte and the right hash."""
        tried, size = 0, part.stat().st_size if part.exists() else 0
        if known.size is None or size > known.size:
            part.unlink(missing_ok=True)
            size = 0
        digest = _Digest(known)
        if size:
            digest.read(part)
            with self._lock:
                self.resumed += size
            self._arrived(size)
        while not part.exists() or size < (size if known.size is None else known.size):
            if self.stop.is_set():
                raise KTError("the download was stopped")
            why = "the hub sent less than it said"
            try:
                self._stream(name, part, digest)
            except _ConnectionLost as lost:
                why = str(lost)
            before, size = size, part.stat().st_size if part.exists() else 0
            if part.exists() and (known.size is None or size >= known.size):
                break
            tried = 0 if size > before else tried + 1
            if tried >= MAX_STALLED_ATTEMPTS:
                raise KTError(f"{name}: the connection was lost ({why}); the same command goes on from there")
            self.stop.wait(RETRY_SECONDS)
        if digest.wrong():
            part.unlink()
            raise KTError(f"{name}: what arrived has another hash than the hub says; run the command again")

    def _stream(self, name: str, part: Path, digest: _Digest) -> None:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined,unused-ignore]

        size = part.stat().st_size if part.exists() else 0
        url = hf_hub_url(self._listing.repo, name, revision=self._listing.revision, endpoint=self._endpoint)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if size:
            headers["Range"] = f"bytes={size}-"
        request = get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS)
        blocks = _lost_when_broken(request, name)
        status = next(blocks)
        fresh = size and status != b"206"  # the whole file again
        if fresh:
            self._arrived(-size)
            digest.clear()
        with part.open("wb" if fresh else "ab") as file:
            for block in blocks:
                file.write(block)
                digest.update(block)
                self._arrived(len(block))
                if self.stop.is_set():
                    return


def _lost_when_broken(request: Any, name: str) -> Iterator[bytes]:
    """The status, then the body in blocks; whatever the network does in between becomes _Lost."""
    try:
        with request as response:
            status = int(response.status_code)
            if status in (401, 403, 404, 416):
                raise InputError(name, f"status {status} of the hub", "the file", "a gated model needs HF_TOKEN")
            if status >= 400:
                raise _ConnectionLost(f"status {status}")
            yield str(status).encode()
            yield from response.iter_bytes(chunk_size=CHUNK_BYTES)
    except (_ConnectionLost, KTError, GeneratorExit):
        raise
    except Exception as error:  # of whichever client huggingface_hub has
        raise _ConnectionLost(str(error) or type(error).__name__) from error


def _expected_hash(known: FileFacts) -> str | None:
    return known.sha256 or known.git_sha1


def _read_record(file: Path) -> dict[str, str | None]:
    """Nothing where there is none, or where somebody has been at it: then files are hashed."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Digest:
    """sha256 of a file, or git's sha1 of a small one, as its bytes pass."""

    def __init__(self, known: FileFacts) -> None:
        self._known = known
        self.clear()

    def clear(self) -> None:
        self._sum = hashlib.sha256() if self._known.sha256 else hashlib.sha1(usedforsecurity=False)
        if not self._known.sha256:
            self._sum.update(f"blob {self._known.size}\0".encode())

    def update(self, block: bytes) -> None:
        self._sum.update(block)

    def read(self, file: Path) -> None:
        with file.open("rb") as handle:
            while block := handle.read(CHUNK_BYTES):
                self.update(block)

    def wrong(self) -> bool:
        wanted = _expected_hash(self._known)
        return wanted is not None and self._sum.hexdigest() != wanted


def hash_is_wrong(file: Path, known: FileFacts) -> bool:
    digest = _Digest(known)
    digest.read(file)
    return digest.wrong()


def from_modelscope(
    repo: str, target: Path, revision: str | None = None, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Downloaded:
    """Through ModelScope's client, which keeps its own parts and goes on with them."""
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise InputError("source", "modelscope", "its client installed", "pip install modelscope") from error
    before = {file for file in target.rglob("*") if file.is_file()}
    words: dict[str, Any] = {"revision": revision} if revision else {}
    words |= {"allow_patterns": list(include)} if include else {}
    try:
        snapshot_download(
            repo,
            local_dir=str(target),
            ignore_patterns=[*exclude] if include else [*DEFAULT_EXCLUDES, *exclude],
            **words,
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError("repo", f"{repo} ({reason})", "a model that ModelScope gives") from error
    found = [file for file in sorted(target.rglob("*")) if file.is_file() and not _hidden(file, target)]
    files = {file.relative_to(target).as_posix(): FileFacts(file.stat().st_size) for file in found}
    kept = sum(file in before for file in found)
    return Downloaded(target, Listing(repo, revision or "master", files), len(found) - kept, kept, 0)


def _hidden(file: Path, target: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(target).parts)
