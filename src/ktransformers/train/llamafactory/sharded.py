"""FSDP2 in LLaMA-Factory with `use_kt: true`: a configuration of `accelerate launch`, read and applied as `kt train`
does it (`train/sharding.py`), because accelerate's own FSDP2 has no place for packed experts. Its variables are removed
before the model is loaded, and LLaMA-Factory's trainer for supervised tuning shards the model itself."""

from __future__ import annotations

import logging
import os
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger, show
from ktransformers.train.divided_trainer import DividedModel
from ktransformers.train.llamafactory.configuration import read_kt_settings
from ktransformers.train.settings import ShardSettings
from ktransformers.train.sharding import (
    hide_from_accelerate,
    launcher_sharding,
    leave_out_attention_graphs,
    read_shard_options,
)

log = logger(__name__)
_requested: dict[str, Any] = {"options": None}  # from the parser of LLaMA-Factory to its trainer


def take_sharding(model_args: Any, training_args: Any, stage: str) -> None:
    """Before the model is loaded: what the launcher asks for, out of accelerate's sight."""
    asked = launcher_sharding(os.environ)
    if training_args.fsdp:
        raise InputError("fsdp", training_args.fsdp, "a config file of `accelerate launch`", "`kt train` has the key")
    if not asked:
        return
    if stage != "sft":
        raise InputError("stage", f"{stage} under FSDP2", "sft with use_kt", "`kt train` has dpo under FSDP2")
    show(logging.INFO)
    hide_from_accelerate(os.environ)
    settings = read_kt_settings(model_args, on_gpu=not training_args.use_cpu, training=True)
    trainer = {"optim": str(getattr(training_args.optim, "value", training_args.optim)), "fp16": training_args.fp16}
    changes = {"shard": ShardSettings.model_validate(asked), "trainer": {**settings.trainer, **trainer}}
    options, notes = read_shard_options(settings.model_copy(update=changes))
    for note in notes:
        log.info("%s", note)
    if options is not None:
        leave_out_attention_graphs()
        log.info("FSDP2: everything but the experts is sharded")
    _requested["options"] = options


def shard_on_request(module: Any) -> None:
    """In `llamafactory.train.sft.trainer`."""
    stock = module.CustomSeq2SeqTrainer

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, *args, **kwargs)
        if _requested["options"] is not None:
            self.shard(_requested["options"])

    module.CustomSeq2SeqTrainer = type(stock.__name__, (DividedModel, stock), {"__init__": begin})
