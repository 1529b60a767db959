"""Experts of a packed directory: files are memory-mapped, and stores compute from the mapping without a copy.

Opening reads the headers and the manifest. Pages are read when a token is routed to their expert, and all processes
share them. On several NUMA nodes each page is read in on the node that computes with it. An expert is compared with its
checksum when it is first computed with or copied to a GPU. A directory with another layout version than these kernels,
or of another model, is refused before transformers loads anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.mapped import check_pages, load_pages, map_file
from ktransformers.checkpoint.matrix import DTYPES
from ktransformers.checkpoint.packed import (
    MANIFEST_FILE,
    REPACK_HINT,
    PackedLayer,
    check_shards,
    checksums_name,
    is_packed,
    read_manifest,
    read_packed_section,
    verify_packed,
)
from ktransformers.experts.contract import Contract, new_store
from ktransformers.experts.store import LAYOUT_VERSION, ExpertStore
from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger

log = logger(__name__)


class PackedExperts:
    def __init__(self, directory: Path, *, pages: str = "lazy", verify: bool | None = None) -> None:
        check_pages(pages)
        self.directory = directory
        self._pages = pages
        self._manifest = verify_packed(directory) if verify else read_manifest(directory)
        if self._manifest.layout != LAYOUT_VERSION:
            raise InputError(
                str(directory / MANIFEST_FILE),
                f"experts packed in layout {self._manifest.layout}",
                f"layout {LAYOUT_VERSION}, which this version of ktransformers computes with",
                REPACK_HINT,
            )
        self._layouts = check_shards(directory, self._manifest)
        self._compares = verify is not False and env.verify_enabled()
        self._mapped: dict[str, Tensor] = {}  # file -> its bytes: several layers may be of one file
        self._said_unverified = False

    @property
    def has_quantized_linears(self) -> bool:
        return bool(self._manifest.linears)

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors in the packed files."""
        return [name for layer in self._manifest.layers for name in self._layouts[layer.file].slots]

    def check(self, name: str, contract: Contract) -> PackedLayer:
        """The manifest's entry for the module `name` of the model; its shape must be that of the module."""
        layer, shape = self._manifest.locate(name), contract.shape
        given = (layer.experts, layer.hidden, layer.intermediate, layer.gated, layer.biased)
        expected = (shape.num_experts, shape.hidden, shape.intermediate, shape.gated, shape.biased)
        if given != expected:
            text = "{} experts, hidden {}, intermediate {}, gated {}, biased {}"
            file = str(self.directory / layer.file)
            raise InputError(file, text.format(*given), f"{text.format(*expected)}, as config.json says", REPACK_HINT)
        return layer

    def store(
        self,
        name: str,
        contract: Contract,
        *,
        pool: _core.Pool | None = None,
        isa: str | None = None,
        precision: str = "bf16",
        order: Sequence[int] | None = None,
    ) -> ExpertStore:
        """A store over the mapped experts of the module `name`. With an `order`, expert i is the file's `order[i]`: a
        range of the file's experts is mapped, any other order is copied. An order may leave experts out, and the bytes
        of those are not read."""
        layer = self.check(name, contract)
        if precision != "bf16" and "bf16" in layer.formats.values():
            raise InputError(
                "precision", precision, "bf16: these experts are packed in it", "open the checkpoint they come from"
            )
        chosen = list(range(layer.experts) if order is None else order)
        options: Any = {"pool": pool, "isa": isa, "precision": precision, "formats": layer.formats}
        store = new_store(contract, **options, experts=len(chosen))
        is_part = len(chosen) < layer.experts
        if is_part and self._pages != "lazy":
            raise InputError("pages", self._pages, "lazy with a part of the experts")
        path = self.directory / layer.file
        if layer.file not in self._mapped:
            self._mapped[layer.file] = map_file(path)
        file = self._mapped[layer.file]
        slots = self._layouts[layer.file].slots
        parts: dict[str, Tensor] = {}
        for role, tensor in layer.tensors.items():
            slot = slots[tensor]
            data = file[slot.offset : slot.offset + slot.bytes]
            parts[role] = data if slot.dtype == "U8" else data.view(DTYPES[slot.dtype]).view(slot.shape)
        checksums = self._checksums(file, layer)
        if chosen != list(range(layer.experts)):
            index = _as_index(chosen)
            parts = {role: _select(part, layer.experts, index) for role, part in parts.items()}
            checksums = None if checksums is None else checksums[index].contiguous()
        # Roles are the names of adopt's arguments.
        store.adopt(**parts, checksums=checksums, source=f"{path}, layer {layer.module}")
        if self._pages != "lazy":
            store.place_pages()  # before one thread reads all of them
            load_pages(path, file, self._pages)
        return store

    def _checksums(self, file: Tensor, layer: PackedLayer) -> Tensor | None:
        """The checksums of the layer's experts; None if there are none or they are not wanted."""
        stored_as = layer.tensors["down"].rpartition(".")[0]  # another module, if several layers are of one file
        slot = self._layouts[layer.file].slots.get(checksums_name(stored_as))
        if slot is None or not self._compares:
            if not self._said_unverified:
                self._said_unverified = True
                reason = "as asked for" if slot is not None else "they have no checksums: packed by an older version"
                log.warning("%s: experts are not verified, %s", self.directory, reason)
            return None
        if (slot.dtype, slot.shape) != ("I64", (layer.experts,)):
            given = f"checksums of {slot.dtype} {list(slot.shape)}"
            raise InputError(str(self.directory / layer.file), given, f"I64 [{layer.experts}]", REPACK_HINT)
        return file[slot.offset : slot.offset + slot.bytes].view(torch.int64)


def _as_index(experts: list[int]) -> slice | list[int]:
    """A slice for a range of experts, which needs no copy."""
    first = experts[0]
    is_range = experts == list(range(first, first + len(experts)))
    return slice(first, first + len(experts)) if is_range else experts


def _select(part: Tensor, experts: int, index: slice | list[int]) -> Tensor:
    rows = part.view(experts, -1)[index]
    return rows.reshape(-1) if part.dim() == 1 else rows.reshape(len(rows), *part.shape[1:])


def open_packed(
    files: Sequence[str | Path], *, pages: str = "lazy", verify: bool | None = None
) -> PackedExperts | None:
    """The packed experts in the directory of these files; None for an ordinary checkpoint."""
    directory = Path(files[0]).parent
    if not is_packed(directory) and not read_packed_section(directory):
        return None
    return PackedExperts(directory, pages=pages, verify=verify)
