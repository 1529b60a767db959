"""A source of experts alone: the tree of `.kt` files that kt-kernel's converter writes beside no other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktransformers.checkpoint.experts import ExpertShape
from ktransformers.checkpoint.sources.kt_kernel import KTLayers
from ktransformers.checkpoint.sources.source import LayerSource, PlainTensor


class TreeSource:
    quantised = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._layers = KTLayers.of_tree(path)

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("_layer_*/_numa_*/*.kt"))

    @property
    def expert_roots(self) -> list[str]:
        return self._layers.roots

    def config(self) -> dict[str, Any] | None:
        return None

    def layer(self, module: str, shape: ExpertShape, interleaved: bool = False) -> LayerSource:
        return self._layers.layer(module, shape)

    def rest(self) -> list[PlainTensor]:
        return []

    def release(self) -> None:
        """Files are read one at a time; nothing is held."""
