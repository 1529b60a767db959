"""LoRA factors of one node's experts of one layer as a message: a JSON description, then the factors one after the
other. `pairs` are those of `adapters/lora.py`, a `[E, r, in]` and b `[E, out, r]` of gate, up and down; an A that gate
and up share is sent once."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ktransformers.adapters import LoraPair
from ktransformers.serve.nodes.wire import DTYPES as WIRE_DTYPES
from ktransformers.serve.nodes.wire import MAX_TEXT_BYTES, ConnectionLost, dtype_code, read_tensor, tensor_bytes

LENGTH = struct.Struct("<Q")
ALIGNMENT = 8


def select_experts(pairs: Mapping[str, LoraPair], experts: Sequence[int]) -> dict[str, LoraPair]:
    """The factors of these experts; a shared A stays shared."""
    index = torch.tensor(list(experts), dtype=torch.long)
    chosen: dict[int, Tensor] = {}
    selected = {}
    for role, pair in pairs.items():
        a = chosen.setdefault(id(pair.a), pair.a[index])
        selected[role] = LoraPair(a, pair.b[index], pair.scaling)
    return selected


def encode_pairs(what: str, pairs: Mapping[str, LoraPair]) -> list[memoryview | bytes]:
    parts: list[memoryview | bytes] = []
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    rows = {}
    for role, pair in pairs.items():
        for tensor in (pair.a, pair.b):
            if id(tensor) not in places:
                places[id(tensor)] = len(tensors)
                tensors.append(tensor.to(torch.float32) if tensor.dtype not in WIRE_DTYPES else tensor)
        rows[role] = [places[id(pair.a)], places[id(pair.b)], pair.scaling]
    described = {
        "what": what,
        "pairs": rows,
        "tensors": [[dtype_code(tensor.dtype), list(tensor.shape)] for tensor in tensors],
    }
    document = json.dumps(described).encode()
    document += b" " * (-len(document) % ALIGNMENT)
    parts += [LENGTH.pack(len(document)), document]
    for tensor in tensors:
        data = tensor_bytes(tensor)
        parts += [data, b"\0" * (-len(data) % ALIGNMENT)]
    return parts


def decode_pairs(payload: memoryview) -> tuple[str, dict[str, LoraPair]]:
    """What the factors belong to, for errors, and views of the payload."""
    (length,) = LENGTH.unpack(payload[: LENGTH.size])
    if length > min(MAX_TEXT_BYTES, len(payload) - LENGTH.size):
        raise ConnectionLost("a message of LoRA factors without its description")
    document = json.loads(bytes(payload[LENGTH.size : LENGTH.size + length]))
    offset, tensors = LENGTH.size + length, list[Tensor]()
    for code, shape in document["tensors"]:
        tensor, offset = read_tensor(payload, offset, WIRE_DTYPES[code], *shape)
        tensors.append(tensor)
        offset += -offset % ALIGNMENT
    pairs = {
        role: LoraPair(tensors[a], tensors[b], float(scaling)) for role, (a, b, scaling) in document["pairs"].items()
    }
    return str(document["what"]), pairs
