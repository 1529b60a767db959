"""The interface of a format: how to recognise, read and write an adapter, and helpers that all writers use."""

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
from ktransformers.ground.files import write_json

MODEL_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterFormat:
    name: str
    description: str
    matches: Callable[[Content], bool]  # decided by tensor names
    read: Callable[[Content, ReadContext], Adapter]
    write: Callable[[Adapter, Path], list[WrittenTensor]]  # into an existing empty directory
    pairs_per_layer: Callable[[Experts], int]  # LoRA pairs written for one layer of experts, to check the count


def module_batches(adapter: Adapter, spell: Callable[[str], str]) -> Iterator[TensorBatch]:
    """The tensors of modules that are not routed experts, under the names that `spell` returns."""
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
    """Writes adapter_model.safetensors and adapter_config.json."""
    records = write_safetensors(directory / MODEL_FILE, batches)
    write_json(directory / CONFIG_FILE, config)
    return records
