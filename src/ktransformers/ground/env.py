"""Every environment variable that ktransformers reads; docs/environment.md has the same table.

The native core reads the CPU variant, the thread count and the debug switch itself, because it also runs without
Python; they are listed here so that there is one list.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ktransformers.ground.errors import InputError

GPU_MEMORY = "KT_GPU_MEMORY"
GRAPHS = ("experts", "attention", "decode")  # what KT_GRAPHS can name


@dataclass(frozen=True)
class Variable:
    name: str
    values: str
    meaning: str


VARIABLES = (
    Variable(
        "KT_ISA",
        "generic, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx, neon, neon_bf16",
        "CPU variant to use instead of the best one",
    ),
    Variable("KT_KERNEL_CPU_VARIANT", "kt-kernel's names", "the same, used if KT_ISA is not set"),
    Variable("KT_THREADS", "a positive number", "threads of a pool without an explicit count, over all groups"),
    Variable(
        "KT_PLACE",
        "auto, cpu, resident, host_callback, stream, stream_all, split",
        "where `place.attach` computes the experts of a model on a GPU; default cpu",
    ),
    Variable("KT_VERIFY", "1, 0", "0: packed experts are not compared with their checksums when they are first read"),
    Variable(
        "KT_GRAPHS",
        "a list of experts, attention, decode; 0 or none",
        "CUDA graphs to use: expert passes, attention in training, decode steps of `kt serve`; "
        "default all; the rest runs eagerly",
    ),
    Variable(
        GPU_MEMORY,
        "a size, as 24GB",
        "memory that a GPU counts as having: torch allocates no more, and plans are made for it",
    ),
    Variable(
        "KT_LOG", "debug, info, warning, error", "log to stderr from this level up; debug includes the choices made"
    ),
    Variable("KT_KERNEL_DEBUG", "1", "the same as KT_LOG=debug"),
    Variable(
        "KT_PROGRESS",
        "an open file descriptor",
        "where a command writes its progress as JSON lines, for the program that started it (`kt loop`)",
    ),
    Variable(
        "KT_SGLANG_OPTIONS",
        "JSON",
        "options of our plugin for SGLang, which its launcher passes to its other processes",
    ),
    Variable(
        "KT_NODES_TOKEN",
        "a secret",
        "that all nodes of one `kt serve` over several nodes know; needed unless rank 0 is at a loopback address",
    ),
    Variable("API_HOST", "an address", "listening address of `kt serve` without --host"),
    Variable("API_PORT", "a port's number", "port of `kt serve` without --port"),
    Variable("API_KEY", "a key", "API key that `kt serve` without --api-key requires"),
)


def text(name: str) -> str:
    """The value of one of VARIABLES, empty if not set."""
    if name not in {variable.name for variable in VARIABLES}:
        raise KeyError(f"{name} is not in ktransformers.ground.env.VARIABLES; add it there and to docs/environment.md")
    return os.environ.get(name, "").strip()


def secret(name: str) -> str | None:
    """The value of one of VARIABLES that protects something: set, but empty, is an error and not the same as unset."""
    value = text(name)
    if not value and name in os.environ:
        raise InputError(name, "an empty value", "a secret", f"`unset {name}` to go without one")
    return value or None


def graphs_enabled(name: str) -> bool:
    """Whether KT_GRAPHS leaves these graphs on; `name` is one of GRAPHS. Unset: all are, `0` or `none`: none is."""
    value = text("KT_GRAPHS")
    if value in ("", "0", "none"):
        return not value
    words = [word.strip() for word in value.split(",")]
    if not set(words) <= set(GRAPHS):
        raise InputError("KT_GRAPHS", repr(value), f"a list of {', '.join(GRAPHS)}; 0 or none for no graphs at all")
    return name in words


def verify_enabled() -> bool:
    """Whether packed experts are compared with their checksums; KT_VERIFY unset: they are."""
    value = text("KT_VERIFY")
    if value not in ("", "0", "1"):
        raise InputError("KT_VERIFY", repr(value), "1 or 0")
    return value != "0"


def current() -> dict[str, str]:
    """The VARIABLES that are set, with their values; keys are masked."""
    values = {variable.name: text(variable.name) for variable in VARIABLES if text(variable.name)}
    return {name: "(set)" if name.endswith("_KEY") else value for name, value in values.items()}
