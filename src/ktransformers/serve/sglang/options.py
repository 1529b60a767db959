"""`--kt-*` flags that mainline SGLang does not have, added to its parser; `ServerOptions` is what they amount to.

SGLang builds its arguments from the fields of a dataclass and drops what is no field, so `read_options` takes ours from
the parsed namespace before that happens. Some of its own fields change with them: prefill graphs are off with a
threshold for layerwise prefill, because a captured pass makes no decisions, and a file of activation counts is ours to
read, not its expert parallelism's.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ktransformers.ground import env
from ktransformers.ground.errors import InputError

STRATEGIES = ("uniform", "frequency", "front-loading", "random")
OPTIONS_VARIABLE = "KT_SGLANG_OPTIONS"


@dataclass(frozen=True)
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
        os.environ[OPTIONS_VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> ServerOptions:
        fields: dict[str, Any] = json.loads(env.text(OPTIONS_VARIABLE))
        if fields.get("numa_nodes") is not None:
            fields["numa_nodes"] = tuple(fields["numa_nodes"])
        return cls(**fields)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ktransformers", "experts on the CPU, in addition to SGLang's own --kt-* flags")
    group.add_argument(
        "--kt-gpu-experts-ratio",
        type=float,
        help="Share of all experts on the GPU, 0 to 1; wins over --kt-num-gpu-experts.",
    )
    group.add_argument(
        "--kt-expert-placement-strategy",
        choices=STRATEGIES,
        default="uniform",
        help="Which experts are on the GPU; frequency: those with most tokens in the file of --init-expert-location.",
    )
    group.add_argument(
        "--kt-gpu-prefill-token-threshold",
        type=int,
        default=0,
        metavar="TOKENS",
        help="Stream all experts of a layer to the GPU for prefill batches of at least so many tokens.",
    )
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
    given = [name for name in ("kt_gpu_experts_ratio", "kt_numa_nodes") if getattr(args, name, None) is not None]
    given += [name for name in ("kt_gpu_prefill_token_threshold", "kt_expert_lora_path") if getattr(args, name, None)]
    if args.kt_weight_path is None:
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise InputError(flag, "without --kt-weight-path", "experts on the CPU", "add --kt-weight-path MODEL")
        return None
    ratio, number = args.kt_gpu_experts_ratio, args.kt_num_gpu_experts
    if ratio is None and number is None:
        expected = "--kt-num-gpu-experts, 0 or more for each layer, or --kt-gpu-experts-ratio"
        raise InputError("--kt-weight-path", "no number of GPU experts", expected)
    if ratio is not None and not 0 <= ratio <= 1:
        raise InputError("--kt-gpu-experts-ratio", ratio, "a number from 0 to 1")
    if number is not None and number < 0:
        raise InputError("--kt-num-gpu-experts", number, "0 or more")
    nodes = getattr(args, "kt_numa_nodes", None)
    if nodes is not None and len(nodes) != args.kt_threadpool_count:
        expected = f"{args.kt_threadpool_count}, as --kt-threadpool-count says"
        raise InputError("--kt-numa-nodes", f"{len(nodes)} nodes", expected)
    if args.kt_gpu_prefill_token_threshold < 0:
        raise InputError("--kt-gpu-prefill-token-threshold", args.kt_gpu_prefill_token_threshold, "0 or more tokens")
    counts = _take_activation_counts(args)
    static, by_name = _expert_adapters(args)
    if args.kt_gpu_prefill_token_threshold and hasattr(args, "disable_prefill_cuda_graph"):
        args.disable_prefill_cuda_graph = True
    return ServerOptions(
        model_path=args.model_path,
        num_gpu_experts=number,
        gpu_experts_ratio=ratio,
        placement_strategy=args.kt_expert_placement_strategy,
        activation_counts=counts,
        gpu_prefill_token_threshold=args.kt_gpu_prefill_token_threshold,
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
