"""Runs `kt` commands as child processes: output to the run's log, progress through a pipe, a server for stages that
need one, no leftovers.

The run's lock is a locked file whose descriptor every child inherits: a second loop in the same directory is refused
while any process of the first is alive. Children also request SIGTERM from the kernel when their parent dies, so that a
killed loop does not keep training.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.files import try_lock
from ktransformers.ground.progress import ProgressEvent, receive

PROGRAM = [sys.executable, "-c", "from ktransformers.cli.main import main; main()"]
PR_SET_PDEATHSIG = 1
TERMINATE_SECONDS = 90.0  # before SIGKILL: a trainer finishes its step and saves
SERVER_START_SECONDS = 1800.0  # for a server to load
LOG_TAIL_LINES = 12  # shown of a failed stage's log

PrintLine = Callable[[str], None]
ReportEvent = Callable[[ProgressEvent], None]


class StageFailed(KTError):
    """A stage's command exited with an error."""

    def __init__(self, stage: str, code: int, log: Path) -> None:
        lines = log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        super().__init__(f"stage {stage} ended with code {code}; {log} ends with:\n" + "\n".join(lines))
        self.code = code


@contextmanager
def locked(run: Path) -> Iterator[int]:
    """Locks the run's directory for this loop; yields the descriptor for children to inherit."""
    handle = os.open(run / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    if not try_lock(handle):
        os.close(handle)
        raise InputError(
            "run", f"{run}, which another loop is using", "another directory", "or wait for that loop to end"
        )
    try:
        yield handle
    finally:
        os.close(handle)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["kt", *arguments])


def run_command(
    arguments: Sequence[str],
    log: Path,
    lock: int,
    document: Path | None = None,
    on_line: PrintLine | None = None,
    on_event: ReportEvent | None = None,
) -> int:
    """Returns the exit code. Output goes to the log and, line by line, to `on_line`; a JSON document to its own file;
    progress to `on_event`."""
    partial = None if document is None else document.with_name(f".{document.name}.partial")
    with ExitStack() as stack:
        kept = stack.enter_context(_open_log(arguments, log))
        out = subprocess.PIPE if partial is None else stack.enter_context(partial.open("wb"))
        errors = subprocess.STDOUT if partial is None else subprocess.PIPE
        child = stack.enter_context(_running(arguments, out, errors, lock, on_event))
        spoken = child.stdout if partial is None else child.stderr
        assert spoken is not None
        for line in spoken:
            kept.write(line)
            kept.flush()
            if on_line is not None:
                on_line(line.decode(errors="replace").rstrip("\n"))
        code = child.wait()
    if partial is not None and document is not None:
        _store_document(partial, document, log)
    return code


def _open_log(arguments: Sequence[str], log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    stream = log.open("ab")
    stream.write(f"$ {command_line(arguments)}\n".encode())
    stream.flush()
    return stream


@contextmanager
def _progress_pipe(on_event: ReportEvent | None) -> Iterator[int | None]:
    """The end of a pipe for a child's progress. A thread passes the events on; it ends when no process holds the pipe,
    and is not waited for, because a process that the child has left behind may."""
    if on_event is None:
        yield None
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # a child drops events rather than wait for a reader

    def pass_on() -> None:
        with os.fdopen(reading, "rb") as stream:
            for event in receive(stream):
                on_event(event)

    threading.Thread(target=pass_on, name="kt-progress", daemon=True).start()
    try:
        yield writing
    finally:
        os.close(writing)


def _store_document(partial: Path, document: Path, log: Path) -> None:
    """Moves printed JSON to its file; other output goes to the log."""
    text = partial.read_text(errors="replace")
    try:
        json.loads(text)
    except ValueError:
        with log.open("a") as stream:
            stream.write(text)
        partial.unlink()
        return
    partial.replace(document)


@contextmanager
def _running(
    arguments: Sequence[str], out: int | IO[bytes], errors: int, lock: int, on_event: ReportEvent | None
) -> Iterator[subprocess.Popen[bytes]]:
    """The child, which is terminated at the end. API_KEY is left out of its variables: a server would refuse the other
    children, which are given no key."""
    variables = {name: value for name, value in os.environ.items() if name != "API_KEY"} | {"PYTHONUNBUFFERED": "1"}
    with _progress_pipe(on_event) as events:
        child = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            pass_fds=(lock,) if events is None else (lock, events),
            start_new_session=True,  # Ctrl-C reaches only this process: a second signal makes a trainer stop at once
            preexec_fn=_die_with_parent,
            env=variables if events is None else variables | {"KT_PROGRESS": str(events)},
        )
        try:
            yield child
        finally:
            terminate(child)


def terminate(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL after a timeout."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_port(preferred: int | None) -> int:
    """The preferred port if free (a resumed stage must find its server at the old address), else any."""
    for port in (preferred, 0):
        if port is None:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise KTError("127.0.0.1 has no free port")


@contextmanager
def server(
    arguments: Sequence[str], port: int, log: Path, lock: int, on_event: ReportEvent | None = None
) -> Iterator[str]:
    """A running `kt serve`; yields its address."""
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    with _open_log(arguments, log) as stream, _running(arguments, stream, subprocess.STDOUT, lock, on_event) as child:
        while not _is_ready(url):
            if child.poll() is not None:
                raise StageFailed("serve", child.returncode, log)
            if time.monotonic() - started > SERVER_START_SECONDS:
                raise KTError(f"{url}: no answer after {SERVER_START_SECONDS:.0f} s; {log} says how far it came")
            time.sleep(0.2)
        yield url


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
