"""`kt_backend`, the key of earlier guides that names a number format and a CPU variant in one word, such as AMXBF16."""

from __future__ import annotations

from ktransformers.errors import InputError

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
    if name in ("AUTO", "BF16", "LLAMAFILE", "AMXBF16", "AMXBF16_SFT"):
        return None
    isa = name.removesuffix("_SFT").removesuffix("BF16").rstrip("_") if not name.startswith("AVX512_BF16") else name
    if isa in ISAS and "INT" not in name:
        return ISAS[isa]
    raise InputError(
        "kt_backend", backend, "auto, AMXBF16, AVX512BF16 or AVX2BF16", "experts keep the format they are stored in"
    )
