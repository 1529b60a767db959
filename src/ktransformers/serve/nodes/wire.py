"""Messages between rank 0 and expert nodes: a fixed binary header of 64 bytes, then as many bytes as it says.

Plain TCP instead of torch.distributed, because a lost peer breaks a gloo group for good, while here a node may leave
and come back. Nothing is pickled: a payload is the bytes of tensors, or JSON of a bounded size. All numbers are little
endian. Every operation has a deadline; a connection that misses it, or that closes, raises `ConnectionLost` and is
closed, because a late answer would be taken for that to the next message.

| kind | from | payload |
|---|---|---|
| CHALLENGE, HELLO, WELCOME, REFUSED | both | the handshake (`handshake.py`) |
| READY | node | none: its experts are loaded |
| FORWARD | rank 0 | hidden `[rows, H]`, weights float32 `[rows, k]`, ids int32 `[rows, k]`, with LoRA int32 `[rows]` |
| RESULT | node | `[rows, H]` in the dtype of the hidden states |
| LOAD | rank 0 | LoRA factors of the node's experts of one layer (`adapter_wire.py`) |
| UNLOAD | rank 0 | none; `handle` names what LOAD sent |
| PING | rank 0 | none |
| DONE | node | none: the answer to LOAD, UNLOAD and PING |
| FAILED | node | text: the message could not be computed; the connection stays |
| BYE | rank 0 | none: the server ends |
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.ground.errors import KTError
from ktransformers.plan.exchange import HEADER_BYTES

MAGIC = b"KTX1"
HEADER = struct.Struct("<4sHH5IQQ20x")  # magic, kind, dtype, layer, rows, top_k, handle, width, number, payload bytes
assert HEADER.size == HEADER_BYTES
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A machine that lost its power while it loaded sends nothing: it is noticed after a minute.
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
MAX_TEXT_BYTES = 1 << 20  # of JSON and of errors
MAX_PAYLOAD_BYTES = 1 << 34  # of rows or factors


class Kind(enum.IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    READY = 5
    FORWARD = 6
    RESULT = 7
    LOAD = 8
    UNLOAD = 9
    PING = 10
    DONE = 11
    FAILED = 12
    BYE = 13


class ConnectionLost(KTError):
    """The other end is gone, too slow, or speaks another protocol."""


class NoAnswer(ConnectionLost):
    """The other end was too slow."""


@dataclass(frozen=True)
class Header:
    kind: Kind
    dtype: int = 0  # index into DTYPES
    layer: int = 0
    rows: int = 0
    top_k: int = 0
    handle: int = 0  # of LOAD and UNLOAD; of FORWARD 1 if the rows name their adapters
    width: int = 0
    number: int = 0  # of the message; its answer has the same
    size: int = 0  # bytes of the payload

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def dtype_code(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class Connection:
    """One socket; not thread-safe: the caller holds a lock from a message to its answer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self.sent = self.received = 0  # bytes, headers included
        self.closed = False
        self._buffer = bytearray(1 << 16)

    @property
    def peer(self) -> str:
        try:
            return str(self._sock.getpeername()[0])
        except OSError:
            return "unknown address"

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def send(self, header: Header, *parts: memoryview | bytes, seconds: float) -> None:
        size = sum(len(part) for part in parts)
        packed = HEADER.pack(
            MAGIC,
            header.kind,
            header.dtype,
            header.layer,
            header.rows,
            header.top_k,
            header.handle,
            header.width,
            header.number,
            size,
        )
        deadline = time.monotonic() + seconds
        views = [memoryview(part) for part in (packed, *parts) if len(part)]
        try:
            while views:
                self._sock.settimeout(_left(deadline))
                views = _skip(views, self._sock.sendmsg(views[:16]))
        except (OSError, ValueError) as error:
            raise self._lost(error, seconds) from error
        self.sent += HEADER_BYTES + size

    def receive(
        self, *, seconds: float | None, limit: int = MAX_PAYLOAD_BYTES, into: Tensor | None = None
    ) -> tuple[Header, memoryview]:
        """Header and payload; the payload is valid until the next call. `seconds`: None waits for as long as the other
        end is there. `into`: where a payload of exactly its size is stored."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            start = memoryview(bytearray(HEADER_BYTES))
            self._fill(start, deadline)
            magic, kind, dtype, layer, rows, top_k, handle, width, number, size = HEADER.unpack(start)
            if magic != MAGIC or size > limit:
                raise ValueError("not a message of this protocol" if magic != MAGIC else f"a message of {size} bytes")
            header = Header(Kind(kind), dtype, layer, rows, top_k, handle, width, number, size)
            if header.dtype >= len(DTYPES):
                raise ValueError(f"dtype {header.dtype}")
            payload = self._target(size, into if header.kind == Kind.RESULT else None)
            self._fill(payload, deadline)
        except (OSError, ValueError) as error:
            raise self._lost(error, seconds) from error
        self.received += HEADER_BYTES + size
        return header, payload

    def _target(self, size: int, into: Tensor | None) -> memoryview:
        if into is not None:
            view = tensor_bytes(into)
            if len(view) != size:
                raise ValueError(f"{size} bytes instead of {len(view)}")
            return view
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        while len(view):
            self._sock.settimeout(None if deadline is None else _left(deadline))
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("the connection was closed")
            view = view[count:]

    def _lost(self, error: Exception, seconds: float | None) -> ConnectionLost:
        self.close()
        if isinstance(error, TimeoutError):
            return NoAnswer(f"no answer within {seconds:g} s")
        if isinstance(error, ConnectionError):
            return ConnectionLost("the connection was closed")
        return ConnectionLost(str(error))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _skip(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after `count` bytes."""
    rest = []
    for view in views:
        taken = min(count, len(view))
        count -= taken
        if taken < len(view):
            rest.append(view[taken:])
    return rest


def read_tensor(payload: memoryview, offset: int, dtype: torch.dtype, *shape: int) -> tuple[Tensor, int]:
    """A view of the payload as a tensor, and the offset behind it."""
    count = 1
    for size in shape:
        count *= size
    end = offset + count * dtype.itemsize
    if end > len(payload):
        raise ConnectionLost(f"{len(payload)} bytes of payload where {end} are announced")
    if not count:
        return torch.empty(shape, dtype=dtype), end
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(shape), end
