"""Writes the file of one layer's packed experts from a staging store that holds a few experts at a time.

Experts are contiguous in the packed layout, so the bytes of a store with n experts are a slice of the layer's bytes and
are written to its offset. The file is laid out after the first experts are packed, because the sizes of biases are not
known before.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.checkpoint.packed import PackedLayer, checksums_name
from ktransformers.checkpoint.tensorfile import FileLayout, TensorFile, plan_layout
from ktransformers.experts.store import LAYOUT_VERSION, ExpertStore
from ktransformers.quant.plan import LayerPlan


class LayerFile:
    def __init__(self, plan: LayerPlan, directory: Path, conversion: str, store: ExpertStore) -> None:
        self._plan = plan
        self._path = directory / plan.file
        self._metadata = {"format": "kt", "conversion": conversion, "layout": str(LAYOUT_VERSION)}
        self._store = store
        self._shape = plan.origin.contract.shape
        self._checksums = checksums_name(plan.origin.module)
        self._file: TensorFile | None = None

    def flush(self, expert: int) -> None:
        """Call after `expert` was packed: writes the store's bytes if it is full or `expert` is the last one."""
        capacity = self._store.num_experts
        count = expert % capacity + 1
        if count < capacity and expert + 1 < self._shape.num_experts:
            return
        tensors = self._store.memory()
        if self._file is None:
            self._file = TensorFile(self._path, self._layout(tensors))
        checksums = torch.tensor(self._store.checksums()[:count])
        self._file.write(self._checksums, checksums, checksums.itemsize * (expert + 1 - count))
        for role, tensor in tensors.items():
            packed = tensor.reshape(-1)[: tensor.numel() // capacity * count]
            self._file.write(self._name(role), packed, tensor.nbytes // capacity * (expert + 1 - count))

    def _layout(self, tensors: dict[str, Tensor]) -> FileLayout:
        experts, capacity = self._shape.num_experts, self._store.num_experts
        entries = []
        for role, tensor in tensors.items():
            shape = (tensor.numel() // capacity * experts,) if tensor.dim() == 1 else (experts, *tensor.shape[1:])
            entries.append((self._name(role), SPELLED[tensor.dtype], shape))
        entries.append((self._checksums, SPELLED[torch.int64], (experts,)))
        return plan_layout(entries, self._metadata, padding=f"{self._plan.origin.module}.padding")

    def _name(self, role: str) -> str:
        """Name of the model's parameter that the packed tensor replaces."""
        parameters = self._plan.origin.contract.parameters()
        return f"{self._plan.origin.module}.{parameters.get(role) or parameters[role.replace('gate_up', 'up')]}"

    def manifest(self) -> PackedLayer:
        """The layer's entry of the manifest."""
        shape, capacity = self._shape, self._store.num_experts
        tensors = self._store.memory()
        return PackedLayer(
            module=self._plan.origin.module,
            file=self._plan.file,
            experts=shape.num_experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            gated=shape.gated,
            biased=shape.biased,
            formats=self._plan.formats,
            tensors={role: self._name(role) for role in tensors},
            bytes={role: tensor.nbytes // capacity * shape.num_experts for role, tensor in tensors.items()},
            layout=self._store.layout(),
        )

    def finish(self) -> None:
        assert self._file is not None
        self._file.finish()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
