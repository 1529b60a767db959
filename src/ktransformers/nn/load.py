"""`load_model`: a stock transformers model from a local directory, its experts in stores instead of parameters.

Everything but the experts is the business of stock `from_pretrained`: the class, conversion of names, dtypes, tied
weights, buffers that are computed rather than loaded. `nn/quantizer.py` takes the experts out of it. What stock only
warns about, a tensor that is missing and would be left random, is an error here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ktransformers import _core
from ktransformers.checkpoint import Shards
from ktransformers.errors import InputError
from ktransformers.nn.prepare import METHOD, in_stock_terms, read_config, refuse_quantised, take_quantisation
from ktransformers.nn.quantizer import KTConfig, Progress


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
    progress: Progress | None = None,
) -> PreTrainedModel:
    """The model in `path`, ready to run: experts in host memory, the rest in `dtype` on `device` (None: the CPU).

    `precision` is that of the experts: "bf16", or "f32" and "f64", which compute with the numbers of the files
    unrounded. `progress(done, layers)` is called after each layer of experts.
    """
    directory = Path(path)
    config = _config(directory)
    Shards.of_directory(directory)  # a broken download is said before anything is built
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model, info = auto.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        device_map=None if device is None else {"": torch.device(device)},
        quantization_config=KTConfig(isa=isa, pool=pool, progress=progress, precision=precision),
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(missing[0], f"{len(missing)} tensors missing in {directory}", "every tensor of the model")
    loaded: PreTrainedModel = model
    return loaded


def _config(directory: Path) -> PreTrainedConfig:
    left, source = take_quantisation(read_config(directory))
    if source is not None and source.get("quant_method") == METHOD:  # a prepared directory
        source = source.get("source")
    refuse_quantised(str(directory / "config.json"), source)
    words = in_stock_terms(left)
    if words.get("model_type") != left.get("model_type"):
        same: PreTrainedConfig = AutoConfig.for_model(words.pop("model_type"), **words)
        return same
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory)
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config
