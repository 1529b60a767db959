"""The command line of stock SGLang's server for `kt serve --engine sglang` and `kt run --engine sglang`, and its start.

What the line leaves open the plan decides: experts on the GPU, threads, the share of GPU memory that SGLang may fill.
Parsers follow the chat template. An option that SGLang has no flag for is refused before anything starts. The process
becomes SGLang's (exec), so signals and the entry of `kt chat` are those of the server. SGLang is not imported here: it
may lie in an environment of its own, with our wheel in it, and `sglang` on PATH.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_kernel.methods import method_for
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.cache import CacheOptions
from ktransformers.ground.options.field import options_of
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.ground.options.serving import NO_LIMIT
from ktransformers.modeling.pretrained import read_pretrained_config, read_tokenizer
from ktransformers.serve.flags import Launch
from ktransformers.serve.forecast import plan_server
from ktransformers.serve.formats.families import CALL_SIGNS, CALLS_OF_TYPE, THINKING_OF_TYPE, THINKING_SIGNS, find
from ktransformers.serve.running import RunningServer, record_server
from ktransformers.serve.sglang.options import first_with_experts
from ktransformers.serve.target import Target

if TYPE_CHECKING:
    from ktransformers.plan import Plan

PROGRAM = "sglang"
# Options that are passed on under the same flag, with a value and without.
VALUES = (
    *("host", "port", "api_key", "chat_template", "context_length", "max_running_requests", "max_total_tokens"),
    *("chunked_prefill_size", "dtype", "log_level", "kv_cache_dtype"),
)
SWITCHES = ("trust_remote_code", "disable_cuda_graph", "disable_overlap_schedule")
PLACED = (
    *("kt_gpu_experts_ratio", "kt_expert_placement_strategy", "init_expert_location"),
    *("kt_gpu_prefill_token_threshold", "kt_max_deferred_experts_per_token", "kt_enable_dynamic_expert_update"),
)
# Options that `sglang_command` reads itself, and those that mean nothing once SGLang runs.
READ = (
    *("target", "engine", "served_model_name", "lora_paths", "always_on", "experts", "method", "threads", "groups"),
    *("memory", "gpus", "tool_call_parser", "reasoning_parser", "expert_format", "place", "notes", "force", "device"),
)
READ_PLACED = ("kt_num_gpu_experts", "kt_place")
# SGLang's words where they differ from those of our tables.
CALL_WORDS = {"mistral_list": "mistral"}
REASONING_OF_CALLS = {"glm45": "glm45", "glm47": "glm45", "kimi_k2": "kimi_k2", "minimax-m2": "minimax"}
# Of a GPU's memory: what the plan counts for passes, and room for CUDA graphs and the driver.
PASSING = ("activations", "scores", "workspace", "transfers", "groups", "slots")
SPARE_BYTES = 2 << 30
LEAST_FRACTION, MOST_FRACTION = 0.3, 0.95


def run_sglang(
    launch: Launch,
    target: Target,
    log: Callable[[str], None],
    show: Callable[[Plan], None],
    on_ready: Callable[[RunningServer], None],
) -> None:
    """Plan, build the command and become SGLang's server."""
    program = find_program()
    plan = plan_sglang(launch, target, log, show)
    command = [*program, *sglang_words(launch, target, plan)]
    log(f"starting {shlex.join(hide_key(command))}")
    assert launch.host is not None and launch.port is not None
    on_ready(record_server(launch.host, launch.port, served_name(launch, target)))
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, "OMP_NUM_THREADS": "1"})  # torch's threads beside the experts'


def find_program() -> list[str]:
    """`sglang serve` of the PATH, else SGLang of this environment."""
    if (found := shutil.which(PROGRAM)) is not None:
        return [found, "serve"]
    if importlib.util.find_spec(PROGRAM) is not None:
        return [sys.executable, "-m", "sglang.launch_server"]
    remedy = "pip install sglang and this package into one environment, and put its bin on PATH (docs/engines.md)"
    raise InputError("--engine", "sglang, which is not installed", "`sglang` on PATH", remedy)


def plan_sglang(
    launch: Launch, target: Target, log: Callable[[str], None], show: Callable[[Plan], None]
) -> Plan | None:
    """The plan of a server whose experts on the GPU are residents and whose others the CPU computes; all of them where
    an adapter has LoRA of experts."""
    check_options(launch)
    place = {"kt_place": "resident", **launch.place}
    if adapter_with_experts(launch, target) is not None:
        place = {"kt_place": "cpu"}
    plan = plan_server(replace(launch, place=place), target, log, show)
    if plan is not None and not plan.nearest.choice.gpus and not launch.force:
        reason = plan.gpu_unused_reason or "no GPU"
        remedy = "leave --engine out: our own server runs on a CPU; --force starts SGLang all the same"
        raise InputError("--engine", f"sglang, with {reason}", "a GPU that holds everything but the experts", remedy)
    return plan


