"""Blocks of cached tokens: what the lower tiers of the KV cache store, and the hashes that name them.

A block of the cache (`kv_cache.py`) has BLOCK_TOKENS tokens of every part of every layer. In a lower tier it is one
flat run of bytes, and `BlockLayout` says where each part lies in it.

Blocks are named by a hash chain: `hash(name of the block before, its token ids)`. The chain begins at a root, the hash
of everything else that keys and values depend on: the model, the adapter's content, dtype, shapes and the format's
version. Two blocks of one name hold the same numbers, in this process and in a file of an earlier one.

Families with convolution or recurrent states can be continued only where a copy of the states exists (`snapshots.py`).
Such a copy is stored in pieces of the size of a block, named by the block that it follows: records stay of one size,
whether a state is larger than a block or smaller.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, BlockMemory
from ktransformers.serve.cache.snapshots import States

BLOCK_FORMAT = 1  # of the bytes of a block and of its name
HASH_BYTES = 20
ALIGNMENT = 64  # bytes, of each part in a block

BlockHash = bytes


@dataclass(frozen=True)
class PartPlace:
    """Where one part of one layer lies in a block: `[heads, BLOCK_TOKENS, size]` from `offset`."""

    part: str
    layer: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device
    offset: int

    @property
    def bytes(self) -> int:
        return self.heads * BLOCK_TOKENS * self.size * self.dtype.itemsize

    @property
    def like(self) -> Tensor:
        """As `BlockMemory.part` takes it."""
        return torch.empty(self.heads, 0, self.size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class StatePlace:
    """Where one state of one layer lies in the copy of a sequence's states."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BlockLayout:
    places: tuple[PartPlace, ...]  # those of a device are adjacent
    bytes: int  # of a block
    states: tuple[StatePlace, ...] = ()

    @classmethod
    def of_memory(cls, memory: BlockMemory, states: States) -> BlockLayout | None:
        """That of a memory in which a sequence was computed, and of its states; None: it holds nothing per token."""
        parts = [
            (str(tensor.device), layer, part, tensor)
            for part, tensors in memory.parts.items()
            for layer, tensor in tensors.items()
        ]
        places, offset = [], 0
        for _, layer, part, tensor in sorted(parts, key=lambda entry: entry[:3]):
            heads, _, _, size = tensor.shape
            place = PartPlace(part, layer, heads, size, tensor.dtype, tensor.device, offset)
            places.append(place)
            offset += -(-place.bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), offset, _state_places(states)) if places else None

    @cached_property
    def state_pieces(self) -> int:
        """Blocks that a copy of the states takes; 0: the family has none."""
        return -(-(self.states[-1].offset + self.states[-1].bytes) // self.bytes) if self.states else 0

    @cached_property
    def segments(self) -> list[tuple[torch.device, int, int]]:
        """(device, first byte, last byte + 1) of each device."""
        devices = list(dict.fromkeys(place.device for place in self.places))
        firsts = [next(place.offset for place in self.places if place.device == device) for device in devices]
        return list(zip(devices, firsts, [*firsts[1:], self.bytes], strict=True))

    def places_on(self, device: torch.device) -> Iterator[PartPlace]:
        return (place for place in self.places if place.device == device)

    def describe(self) -> str:
        """Everything that the bytes of a block depend on except its tokens and weights."""
        parts = [
            f"{place.layer}:{place.part}:{place.heads}x{place.size}:{place.dtype}@{place.offset}"
            for place in sorted(self.places, key=lambda place: (place.layer, place.part))
        ]
        states = [f"{place.layer}:{place.name}:{place.shape}:{place.dtype}@{place.offset}" for place in self.states]
        return " ".join([*parts, *states])

    def matches(self, memory: BlockMemory) -> bool:
        """Whether it holds exactly these parts."""
        held = {(part, layer): tensor for part, tensors in memory.parts.items() for layer, tensor in tensors.items()}
        return len(held) == len(self.places) and all(
            (tensor := held.get((place.part, place.layer))) is not None
            and (tensor.shape[0], tensor.shape[3], tensor.dtype) == (place.heads, place.size, place.dtype)
            for place in self.places
        )

    def matches_states(self, states: States) -> bool:
        held = {(layer, name): state for layer, kept in states.items() for name, state in kept.items()}
        return len(held) == len(self.states) and all(
            (state := held.get((place.layer, place.name))) is not None
            and (tuple(state.shape), state.dtype) == (place.shape, place.dtype)
            for place in self.states
        )

    def pack_states(self, states: States) -> Tensor:
        """uint8 `[state_pieces, bytes]` on the device of the first state."""
        flat = torch.empty(self.state_pieces * self.bytes, dtype=torch.uint8, device=self.states[0].device)
        for place in self.states:
            numbers = flat[place.offset : place.offset + place.bytes].view(place.dtype).view(place.shape)
            numbers.copy_(states[place.layer][place.name], non_blocking=True)
        return flat.view(self.state_pieces, self.bytes)

    def unpack_states(self, pieces: Tensor) -> States:
        """The inverse of `pack_states`; the states are copies."""
        states, flat = States(), pieces.view(-1)
        for place in self.states:
            numbers = flat[place.offset : place.offset + place.bytes].view(place.dtype).view(place.shape)
            states.put(place.layer, place.name, numbers.to(place.device, copy=True))
        return states


def _state_places(states: States) -> tuple[StatePlace, ...]:
    places, offset = [], 0
    for layer, kept in sorted(states.items()):
        for name, state in sorted(kept.items()):
            place = StatePlace(layer, name, tuple(state.shape), state.dtype, state.device, offset)
            places.append(place)
            offset += -(-place.bytes // ALIGNMENT) * ALIGNMENT
    return tuple(places)


def root_hash(identity: bytes, adapter: bytes, layout: BlockLayout) -> BlockHash:
    """Where the chains of a model begin under an adapter; `adapter` is empty for the base."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"kt kv block")
    for text in (struct.pack("<II", BLOCK_FORMAT, BLOCK_TOKENS), identity, adapter, layout.describe().encode()):
        digest.update(struct.pack("<Q", len(text)) + text)
    return digest.digest()


def block_hashes(root: BlockHash, tokens: Sequence[int]) -> list[BlockHash]:
    """Names of the whole blocks at the beginning of `tokens`."""
    names, name = [], root
    for first in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        ids = array("q", tokens[first : first + BLOCK_TOKENS]).tobytes()
        name = hashlib.blake2b(name + ids, digest_size=HASH_BYTES).digest()
        names.append(name)
    return names


def state_names(name: BlockHash, pieces: int) -> list[BlockHash]:
    """Names of the pieces of the states after the block of that name."""
    return [
        hashlib.blake2b(name + b"state" + struct.pack("<I", piece), digest_size=HASH_BYTES).digest()
        for piece in range(pieces)
    ]


def copy_from_memory(
    memory: BlockMemory, places: Iterator[PartPlace], numbers: Sequence[int], blocks: Tensor, origin: int = 0
) -> None:
    """Copy the blocks with these numbers into uint8 `[n, bytes]`, whose byte 0 is byte `origin` of a block."""
    for place in places:
        held = memory.parts[place.part][place.layer]
        _in_blocks(place, blocks, origin).copy_(held[:, _index(numbers, held.device)], non_blocking=True)


def copy_to_memory(
    memory: BlockMemory, places: Iterator[PartPlace], numbers: Sequence[int], blocks: Tensor, origin: int = 0
) -> None:
    """The inverse of `copy_from_memory`; parts that the memory lacks are allocated."""
    for place in places:
        held = memory.part(place.part, place.layer, place.like)
        held[:, _index(numbers, held.device)] = _in_blocks(place, blocks, origin)


def _index(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """A slice where they follow each other, so that indexing copies nothing."""
    first = numbers[0]
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers).to(device, non_blocking=True)


def _in_blocks(place: PartPlace, blocks: Tensor, origin: int) -> Tensor:
    """[heads, n, BLOCK_TOKENS, size], a view of uint8 `[n, bytes]`."""
    start = place.offset - origin
    numbers = blocks[:, start : start + place.bytes].view(place.dtype)
    return numbers.view(-1, place.heads, BLOCK_TOKENS, place.size).transpose(0, 1)
