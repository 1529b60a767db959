"""What SGLang loads, and what kt-kernel's converter writes for it: per-expert pairs without PEFT's prefix.

Experts always stand under `model.layers.{L}`, also where the model itself says `model.language_model.layers`. SGLang
reads one r and one lora_alpha for the whole adapter and no patterns, so ranks are padded to the largest.
"""

from __future__ import annotations

from pathlib import Path

from ktransformers.adapters.config import written
from ktransformers.adapters.content import Content
from ktransformers.adapters.dialects.dialect import Dialect, module_batches, save
from ktransformers.adapters.dialects.peft import leaf
from ktransformers.adapters.dialects.per_expert import expert_batch, is_single, pairs, read
from ktransformers.adapters.fit import uniform
from ktransformers.adapters.lora import Adapter
from ktransformers.adapters.names import in_files, ordered, place
from ktransformers.adapters.write import WrittenTensor


def claims(content: Content) -> bool:
    return any(is_single(name) for name in content.tensors)


def write(adapter: Adapter, directory: Path) -> list[WrittenTensor]:
    adapter = uniform(adapter)
    batches = []
    for layer in adapter.experts:
        outer, number, block = place(in_files(layer.root, adapter.words))
        stem = f"model.{outer}.layers" if outer else "model.layers"
        batches.append(expert_batch(layer, f"{stem}.{number}.{block}", adapter.words))
    batches += module_batches(adapter, lambda name: in_files(name, adapter.words))
    leaves = {leaf(module) for module in adapter.modules}
    leaves |= {adapter.words.matrix(role) for layer in adapter.experts[:1] for role in layer.forms}
    default = next(adapter.forms())
    config = written(adapter, default, {}, target_modules=ordered(leaves), target_parameters=None)
    return save(directory, batches, config)


DIALECT = Dialect("sglang", "SGLang, one pair for each expert, no prefix", claims, read, write, pairs)
