"""Every environment variable that ktransformers reads; docs/environment.md says the same in a table.

The native core reads the CPU variant, the thread count and the debug switch itself, because it also runs without
Python; they stand here so that there is one list.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ktransformers.errors import InputError

GRAPHS = ("experts", "attention", "decode")  # what KT_GRAPHS can name


@dataclass(frozen=True)
class Variable:
    name: str
    values: str
    meaning: str


VARIABLES = (
    Variable("KT_ISA", "generic, avx2, avx512, avx512_bf16, amx", "CPU variant to use instead of the best one"),
    Variable("KT_KERNEL_CPU_VARIANT", "kt-kernel's names", "the same, read where KT_ISA is not set"),
    Variable("KT_THREADS", "a positive number", "threads of a pool that is not told a count, in all groups together"),
    Variable(
        "KT_PLACE",
        "auto, cpu, stream, resident",
        "where `place.attach` has experts of a GPU's model computed; cpu by default",
    ),
    Variable("KT_PIN", "map, stage", "how packed experts get to a GPU: registered where they lie, or staged"),
    Variable(
        "KT_GRAPHS",
        "a list of experts, attention, decode; 0 or none",
        "what is replayed from CUDA graphs: expert passes, attention of training steps, decode steps of `kt serve`; "
        "all by default, the rest is launched by Python, kernel by kernel",
    ),
    Variable("KT_LOG", "debug, info, warning, error", "log to stderr from this level up; debug says what was chosen"),
    Variable("KT_KERNEL_DEBUG", "1", "the same as KT_LOG=debug"),
    Variable("API_HOST", "an address", "`kt serve` without --host listens there"),
    Variable("API_PORT", "a port's number", "`kt serve` without --port listens there"),
    Variable("API_KEY", "a key", "`kt serve` without --api-key wants this key"),
)


def text(name: str) -> str:
    """The value of one of VARIABLES, empty when it is not set."""
    if name not in {variable.name for variable in VARIABLES}:
        raise KeyError(f"{name} is not in ktransformers.env.VARIABLES; add it there and to docs/environment.md")
    return os.environ.get(name, "").strip()


def graphs_enabled(name: str) -> bool:
    """Whether KT_GRAPHS leaves these graphs on; `name` is one of GRAPHS. Unset: all are, `0` or `none`: none is."""
    value = text("KT_GRAPHS")
    if value in ("", "0", "none"):
        return not value
    words = [word.strip() for word in value.split(",")]
    if not set(words) <= set(GRAPHS):
        raise InputError("KT_GRAPHS", repr(value), f"a list of {', '.join(GRAPHS)}; 0 or none for no graphs at all")
    return name in words


def current() -> dict[str, str]:
    """Those of VARIABLES that are set, with their values; of a key only that it is set."""
    found = {variable.name: text(variable.name) for variable in VARIABLES if text(variable.name)}
    return {name: "(set)" if name.endswith("_KEY") else value for name, value in found.items()}
