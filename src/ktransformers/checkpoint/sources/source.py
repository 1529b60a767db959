"""What every source of weights offers: layers of experts in the bytes of the release, and all other tensors as plain
numbers under Hugging Face names.

A source knows files and nothing of models: whoever has the model names the module whose experts it wants and what shape
they must have. Opening costs headers; data is mapped and read when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape, Formats


@dataclass(frozen=True)
class PlainTensor:
    """Not an expert. `read` decodes where the file has it quantised, then to bf16."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class LayerSource:
    formats: Formats  # of gate, up and down
    bytes: int  # in the files
    chunks: Callable[[], Iterator[ExpertChunk]]


class Source(Protocol):
    path: Path

    @property
    def files(self) -> list[Path]: ...

    @property
    def expert_roots(self) -> list[str]:
        """What stands before `experts` in the names of modules, for every layer that has some."""
        ...

    @property
    def quantised(self) -> bool:
        """Something in it has to be decoded before stock transformers can use it."""
        ...

    def config(self) -> dict[str, Any] | None:
        """A config.json in the words of Hugging Face, where the weights themselves carry it."""
        ...

    def layer(self, module: str, shape: ExpertShape, interleaved: bool = False) -> LayerSource:
        """Checked by the headers; an error names what is missing or misshapen."""
        ...

    def rest(self) -> list[PlainTensor]: ...

    def release(self) -> None:
        """Let go of the maps; the next question takes them again."""
        ...
