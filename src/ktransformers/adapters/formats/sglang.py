"""The format that SGLang loads and kt-kernel's converter writes: per-expert pairs without PEFT's prefix.

Experts are always named `model.layers.{L}`, even if the model itself says `model.language_model.layers`. SGLang
supports one r and one lora_alpha for the whole adapter and no patterns, so ranks are padded to the largest.
"""

from __future__ import annotations

from pathlib import Path

from ktransformers.adapters.config import build_config
from ktransformers.adapters.content import Content
from ktransformers.adapters.fit import make_uniform
from ktransformers.adapters.formats.adapter_format import AdapterFormat, module_batches, save_adapter
from ktransformers.adapters.formats.per_expert import count_pairs, expert_batch, is_expert_key, read
from ktransformers.adapters.lora import Adapter
from ktransformers.adapters.names import name_in_checkpoint
from ktransformers.adapters.write import WrittenTensor
from ktransformers.checkpoint.layout import split_layer_name


def matches(content: Content) -> bool:
    return any(is_expert_key(name) for name in content.tensors)


def write(adapter: Adapter, directory: Path) -> list[WrittenTensor]:
    adapter = make_uniform(adapter)
    batches = []
    for layer in adapter.experts:
        outer, number, block = split_layer_name(name_in_checkpoint(layer.root, adapter.naming))
        stem = f"model.{outer}.layers" if outer else "model.layers"
        batches.append(expert_batch(layer, f"{stem}.{number}.{block}", adapter.naming))
    batches += module_batches(adapter, lambda name: name_in_checkpoint(name, adapter.naming))
    default = next(adapter.forms())
    config = build_config(adapter, default, {}, target_modules=adapter.target_names(), target_parameters=None)
    return save_adapter(directory, batches, config)


ADAPTER_FORMAT = AdapterFormat(
    "sglang", "SGLang, one pair for each expert, no prefix", matches, read, write, count_pairs
)