def sglang_words(launch: Launch, target: Target, plan: Plan | None) -> list[str]:
    """The flags of SGLang's server."""
    place, model = launch.place, str(target.model)
    words: dict[str, Any] = {"--model-path": model, "--served-model-name": served_name(launch, target)}
    options = options_of(Launch)
    for name in VALUES:
        value = getattr(launch, name)
        words[options[name].flags[0]] = -1 if value == NO_LIMIT else None if value == options[name].default else value
    words["--tp-size"] = launch.gpus
    words["--mem-fraction-static"] = launch.memory if launch.memory != CacheOptions.memory else memory_fraction(plan)
    words["--tool-call-parser"], words["--reasoning-parser"] = parsers(launch, target)
    experts = target.choose_experts(launch.experts)
    words |= {"--kt-weight-path": str(experts or model), "--kt-method": method_of(launch, plan, experts)}
    words |= {"--kt-cpuinfer": launch.threads or (plan and plan.machine.cpu.threads)}
    words |= {"--kt-threadpool-count": launch.groups or (plan.machine.cpu.nodes if plan is not None else 1)}
    words["--kt-num-gpu-experts"] = _gpu_experts(launch, target, plan)
    for name in (name for name in PLACED if place.get(name)):
        words[options_of(PlacementOptions)[name].flags[0]] = place[name]
    if "--kt-gpu-experts-ratio" in words and words["--kt-num-gpu-experts"] == 0:
        del words["--kt-gpu-experts-ratio"]
    for name in SWITCHES:
        words[options[name].flags[0]] = getattr(launch, name)
    listed = [part for flag, value in words.items() for part in _flag(flag, value)]
    adapters = [f"{name}={directory}" for name, directory in (*target.adapters, *launch.lora_paths)]
    if adapters:
        listed += ["--enable-lora", "--lora-backend", "triton", "--lora-paths", *adapters]
    return listed + (["--kt-expert-lora-path", str(launch.always_on)] if launch.always_on else [])


def _flag(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, str(value)]


def check_options(launch: Launch) -> None:
    """Refuse what SGLang has no flag for."""
    known = {*VALUES, *SWITCHES, *READ}
    defaults = Launch(target=launch.target)
    serving = options_of(Launch)
    for item in fields(launch):
        if item.name not in known and getattr(launch, item.name) != getattr(defaults, item.name):
            option = serving.get(item.name)
            flag = option.flags[0] if option is not None and option.flags else item.name
            raise InputError(flag, getattr(launch, item.name), "it without --engine sglang")
    for name, value in launch.place.items():
        if name not in (*PLACED, *READ_PLACED):
            raise InputError(name, value, "it without --engine sglang")
    if launch.place.get("kt_place") not in (None, "resident", "split"):
        raise InputError("--kt-place", launch.place["kt_place"], "resident with --engine sglang")
    if launch.port == 0:
        raise InputError("--port", 0, "the port of the server with --engine sglang")


def served_name(launch: Launch, target: Target) -> str:
    return launch.served_model_name or target.name


def adapter_with_experts(launch: Launch, target: Target) -> str | None:
    if launch.always_on is not None:
        return str(launch.always_on)
    return first_with_experts(path for _, path in (*target.adapters, *launch.lora_paths))


def _gpu_experts(launch: Launch, target: Target, plan: Plan | None) -> int:
    """Of each layer; LoRA of experts is computed where all of them are, on the CPU."""
    if adapter_with_experts(launch, target) is not None:
        return 0
    given = launch.place.get("kt_num_gpu_experts")
    planned = plan.nearest.choice.residents if plan is not None else 0
    return int(planned if given is None else given)


def memory_fraction(plan: Plan | None) -> float | None:
    """The share of the GPU for weights and KV cache: all but what passes need. None: SGLang decides."""
    if plan is None or not plan.nearest.memory.gpus:
        return None
    table, gpu = plan.nearest.memory.gpus[0], plan.machine.gpus[0]
    reserved = SPARE_BYTES + sum(size for name, size in table.items() if name in PASSING)
    return round(min(MOST_FRACTION, max(LEAST_FRACTION, 1 - reserved / gpu.memory)), 2)


def method_of(launch: Launch, plan: Plan | None, experts: Path | None) -> str:
    if launch.expert_format is not None and launch.expert_format != "int8":
        remedy = "or write a directory with `kt quant` and pass it as --kt-weight-path"
        raise InputError("--kt-method", launch.expert_format, "int8, AMXINT8 or AMXINT4 with --engine sglang", remedy)
    if launch.expert_format == "int8":
        return "AMXINT8"
    if launch.method is not None and launch.method.upper() not in ("AUTO", "AMXBF16"):
        return launch.method.upper()
    return method_for({"up": plan.model.stored}) if plan is not None and experts is None else "LLAMAFILE"


def parsers(launch: Launch, target: Target) -> tuple[str | None, str | None]:
    """SGLang's words for the formats of tool calls and of reasoning that the model's chat template has."""
    kind = str(read_pretrained_config(target.model).model_type)
    template = str(read_tokenizer(target.model, trust_remote_code=launch.trust_remote_code).chat_template or "")
    calls = find(CALL_SIGNS, template) or ("" if template else CALLS_OF_TYPE.get(kind, ""))
    thinking = find(THINKING_SIGNS, template) or ("" if template else THINKING_OF_TYPE.get(kind, ""))
    words = CALL_WORDS.get(calls, calls), thinking and REASONING_OF_CALLS.get(calls, thinking)
    return launch.tool_call_parser or words[0] or None, launch.reasoning_parser or words[1] or None


def hide_key(command: list[str]) -> list[str]:
    """For a log."""
    return ["***" if before == "--api-key" else word for before, word in zip(["", *command], command, strict=False)]
