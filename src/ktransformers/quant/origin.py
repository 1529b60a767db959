"""The source of a conversion: a checkpoint's configuration, its expert layers, and its other tensors.

Stock transformers builds the model on the meta device, which shows the expert modules and their layout. The experts'
tensors are read in chunks, as for loading a model (`checkpoint/sources`); the others one by one, unchanged or, if
quantised, dequantised to bf16. Experts without a module in the model (those of an MTP layer) are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ktransformers.checkpoint.dense import TOKENIZER_FILES
from ktransformers.checkpoint.gguf_directory import TOKENIZERS
from ktransformers.checkpoint.gguf_tokenizer import tokenizer_files
from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.packed import SourceFile, is_packed
from ktransformers.checkpoint.recode import Weight, single_experts
from ktransformers.checkpoint.rest import copy_small_files
from ktransformers.checkpoint.sources import LayerSource, PlainTensor, open_source
from ktransformers.checkpoint.sources.gguf_header import read_header
from ktransformers.checkpoint.tensorfile import sha256
from ktransformers.experts.contract import Contract, expert_modules, read_contract
from ktransformers.ground.errors import InputError
from ktransformers.modeling import load
from ktransformers.modeling.load import meta_model
from ktransformers.modeling.prepare import (
    open_expert_source,
    read_checkpoint_facts,
    read_config,
    split_quantisation,
    to_stock_config,
)
from ktransformers.modeling.pretrained import require_json

HASHED_PREFIX_BYTES = 1 << 20  # of a file without a safetensors header


@dataclass(frozen=True)
class OriginLayer:
    module: str
    number: int
    contract: Contract
    tensors: LayerSource

    @property
    def formats(self) -> dict[str, str]:
        """gate, up, down -> format in the source."""
        return self.tensors.formats

    @property
    def bytes(self) -> int:
        return self.tensors.bytes

    def experts(self) -> Iterator[tuple[int, dict[str, Weight]]]:
        """(expert, role -> matrix `[1, N, K]` or bias `[1, N]`)."""
        transposed, interleaved = self.contract.shape.transposed, self.contract.interleaved
        return single_experts(self.tensors.chunks(), transposed=transposed, interleaved=interleaved)


class Origin:
    def __init__(self, path: str | Path, experts: str | Path | None = None) -> None:
        """`path` is a model's directory or a GGUF file; `experts` another source of the experts, as in `load_model`."""
        self.path = Path(path)
        self.experts = None if experts is None else Path(experts)
        for checkpoint in (self.path, self.experts):
            if checkpoint is not None and is_packed(checkpoint):
                raise InputError(str(checkpoint), "a packed directory", "the checkpoint that it was made from")
        facts = read_checkpoint_facts(self.path)
        self._source = open_source(self.path, facts.rest)
        self._experts = open_expert_source(facts, self.experts) or self._source
        self.quantisation = facts.rest
        self.config = self._configuration()
        self.notes: list[str] = []  # what the result will lack
        self._tokenizer = self._embedded_tokenizer()
        modules = expert_modules(build_meta_model(self.path))
        if not modules:
            raise InputError(str(path), "a model without expert layers", "a Mixture of Experts")
        self.layers = [self._layer(name, read_contract(name, module)) for name, module in modules.items()]

    def _configuration(self) -> dict[str, Any]:
        """The contents of config.json, or the configuration that the weights carry themselves."""
        embedded = None if self._has_config() else self._source.config()
        config, _ = split_quantisation(read_config(self.directory) if embedded is None else embedded)
        return to_stock_config(config)

    def _layer(self, name: str, contract: Contract) -> OriginLayer:
        match = PLACE.fullmatch(name)
        tensors = self._experts.layer(name, contract.shape, contract.interleaved)
        return OriginLayer(name, int(match["layer"]) if match else 0, contract, tensors)

    @property
    def directory(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def name(self) -> str:
        return self.path.absolute().name

    def rest(self) -> list[PlainTensor]:
        return self._source.rest()

    def meta_model(self) -> nn.Module:
        return build_meta_model(self.path)

    def write_small_files(self, target: Path) -> None:
        """Tokenizer, generation settings, licence: the files next to the weights, or the tokenizer of a GGUF file."""
        if self.path.is_dir():
            copy_small_files(self.path, target)
        elif self._has_config():  # the folder of a single file may hold other models' files
            copy_small_files(self.directory, target, only=TOKENIZER_FILES)
        for name, text in self._tokenizer.items():
            (target / name).write_text(text)

    def _has_config(self) -> bool:
        return (self.directory / "config.json").is_file()

    def _embedded_tokenizer(self) -> dict[str, str]:
        """File name -> text of the tokenizer inside a GGUF file without one next to it. Read before the conversion, so
        that a tokenizer that cannot be rebuilt is reported at its beginning."""
        file = self._source.files[0]
        own_folder = self.path.is_dir() or self._has_config()
        if (own_folder and any((self.directory / name).is_file() for name in TOKENIZERS)) or file.suffix != ".gguf":
            return {}
        try:
            return tokenizer_files(str(file), read_header(file).fields)
        except InputError as error:
            self.notes.append(f"no tokenizer: {error}")
            return {}

    def release(self) -> None:
        """Unmap the files."""
        self._source.release()
        self._experts.release()

    @property
    def paths(self) -> list[Path]:
        return self._source.files + (self._experts.files if self._experts is not self._source else [])

    def files(self, *, hashed: bool = False) -> list[SourceFile]:
        """Fingerprints of the source files; `hashed` reads and hashes their contents."""
        return [fingerprint(path, hashed=hashed) for path in self.paths]


def build_meta_model(directory: Path) -> nn.Module:
    """The model on the meta device, once the small files that are copied with it have been checked."""
    load.load_config(directory)  # first: its errors name the model, those of the next line a file
    require_json(directory)  # tokenizer and generation_config.json, which are copied
    return meta_model(directory)


def fingerprint(path: Path, *, hashed: bool = False) -> SourceFile:
    """Name, size and hash of the header, which has every name, shape and offset; with `hashed` also of the contents. A
    blob of the hub's cache is named by its hash."""
    with path.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little") if path.suffix == ".safetensors" else HASHED_PREFIX_BYTES
        header = start + stream.read(min(length, 100 * HASHED_PREFIX_BYTES))
    blob = path.resolve().name
    content_hash = blob if re.fullmatch(r"[0-9a-f]{64}", blob) else sha256(path) if hashed else None
    return SourceFile(
        name=path.name, bytes=path.stat().st_size, header_sha256=hashlib.sha256(header).hexdigest(), sha256=content_hash
    )
