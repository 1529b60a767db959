"""`load_model`: a stock transformers model from a local directory, its experts in stores instead of parameters.

Everything but the experts is the business of stock `from_pretrained`: the class, conversion of names, dtypes, tied
weights, buffers that are computed rather than loaded. `nn/quantizer.py` takes the experts out of it. A release whose
other weights are quantised too, or that is no safetensors at all, reaches `from_pretrained` as a dictionary of tensors
that are decoded to bf16 one by one, when each is asked for. What stock only warns about, a tensor that is missing and
would be left random, is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ktransformers import _core
from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.sources import PlainTensor, Source, open_source
from ktransformers.errors import InputError
from ktransformers.nn.prepare import METHOD, config_file, in_stock_terms, read_config, take_quantisation
from ktransformers.nn.quantizer import KTConfig, Progress


def load_model(
    path: str | Path,
    *,
    experts: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
    progress: Progress | None = None,
    pages: str = "lazy",
    verify: bool = False,
) -> PreTrainedModel:
    """The model in `path`, ready to run: experts in host memory, the rest in `dtype` on `device` (None: the CPU).

    `path` is a model's directory or a GGUF file; `experts` names another place that the experts are to come from: a
    GGUF file, a packed directory, what kt-kernel's converter has written, another release of the same model.
    `precision` is that of the experts: "bf16", or "f32" and "f64", which compute with the numbers of the files
    unrounded. `progress(done, layers)` is called after each layer of experts. Of a packed directory, `pages` says when
    its pages come ("lazy", "prefault" or "lock"), and `verify` computes its checksums first.
    """
    path = Path(path)
    told = read_told(path)
    source = open_source(path, told.rest)  # a broken download is said before anything is built
    given = None if experts is None else Path(experts)
    packed = given is not None and is_packed(given)
    weights = _experts(told, None if packed else given)
    asked = KTConfig(isa=isa, pool=pool, progress=progress, precision=precision, source=told.rest, weights=weights)
    asked.pages, asked.verify, asked.packed_at = pages, verify, given if packed else None
    options: dict[str, Any] = {
        "config": _config(path),
        "dtype": dtype,
        "device_map": None if device is None else {"": torch.device(device)},
        "output_loading_info": True,
    }
    if source.quantised:
        asked.weights = weights or source
        model, info = _from_tensors(path, source, asked, options)
    else:
        auto: Any = AutoModelForCausalLM if _is_causal(options["config"]) else AutoModelForImageTextToText
        model, info = auto.from_pretrained(path, quantization_config=asked, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(missing[0], f"{len(missing)} tensors missing in {path}", "every tensor of the model")
    loaded: PreTrainedModel = model
    return loaded


@dataclass(frozen=True)
class CheckpointFacts:
    """What config.json says of the weights: how those in its directory are quantised, and where the experts are if not
    there."""

    rest: dict[str, Any] | None = None
    experts: Path | None = None
    experts_quantised: dict[str, Any] | None = None


def read_told(path: Path) -> CheckpointFacts:
    file = config_file(path)
    if file is None:
        return CheckpointFacts()
    _, words = take_quantisation(read_config(file.parent))
    if words is None or words.get("quant_method") != METHOD:
        accept(str(file), words)
        return CheckpointFacts(words)
    if words.get("experts") is None:  # what is prepared without copies, or packed
        accept(str(file), words.get("source"))
        return CheckpointFacts(words.get("source"))
    return CheckpointFacts(None, Path(words["experts"]), words.get("source"))


def _experts(told: CheckpointFacts, given: Path | None) -> Source | None:
    """Opened, where they are not beside the rest; what the caller names counts."""
    if given is not None:
        there = read_told(given)
        return _experts(there, None) or open_source(given, there.rest)
    return None if told.experts is None else open_source(told.experts, told.experts_quantised)


def _config(path: Path) -> PreTrainedConfig:
    file = config_file(path)
    if file is None:
        carried = open_source(path).config()
        if carried is None:
            raise InputError(
                str(path), "experts alone", "a model", "pass them as `experts` beside the model's directory"
            )
        made: PreTrainedConfig = AutoConfig.for_model(carried.pop("model_type"), **carried)
        return made
    read_told(path)
    left, _ = take_quantisation(read_config(file.parent))
    words = in_stock_terms(left)
    if words.get("model_type") != left.get("model_type"):
        same: PreTrainedConfig = AutoConfig.for_model(words.pop("model_type"), **words)
        return same
    config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent)
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def _is_causal(config: PreTrainedConfig) -> bool:
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


@dataclass(frozen=True)
class LazyTensor:
    """A tensor as transformers takes it from a file: decoded when it is indexed."""

    tensor: PlainTensor

    def get_dtype(self) -> str:
        return SPELLED[self.tensor.dtype]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, _: Any) -> Tensor:
        return self.tensor.read()


def _from_tensors(path: Path, source: Source, asked: KTConfig, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`from_pretrained` of a dictionary; what it then does not find beside the weights is read here."""
    config = options["config"]
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING if _is_causal(config) else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    tensors = {tensor.name: LazyTensor(tensor) for tensor in source.rest()}
    model, info = kinds[type(config)].from_pretrained(None, state_dict=tensors, quantization_config=asked, **options)
    directory = path if path.is_dir() else path.parent
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    model.name_or_path = model.config._name_or_path = str(path)
    return model, info
