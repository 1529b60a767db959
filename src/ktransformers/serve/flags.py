"""Every flag of `kt serve` in one place: ours, those of SGLang's launch lines that have an effect here, and those that
have none, each with the note that is printed once. docs/serve.md has the same tables. `kt run` has all of them and a
few of its own (`RUN_FLAGS`).

`kt serve --help` imports this module, so it imports nothing heavy. An unknown flag is an error; so is a known flag that
requests an unsupported feature, if ignoring it would change results.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktransformers.experts.partition import PARTITIONS as EXPERT_PARTITIONS
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import rest_word


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    field: str
    help: str
    kind: type = str
    default: Any = None
    many: bool = False
    metavar: str = ""  # of what --help shows; default: the field's name


# The fields of `ground.options.placement.PlacementOptions`, by the same names.
PLACEMENT_FLAGS = (
    Flag(
        ("--kt-place",),
        "kt_place",
        "where experts are computed: auto, cpu, resident, host_callback, stream, stream_all, split; "
        "default: KT_PLACE, then auto",
    ),
    Flag(
        ("--kt-num-gpu-experts", "--gpu-experts"),
        "kt_num_gpu_experts",
        "experts of each layer that stay on the GPU",
        int,
    ),
    Flag(
        ("--kt-gpu-experts-ratio",),
        "kt_gpu_experts_ratio",
        "share of all experts that stay on the GPU, 0 to 1; overrides a number for each layer",
        float,
    ),
    Flag(
        ("--kt-expert-placement-strategy",),
        "kt_expert_placement_strategy",
        "how experts on the GPU are chosen: uniform, frequency, front-loading or random; default: frequency with "
        "statistics, else uniform",
    ),
    Flag(
        ("--init-expert-location",),
        "init_expert_location",
        "statistics for frequency: our JSON or safetensors, or kt-kernel's .pt",
    ),
    Flag(
        ("--kt-gpu-prefill-token-threshold", "--kt-gpu-prefill-threshold"),
        "kt_gpu_prefill_token_threshold",
        "batches of at least so many tokens stream all experts to the GPU",
        int,
    ),
    Flag(
        ("--kt-enable-dynamic-expert-update",),
        "kt_enable_dynamic_expert_update",
        "accepted, has no effect yet; the word is reserved for an expert cache",
        bool,
    ),
    Flag(
        ("--kt-max-deferred-experts-per-token",),
        "kt_max_deferred_experts_per_token",
        "accepted, not done here: exact decode steps in CUDA graphs are faster; see docs/place.md",
        int,
    ),
    Flag(
        ("--kt-w8a8",),
        "kt_w8a8",
        "8-bit activations on the CPU, for experts in int8, int4 or GGUF's types, an approximation",
        bool,
    ),
    Flag(("--kt-record-experts",), "kt_record_experts", "write counts of routed tokens to this file at the end"),
    Flag(
        ("--kt-optimize-rule", "--optimize-config-path", "--optimize_config_path"),
        "kt_optimize_rule",
        "operators and devices by rule: a YAML file, or a name that says how many GPUs; see docs/operators.md",
    ),
)

SUPPORTED_FLAGS = (
    Flag(("--model", "--model-path"), "model_flag", "the same as MODEL"),
    Flag(("--lora-paths",), "lora_paths", "adapters to load: NAME=DIR, or DIR alone", metavar="NAME=DIR", many=True),
    Flag(("--served-model-name",), "served_model_name", "what requests call the base; default: the directory's name"),
    Flag(("--host", "-H"), "host", "address to listen on; default: 127.0.0.1, this machine alone"),
    Flag(("--port", "-p"), "port", "port to listen on; default: 30000", int),
    Flag(("--api-key",), "api_key", "requests must send this key"),
    Flag(
        ("--allowed-hosts",),
        "allowed_hosts",
        "names that requests may be sent to besides the address of --host; *: any",
        metavar="NAME",
        many=True,
    ),
    Flag(
        ("--cors-origins",),
        "cors_origins",
        "origins of web pages that may send requests, such as https://example.org; *: any; default: none",
        metavar="ORIGIN",
        many=True,
    ),
    Flag(("--watch",), "watch", "a training output directory: serve its checkpoints as they are saved"),
    Flag(("--max-running-requests",), "max_running_requests", "sequences in a batch", int, 16),
    Flag(("--max-queued-requests",), "max_queued_requests", "sequences in the queue; more are answered 429", int, 128),
    Flag(("--chunked-prefill-size",), "chunked_prefill_size", "prompt tokens in one step; -1: no limit", int, 512),
    Flag(
        ("--max-total-tokens",),
        "max_total_tokens",
        "capacity of the KV cache in tokens; default: by --mem-fraction-static",
        int,
    ),
    Flag(
        ("--context-length",), "context_length", "prompt and new tokens of one request; default: the model's limit", int
    ),
    Flag(
        ("--mem-fraction-static",),
        "memory",
        "share of the memory that is free after loading for the KV cache",
        float,
        0.5,
    ),
    Flag(
        ("--kv-host-gb",),
        "kv_host_gb",
        "GiB of host memory for blocks of the KV cache that leave its slots; default: of kt serve with a GPU a tenth "
        "of what is free, at most 8, else 0",
        float,
    ),
    Flag(("--kv-disk",), "kv_disk", "a file, or a folder for it, that keeps blocks of the KV cache over restarts"),
    Flag(("--kv-disk-gb",), "kv_disk_gb", "GiB of that file; default: half of what is free on its disk", float),
    Flag(
        ("--kv-cache-dtype",),
        "kv_cache_dtype",
        "of keys and values: auto, as the model is computed, bf16 for a model in bf16, or fp8, codes of e4m3 with a "
        "scale for each token and head",
        str,
        "auto",
    ),
    Flag(("--max-body-bytes",), "max_body_bytes", "bytes of one request", int, 16 * 2**20),
    Flag(("--max-prompts",), "max_prompts", "prompts of one /v1/completions", int, 128),
    Flag(("--max-messages",), "max_messages", "messages of one chat", int, 4096),
    Flag(("--max-tools",), "max_tools", "tools of one chat", int, 128),
    Flag(("--max-schema-properties",), "max_schema_properties", "properties of one JSON schema", int, 1000),
    Flag(("--max-schema-depth",), "max_schema_depth", "levels of objects and lists of one JSON schema", int, 64),
    Flag(("--prepare-workers",), "prepare_workers", "processes that parse and tokenise requests", int, 2),
    Flag(("--prepare-timeout",), "prepare_timeout", "seconds that this may take for one request", float, 10.0),
    Flag(("--request-timeout",), "request_timeout", "seconds until a request is aborted; 0: never", float, 0.0),
    Flag(("--dtype",), "dtype", "auto, bfloat16, float16 or float32: everything but the experts", str, "auto"),
    Flag(
        ("--trust-remote-code",),
        "trust_remote_code",
        "run the code that a release brings as its tokenizer; models are those of transformers",
        bool,
    ),
    Flag(("--device",), "device", "cpu or cuda: everything but the experts; default: cuda where there is one"),
    Flag(("--chat-template",), "chat_template", "a file with a Jinja template in place of the base model's"),
    Flag(("--kt-cpuinfer", "--cpu-threads"), "threads", "threads of the experts; default: chosen by the machine", int),
    Flag(("--kt-threadpool-count",), "groups", "groups of threads, one per NUMA node; default: all nodes", int),
    Flag(("--kt-expert-lora-path", "--kt-lora-path"), "always_on", "an adapter whose experts apply to every request"),
    Flag(
        ("--kt-weight-path", "--weights-path"),
        "experts",
        "where the experts come from: packed, GGUF or kt-kernel's files",
    ),
    Flag(("--kt-method",), "method", "format of the experts; see docs/serve.md"),
    Flag(
        ("--deterministic", "--enable-deterministic-inference"),
        "deterministic",
        "the same request has the same answer whatever else is served, in 16 bits too; slower; on the CPU",
        bool,
    ),
    Flag(("--prefault",), "prefault", "read all pages of a packed directory before the first request", bool),
    Flag(("--lock",), "lock", "the same, and lock them in memory; `ulimit -l` must allow it", bool),
    Flag(("--no-verify",), "no_verify", "do not compare packed experts with their checksums on first use", bool),
    *PLACEMENT_FLAGS,
    Flag(
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        "gpus",
        "GPUs that whole layers are distributed over, not heads; default: 1, or as many as the plan needs",
        int,
    ),
    Flag(
        ("--hosts-address",),
        "hosts_address",
        "several hosts: ADDRESS:PORT on which rank 0 waits for the others; default: MASTER_ADDR and MASTER_PORT + 1",
        metavar="ADDRESS:PORT",
    ),
    Flag(
        ("--hosts-timeout",),
        "hosts_timeout",
        "several hosts: seconds after which a host that does not answer is gone",
        float,
        60.0,
    ),
    Flag(
        ("--kt-expert-partition",),
        "expert_partition",
        "several hosts: experts (ranges of ids), layers, or frequency, by the counts of --init-expert-location",
        default="experts",
    ),
    Flag(
        ("--first-host-experts",),
        "first_host_experts",
        "several hosts: experts of each layer on rank 0; the others share the rest; default: as many as every host",
        int,
    ),
    Flag(
        ("--cuda-graph-max-bs",),
        "cuda_graph_max_bs",
        "largest batch that is captured in a CUDA graph, 32 at most",
        int,
        32,
    ),
    Flag(("--disable-cuda-graph",), "disable_cuda_graph", "decode without CUDA graphs", bool),
    Flag(
        ("--disable-overlap-schedule",),
        "disable_overlap_schedule",
        "CUDA graphs: launch a decode step only when the host has read the tokens of the step before",
        bool,
    ),
    Flag(
        ("--rest",),
        "rest",
        "linear layers outside of the experts: keep, in the bits of the release, bf16, or a format such as int8, "
        "int4:32 or fp8 that they are encoded in",
        default="keep",
    ),
    Flag(
        ("--attention-backend", "--decode-attention-backend"),
        "attention_backend",
        "of new tokens on a GPU: triton, in CUDA graphs, or torch, without them; SGLang's other words are accepted",
        default="triton",
    ),
    Flag(("--log-level",), "log_level", "of the HTTP server", str, "warning"),
    Flag(("--force",), "force", "serve even if the plan says that it does not fit", bool),
)

# Words of --kv-cache-dtype -> the dtype of the model that they ask for; None: any.
CACHE_DTYPES: dict[str, str | None] = {"auto": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}
FP8_WORDS = ("fp8", "fp8_e4m3")  # the second is SGLang's
CACHE_DTYPES |= dict.fromkeys(FP8_WORDS)

# What `kt run` has besides: an answer to one prompt.
RUN_FLAGS = (
    Flag(("--adapter",), "adapter", "name of the adapter to ask; default: a training output's own"),
    Flag(("--system",), "system", "system message"),
    Flag(("--max-tokens",), "max_tokens", "at most that many tokens of answer", int, 512),
    Flag(("--temperature",), "temperature", "0 is greedy; default: the model's", float),
    Flag(("--dry-run",), "dry_run", "print the plan and the command of the server, load nothing", bool),
)

# Names of formats in earlier guides -> the format of `kt quant`; None: experts stay as released.
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

ATTENTION_BACKENDS = ("triton", "torch")
OTHER_ATTENTION_BACKENDS: dict[str, str] = {  # SGLang's words, and what is used instead
    **dict.fromkeys(("torch_native", "flex_attention", "intel_amx", "ascend"), "torch"),
    **dict.fromkeys(("flashinfer", "fa3", "fa4", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha"), "triton"),
    **dict.fromkeys(("aiter", "wave", "dual_chunk_flash_attn", "hybrid_linear_attn", "nsa", "dsa"), "triton"),
}

IGNORED_SWITCHES: dict[str, str] = {  # take no value
    "--enable-mixed-chunk": "prefill and decode always share a batch",
    "--enable-p2p-check": "GPUs exchange hidden states through torch",
    "--enable-shared-experts-fusion": "shared experts are computed as the model has them",
    "--disable-shared-experts-fusion": "shared experts are computed as the model has them",
    "--enable-lora": "adapters are always enabled",
    "--disable-radix-cache": "prefixes are cached per KV slot",
    "--enable-metrics": "/metrics is always served",
    "--disable-custom-all-reduce": "there is no all-reduce over GPUs",
    "--skip-server-warmup": "there is no warm-up",
    "--allow-auto-truncate": "prompts that are too long are refused",
    "--record-kt-gpu-expert-distribution": "--kt-record-experts writes counts",
}
IGNORED_OPTIONS: dict[str, str] = {  # take one value
    "--kt-numa-nodes": "nodes are detected; --kt-threadpool-count limits them",
    "--numa-nodes": "nodes are detected; --kt-threadpool-count limits them",
    "--prefill-attention-backend": "attention of prompts is torch's own",
    "--sampling-backend": "sampling is torch's own",
    "--lora-backend": "adapters are applied by our own code",
    "--max-loras-per-batch": "a batch may hold any number of adapters",
    "--max-loaded-loras": "adapters stay until they are unloaded",
    "--max-lora-rank": "ranks are read from the adapters",
    "--lora-target-modules": "targets are read from the adapters",
    "--max-prefill-tokens": "--chunked-prefill-size sets it",
    "--schedule-policy": "first come, first served",
    "--schedule-conservativeness": "a sequence without KV capacity is preempted and recomputed later",
    "--watchdog-timeout": "--request-timeout sets it",
    "--fp8-gemm-backend": "there are no FP8 GEMMs",
    "--page-size": "the cache has slots, not pages",
    "--random-seed": "each request sets its own seed",
    "--tokenizer-path": "the tokenizer lies in the model directory",
    "--grammar-backend": "llguidance is used",
    "--tool-call-parser": "calls are parsed in the formats that docs/serve.md lists",
    "--reasoning-parser": "reasoning stays in the text",
}


@dataclass(frozen=True)
class Launch:
    """The options of one launch line."""

    target: str
    lora_paths: tuple[tuple[str, str], ...] = ()
    served_model_name: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    watch: Path | None = None
    max_running_requests: int = 16
    max_queued_requests: int = 128
    chunked_prefill_size: int = 512
    max_total_tokens: int | None = None
    context_length: int | None = None
    memory: float = 0.5
    kv_host_gb: float | None = None
    kv_disk: Path | None = None
    kv_disk_gb: float | None = None
    kv_cache_dtype: str = "auto"
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 128
    max_messages: int = 4096
    max_tools: int = 128
    max_schema_properties: int = 1000
    max_schema_depth: int = 64
    prepare_workers: int = 2
    prepare_timeout: float = 10.0
    request_timeout: float = 0.0
    dtype: str = "auto"
    trust_remote_code: bool = False
    device: str | None = None
    chat_template: Path | None = None
    threads: int | None = None
    groups: int | None = None
    isa: str | None = None  # CPU variant of the experts, of `kt_backend` in a YAML file
    expert_format: str | None = None  # that experts are encoded in while they are loaded, likewise; None: as released
    always_on: Path | None = None
    experts: Path | None = None
    pages: str = "lazy"  # of a packed directory: lazy, prefault or lock
    verify: bool | None = None  # of `load_model`
    deterministic: bool = False
    gpus: int | None = None  # that layers are distributed over
    place: dict[str, Any] = field(
        default_factory=dict
    )  # fields of `ground.options.placement.PlacementOptions` that the line sets
    hosts_address: str | None = None
    hosts_timeout: float = 60.0
    expert_partition: str = "experts"
    first_host_experts: int | None = None
    cuda_graph_max_bs: int = 32
    disable_cuda_graph: bool = False
    disable_overlap_schedule: bool = False
    attention_backend: str = "triton"  # or torch: of new tokens on a GPU
    rest: str = "keep"  # or bf16, or the format of linear layers outside of the experts
    log_level: str = "warning"
    force: bool = False
    notes: tuple[str, ...] = field(default=())  # on flags that were accepted without effect

    @property
    def fp8_cache(self) -> bool:
        """Keys and values are codes of 8 bits."""
        return self.kv_cache_dtype in FP8_WORDS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise InputError(self.prog, message, "flags as in docs/serve.md", f"`{self.prog} --help` lists them")


def make_parser() -> argparse.ArgumentParser:
    return _add_launch_flags(_Parser(prog="kt serve", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False))


def make_run_parser() -> argparse.ArgumentParser:
    parser = _add_launch_flags(_Parser(prog="kt run", description=_RUN_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False))
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and exit; without it, serve")
    for flag in RUN_FLAGS:
        _add_flag(parser, flag)
    return parser


# Flags of all verbs, which `kt` takes before; here for --help.
VERB_FLAGS = {
    "--json": "print the address, or the answer to a prompt, as one JSON document",
    "--quiet": "no progress and no notes",
    "--verbose": "all of the plan, and one line for each tensor of an adapter",
}


def _add_launch_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("target", nargs="?", metavar="MODEL", help="a model, a training output, or its YAML file")
    for flag in SUPPORTED_FLAGS:
        _add_flag(parser, flag)
    for name in IGNORED_SWITCHES:
        parser.add_argument(name, action="append_const", const=name, dest="moot", help=argparse.SUPPRESS)
    for name in IGNORED_OPTIONS:
        parser.add_argument(name, dest=f"moot {name}", help=argparse.SUPPRESS)
    for name, text in VERB_FLAGS.items():
        parser.add_argument(name, action="store_true", dest=f"moot {name}", help=text)
    return parser


def _add_flag(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.kind is bool:
        parser.add_argument(*flag.names, dest=flag.field, action="store_true", help=flag.help)
        return
    parser.add_argument(
        *flag.names,
        dest=flag.field,
        type=flag.kind,
        default=flag.default,
        help=flag.help + (f"; default: {flag.default}" if flag.default is not None else ""),
        metavar=flag.metavar or flag.field.removesuffix("_flag").upper(),
        **({"nargs": "+", "action": "extend"} if flag.many else {}),  # type: ignore[arg-type]
    )


_DESCRIPTION = "Serve a model over the OpenAI API: the base and any number of adapters, chosen by each request."
_RUN_DESCRIPTION = "Serve a model as `kt serve` does, or answer one PROMPT and exit."
_EPILOG = "SGLang's other flags are accepted and ignored; docs/serve.md lists them with the reasons."


@dataclass(frozen=True)
class RunLine:
    """The options of a line of `kt run`."""

    launch: Launch
    prompt: str | None
    adapter: str | None
    system: str | None
    max_tokens: int
    temperature: float | None
    dry_run: bool


def parse(words: Sequence[str]) -> Launch:
    return _make_launch(vars(make_parser().parse_args(list(words))), "kt serve")


def parse_run(words: Sequence[str]) -> RunLine:
    """MODEL, PROMPT and flags in any order."""
    options = vars(make_run_parser().parse_intermixed_args(list(words)))
    if options["model_flag"] and options["target"] and options["prompt"] is None:
        options["target"], options["prompt"] = None, options["target"]  # --model M PROMPT
    own = {name: options.pop(name) for name in ("prompt", *(flag.field for flag in RUN_FLAGS))}
    if own["max_tokens"] < 1:
        raise InputError("max-tokens", own["max_tokens"], "1 or more")
    if own["temperature"] is not None and not 0 <= own["temperature"] <= 2:
        raise InputError("temperature", own["temperature"], "0 to 2")
    return RunLine(_make_launch(options, "kt run"), **own)


def names_model(words: Sequence[str]) -> bool:
    """Whether a line of `kt serve` or `kt run` names a model."""
    options = make_run_parser().parse_intermixed_args(list(words))
    return bool(options.target or options.model_flag)


def _make_launch(options: dict[str, Any], program: str) -> Launch:
    """The launch that parsed flags ask for."""
    targets = [name for name in (options.pop("target"), options.pop("model_flag")) if name]
    if len(targets) != 1:
        given = "nothing" if not targets else f"{len(targets)} models"
        expected = "one model: a folder, a name of `kt model list` or `kt model known`, a hub id or a YAML file"
        raise InputError("MODEL", given, expected, f"{program} MODEL, or --model MODEL")
    notes = [f"{name}: {IGNORED_SWITCHES[name]}" for name in dict.fromkeys(options.pop("moot") or [])]
    for name, reason in IGNORED_OPTIONS.items():
        value = options.pop(f"moot {name}")
        if value is not None:
            notes.append(f"{name} {value}: {reason}")
    for name in VERB_FLAGS:
        options.pop(f"moot {name}")
    notes += _method_notes(options.pop("method"))
    options["rest"] = rest_word(options["rest"])
    options["attention_backend"], note = _attention_backend(options["attention_backend"])
    notes += note
    _check_ranges(options)
    paths = tuple(_parse_lora_path(word) for word in options.pop("lora_paths") or [])
    names = [name for name, _ in paths]
    if len(set(names)) < len(names):
        raise InputError("lora-paths", ", ".join(names), "every name once")
    for name in ("watch", "chat_template", "always_on", "experts", "kv_disk"):
        options[name] = None if options[name] is None else Path(options[name])
    for name in ("allowed_hosts", "cors_origins"):
        options[name] = tuple(options[name] or ())
    placement = {flag.field: options.pop(flag.field) for flag in PLACEMENT_FLAGS}
    options["place"] = {name: value for name, value in placement.items() if value is not None and value is not False}
    prefault, lock = options.pop("prefault"), options.pop("lock")
    options["verify"] = False if options.pop("no_verify") else None
    options["pages"] = "lock" if lock else "prefault" if prefault else "lazy"
    return Launch(target=targets[0], lora_paths=paths, notes=tuple(notes), **options)


def _method_notes(word: str | None) -> list[str]:
    if word is None:
        return []
    if word.upper() not in KT_METHODS:
        raise InputError("kt-method", word, f"one of {', '.join(KT_METHODS)}")
    stays = f"--kt-method {word}: experts keep the format in which they are stored"
    quant_format = KT_METHODS[word.upper()]
    return [stays if quant_format is None else f"{stays}; `kt quant --format {quant_format}` converts them"]


def _attention_backend(word: str) -> tuple[str, list[str]]:
    """Ours, and a note where SGLang's word names another."""
    if word in ATTENTION_BACKENDS:
        return word, []
    if word not in OTHER_ATTENTION_BACKENDS:
        known = ", ".join((*ATTENTION_BACKENDS, *OTHER_ATTENTION_BACKENDS))
        raise InputError("attention-backend", word, f"one of {known}")
    used = OTHER_ATTENTION_BACKENDS[word]
    return used, [f"--attention-backend {word}: {used} is used instead"]


