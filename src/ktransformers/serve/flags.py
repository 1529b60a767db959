"""Every flag of `kt serve` in one place: ours, those of SGLang's launch lines that mean something here, and those that
do not, each with the sentence that the user reads once. docs/serve.md prints the same tables.

This module is read for `kt serve --help`, so it imports nothing heavy. An unknown flag is an error; a known one that
asks for what does not exist is an error, too, where ignoring it would change answers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktransformers.errors import InputError


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    field: str
    help: str
    kind: type = str
    default: Any = None
    many: bool = False


# What `place.wish.Wish` has, by the same words; that module is not read here, because it brings torch.
PLACEMENT_FLAGS = (
    Flag(
        ("--kt-place",),
        "kt_place",
        "where experts are computed: auto, cpu, stream, resident; default: KT_PLACE, then auto",
    ),
    Flag(("--kt-num-gpu-experts",), "kt_num_gpu_experts", "experts of each layer that stay on the GPU", int),
    Flag(("--kt-gpu-experts-ratio",), "kt_gpu_experts_ratio", "share of all experts that stay there; wins", float),
    Flag(
        ("--kt-expert-placement-strategy",),
        "kt_expert_placement_strategy",
        "which ones: uniform, frequency, front-loading or random; default: uniform",
    ),
    Flag(
        ("--init-expert-location",),
        "init_expert_location",
        "statistics for frequency: our JSON or safetensors, or kt-kernel's .pt",
    ),
    Flag(
        ("--kt-gpu-prefill-token-threshold",),
        "kt_gpu_prefill_token_threshold",
        "batches of so many tokens are streamed to the GPU whole",
        int,
    ),
    Flag(
        ("--kt-enable-dynamic-expert-update",),
        "kt_enable_dynamic_expert_update",
        "after such a batch its busiest experts are the residents",
        bool,
    ),
    Flag(
        ("--kt-max-deferred-experts-per-token",),
        "kt_max_deferred_experts_per_token",
        "experts of a token that may come one layer late, an approximation",
        int,
    ),
    Flag(
        ("--kt-w8a8",),
        "kt_w8a8",
        "8-bit activations on the CPU, for int8 or int4 experts, an approximation",
        bool,
    ),
    Flag(("--kt-record-experts",), "kt_record_experts", "write counts of routed tokens to this file at the end"),
    Flag(
        ("--kt-optimize-rule", "--optimize-config-path", "--optimize_config_path"),
        "kt_optimize_rule",
        "placement rules, a YAML file; see docs/place.md",
    ),
)

SUPPORTED_FLAGS = (
    Flag(("--model", "--model-path"), "model_flag", "the same as MODEL"),
    Flag(("--lora-paths",), "lora_paths", "adapters to load: NAME=DIR, or DIR alone", many=True),
    Flag(("--served-model-name",), "served", "what requests call the base; default: the directory's name"),
    Flag(("--host",), "host", "address to listen on; default: 127.0.0.1, this machine alone"),
    Flag(("--port",), "port", "port to listen on; default: 30000", int),
    Flag(("--api-key",), "api_key", "requests must bring this key"),
    Flag(("--watch",), "watch", "a training output directory: serve its checkpoints as they are saved"),
    Flag(("--max-running-requests",), "running", "sequences in a batch", int, 16),
    Flag(("--max-queued-requests",), "queued", "sequences that may wait; more are answered 429", int, 128),
    Flag(("--chunked-prefill-size",), "chunk", "prompt tokens in one step; -1: no limit", int, 512),
    Flag(("--max-total-tokens",), "tokens", "room of the KV cache; default: by --mem-fraction-static", int),
    Flag(("--context-length",), "context", "prompt and answer of one request; default: the model's", int),
    Flag(("--mem-fraction-static",), "memory", "share of the memory that is free after loading for KV", float, 0.5),
    Flag(("--request-timeout",), "timeout", "seconds until an answer is given up; 0: never", float, 0.0),
    Flag(("--dtype",), "dtype", "auto, bfloat16, float16 or float32: everything but the experts", str, "auto"),
    Flag(("--device",), "device", "cpu or cuda: everything but the experts; default: cuda where there is one"),
    Flag(("--chat-template",), "chat_template", "a file with a Jinja template in place of the model's"),
    Flag(("--kt-cpuinfer",), "threads", "threads of the experts; default: chosen by the machine", int),
    Flag(("--kt-threadpool-count",), "groups", "groups of threads, one per NUMA node; default: all nodes", int),
    Flag(("--kt-expert-lora-path", "--kt-lora-path"), "always", "an adapter whose experts are on for every request"),
    Flag(("--kt-weight-path",), "experts", "where the experts come from: packed, GGUF or kt-kernel's files"),
    Flag(("--kt-method",), "method", "format of the experts; see docs/serve.md"),
    Flag(("--prefault",), "prefault", "bring all pages of a packed directory before the first request", bool),
    Flag(("--lock",), "lock", "the same, and keep them in memory; `ulimit -l` must allow it", bool),
    *PLACEMENT_FLAGS,
    Flag(
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        "gpus",
        "GPUs that the layers are spread over; default: 1, or as many as the plan needs",
        int,
    ),
    Flag(("--cuda-graph-max-bs",), "graph_rows", "sequences that a step in a CUDA graph may have, 32 at most", int, 32),
    Flag(("--disable-cuda-graph",), "no_graphs", "new tokens are computed kernel by kernel", bool),
    Flag(("--log-level",), "log_level", "of the HTTP server", str, "warning"),
    Flag(("--force",), "force", "serve even where the plan says that it cannot fit", bool),
)

# Names of formats in earlier guides -> the word for `kt quant`, None where the released bytes stay as they are.
KT_METHODS: dict[str, str | None] = {
    "BF16": "bf16",
    "AMXBF16": "bf16",
    "AUTO": None,
    "AMXINT8": "int8",
    "AMXINT4": "int4",
    "MOE_INT8": "int8",
    "MOE_INT4": "int4",
    "RAWINT4": None,
    "FP8": None,
    "FP8_PERCHANNEL": None,
    "GPTQ_INT4": None,
    "MXFP4": None,
    "LLAMAFILE": None,
}

IGNORED_SWITCHES: dict[str, str] = {  # take no value
    "--trust-remote-code": "models are those of transformers, no code is fetched",
    "--enable-mixed-chunk": "prompts and answers always share a batch",
    "--enable-p2p-check": "GPUs exchange hidden states through torch",
    "--disable-shared-experts-fusion": "shared experts are computed as the model has them",
    "--enable-lora": "adapters are always possible",
    "--disable-radix-cache": "prefixes are kept per slot",
    "--enable-metrics": "/metrics is always there",
    "--disable-custom-all-reduce": "nothing is reduced over GPUs",
    "--skip-server-warmup": "there is none",
    "--allow-auto-truncate": "prompts that are too long are refused",
    "--record-kt-gpu-expert-distribution": "--kt-record-experts writes counts",
}
IGNORED_OPTIONS: dict[str, str] = {  # take one value
    "--kt-numa-nodes": "nodes are found by themselves; --kt-threadpool-count limits them",
    "--attention-backend": "attention is torch's own",
    "--prefill-attention-backend": "attention is torch's own",
    "--decode-attention-backend": "attention is torch's own",
    "--sampling-backend": "sampling is torch's own",
    "--lora-backend": "adapters are applied by our own code",
    "--max-loras-per-batch": "a batch may hold any number of adapters",
    "--max-loaded-loras": "adapters stay until they are unloaded",
    "--max-lora-rank": "ranks are read from the adapters",
    "--lora-target-modules": "targets are read from the adapters",
    "--max-prefill-tokens": "--chunked-prefill-size says it",
    "--schedule-policy": "first come, first served",
    "--schedule-conservativeness": "an answer without room waits and goes on later",
    "--watchdog-timeout": "--request-timeout says it",
    "--fp8-gemm-backend": "there are no FP8 products",
    "--kv-cache-dtype": "keys and values are kept as the model computes them",
    "--page-size": "the cache has slots, not pages",
    "--random-seed": "a request's own seed says it",
    "--tokenizer-path": "the tokenizer lies in the model directory",
    "--grammar-backend": "llguidance is the one",
    "--tool-call-parser": "calls are read in the forms that docs/serve.md lists",
    "--reasoning-parser": "thoughts stay in the text",
}


@dataclass(frozen=True)
class Launch:
    """A launch line, read."""

    target: str
    lora_paths: tuple[tuple[str, str], ...] = ()
    served: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = None
    watch: Path | None = None
    running: int = 16
    queued: int = 128
    chunk: int = 512
    tokens: int | None = None
    context: int | None = None
    memory: float = 0.5
    timeout: float = 0.0
    dtype: str = "auto"
    device: str | None = None
    chat_template: Path | None = None
    threads: int | None = None
    groups: int | None = None
    always: Path | None = None
    experts: Path | None = None
    pages: str = "lazy"  # of a packed directory: lazy, prefault or lock
    gpus: int | None = None  # that layers are spread over
    place: dict[str, Any] = field(default_factory=dict)  # fields of `place.wish.Wish` that the line gives
    graph_rows: int = 32
    no_graphs: bool = False
    log_level: str = "warning"
    force: bool = False
    notes: tuple[str, ...] = field(default=())  # what was accepted and means nothing here


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise InputError("kt serve", message, "a launch line as in docs/serve.md", "`kt serve --help` lists the flags")


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="kt serve", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    made.add_argument("target", nargs="?", metavar="MODEL", help="a model, a training output, or its YAML file")
    for flag in SUPPORTED_FLAGS:
        if flag.kind is bool:
            made.add_argument(*flag.names, dest=flag.field, action="store_true", help=flag.help)
            continue
        metavar = flag.field.removesuffix("_flag").upper()
        made.add_argument(
            *flag.names,
            dest=flag.field,
            type=flag.kind,
            default=flag.default,
            help=flag.help + (f"; default: {flag.default}" if flag.default is not None else ""),
            metavar="NAME=DIR" if flag.many else metavar,
            **({"nargs": "+", "action": "extend"} if flag.many else {}),  # type: ignore[arg-type]
        )
    for name in IGNORED_SWITCHES:
        made.add_argument(name, action="append_const", const=name, dest="moot", help=argparse.SUPPRESS)
    for name in IGNORED_OPTIONS:
        made.add_argument(name, dest=f"moot {name}", help=argparse.SUPPRESS)
    return made


_DESCRIPTION = "Serve a model over the OpenAI API: the base and any number of adapters, chosen by each request."
_EPILOG = "SGLang's other flags are accepted and mean nothing here; docs/serve.md lists them with the reasons."


def parse(words: Sequence[str]) -> Launch:
    found = vars(parser().parse_args(list(words)))
    given = [name for name in (found.pop("target"), found.pop("model_flag")) if name]
    if len(given) != 1:
        raise InputError("MODEL", f"{len(given)} models", "one", "kt serve MODEL, or --model MODEL")
    notes = [f"{name}: {IGNORED_SWITCHES[name]}" for name in dict.fromkeys(found.pop("moot") or [])]
    for name, why in IGNORED_OPTIONS.items():
        value = found.pop(f"moot {name}")
        if value is not None:
            notes.append(f"{name} {value}: {why}")
    notes += _method_notes(found.pop("method"))
    _check_ranges(found)
    paths = tuple(_parse_lora_path(word) for word in found.pop("lora_paths") or [])
    names = [name for name, _ in paths]
    if len(set(names)) < len(names):
        raise InputError("lora-paths", ", ".join(names), "every name once")
    for name in ("watch", "chat_template", "always", "experts"):
        found[name] = None if found[name] is None else Path(found[name])
    asked = {flag.field: found.pop(flag.field) for flag in PLACEMENT_FLAGS}
    found["place"] = {name: value for name, value in asked.items() if value is not None and value is not False}
    prefault, lock = found.pop("prefault"), found.pop("lock")
    found["pages"] = "lock" if lock else "prefault" if prefault else "lazy"
    return Launch(target=given[0], lora_paths=paths, notes=tuple(notes), **found)


def _method_notes(word: str | None) -> list[str]:
    if word is None:
        return []
    if word.upper() not in KT_METHODS:
        raise InputError("kt-method", word, f"one of {', '.join(KT_METHODS)}")
    stays = f"--kt-method {word}: experts keep the format that they are stored in"
    made = KT_METHODS[word.upper()]
    return [stays if made is None else f"{stays}; `kt quant --format {made}` makes others"]


def _check_ranges(found: dict[str, Any]) -> None:
    for name, least in (
        ("running", 1),
        ("queued", 1),
        ("tokens", 64),
        ("context", 2),
        ("port", 0),
        ("gpus", 1),
        ("graph_rows", 1),
    ):
        if found[name] is not None and found[name] < least:
            raise InputError(name, found[name], f"{least} or more")
    if found["chunk"] == -1:
        found["chunk"] = 2**31
    if found["chunk"] < 1:
        raise InputError("chunked-prefill-size", found["chunk"], "1 or more, or -1")
    if not 0 < found["memory"] <= 1:
        raise InputError("mem-fraction-static", found["memory"], "more than 0, at most 1")


def _parse_lora_path(word: str) -> tuple[str, str]:
    name, separator, place = word.partition("=")
    if not separator:
        name, place = Path(word).name, word
    if not re.fullmatch(r"[\w.-]+", name) or not place:
        raise InputError("lora-paths", repr(word), "NAME=DIR; names have letters, digits, dots and dashes")
    return name, place
