"""Experts from a packed directory: mapped, not read, and handed to stores as they lie.

Opening costs the headers and the manifest; pages come when a token asks for its experts, and every process that opens
the directory shares them. On several NUMA nodes a store copies its slices instead. A directory whose layout is not that
of these kernels, or that does not fit the model, is refused before transformers loads anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.mapped import check_pages, map_file
from ktransformers.checkpoint.matrix import DTYPES
from ktransformers.checkpoint.packed import (
    AGAIN,
    MANIFEST,
    PackedLayer,
    check_shards,
    is_packed,
    packed_words,
    read_manifest,
    verify_packed,
)
from ktransformers.errors import InputError
from ktransformers.nn.contract import Contract
from ktransformers.nn.experts import new_store
from ktransformers.nn.store import LAYOUT_VERSION, ExpertStore


class PackedExperts:
    def __init__(self, directory: Path, *, pages: str = "lazy", verify: bool = False) -> None:
        check_pages(pages)
        self.directory = directory
        self._pages = pages
        self._manifest = verify_packed(directory) if verify else read_manifest(directory)
        if self._manifest.layout != LAYOUT_VERSION:
            raise InputError(
                str(directory / MANIFEST),
                f"experts packed in layout {self._manifest.layout}",
                f"layout {LAYOUT_VERSION}, which this version of ktransformers computes with",
                AGAIN,
            )
        self._layouts = check_shards(directory, self._manifest)

    @property
    def tensors(self) -> list[str]:
        """Names of what lies in the packed files."""
        return [name for layer in self._manifest.layers for name in self._layouts[layer.file].slots]

    def check(self, name: str, contract: Contract) -> PackedLayer:
        """The packed experts of the model's module `name`, of its shape."""
        found, shape = self._manifest.locate(name), contract.shape
        given = (found.experts, found.hidden, found.intermediate, found.gated, found.biased)
        wanted = (shape.num_experts, shape.hidden, shape.intermediate, shape.gated, shape.biased)
        if given != wanted:
            words = "{} experts, hidden {}, intermediate {}, gated {}, biased {}"
            where = str(self.directory / found.file)
            raise InputError(where, words.format(*given), f"{words.format(*wanted)}, as config.json says", AGAIN)
        return found

    def store(
        self,
        name: str,
        contract: Contract,
        *,
        pool: _core.Pool | None = None,
        isa: str | None = None,
        precision: str = "bf16",
    ) -> ExpertStore:
        layer = self.check(name, contract)
        if precision != "bf16" and "bf16" in layer.formats.values():
            raise InputError(
                "precision", precision, "bf16: these experts are packed in it", "open what they were made from"
            )
        store = new_store(contract, pool=pool, isa=isa, precision=precision, formats=layer.formats)
        file = map_file(self.directory / layer.file, self._pages)
        slots = self._layouts[layer.file].slots
        parts: dict[str, Tensor] = {}
        for role, tensor in layer.tensors.items():
            slot = slots[tensor]
            data = file[slot.offset : slot.offset + slot.bytes]
            parts[role] = data if slot.dtype == "U8" else data.view(DTYPES[slot.dtype]).view(slot.shape)
        store.adopt(**parts)  # roles are the names of adopt's arguments
        return store


def open_packed(files: Sequence[str | Path], *, pages: str = "lazy", verify: bool = False) -> PackedExperts | None:
    """The packed experts beside a checkpoint's files; None where it is an ordinary checkpoint."""
    directory = Path(files[0]).parent
    if not is_packed(directory) and not packed_words(directory):
        return None
    return PackedExperts(directory, pages=pages, verify=verify)