def _check_ranges(options: dict[str, Any]) -> None:
    for name, minimum in (
        ("max_running_requests", 1),
        ("max_queued_requests", 1),
        ("max_total_tokens", 64),
        ("context_length", 2),
        ("port", 0),
        ("gpus", 1),
        ("cuda_graph_max_bs", 1),
        ("max_body_bytes", 1024),
        ("max_prompts", 1),
        ("max_messages", 1),
        ("max_tools", 1),
        ("max_schema_properties", 1),
        ("max_schema_depth", 4),
        ("prepare_workers", 1),
        ("prepare_timeout", 0.1),
    ):
        if options[name] is not None and options[name] < minimum:
            raise InputError(name, options[name], f"{minimum} or more")
    if options["api_key"] is not None and not options["api_key"].strip():
        raise InputError("api-key", "an empty key", "a key", "without --api-key requests need none")
    if options["chunked_prefill_size"] == -1:
        options["chunked_prefill_size"] = 2**31
    if options["chunked_prefill_size"] < 1:
        raise InputError("chunked-prefill-size", options["chunked_prefill_size"], "1 or more, or -1")
    _check_cache(options)
    if options["expert_partition"] not in EXPERT_PARTITIONS:
        raise InputError("kt-expert-partition", options["expert_partition"], "one of " + ", ".join(EXPERT_PARTITIONS))
    if not 0 < options["hosts_timeout"] < math.inf:
        raise InputError("hosts-timeout", options["hosts_timeout"], "more than 0 seconds")
    if not 0 < options["memory"] <= 1:
        raise InputError("mem-fraction-static", options["memory"], "more than 0, at most 1")


def _check_cache(options: dict[str, Any]) -> None:
    host, disk_gb, dtype = options["kv_host_gb"], options["kv_disk_gb"], options["kv_cache_dtype"]
    if host is not None and not 0 <= host < math.inf:
        raise InputError("kv-host-gb", host, "0 or more")
    if disk_gb is not None and not 0 < disk_gb < math.inf:
        raise InputError("kv-disk-gb", disk_gb, "more than 0")
    if disk_gb is not None and options["kv_disk"] is None:
        raise InputError("kv-disk-gb", disk_gb, "--kv-disk PATH beside it")
    if options["kv_disk"] == "":
        raise InputError("kv-disk", "an empty path", "a file or a folder")
    if dtype not in CACHE_DTYPES:
        raise InputError("kv-cache-dtype", dtype, "auto, bf16 or fp8 (e4m3)")


def _parse_lora_path(word: str) -> tuple[str, str]:
    name, separator, directory = word.partition("=")
    if not separator:
        name, directory = Path(word).name, word
    if not re.fullmatch(r"[\w.-]+", name) or not directory:
        raise InputError("lora-paths", repr(word), "NAME=DIR; names have letters, digits, dots and dashes")
    return name, directory
