"""Ranks that differ are refused on every rank before anything is loaded, and the message names the rank."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from ktransformers.ground.errors import InputError
from ktransformers.parallel import rank_check
from tests.support.forked import Forked

RANK = """
import contextlib, json, os, sys
from ktransformers.ground import system
from ktransformers.ground.errors import KTError
from ktransformers.parallel import rank_check
other, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
if other == "version" and rank == 1:
    known = system.version_of
    rank_check.system.version_of = lambda name: "0.0.1" if name == "peft" else known(name)
if other == "dies" and rank == 1:
    sys.exit(7)
answer = {}
try:
    ranks = rank_check.join_ranks(seconds=3 if other == "dies" else 30)
    rank_check.require_equal_packages(ranks)
    facts = {"files": "a", "rows": 12} | ({"files": "b"} if other == "files" and rank == 1 else {})
    rank_check.require_equal(ranks, facts, "copy them")
    answer["values"] = [ranks.exchange("value", {"rank": rank, "call": call}) for call in range(2)]
except KTError as error:
    answer["error"] = str(error)
open(f"{folder}/{rank}.json", "w").write(json.dumps(answer))
if "values" in answer:
    with contextlib.suppress(KTError):  # rank 0 has the store, and may end first
        ranks.exchange("end", None)
        ranks.acknowledge("end")
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks(tmp_path: Path, other: str, port: str, count: int = 2) -> list[dict[str, object]]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    started = [Forked(RANK, other, tmp_path, **where, RANK=str(rank)) for rank in range(count)]
    ended = [rank.wait(60) for rank in started]
    assert other == "dies" or not any(rank.returncode for rank in ended), "".join(rank.stderr for rank in ended)
    files = [tmp_path / f"{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def test_equal_ranks_exchange_values(tmp_path: Path) -> None:
    for answer in run_ranks(tmp_path, "nothing", free_port()):
        assert answer == {"values": [[{"rank": rank, "call": call} for rank in range(2)] for call in range(2)]}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("version", ["version of peft of rank 1 on", "given 0.0.1", "as rank 0 on"]),
        ("files", ["files of rank 1 on", "given b, expected a, as rank 0", "copy them"]),
        ("dies", ["127.0.0.1:", "expected 2 ranks that reach it"]),
    ],
)
def test_rank_that_differs_is_named_on_every_rank(tmp_path: Path, other: str, words: list[str]) -> None:
    answers = run_ranks(tmp_path, other, free_port())
    assert len(answers) == (1 if other == "dies" else 2)
    for answer in answers:
        assert all(word in str(answer["error"]) for word in words), answer


def test_port_that_another_program_uses_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        rank = Forked(RANK, "nothing", tmp_path, **where, RANK="0")
        rank.wait(60)
    answer = json.loads((tmp_path / "0.json").read_text())
    assert "MASTER_PORT: given 127.0.0.1:" in answer["error"] and "--master-port" in answer["error"]


RESTARTED = """
import json, os, sys, torch
import torch.distributed as dist
from ktransformers.parallel.rank_check import join_ranks, open_process_group
ranks = join_ranks(seconds=30)
pids = ranks.exchange("process", os.getpid())
open_process_group(ranks, cpu=True, backend=None, seconds=30)
total = torch.tensor([os.getpid()])
dist.all_reduce(total)
open(f"{sys.argv[1]}/{ranks.rank}.json", "w").write(json.dumps([pids, int(total)]))
os._exit(9)  # as if killed: nothing is taken back from the store
"""


def test_restarted_ranks_do_not_read_what_those_before_them_wrote(tmp_path: Path) -> None:
    """torchrun's static rendezvous keeps one store for all restarts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        ranks = [Forked(RESTARTED, tmp_path, **where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
        ended = [rank.wait(60) for rank in ranks]
        assert [rank.returncode for rank in ended] == [9, 9], "".join(rank.stderr[-2000:] for rank in ended)
        pids = [rank.pid for rank in ranks]
        for rank in range(2):
            assert json.loads((tmp_path / f"{rank}.json").read_text()) == [pids, sum(pids)]


def test_single_process_has_no_ranks_and_wrong_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert rank_check.join_ranks() is None
    rank_check.require_equal(None, {"files": "a"}, "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="MASTER_ADDR: given nothing"):
        rank_check.join_ranks()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InputError, match="RANK: given 2, expected less than WORLD_SIZE, 2"):
        rank_check.join_ranks()
    assert os.environ["WORLD_SIZE"] == "2"
