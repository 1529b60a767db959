"""LoRA adapters of MoE models: read and write every adapter format, convert, merge into a checkpoint, and verify by
manifest."""

from __future__ import annotations

from ktransformers.adapters.canonical import adapter_from_tensors
from ktransformers.adapters.convert import Conversion, Output, convert, describe_adapter, read_adapter, write_adapter
from ktransformers.adapters.formats import ADAPTER_FORMATS
from ktransformers.adapters.lora import Adapter, Experts, Extra, Module, PairForm
from ktransformers.adapters.merge import Merge, MergeCheck, merge
from ktransformers.adapters.model import ModelFacts, facts_from_config, find_facts
from ktransformers.experts.lora import LoraPair

DIALECTS = ADAPTER_FORMATS  # the earlier name

__all__ = [
    "ADAPTER_FORMATS",
    "DIALECTS",
    "Adapter",
    "Conversion",
    "Experts",
    "Extra",
    "LoraPair",
    "Merge",
    "MergeCheck",
    "ModelFacts",
    "Module",
    "Output",
    "PairForm",
    "adapter_from_tensors",
    "convert",
    "describe_adapter",
    "facts_from_config",
    "find_facts",
    "merge",
    "read_adapter",
    "write_adapter",
]
