"""What a conversion starts from: a checkpoint's configuration, its layers of experts, and everything else.

The model is built without memory, by stock transformers, to learn which of its modules are experts and how they lie;
their tensors come in pieces, as when a model is loaded (`checkpoint/sources`). All others come one by one, as they are,
or decoded to bf16 where they are quantised. Experts that the model has no module for (an MTP layer's) are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from ktransformers.checkpoint.dense import TOKENIZER_FILES
from ktransformers.checkpoint.gguf_tokenizer import tokenizer_files
from ktransformers.checkpoint.layout import PLACE
from ktransformers.checkpoint.packed import SourceFile, is_packed
from ktransformers.checkpoint.recode import Weight, split
from ktransformers.checkpoint.rest import copy_small_files
from ktransformers.checkpoint.sources import LayerSource, PlainTensor, open_source
from ktransformers.checkpoint.sources.gguf_header import read_header
from ktransformers.checkpoint.tensorfile import sha256
from ktransformers.errors import InputError
from ktransformers.nn import load
from ktransformers.nn.contract import Contract, expert_modules, read_contract
from ktransformers.nn.prepare import read_config, split_quantisation, to_stock_config

HASHED_PREFIX_BYTES = 1 << 20  # bytes of a file that has no safetensors header
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


@dataclass(frozen=True)
class OriginLayer:
    module: str
    number: int
    contract: Contract
    tensors: LayerSource

    @property
    def formats(self) -> dict[str, str]:
        """gate, up, down -> as released."""
        return self.tensors.formats

    @property
    def bytes(self) -> int:
        return self.tensors.bytes

    def experts(self) -> Iterator[tuple[int, dict[str, Weight]]]:
        """(first expert, roles `[E, N, K]` and `[E, N]`): an expert at a time, or a layer in views of the file."""
        transposed, interleaved = self.contract.shape.transposed, self.contract.interleaved
        for piece in self.tensors.chunks():
            yield piece.first_expert, split(piece, transposed=transposed, interleaved=interleaved)


class Origin:
    def __init__(self, path: str | Path, experts: str | Path | None = None) -> None:
        """A model's directory or a GGUF file; `experts` is another place for the experts, as in `load_model`."""
        self.path = Path(path)
        self.experts = None if experts is None else Path(experts)
        for place in (self.path, self.experts):
            if place is not None and is_packed(place):
                raise InputError(str(place), "a packed directory", "the checkpoint that it was made from")
        told = load.read_checkpoint_facts(self.path)
        self._source = open_source(self.path, told.rest)
        self._experts = load.open_expert_source(told, self.experts) or self._source
        self.quantisation = told.rest
        self.config = self._configuration()
        self.notes: list[str] = []  # what the result will lack
        self._tokenizer = self._carried_tokenizer()
        modules = expert_modules(build_meta_model(self.path))
        if not modules:
            raise InputError(str(path), "a model without expert layers", "a Mixture of Experts")
        self.layers = [self._layer(name, read_contract(name, module)) for name, module in modules.items()]

    def _configuration(self) -> dict[str, Any]:
        """The words of config.json, from beside the weights or from inside them."""
        carried = None if self._has_config() else self._source.config()
        words, _ = split_quantisation(read_config(self.directory) if carried is None else carried)
        return to_stock_config(words)

    def _layer(self, name: str, contract: Contract) -> OriginLayer:
        place = PLACE.fullmatch(name)
        tensors = self._experts.layer(name, contract.shape, contract.interleaved)
        return OriginLayer(name, int(place["layer"]) if place else 0, contract, tensors)

    @property
    def directory(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def name(self) -> str:
        return self.path.absolute().name

    def rest(self) -> list[PlainTensor]:
        return self._source.rest()

    def write_small_files(self, target: Path) -> None:
        """Tokenizer, generation settings, licence: those beside the weights, or the tokenizer inside a GGUF file."""
        if self.path.is_dir():
            copy_small_files(self.path, target)
        elif self._has_config():  # other models may lie beside a file
            copy_small_files(self.directory, target, only=TOKENIZER_FILES)
        for name, text in self._tokenizer.items():
            (target / name).write_text(text)

    def _has_config(self) -> bool:
        return (self.directory / "config.json").is_file()

    def _carried_tokenizer(self) -> dict[str, str]:
        """File name -> text, out of a GGUF file that has none beside it. Asked at the beginning: at the end of a
        conversion nothing should come as a surprise."""
        file = self._source.files[0]
        beside = (self.path.is_dir() or self._has_config()) and any((self.directory / n).is_file() for n in TOKENIZERS)
        if beside or file.suffix != ".gguf":
            return {}
        try:
            return tokenizer_files(str(file), read_header(file).fields)
        except InputError as error:
            self.notes.append(f"no tokenizer: {error}")
            return {}

    def release(self) -> None:
        """Let go of the mapped files."""
        self._source.release()
        self._experts.release()

    @property
    def paths(self) -> list[Path]:
        return self._source.files + (self._experts.files if self._experts is not self._source else [])

    def files(self, *, hashed: bool = False) -> list[SourceFile]:
        """What the numbers come from; `hashed` reads all of it."""
        return [fingerprint(path, hashed=hashed) for path in self.paths]


def build_meta_model(directory: Path) -> nn.Module:
    """The model without numbers."""
    config = load.load_config(directory)
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config)
    return model


def fingerprint(path: Path, *, hashed: bool = False) -> SourceFile:
    """Cheap but for `hashed`: the header has every name, shape and offset. A blob of the hub's cache is named by its
    hash."""
    with path.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little") if path.suffix == ".safetensors" else HASHED_PREFIX_BYTES
        header = start + stream.read(min(length, 100 * HASHED_PREFIX_BYTES))
    blob = path.resolve().name
    known = blob if re.fullmatch(r"[0-9a-f]{64}", blob) else sha256(path) if hashed else None
    return SourceFile(
        name=path.name,
        bytes=path.stat().st_size,
        header_sha256=hashlib.sha256(header).hexdigest(),
        sha256=known,
    )
