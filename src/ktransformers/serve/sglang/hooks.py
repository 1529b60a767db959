"""The functions and classes of SGLang that the plugin hooks, through SGLang's own registry.

SGLang resolves targets when all plugins have run and only logs one that it does not find, so `register_hook` resolves
it first and raises. `KTEPWrapperMethod` is replaced by a subclass with a mask of experts; FusedMoE's weight loader puts
experts into the slots of that mask; the LoRA manager leaves experts to the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.serve.sglang.options import ServerOptions, add_arguments, read_options

SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
METHOD = "sglang.srt.layers.moe.kt_ep_wrapper.KTEPWrapperMethod"
FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
LORA_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"


def register_hook(target: str, hook: Callable[..., Any], kind: str) -> None:
    """`kind`: BEFORE, AFTER, AROUND or REPLACE."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    owner = target.rpartition(".")[0]
    try:
        importlib.import_module(owner if owner.islower() else owner.rpartition(".")[0])  # says what it lacks, if so
        pkgutil.resolve_name(target)
    except (AttributeError, ImportError, ValueError) as error:
        expected = "SGLang 0.5.17 to 0.5.23"
        raise InputError(
            "SGLang", f"no {target} ({error})", expected, "or set SGLANG_PLUGINS to leave it out"
        ) from error
    HookRegistry.register(target, hook, HookType[kind])


def register_parser_hooks() -> None:
    """In the launching process: extend SGLang's parser, and take our options from what it has parsed."""

    def add(result: Any, parser: argparse.ArgumentParser) -> None:
        add_arguments(parser)

    def parse(original: Any, cls: type, args: argparse.Namespace) -> Any:
        try:
            options = read_options(args)
        except InputError as error:
            raise SystemExit(f"ktransformers: {error}") from error
        if options is not None:
            options.to_environment()
        return original(cls, args)

    register_hook(f"{SERVER_ARGS}.add_cli_args", add, "AFTER")
    register_hook(f"{SERVER_ARGS}.from_cli_args", parse, "AROUND")


def register_model_hooks() -> None:
    """In scheduler processes."""
    from ktransformers.serve.sglang import adapters, method

    options = ServerOptions.from_environment()
    stock = importlib.import_module(METHOD.rpartition(".")[0])
    register_hook(METHOD, method.masked_method(stock.KTEPWrapperMethod, options), "REPLACE")
    for loader in ("_weight_loader_physical", "_weight_loader_impl"):
        register_hook(f"{FUSED_MOE}.{loader}", method.load_into_slot, "AROUND")
    lora = adapters.ExpertAdapters(options)
    register_hook(f"{LORA_MANAGER}._load_lora_adapter", lora.load, "AROUND")
    register_hook(f"{LORA_MANAGER}.init_lora_adapters", lora.pack_after_start, "AFTER")
    register_hook(f"{LORA_MANAGER}.prepare_lora_batch", lora.write_rows, "AFTER")
