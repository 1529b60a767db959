"""Runs `kt` commands as child processes: output to the run's log, a server for stages that need one, no leftovers.

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
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ktransformers.errors import InputError, KTError
from ktransformers.files import try_lock

PROGRAM = [sys.executable, "-c", "from ktransformers.cli.main import main; main()"]
PR_SET_PDEATHSIG = 1
TERMINATE_SECONDS = 90.0  # before SIGKILL: a trainer finishes its step and saves
SERVER_START_SECONDS = 1800.0  # for a server to load
LOG_TAIL_LINES = 12  # shown of a failed stage's log

PrintLine = Callable[[str], None]


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
    arguments: Sequence[str], log: Path, lock: int, document: Path | None, on_line: PrintLine | None
) -> int:
    """Returns the exit code. Output goes to the log, a JSON document to its own file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    partial = None if document is None else document.with_name(f".{document.name}.partial")
    with log.open("ab") as errors:
        errors.write(f"$ {command_line(arguments)}\n".encode())
        errors.flush()
        out = subprocess.PIPE if partial is None else partial.open("wb")
        child = _start(arguments, out, errors.fileno() if partial is not None else subprocess.STDOUT, lock)
        try:
            if child.stdout is not None:
                for line in child.stdout:
                    errors.write(line)
                    errors.flush()
                    if on_line is not None:
                        on_line(line.decode(errors="replace").rstrip("\n"))
            code = child.wait()
        finally:
            terminate(child)
            if not isinstance(out, int):
                out.close()
    if partial is not None and document is not None:
        _store_document(partial, document, log)
    return code


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


def _start(arguments: Sequence[str], out: int | IO[bytes], errors: int, lock: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        pass_fds=(lock,),
        start_new_session=True,  # Ctrl-C reaches only this process: a second signal makes a trainer stop immediately
        preexec_fn=_die_with_parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


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
def server(arguments: Sequence[str], port: int, log: Path, lock: int) -> Iterator[str]:
    """A running `kt serve`; yields its address."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        stream.write(f"$ {command_line(arguments)}\n".encode())
        stream.flush()
        child = _start(arguments, stream.fileno(), subprocess.STDOUT, lock)
        try:
            url = f"http://127.0.0.1:{port}"
            started = time.monotonic()
            while not _is_ready(url):
                if child.poll() is not None:
                    raise StageFailed("serve", child.returncode, log)
                if time.monotonic() - started > SERVER_START_SECONDS:
                    raise KTError(f"{url}: no answer after {SERVER_START_SECONDS:.0f} s; {log} says how far it came")
                time.sleep(0.2)
            yield url
        finally:
            terminate(child)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
