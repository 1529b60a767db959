"""Weight formats with separate codes and scales, one row each, written from their definitions and not from the product:
what a code and a stored scale stand for, and how near the encoder comes. Every test over formats takes its list from
here; blocks of GGUF are in `checkpoint/blocks.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ktransformers import _core


def e2m1(code: int) -> float:
    """Sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def e8m0(code: float) -> float:
    return 2.0 ** (code - 127)


def e4m3_scale(code: float) -> float:
    return e4m3(int(code))


def int8(code: int) -> float:
    return code - 256 if code > 127 else code


def minus8(code: int) -> float:
    return code - 8


@dataclass(frozen=True)
class FormatRow:
    bits: int
    number: Callable[[int], float]  # of an unsigned code
    scale: Callable[[float], float]  # of a stored scale
    columns: int  # that share it; 0: all
    error: float  # relative, of Gaussian numbers when they are encoded: a little above what was measured
    rows: int = 1  # that share a scale


ROWS = {
    "int8": FormatRow(8, int8, float, 0, 0.009),
    "int4:0": FormatRow(4, minus8, float, 0, 0.106),
    "int4:32": FormatRow(4, minus8, float, 32, 0.085),
    "int4:64": FormatRow(4, minus8, float, 64, 0.093),
    "int4:128": FormatRow(4, minus8, float, 128, 0.1),
    "int4:64:f16": FormatRow(4, minus8, float, 64, 0.093),
    "int4:96:f32": FormatRow(4, minus8, float, 96, 0.097),
    "fp8:128x128": FormatRow(8, e4m3, float, 128, 0.027, rows=128),
    "fp8:1x128": FormatRow(8, e4m3, float, 128, 0.027),
    "fp8:row": FormatRow(8, e4m3, float, 0, 0.027),
    "mxfp8": FormatRow(8, e4m3, e8m0, 32, 0.027),
    "mxfp4": FormatRow(4, e2m1, e8m0, 32, 0.113),
    "nvfp4": FormatRow(4, e2m1, e4m3_scale, 16, 0.097),
    "mxint4": FormatRow(4, minus8, e8m0, 32, 0.115),
}
# The core's own; the example of CONTRIBUTING.md is in builds for tests alone.
NAMES = {row["name"] for row in _core.formats()}
SPECS = [spec for spec in ROWS if spec.partition(":")[0] in NAMES]
