"""The command line of `kt serve` and `kt run`: flags of the options in `ground/options`, and SGLang's flags without
effect here, each with the note that is printed once. docs/serve.md has the same tables.

`kt serve --help` imports this module, so it imports nothing heavy. An unknown flag is an error; so is a known flag that
requests an unsupported feature, if ignoring it would change results.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from pydantic.dataclasses import dataclass

from ktransformers.ground.errors import InputError, MissingArgumentError, nearest
from ktransformers.ground.linear_storage import rest_word
from ktransformers.ground.options.cache import CacheOptions
from ktransformers.ground.options.field import CLOSED, add_flags, build, options_of
from ktransformers.ground.options.placement import PlacementOptions, take_options
from ktransformers.ground.options.serving import PromptOptions, ServingOptions
from ktransformers.serve.formats.families import CALL_ALIASES, CALLS, THINKING, THINKING_ALIASES

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

CONVERTED = {
    "bf16": "`kt quant --format bf16` converts them",
    "int8": "--kt-method int8 quantizes them while they are loaded",
    "int4": "--kt-method int4:32 quantizes them while they are loaded",
}

PARSERS: dict[str, set[str]] = {
    "tool-call-parser": {*CALLS, *CALL_ALIASES},
    "reasoning-parser": {*THINKING, *THINKING_ALIASES},
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
    "--disable-radix-cache": "prefixes are always cached",
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
    "--page-size": "blocks of the cache have 64 tokens",
    "--random-seed": "each request sets its own seed",
    "--tokenizer-path": "the tokenizer lies in the model directory",
    "--grammar-backend": "llguidance is used",
}


GROUPS: dict[str, type] = {"serving": ServingOptions, "KV cache": CacheOptions, "placement": PlacementOptions}


@dataclass(frozen=True, config=CLOSED)
class Launch(CacheOptions, ServingOptions):
    """The options of one launch line."""

    isa: str | None = None  # CPU variant of the experts, of `kt_backend` in a YAML file
    # That experts are quantized to while they are loaded, by --kt-method or `kt_backend`; None: as released.
    expert_format: str | None = None
    place: dict[str, Any] = field(default_factory=dict)  # fields of `PlacementOptions` that the line sets
    notes: tuple[str, ...] = ()  # on flags that were accepted without effect


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise InputError(self.prog, message, "flags as in docs/serve.md", f"`{self.prog} --help` lists them")


def make_parser() -> argparse.ArgumentParser:
    return _add_launch_flags(FlagParser(prog="kt serve", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False))


def make_run_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="kt run", description=_RUN_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    _add_launch_flags(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and exit; without it, serve")
    add_flags(parser.add_argument_group("answer"), options_of(PromptOptions))
    return parser


# Flags of all verbs, which `kt` takes before; here for --help.
VERB_FLAGS = {
    "--json": "print the address, or the answer to a prompt, as one JSON document",
    "--quiet": "no progress and no notes",
    "--verbose": "all of the plan, and one line for each tensor of an adapter",
}


def _add_launch_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("target", nargs="?", metavar="MODEL", help="a model, a training output, or its YAML file")
    for title, model in GROUPS.items():
        add_flags(parser.add_argument_group(title), options_of(model))
    for name in IGNORED_SWITCHES:
        parser.add_argument(name, action="append_const", const=name, dest="moot", help=argparse.SUPPRESS)
    for name in IGNORED_OPTIONS:
        parser.add_argument(name, dest=f"moot {name}", help=argparse.SUPPRESS)
    for name, text in VERB_FLAGS.items():
        parser.add_argument(name, action="store_true", dest=f"moot {name}", help=text)
    return parser


_DESCRIPTION = (
    "Serve a base and any number of adapters, chosen by each request: OpenAI's, Anthropic's and Ollama's APIs."
)
_RUN_DESCRIPTION = "Serve a model as `kt serve` does, or answer one PROMPT and exit."
_EPILOG = "SGLang's other flags are accepted and ignored; docs/serve.md lists them with the reasons."


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class RunLine(PromptOptions):
    """The options of a line of `kt run`."""

    launch: Launch


def parse(words: Sequence[str]) -> Launch:
    return _make_launch(vars(make_parser().parse_args(list(words))), "kt serve")


def parse_run(words: Sequence[str]) -> RunLine:
    """MODEL, PROMPT and flags in any order."""
    options = vars(make_run_parser().parse_intermixed_args(list(words)))
    if options["target_flag"] and options["target"] and options["prompt"] is None:
        options["target"], options["prompt"] = None, options["target"]  # --model M PROMPT
    own = {name: options.pop(name) for name in ("prompt", *options_of(PromptOptions))}
    return build(RunLine, {**own, "launch": _make_launch(options, "kt run")}, by_flag=True)


def names_model(words: Sequence[str]) -> bool:
    """Whether a line of `kt serve` or `kt run` names a model."""
    options = make_run_parser().parse_intermixed_args(list(words))
    return bool(options.target or options.target_flag)


def _make_launch(options: dict[str, Any], program: str) -> Launch:
    """The launch that parsed flags ask for."""
    targets = [name for name in (options.pop("target"), options.pop("target_flag")) if name]
    if len(targets) != 1:
        expected = "one model: a folder, a name of `kt model list` or `kt model known`, a hub id or a YAML file"
        remedy = f"{program} MODEL, or --model MODEL"
        if not targets:
            raise MissingArgumentError("MODEL", expected, remedy)
        raise InputError("MODEL", f"{len(targets)} models", expected, remedy)
    notes = [f"{name}: {IGNORED_SWITCHES[name]}" for name in dict.fromkeys(options.pop("moot") or [])]
    for name, reason in IGNORED_OPTIONS.items():
        value = options.pop(f"moot {name}")
        if value is not None:
            notes.append(f"{name} {value}: {reason}")
    for name in VERB_FLAGS:
        options.pop(f"moot {name}")
    options["expert_format"], method_notes = _expert_format(options["method"])
    notes += method_notes
    options["attention_backend"], note = _attention_backend(options["attention_backend"])
    for flag, known in PARSERS.items():
        word = options[flag.replace("-", "_")]
        if word is not None and word not in known:
            raise InputError(flag, word, nearest(word, known, f"one of {', '.join(sorted(known))}"), "or leave it out")
    place = take_options(options)
    return build(Launch, {**options, "target": targets[0], "place": place, "notes": (*notes, *note)}, by_flag=True)


def _expert_format(word: str | None) -> tuple[str | None, list[str]]:
    """The format that --kt-method has experts quantized to while they are loaded; None for a word of earlier guides,
    with which they stay as they are stored, and a note that says so."""
    if word is None:
        return None, []
    if word.upper() in KT_METHODS:
        stays = f"--kt-method {word}: experts keep the format in which they are stored"
        converted = KT_METHODS[word.upper()]
        return None, [stays if converted is None else f"{stays}; {CONVERTED[converted]}"]
    from ktransformers import _core

    formats = {row["name"] for row in _core.formats() if row["written"]}
    if word.partition(":")[0] not in formats:
        expected = f"one of {', '.join(KT_METHODS)}, or a format: {', '.join(sorted(formats))}"
        raise InputError("kt-method", word, expected)
    return rest_word(word), []


def _attention_backend(word: str) -> tuple[str, list[str]]:
    """Ours, and a note where SGLang's word names another."""
    if word in ATTENTION_BACKENDS:
        return word, []
    if word not in OTHER_ATTENTION_BACKENDS:
        known = ", ".join((*ATTENTION_BACKENDS, *OTHER_ATTENTION_BACKENDS))
        raise InputError("attention-backend", word, f"one of {known}")
    used = OTHER_ATTENTION_BACKENDS[word]
    return used, [f"--attention-backend {word}: {used} is used instead"]
