"""Servers of this user that are running: one small file each, written when a server listens and removed when it ends.

`kt` alone lists them, and `kt chat` offers them. A file whose process has gone, after a kill, is removed by the next
reader.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, write_json
from ktransformers.ground.settings import data_folder

CONNECT_SECONDS = 0.3


@dataclass(frozen=True)
class RunningServer:
    pid: int
    host: str
    port: int
    model: str

    @property
    def address(self) -> str:
        """Where this machine reaches it: a wildcard is listened on by the loopback address too."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        return f"http://{f'[{self.address}]' if ':' in self.address else self.address}:{self.port}"


def _folder() -> Path:
    return data_folder() / "servers"


def record_server(host: str, port: int, model: str) -> RunningServer:
    """Lists this process; without a folder that can be written it is not listed."""
    server = RunningServer(os.getpid(), host, port, model)
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        write_json(_folder() / f"{server.pid}.json", asdict(server))
    return server


def forget_server() -> None:
    (_folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def accepts(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def running_servers() -> list[RunningServer]:
    servers = []
    for file in sorted(_folder().glob("*.json")):
        try:
            server = RunningServer(**read_json_object(file))
        except (InputError, TypeError):
            continue
        if not Path(f"/proc/{server.pid}").exists():
            file.unlink(missing_ok=True)
        elif accepts(server.address, server.port):  # another engine is listed before it listens
            servers.append(server)
    return servers
