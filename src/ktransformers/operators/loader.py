"""`Loader`: tensors of a checkpoint by their Hugging Face names, whatever files it has (safetensors, quantised or not,
GGUF, kt-kernel's output). An operator gets it as `gguf_loader`, the name that KTransformers gives to this argument.

Files are opened when the first tensor is asked for, and mapped: a tensor is read when it is loaded.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.sources import PlainTensor, Source, open_source
from ktransformers.checkpoint.sources.gguf import gguf_files
from ktransformers.ground.errors import InputError, nearest
from ktransformers.modeling.prepare import read_checkpoint_facts


class Loader:
    """All tensors but those of the routed experts, which are in stores."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @functools.cached_property
    def source(self) -> Source:
        return open_source(self.path, read_checkpoint_facts(self.path).rest)

    @functools.cached_property
    def _tensors(self) -> dict[str, PlainTensor]:
        return {tensor.name: tensor for tensor in self.source.rest()}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def load_tensor(
        self, name: str, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Dequantised to bf16 if the file has it quantised."""
        return self._find(name).read().to(device=device or "cpu", dtype=dtype)

    def codes(self, name: str) -> Encoded | None:
        """The matrix as the file has it quantized. None if it is dense, or there is no such tensor."""
        tensor = self._tensors.get(name)
        matrix = None if tensor is None or tensor.quantized is None else tensor.quantized()
        return matrix if isinstance(matrix, Encoded) else None

    def release(self) -> None:
        """Unmap the files; the next access maps them again."""
        if "source" in self.__dict__:
            self.source.release()

    def _find(self, name: str) -> PlainTensor:
        if name not in self._tensors:
            expected = nearest(name, self._tensors, "a tensor of these files")
            raise InputError(name, f"no such tensor in {self.path}", expected)
        return self._tensors[name]


class GGUFLoader(Loader):
    """Of a GGUF file, or a directory of them. Tensors have their Hugging Face names."""

    def __init__(self, gguf_path: str | Path) -> None:
        super().__init__(gguf_path)
        if not gguf_files(self.path):
            raise InputError("gguf_path", self.path, "a GGUF file, or a directory of them")
