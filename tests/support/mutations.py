"""Damaged copies of a file, from a seed: bytes that flipped, files that were cut, and documents in which a value was
exchanged for one of another type or of absurd size."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

NUMBERS = [0, 1, -1, 2**31, 2**40, 2**63, -(2**63), 2**64, 10**30, 0.5, -1e308, float("nan"), float("inf"), 255]
VALUES: list[Any] = [*NUMBERS, None, True, False, "", "x", "\0", "\ud800", "../..", "1" * 300, [], [[]], [None], {}]
VALUES += [{"": None}, {"a": {"b": []}}, ["a", 1, None], "(", "(a+)+$"]
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes; most of them near the beginning, where headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        reach = rng.choice((64, 512, 4096, len(changed)))
        at = rng.randrange(max(1, min(reach, len(changed))))
        size = rng.choice((1, 1, 2, 4, 8, 64))
        kind = rng.randrange(7)
        if kind == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + size] = rng.randbytes(size)
        elif kind == 2:
            changed[at : at + size] = b"\xff" * size
        elif kind == 3:
            changed[at : at + size] = b"\0" * size
        elif kind == 4:
            del changed[at : at + size]
        elif kind == 5:
            changed[at:at] = changed[at : at + size * 8]
        else:
            del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


def damage_number(data: bytes, rng: random.Random) -> bytes:
    """A number of a text exchanged for another."""
    spots = list(NUMBER.finditer(data))
    if not spots:
        return damage_bytes(data, rng)
    spot = rng.choice(spots)
    return data[: spot.start()] + json.dumps(rng.choice(VALUES)).encode() + data[spot.end() :]


def _places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _places(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document[:50]):
            yield from _places(value, (*path, index))


def damage_document(document: Any, rng: random.Random) -> Any:
    """A JSON document with a value exchanged, a key removed or renamed, or an element repeated."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(list(_places(changed)))
        if not path:
            return copy.deepcopy(rng.choice(VALUES))
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        kind = rng.randrange(5)
        if kind < 3:
            parent[path[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3:
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[rng.choice(("", "x", "\0", "tensors", "r"))] = parent.pop(path[-1])
        else:
            parent.insert(0, copy.deepcopy(parent[path[-1]]))
    return changed


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """By its values mostly, by its bytes sometimes; lines of JSON one line at a time."""
    if rng.randrange(4) == 0:
        return rng.choice((damage_bytes, damage_number))(data, rng)
    try:
        return json.dumps(damage_document(json.loads(data), rng)).encode()
    except ValueError:
        lines = data.split(b"\n")
        index = rng.choice([number for number, line in enumerate(lines) if line.strip()])
        lines[index] = json.dumps(damage_document(json.loads(lines[index]), rng)).encode()
        return b"\n".join(lines)


def damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header as a document, or the bytes."""
    if rng.randrange(2):
        return damage_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(damage_document(json.loads(data[8 : 8 + length]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def damage_yaml(data: bytes, rng: random.Random) -> bytes:
    import yaml

    if rng.randrange(3) == 0:
        return rng.choice((damage_bytes, damage_number))(data, rng)
    document = damage_document(yaml.safe_load(data), rng)
    return json.dumps(document).encode()  # JSON is YAML
