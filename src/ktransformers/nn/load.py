"""`load_model`: a stock transformers model from a local directory, its experts in stores instead of parameters.

Everything but the experts is the business of stock `from_pretrained`: the class, conversion of names, dtypes, tied
weights, buffers that are computed rather than loaded. `nn/quantizer.py` takes the experts out of it. What stock only
warns about, a tensor that is missing and would be left random, is an error here.
"""

from __future__ import annotations

import json
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
from ktransformers.nn.contract import IMPLEMENTATION
from ktransformers.nn.quantizer import KTConfig, Progress

# Checkpoints whose own type stock transformers lacks, and the type that computes the same.
SAME_AS = {"kimi_k2": "deepseek_v3"}


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """The model in `path`, ready to run: experts in host memory, the rest in `dtype` on `device` (None: the CPU).

    `progress(done, layers)` is called after each layer of experts.
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
        quantization_config=KTConfig(isa=isa, pool=pool, progress=progress),
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(missing[0], f"{len(missing)} tensors missing in {directory}", "every tensor of the model")
    loaded: PreTrainedModel = model
    return loaded


def _config(directory: Path) -> PreTrainedConfig:
    file = directory / "config.json"
    if not file.is_file():
        raise InputError(
            str(directory),
            "no directory with a config.json",
            "a local Hugging Face directory",
            "`hf download` makes one",
        )
    try:
        words = json.loads(file.read_text())
        kind = words.get("model_type")
    except (ValueError, AttributeError) as error:
        raise InputError(str(file), str(error), "a JSON object") from error
    if kind in SAME_AS:
        words = {key: value for key, value in words.items() if key not in ("model_type", "auto_map")}
        config = AutoConfig.for_model(SAME_AS[kind], **words)
    else:
        config = AutoConfig.from_pretrained(directory)
    for part in (config, config.get_text_config(decoder=True)):
        quantised = getattr(part, "quantization_config", None)
        if quantised is None:
            continue
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        if method != IMPLEMENTATION:
            raise InputError(
                str(file), f"a checkpoint quantised with {method!r}", "bf16, fp16 or fp32", "take an unquantised one"
            )
        del part.quantization_config
    return config
