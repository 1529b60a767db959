"""`from_pretrained` of LLaMA-Factory with `use_kt: true`: the released checkpoint's experts go from its files into
packed stores, as `load_model` does it, and the model that LLaMA-Factory gets does not look quantised.

LLaMA-Factory's own changes to the configuration (attention, RoPE, cache) and its device map are kept. Custom code of a
checkpoint is not used for the model, because its experts are not behind transformers' experts interface; stock
transformers has these models. `export` merges an adapter into the checkpoint itself and loads it without packing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger, show
from ktransformers.train.llamafactory.adapter import has_packed_experts
from ktransformers.train.llamafactory.configuration import read_kt_settings

log = logger(__name__)

AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM")
REQUEST = "kt_request"  # keyword argument of from_pretrained that carries model_args from `patch_config`
SAVING = "`llamafactory-cli export` merges an adapter and writes the model"
# Arguments of LLaMA-Factory that load or compute the model in another way.
EXCLUDED_ARGUMENTS = (
    *("use_unsloth", "use_unsloth_gc", "mixture_of_depths", "train_from_scratch", "quantization_bit", "resize_vocab"),
)


def checkpoint_directory(model_args: Any) -> Path:
    """Local directory of the checkpoint; a hub id is downloaded."""
    from ktransformers.train.model import base_directory
    from ktransformers.train.settings import ModelSettings

    keys = {name: getattr(model_args, name) for name in ("model_name_or_path", "model_revision", "cache_dir")}
    directory = base_directory(ModelSettings.model_validate(keys), download=True)
    assert directory is not None
    return directory


def load_packed_experts(module: Any) -> None:
    """In `llamafactory.model.loader`."""
    stock_load_config, stock_load_model, stock_patch_config = module.load_config, module.load_model, module.patch_config

    def load_config(model_args: Any) -> Any:
        if _is_export(model_args):
            options = {**module._get_init_kwargs(model_args), "trust_remote_code": False}
            return module.AutoConfig.from_pretrained(model_args.model_name_or_path, **options)
        if not model_args.use_kt:
            return stock_load_config(model_args)
        from ktransformers.modeling.load import load_config

        module._get_init_kwargs(model_args)  # downloads from another hub than Hugging Face's
        return load_config(checkpoint_directory(model_args))

    def patch_config(config: Any, tokenizer: Any, model_args: Any, init_kwargs: Any, is_trainable: bool) -> None:
        stock_patch_config(config, tokenizer, model_args, init_kwargs, is_trainable)
        if model_args.use_kt:
            init_kwargs[REQUEST] = (model_args, is_trainable)
        elif _is_export(model_args):
            init_kwargs["trust_remote_code"] = False

    def load_model(tokenizer: Any, model_args: Any, *args: Any, **kwargs: Any) -> Any:
        if not model_args.use_kt:
            if not _is_export(model_args):
                log.warning("USE_KT=1 without `use_kt: true`: the experts are transformers' own")
            return stock_load_model(tokenizer, model_args, *args, **kwargs)
        show(logging.INFO)
        _refuse_excluded(model_args)
        model = stock_load_model(tokenizer, model_args, *args, **kwargs)
        if not has_packed_experts(model):
            raise InputError("use_kt", f"{type(model).__name__} without packed experts", "a model that has them")
        return model

    module.load_config, module.patch_config, module.load_model = load_config, patch_config, load_model
    for name in AUTO_CLASSES:
        setattr(module, name, _with_requests(getattr(module, name)))


def _is_export(model_args: Any) -> bool:
    """Of a file with `use_kt: true`, which `training.py` then has switched off."""
    return bool(getattr(model_args, "kt_exporting", False))


def _refuse_excluded(model_args: Any) -> None:
    for name in EXCLUDED_ARGUMENTS:
        if getattr(model_args, name, None):
            raise InputError(name, getattr(model_args, name), "a run without it", f"use_kt excludes {name}")


def _with_requests(stock: Any) -> type:
    """A subclass of an Auto class of transformers, of the same name, whose `from_pretrained` packs on request."""

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.pop(REQUEST, None)
        if request is None:
            return stock.from_pretrained(*args, **kwargs)
        model_args, is_trainable = request
        return load_packed(model_args, kwargs["config"], kwargs.get("device_map"), training=is_trainable)

    return type(stock.__name__, (stock,), {"from_pretrained": classmethod(from_pretrained)})


def load_packed(model_args: Any, config: Any, device_map: Any, *, training: bool) -> Any:
    from ktransformers.modeling.load import meta_model, open_model
    from ktransformers.modeling.quantizer import hide_quantisation
    from ktransformers.operators.rules import require_rules
    from ktransformers.place.apply import ModelPlacement, plan_rules
    from ktransformers.train.model import check_formats, spec_of
    from ktransformers.train.placement import TrainPlacement

    on_gpu = _uses_gpu(device_map)
    settings = read_kt_settings(model_args, on_gpu=on_gpu, training=training)
    place_options = settings.place
    train_placement = TrainPlacement(settings, None) if on_gpu and training else None
    if train_placement is not None and train_placement.loading_device.type == "cpu":
        device_map = {"": train_placement.loading_device}  # from there to several GPUs
    directory = checkpoint_directory(model_args)
    operators, lines = None, list[str]()
    if place_options.kt_optimize_rule is not None:
        if not training:
            require_rules(place_options.kt_optimize_rule)
        gpus = 0 if not on_gpu else 1 if train_placement is None else train_placement.gpus
        operators, lines = plan_rules(meta_model(directory), place_options, gpus)
    for line in lines:
        log.info("%s", line)
    moves_later = train_placement is not None and train_placement.later_gpus > 0
    rest = linear_storage(settings.experts.rest, on_gpu=on_gpu)
    spec = spec_of(directory, settings, operators, log.info, on_gpu=on_gpu)
    model: Any = open_model(replace(spec, dtype="auto", rest=rest, widen=not moves_later), config, device_map)
    model.name_or_path = str(model_args.model_name_or_path)  # PEFT writes it into adapter_config.json
    check_formats(model, settings.experts.kt_expert_weight_format)
    hide_quantisation(model, SAVING)
    if train_placement is not None:
        train_placement.model_loaded(model)
        model.kt_train_placement = train_placement  # for the callback of the run
    elif on_gpu:
        placement = ModelPlacement(place_options)
        placement.attach(model)
        for line in placement.fill(lambda place, device: 0, ()):
            log.info("%s", line)
    return model


def linear_storage(rest: str, *, on_gpu: bool) -> str:
    """`rest` as it is loaded. On a GPU LLaMA-Factory trains on dense weights: a quantized checkpoint is dequantized to
    bf16, and a format that was asked for by name is refused."""
    if not on_gpu or rest == "bf16":
        return rest
    if rest != "keep":
        raise InputError("rest", rest, "keep or bf16 under LLaMA-Factory on a GPU", "`kt train` has formats there")
    log.info("dense linear layers: a quantized checkpoint is dequantized to bf16 on a GPU")
    return "bf16"


def _uses_gpu(device_map: Any) -> bool:
    import torch

    if isinstance(device_map, dict):
        return any(torch.device(device).type == "cuda" for device in device_map.values())
    return torch.cuda.is_available()
