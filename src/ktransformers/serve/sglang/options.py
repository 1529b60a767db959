"""`--kt-*` flags that mainline SGLang does not have, added to its parser; `ServerOptions` is what they amount to.

SGLang builds its arguments from the fields of a dataclass and drops what is no field, so `read_options` takes ours from
the parsed namespace before that happens. Some of its own fields change with them: prefill graphs are off with a
threshold for layerwise prefill, because a captured pass makes no decisions, and a file of activation counts is ours to
read, not its expert parallelism's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.ground.options.field import CLOSED, add_flags, build, options_of
from ktransformers.ground.options.placement import PlacementOptions

_log = logger(__name__)

OPTIONS_VARIABLE = "KT_SGLANG_OPTIONS"
# Options of the placement engine that SGLang's parser lacks -> their help, which names flags of SGLang.
ADDED = {
    "kt_gpu_experts_ratio": "Share of all experts on the GPU, 0 to 1; wins over --kt-num-gpu-experts.",
    "kt_expert_placement_strategy": "Which experts are on the GPU: uniform (default), front-loading, random, or "
    "frequency, those with most tokens in the file of --init-expert-location.",
    "kt_gpu_prefill_token_threshold": "Stream all experts of a layer to the GPU for prefill batches of at least so "
    "many tokens.",
    "kt_enable_dynamic_expert_update": "Accepted without effect: experts on the GPU stay those of the start.",
}


@dataclass(frozen=True, config=CLOSED)
class ServerOptions:
    """The options of one server; empty fields leave mainline's behaviour."""

    model_path: str
    num_gpu_experts: int | None = None  # of each layer
    gpu_experts_ratio: float | None = None  # of all experts; wins over the number
    placement_strategy: str = "uniform"
    activation_counts: str = ""  # file for the strategy `frequency`
    gpu_prefill_token_threshold: int = 0  # batches from so many tokens on are streamed to the GPU; 0: none
    numa_nodes: tuple[int, ...] | None = None
    expert_lora: str = ""  # adapter whose experts apply to every request without an adapter of its own
    expert_lora_by_name: dict[str, str] = field(default_factory=dict)  # adapter of --lora-paths -> its experts

    def to_environment(self) -> None:
        os.environ[OPTIONS_VARIABLE] = TypeAdapter(ServerOptions).dump_json(self).decode()

    @classmethod
    def from_environment(cls) -> ServerOptions:
        return TypeAdapter(ServerOptions).validate_json(env.text(OPTIONS_VARIABLE))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ktransformers", "experts on the CPU, in addition to SGLang's own --kt-* flags")
    options = options_of(PlacementOptions)
    add_flags(group, {name: replace(options[name], flags=options[name].flags[:1], help=ADDED[name]) for name in ADDED})
    group.add_argument("--kt-numa-nodes", type=int, nargs="+", help="NUMA nodes of the thread pools, one for each.")
    group.add_argument(
        "--kt-expert-lora-path",
        nargs="+",
        default=[],
        metavar="[NAME=]DIR",
        help="LoRA of experts, computed on the CPU: DIR for every request, NAME=DIR for those that use adapter NAME.",
    )


def read_options(args: argparse.Namespace) -> ServerOptions | None:
    """From SGLang's parsed arguments; None without --kt-weight-path. Changes fields of `args` that ours decide."""
    if args.kt_weight_path is None:
        given = [name for name in (*ADDED, "kt_numa_nodes", "kt_expert_lora_path") if getattr(args, name, None)]
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise InputError(flag, "without --kt-weight-path", "experts on the CPU", "add --kt-weight-path MODEL")
        return None
    values: dict[str, Any] = {name: getattr(args, name) for name in (*ADDED, "kt_num_gpu_experts")}
    # SGLang's own way to say that there is no threshold is 0.
    values["kt_gpu_prefill_token_threshold"] = values["kt_gpu_prefill_token_threshold"] or None
    place = build(PlacementOptions, values, by_flag=True)
    if place.by_bytes:
        expected = "--kt-num-gpu-experts, 0 or more for each layer, or --kt-gpu-experts-ratio"
        raise InputError("--kt-weight-path", "no number of GPU experts", expected)
    nodes = getattr(args, "kt_numa_nodes", None)
    if nodes is not None and len(nodes) != args.kt_threadpool_count:
        expected = f"{args.kt_threadpool_count}, as --kt-threadpool-count says"
        raise InputError("--kt-numa-nodes", f"{len(nodes)} nodes", expected)
    if place.kt_enable_dynamic_expert_update:
        _log.warning(
            "--kt-enable-dynamic-expert-update: mainline SGLang cannot move experts while it runs; those on the GPU "
            "stay those of the start"
        )
    counts = _take_activation_counts(args)
    static, by_name = _expert_adapters(args)
    number, ratio = place.kt_num_gpu_experts, place.kt_gpu_experts_ratio
    if (ratio or (number and ratio is None)) and (adapter := _adapter_of_experts(args)):
        flag = f"--kt-num-gpu-experts {number}" if ratio is None else f"--kt-gpu-experts-ratio {ratio}"
        _log.warning("%s became 0: %s has LoRA of experts, which the CPU computes", flag, adapter)
        number, ratio = 0, None
    if place.kt_gpu_prefill_token_threshold and hasattr(args, "disable_prefill_cuda_graph"):
        args.disable_prefill_cuda_graph = True
    return ServerOptions(
        model_path=args.model_path,
        num_gpu_experts=number,
        gpu_experts_ratio=ratio,
        placement_strategy=place.strategy,
        activation_counts=counts,
        gpu_prefill_token_threshold=place.kt_gpu_prefill_token_threshold or 0,
        numa_nodes=None if nodes is None else tuple(nodes),
        expert_lora=static,
        expert_lora_by_name=by_name,
    )


def _take_activation_counts(args: argparse.Namespace) -> str:
    """The file of the strategy `frequency`. SGLang would rearrange experts by it as well."""
    if args.kt_expert_placement_strategy != "frequency":
        return ""
    location = args.init_expert_location
    if location == "trivial":
        given, remedy = "without --init-expert-location", "record counts with --expert-distribution-recorder-mode stat"
        raise InputError("--kt-expert-placement-strategy frequency", given, "a .pt file of counts", remedy)
    args.init_expert_location = "trivial"
    return str(location)


def _expert_adapters(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    static, by_name = "", {}
    for word in args.kt_expert_lora_path:
        name, equals, path = word.rpartition("=")
        if equals:
            by_name[name] = path
        elif static:
            raise InputError("--kt-expert-lora-path", f"{static} and {word}", "one directory without a name")
        else:
            static = word
    return static, by_name


def _adapter_of_experts(args: argparse.Namespace) -> str | None:
    if args.kt_expert_lora_path:
        return str(args.kt_expert_lora_path[0])
    given = getattr(args, "lora_paths", None) or ()
    return first_with_experts(
        word["lora_path"] if isinstance(word, dict) else word.partition("=")[2] or word for word in given
    )


def first_with_experts(paths: Iterable[str]) -> str | None:
    """The first adapter that has LoRA of experts. One that is not in a directory here has not been downloaded, and is
    refused when it is loaded."""
    from ktransformers.adapters import read_adapter

    return next((path for path in paths if Path(path).is_dir() and read_adapter(path, verify=False).experts), None)
