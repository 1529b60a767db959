"""Messages between rank 0 and expert nodes: `multiprocessing.connection` over TCP, one message of bytes for a header of
64 bytes and the tensors behind it.

Nothing is unpickled. Numbers are little endian. A connection that misses a deadline or closes raises `ConnectionLost`
and is closed, because a late answer would be taken for that to the next message. Both ends prove that they know the
token before anything else is read (`multiprocessing.connection`'s own challenge).

| kind | from | payload |
|---|---|---|
| READY | node | none: its experts are loaded |
| FORWARD | rank 0 | hidden `[rows, H]`, weights float32 `[rows, k]`, ids int32 `[rows, k]`, with LoRA int32 `[rows]` |
| RESULT | node | `[rows, H]` in the dtype of the hidden states |
| LOAD | rank 0 | a safetensors document: LoRA factors of the node's experts of one layer |
| DONE | node | none: the factors are packed |
| FAILED | node | text: the message could not be computed; the connection stays |
| UNLOAD | rank 0 | none, and no answer: `handle` names what LOAD sent |
| BYE | rank 0 | none: the server ends |
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ktransformers.adapters import LoraPair
from ktransformers.ground.errors import KTError
from ktransformers.plan.exchange import HEADER_BYTES

HEADER = struct.Struct("<6IQ32x")
assert HEADER.size == HEADER_BYTES
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HANDSHAKE_SECONDS = 10.0
# A machine that lost its power while it loaded sends nothing: it is noticed after a minute.
KEEPALIVE = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}

Part = memoryview | bytes


class Kind(enum.IntEnum):
    READY = 1
    FORWARD = 2
    RESULT = 3
    LOAD = 4
    UNLOAD = 5
    DONE = 6
    FAILED = 7
    BYE = 8


class ConnectionLost(KTError):
    """The other end is gone, too slow, or speaks another protocol."""


@dataclass(frozen=True)
class Header:
    kind: int
    dtype: int = 0  # index into DTYPES
    layer: int = 0
    rows: int = 0
    top_k: int = 0
    width: int = 0
    handle: int = 0  # of LOAD and UNLOAD; of FORWARD 1 if the rows name their adapters


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class Connection:
    """One socket; not thread-safe: the caller holds a lock from a message to its answer."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        """`seconds`: that the other end may take to accept bytes, and to go on with a message that it has begun."""
        self.peer = str(sock.getpeername()[0])
        self.sent = self.received = 0  # bytes, headers included
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
        self._sock, self._pipe = sock, Pipe(os.dup(sock.fileno()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a message
        self._sock.close()
        self._pipe.close()

    def authenticate(self, token: str, *, listens: bool) -> None:
        steps = (deliver_challenge, answer_challenge) if listens else (answer_challenge, deliver_challenge)
        try:
            for step in steps:
                step(self._pipe, token.encode())
        except (OSError, EOFError, AssertionError, AuthenticationError) as error:
            self.close()
            if isinstance(error, AuthenticationError):
                raise
            raise ConnectionLost("no handshake of an expert node") from error

    def has_ended(self) -> bool:
        """Whether the other end is gone, while no message is due: only its end makes an idle connection readable."""
        try:
            return self._pipe.poll(0)
        except (OSError, ValueError):
            return True

    def send_bytes(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        self.sent += len(data)

    def receive_bytes(self, seconds: float | None) -> bytearray:
        """None waits for as long as the other end is there."""
        try:
            if not self._pipe.poll(seconds):
                self.close()
                raise ConnectionLost(f"no answer within {seconds:.3g} s")
            data = bytearray(self._pipe.recv_bytes())  # tensors are views of writable memory alone
        except (OSError, ValueError, EOFError) as error:
            raise self._lost(error) from error
        self.received += len(data)
        return data

    def send(self, header: Header, *parts: Part) -> None:
        self.send_bytes(b"".join((HEADER.pack(*astuple(header)), *parts)))

    def receive(self, seconds: float | None) -> tuple[Header, memoryview]:
        data = self.receive_bytes(seconds)
        header = Header(*HEADER.unpack_from(data)) if len(data) >= HEADER_BYTES else Header(0)
        if not 1 <= header.kind <= len(Kind) or header.dtype >= len(DTYPES):
            raise self._lost(ValueError("not a message of this protocol"))
        return header, memoryview(data)[HEADER_BYTES:]

    def _lost(self, error: Exception) -> ConnectionLost:
        self.close()
        if isinstance(error, BlockingIOError):
            return ConnectionLost("it does not read or write")
        closed = isinstance(error, EOFError | ConnectionError) or "closed" in str(error)
        return ConnectionLost("the connection was closed" if closed else str(error))


def read_tensor(payload: memoryview, offset: int, dtype: torch.dtype, *shape: int) -> tuple[Tensor, int]:
    """A view of the payload as a tensor, and the offset behind it."""
    count = math.prod(shape)
    end = offset + count * dtype.itemsize
    if end > len(payload):
        raise ConnectionLost(f"{len(payload)} bytes of payload where {end} are announced")
    if not count:
        return torch.empty(shape, dtype=dtype), end
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(shape), end


def encode_pairs(pairs: Mapping[str, LoraPair], experts: Sequence[int]) -> bytes:
    """The factors of these experts as a safetensors document; an A that gate and up share is stored once."""
    index = torch.tensor(list(experts), dtype=torch.long)
    tensors, shared = dict[str, Tensor](), set[int]()
    for role, pair in sorted(pairs.items()):
        if id(pair.a) not in shared:
            tensors[f"{role}.a"] = pair.a[index].contiguous()
        shared.add(id(pair.a))
        tensors[f"{role}.b"] = pair.b[index].contiguous()
        tensors[f"{role}.scaling"] = torch.tensor([pair.scaling], dtype=torch.float64)
    return save(tensors)


def decode_pairs(payload: memoryview) -> dict[str, LoraPair]:
    tensors = load(bytes(payload))
    roles = sorted(name.removesuffix(".b") for name in tensors if name.endswith(".b"))
    return {
        role: LoraPair(
            tensors[f"{role}.a" if f"{role}.a" in tensors else "gate.a"],
            tensors[f"{role}.b"],
            float(tensors[f"{role}.scaling"]),
        )
        for role in roles
    }
