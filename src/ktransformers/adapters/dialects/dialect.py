"""What a dialect is: how to know it, how to read it, how to write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.adapters.config import CONFIG_FILE
from ktransformers.adapters.content import Content
from ktransformers.adapters.lora import Adapter, Experts, Extra, Module
from ktransformers.adapters.parse import ReadContext
from ktransformers.adapters.write import TensorBatch, TensorSpec, WrittenTensor, write_safetensors
from ktransformers.files import write_json

MODEL_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Dialect:
    name: str
    about: str  # for messages
    claims: Callable[[Content], bool]
    read: Callable[[Content, ReadContext], Adapter]
    write: Callable[[Adapter, Path], list[WrittenTensor]]  # into a directory that exists and is empty
    pairs: Callable[[Experts], int]  # how many it makes of one layer of experts, to count what was written


def module_batches(adapter: Adapter, spell: Callable[[str], str]) -> Iterator[TensorBatch]:
    """The tensors that are not of experts, under the names that `spell` gives."""
    for module in adapter.modules:
        yield _module(module, spell)
    for extra in adapter.extras:
        yield _extra(extra, spell)


def _module(module: Module, spell: Callable[[str], str]) -> TensorBatch:
    form, name = module.form, spell(module.name)

    def read() -> tuple[Any, ...]:
        pair = module.read()
        return pair.a, pair.b

    a = TensorSpec(f"{name}.lora_A.weight", (form.rank, form.inputs), form.dtype)
    b = TensorSpec(f"{name}.lora_B.weight", (form.outputs, form.rank), form.dtype)
    return TensorBatch((a, b), read)


def _extra(extra: Extra, spell: Callable[[str], str]) -> TensorBatch:
    return TensorBatch((TensorSpec(spell(extra.name), extra.shape, extra.dtype),), lambda: (extra.read(),))


def save_adapter(directory: Path, batches: list[TensorBatch], config: dict[str, Any]) -> list[WrittenTensor]:
    records = write_safetensors(directory / MODEL_FILE, batches)
    write_json(directory / CONFIG_FILE, config)
    return records
