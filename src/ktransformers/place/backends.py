"""`kt_backend`, the key of earlier guides that names a number format and a CPU variant in one word, such as AMXBF16."""

from __future__ import annotations

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.operators.rules import find_rules

FORMATS = {"AMXINT8": "int8", "INT8": "int8", "AMXINT4": "int4:32", "INT4": "int4:32"}
ISAS = {
    "AMX": "amx",
    "AVX512": "avx512",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AVX2": "avx2",
    "NEON": "neon",
}


def isa_of_backend(backend: str | None) -> str | None:
    """The CPU variant that `kt_backend` names; None lets the core choose.

    AMXBF16 requests bf16 on AMX machines; without AMX the best available variant is used.
    """
    name = (backend or "auto").upper()
    if name in ("AUTO", "BF16", "LLAMAFILE", "AMXBF16", "AMXBF16_SFT", *FORMATS):
        return None
    isa = name.removesuffix("_SFT").removesuffix("BF16").rstrip("_") if not name.startswith("AVX512_BF16") else name
    if isa in ISAS and "INT" not in name:
        return ISAS[isa]
    raise InputError(
        "kt_backend", backend, "auto, AMXBF16, AMXInt8, AMXInt4, AVX512BF16 or AVX2BF16", "other formats: `kt quant`"
    )


def format_of_backend(backend: str | None) -> str | None:
    """The format that experts are encoded in while they are loaded; None: as released."""
    return FORMATS.get((backend or "auto").upper())


def encoded_format(options: PlacementOptions, backend: str | None = None) -> str | None:
    """The format of all experts in memory where `kt_backend` or rules ask for one, for a plan. Experts whose layers
    differ count as released."""
    file = find_rules(options.kt_optimize_rule)
    words = {str(rule.arguments["backend"]) for rule in file.rules if "backend" in rule.arguments} if file else set()
    by_rule = format_of_backend(words.pop()) if len(words) == 1 else None
    return by_rule or format_of_backend(backend)


def rest_by_rules(options: PlacementOptions, rest: str) -> str:
    """How dense linear layers are stored, for a plan: as rules say that all name the same format, else
    as `rest` does."""
    from ktransformers.operators.linear import DEFAULT_OP, LINEAR_OPS, KTransformersLinear, KTransformersLinearLora

    classes = {f"{item.__module__}.{item.__name__}" for item in (KTransformersLinear, KTransformersLinearLora)}
    file = find_rules(options.kt_optimize_rule)
    given = [rule for rule in file.rules if rule.operator in classes] if file is not None else []
    words = {LINEAR_OPS.get(str(rule.arguments.get("generate_op") or DEFAULT_OP), rest) or "bf16" for rule in given}
    return words.pop() if len(words) == 1 else rest
