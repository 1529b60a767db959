"""Ranks that a launcher has started compare what they are about to do, before anything is loaded.

Ranks with other packages, other model files or another recipe would train or serve one model from different numbers,
or wait for each other in a collective that the other never calls, and no message would say so. `join_ranks` opens the
store at MASTER_ADDR and MASTER_PORT, which `init_process_group` uses too, so no backend (gloo, NCCL) is needed yet;
`require_equal` publishes JSON of this rank's facts there and compares those of all ranks with rank 0's. Every rank
raises the same error. A process without a launcher has no ranks, and nothing is compared.

torchrun's static rendezvous, its default, keeps the store when it restarts ranks, with all that those before had
written: a restarted rank would read their facts, and gloo their addresses, and wait or fail. So the ranks of one start
agree on a random word first, and `init_process_group` gets the store with that word as prefix.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ktransformers.ground import system
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.rank_cores import int_variable

POLL_SECONDS = 0.02  # between two looks at the store
JOIN_SECONDS = 300.0  # until all ranks have started and imported their packages
PACKAGES = ("ktransformers", "torch", "transformers", "peft", "trl", "accelerate", "numpy", "safetensors", "tokenizers")


@dataclass
class Ranks:
    """This rank, their number, and the store that all of them see."""

    store: Any
    rank: int
    count: int
    seconds: float = JOIN_SECONDS
    _rounds: dict[str, int] = field(default_factory=dict)  # calls of `exchange` by name

    def exchange(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, in their order. A collective call; values are JSON."""
        number = self._rounds[name] = self._rounds.get(name, -1) + 1
        keys = [f"kt/{name}/{number}/{rank}" for rank in range(self.count)]
        with _reporting_a_lost_store(self.rank):
            self.store.set(keys[self.rank], json.dumps(value))
            try:
                self.store.wait(keys, timedelta(seconds=self.seconds))
            except dist.DistStoreError as error:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                listed = ", ".join(map(str, missing))
                raise KTError(
                    f"{name}: rank {listed} of {self.count} has not answered within {self.seconds:.0f} s; "
                    "its own output says why"
                ) from error
            return [json.loads(self.store.get(key)) for key in keys]

    def acknowledge(self, name: str) -> None:
        """Rank 0, whose process may have the store, waits until the others have read the values of `name`: it may be
        about to raise and to end."""
        keys = [f"kt/{name}/{self._rounds[name]}/{rank}/read" for rank in range(1, self.count)]
        with _reporting_a_lost_store(self.rank):
            if self.rank:
                self.store.set(keys[self.rank - 1], "")
            else:
                self.store.wait(keys, timedelta(seconds=self.seconds))


@contextmanager
def _reporting_a_lost_store(rank: int) -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise KTError(f"rank {rank} has lost the launcher's store at {where}: another rank or its host is gone") from (
            error
        )


def join_ranks(seconds: float = JOIN_SECONDS) -> Ranks | None:
    """The ranks that a launcher has started with this one, None for a single process. A collective call."""
    rank, count = int_variable("RANK", 0), int_variable("WORLD_SIZE", 1)
    if count < 2:
        return None
    if rank >= count:
        raise InputError("RANK", rank, f"less than WORLD_SIZE, {count}", "a launcher such as torchrun sets both")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise InputError(name, "nothing", "the address of rank 0", "start the ranks with torchrun")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except dist.DistNetworkError as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            raise InputError(
                "MASTER_PORT", f"{where}, which another program uses", "a free port", "--master-port names another"
            ) from error
        raise InputError("MASTER_ADDR", f"{where}, which does not answer ({text})", "the address of rank 0") from error
    except (dist.DistStoreError, ValueError) as error:
        text = str(error).splitlines()[0]
        raise InputError("MASTER_ADDR", f"{where} ({text})", f"{count} ranks that reach it") from error
    with _reporting_a_lost_store(rank):
        word = _shared_word(store, rank, count, seconds)
    return Ranks(PrefixStore(f"kt-{word}", store), rank, count, seconds)


def _shared_word(store: Any, rank: int, count: int, seconds: float) -> str:
    """A random word of rank 0 that the ranks of this start know. Every other rank greets with a random word of its own
    and takes the answer to it alone; rank 0 answers each greeting, also those of earlier starts that are still in the
    store, until all ranks have confirmed its word."""
    own, deadline = secrets.token_hex(8), time.monotonic() + seconds
    if rank:
        store.set(f"kt/greeting/{rank}", own)
    answered: dict[int, str] = {}  # rank -> its greeting
    while time.monotonic() < deadline:
        if rank:
            greeting, _, word = _value(store, f"kt/answer/{rank}").partition(" ")
            if greeting == own:
                store.set(f"kt/confirmed/{rank}", word)
                return word
        else:
            for other in range(1, count):
                greeting = _value(store, f"kt/greeting/{other}")
                if greeting and answered.get(other) != greeting:
                    store.set(f"kt/answer/{other}", f"{greeting} {own}")
                    answered[other] = greeting
            if all(_value(store, f"kt/confirmed/{other}") == own for other in range(1, count)):
                return own
        time.sleep(POLL_SECONDS)
    missing = [other for other in range(1, count) if _value(store, f"kt/confirmed/{other}") != own] if not rank else [0]
    listed = ", ".join(map(str, missing))
    raise KTError(f"rank {listed} of {count} has not answered within {seconds:.0f} s; its own output says why")


def _value(store: Any, key: str) -> str:
    """Empty if there is none; `get` would wait for one."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def open_process_group(ranks: Ranks | None, *, cpu: bool, backend: str | None, seconds: float) -> None:
    """The process group of torch.distributed with the backend that accelerate chooses, in the store of this start."""
    if ranks is None or dist.is_initialized():
        return
    from accelerate import PartialState  # type: ignore[import-untyped]

    store = PrefixStore("process-group", ranks.store)
    given: dict[str, Any] = {"store": store, "rank": ranks.rank, "world_size": ranks.count}
    PartialState(cpu=cpu, backend=backend, timeout=timedelta(seconds=seconds), **given)


def rank_name(rank: int, host: str) -> str:
    return f"rank {rank} on {host}"


def require_equal(ranks: Ranks | None, facts: Mapping[str, Any], remedy: str) -> None:
    """Raises on all ranks unless all have the same facts; names the first that differs and both values. A collective
    call."""
    if ranks is None:
        return
    answers = ranks.exchange("facts", {"host": socket.gethostname(), "facts": dict(facts)})
    ranks.acknowledge("facts")
    first = answers[0]
    for rank, answer in enumerate(answers):
        for name in dict.fromkeys([*first["facts"], *answer["facts"]]):
            expected, given = first["facts"].get(name), answer["facts"].get(name)
            if given != expected:
                raise InputError(
                    f"{name} of {rank_name(rank, answer['host'])}",
                    "nothing" if given is None else given,
                    f"{expected}, as {rank_name(0, first['host'])} has",
                    remedy,
                )


def package_facts() -> dict[str, Any]:
    """Versions of the packages that decide numbers and collectives, and the number of ranks of each host."""
    versions = {f"version of {name}": system.version_of(name) for name in PACKAGES}
    return versions | {"ranks of a host (LOCAL_WORLD_SIZE)": int_variable("LOCAL_WORLD_SIZE", 1)}


def require_equal_packages(ranks: Ranks | None) -> None:
    require_equal(ranks, package_facts(), "install the same packages on all hosts, and start as many ranks on each")
