"""The interface of a source of weights: expert layers in the formats of the release, and all other tensors unquantised
under Hugging Face names.

A source reads files and has no knowledge of models: the caller passes the name of an experts module and its shape.
Opening reads headers; data is memory-mapped and read on access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, decode
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape, Formats


@dataclass(frozen=True)
class MappedWeight:
    """A matrix in the blocks that the core multiplies, in the file's own memory."""

    core: _core.CodedLinear
    format: str
    order: Tensor | None  # of columns, as in `Encoded`


@dataclass(frozen=True)
class PlainTensor:
    """A non-expert tensor. `read` dequantises to bf16 if the file has it quantised."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    quantized: Callable[[], Tensor | Encoded] | None = None  # the same matrix as the file has it quantised
    format: str = ""  # of the quantized matrix; empty if the tensor is dense
    packed: Callable[[_core.Pool, bool], MappedWeight] | None = None  # of a packed directory; whether to verify
    exact: Callable[[], Tensor] | None = None  # a packed matrix, dequantized to float32

    def numbers(self) -> Tensor:
        """In float32, not rounded to bf16 where the file is quantised."""
        if self.exact is not None:
            return self.exact()
        encoded = None if self.quantized is None else self.quantized()
        return decode(encoded).reshape(self.shape) if isinstance(encoded, Encoded) else self.read().float()


class ReadChunks(Protocol):
    """The layer's experts in chunks, in order; of `experts` alone, if given: then a chunk is one expert, and the bytes
    of the others are not read."""

    def __call__(self, experts: Sequence[int] | None = None) -> Iterator[ExpertChunk]: ...


@dataclass(frozen=True)
class LayerSource:
    formats: Formats  # of gate, up and down
    bytes: int  # in the files
    chunks: ReadChunks
    expert: Callable[[int], ExpertChunk] | None = None  # one of them, if the files can be read at any place


class Source(Protocol):
    path: Path

    @property
    def files(self) -> list[Path]: ...

    @property
    def expert_roots(self) -> list[str]:
        """Prefix of `.experts` in module names, for every layer with experts."""
        ...

    @property
    def quantised(self) -> bool:
        """Whether non-expert tensors must be dequantised or converted before stock transformers can load them."""
        ...

    def config(self) -> dict[str, Any] | None:
        """The contents of a Hugging Face config.json, if the weights themselves carry the configuration."""
        ...

    def layer(self, module: str, shape: ExpertShape, interleaved: bool = False) -> LayerSource:
        """The experts of a module, checked against the headers; an error names a missing or misshapen tensor."""
        ...

    def rest(self) -> list[PlainTensor]: ...

    def release(self) -> None:
        """Unmap the files; the next access maps them again."""
        ...
