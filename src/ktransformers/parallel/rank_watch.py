"""Ends a run within seconds when one of its ranks is gone, with one line that names it.

A rank whose peer was killed waits in a collective: gloo reports a closed connection that names no rank, NCCL waits for
its watchdog, and a launcher that terminates the ranks gives them half a minute. So each rank tells the others its host
and process through the launcher's store and writes a heartbeat there; a thread looks at the processes of its own host
and at the heartbeats of the others. When a rank has ended without saying that it was done, the first of those that are
left prints the line and all end at once, whatever they wait for. Files are written under other names and renamed, so
a sudden end leaves nothing half-written, and `torchrun --max-restarts` starts the ranks again.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from ktransformers.ground.errors import KTError
from ktransformers.parallel.rank_check import Ranks, rank_name

LOOK_SECONDS = 0.5  # between two looks at the other ranks
SILENT_SECONDS = 20.0  # without a heartbeat, until a rank of another host counts as gone
GRACE_SECONDS = 1.0  # a rank that ends by an error of its own has printed it by then
FOUND_SECONDS = 2 * (LOOK_SECONDS + GRACE_SECONDS)
EXIT_CODE = 75  # EX_TEMPFAIL: started again, the run goes on


@dataclass(frozen=True)
class RankProcess:
    rank: int
    host: str
    pid: int
    started: str  # clock ticks after boot: a later process may have the same number

    def __str__(self) -> str:
        return f"{rank_name(self.rank, self.host)}, process {self.pid},"

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.started


def _start_time(pid: int) -> str:
    """Empty if there is no such process, or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@contextmanager
def _ignoring_terminations() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class RankWatch:
    """A context: ranks that end inside of it end the run. Entering and leaving are collective calls."""

    def __init__(self, ranks: Ranks | None, describe: Callable[[], str] = lambda: "") -> None:
        self._ranks, self._describe = ranks, describe
        self._done = threading.Event()
        self._store = None if ranks is None else ranks.store.clone()  # a connection waits for one answer at a time
        self._processes: list[RankProcess] = []
        self._beats: dict[int, tuple[str, float]] = {}  # rank -> last heartbeat, and when it was seen first
        self._thread = threading.Thread(target=self._look, name="kt-rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        if self._ranks is not None:
            own = [socket.gethostname(), os.getpid(), _start_time(os.getpid())]
            answers = self._ranks.exchange("process", own)
            self._processes = [RankProcess(rank, *answer) for rank, answer in enumerate(answers)]
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is None:
            return
        if kind is not None and not issubclass(kind, KTError):
            with _ignoring_terminations():  # a launcher sends one as soon as a rank is gone
                self._thread.join(FOUND_SECONDS)  # a collective failed: the thread says which rank is gone, and ends
        if kind is None:
            self._ranks.store.set(self._key("done", self._ranks.rank), "")
            with suppress(dist.DistError, KTError):  # the store may end with the first rank
                self._ranks.exchange("end", None)
                self._ranks.acknowledge("end")
        self._done.set()

    def _key(self, name: str, rank: int) -> str:
        return f"kt/watch/{name}/{rank}"

    def _look(self) -> None:
        assert self._ranks is not None and self._store is not None
        own = self._processes[self._ranks.rank]
        count = 0
        while not self._done.wait(LOOK_SECONDS):
            count += 1
            try:
                self._store.set(self._key("beat", own.rank), str(count))
                gone = [process for process in self._processes if process.rank != own.rank and self._is_gone(process)]
            except (dist.DistError, RuntimeError):
                gone = [process for process in self._processes if process.host == own.host and not process.alive]
                self._end(gone, "the launcher's store is gone")
                continue
            if gone:
                self._end(gone, "")

    def _is_gone(self, process: RankProcess) -> bool:
        assert self._ranks is not None and self._store is not None
        store = self._store
        if process.host == self._processes[self._ranks.rank].host:
            return not process.alive and not store.check([self._key("done", process.rank)])
        key = self._key("beat", process.rank)
        beat = store.get(key).decode() if store.check([key]) else ""
        if self._beats.get(process.rank, ("", 0.0))[0] != beat or process.rank not in self._beats:
            self._beats[process.rank] = (beat, time.monotonic())
        silent = time.monotonic() - self._beats[process.rank][1] > SILENT_SECONDS
        return silent and not store.check([self._key("done", process.rank)])

    def _end(self, gone: list[RankProcess], otherwise: str) -> None:
        """The first rank that is left prints; the others only end, a little later."""
        assert self._ranks is not None
        if self._done.wait(GRACE_SECONDS):  # this rank has come to its end in the meantime
            return
        ended = {process.rank for process in gone}
        first = min(process.rank for process in self._processes if process.rank not in ended)
        if first == self._ranks.rank:
            named = " and ".join(str(process) for process in gone) or otherwise
            ends = "has ended" if len(gone) == 1 else "have ended" if gone else "and"
            line = f"kt: {named} {ends}; this run stops{self._describe()}\n"
            with suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, line.encode())
        os._exit(EXIT_CODE)
