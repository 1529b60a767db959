"""The methods of kt-kernel: which formats of experts each one computes with.

A method's name says how the experts are stored. Where the files already have one of its formats, their bytes are used.
AMXINT4, AMXINT8 and the MOE_ methods stand for kt-kernel's converted weights; from any other source they are quantised
by the rule of its converter while they are loaded. The other methods take released formats as they are and refuse
files in another one. Arithmetic is exact: activations are not rounded to 8 bits as kt-kernel's INT methods do, unless
the method is asked for as AMXINT4_W8A8 or AMXINT8_W8A8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktransformers.ground.errors import InputError


@dataclass(frozen=True)
class Method:
    formats: tuple[str, ...]  # beginnings of the formats that it takes; empty: all
    bits: int = 0  # quantised to so many bits from other formats; 0: other formats are refused
    w8a8: bool = False
    native: bool = False  # a released format, which can be written back in its own layout

    def takes(self, formats: Mapping[str, str]) -> bool:
        """Whether gate, up and down in these formats are used as they are. INT8 in several NUMA parts has groups in
        down, one for each part."""
        if not self.formats:
            return True
        allowed = {role: format.startswith(self.formats) for role, format in formats.items()}
        if self.bits == 8 and formats.get("up") == "int8" and "down" in formats:
            allowed["down"] = formats["down"].startswith(("int8", "uint8"))
        return all(allowed.values())


METHODS = {
    "BF16": Method(("bf16",), native=True),
    "FP8": Method(("fp8",), native=True),
    "FP8_PERCHANNEL": Method(("fp8:row",), native=True),
    "RAWINT4": Method(("int4",), native=True),
    "GPTQ_INT4": Method(("int4",), native=True),
    "SYCL_GPTQ_INT4": Method(("int4",), native=True),
    "MXFP4": Method(("mxfp4",), native=True),
    "NVFP4": Method(("nvfp4",), native=True),
    "MXFP8": Method(("mxfp8",), native=True),
    "LLAMAFILE": Method(()),
    "AMXINT4": Method(("int4",), bits=4),
    "AMXINT8": Method(("int8",), bits=8),
    "AMXINT4_W8A8": Method(("int4",), bits=4, w8a8=True),
    "AMXINT8_W8A8": Method(("int8",), bits=8, w8a8=True),
    "MOE_INT4": Method(("int4",), bits=4),
    "MOE_INT8": Method(("int8",), bits=8),
}

# Methods of mode="sft" -> the method that says how their experts are stored.
SFT_METHODS = {
    "AMXBF16_SFT": "BF16",
    "INT8_SFT": "AMXINT8",
    "AMXINT8_SFT": "AMXINT8",
    "AMXINT4_SFT": "AMXINT4",
    "AMXFP8_SFT": "FP8",
    "RAWINT4_SFT": "RAWINT4",
    "AMXINT4_KGroup_SFT": "RAWINT4",
    "MXFP4_SFT": "MXFP4",
}
SKIP_LORA = "_SkipLoRA"  # ending of methods that compute no gradients of LoRA


def method_of(name: str) -> Method:
    """By the name given to `KTMoEWrapper` in either mode."""
    stored = SFT_METHODS.get(name.removesuffix(SKIP_LORA), name)
    if stored not in METHODS:
        known = ", ".join((*METHODS, *SFT_METHODS))
        raise InputError("method", repr(name), f"one of {known}")
    return METHODS[stored]


def method_for(formats: Mapping[str, str]) -> str:
    """The method that takes experts in these formats as they are, for an error message."""
    return next((name for name, method in METHODS.items() if method.formats and method.takes(formats)), "LLAMAFILE")
