"""The `quantization_config` of config.json: whether a checkpoint can be read, and what names of tensors do not tell.

The format follows from the tensors themselves (`matrix.py`); the configuration is read for what changes the meaning of
the same names (GPTQ's order of columns and its zeros, asymmetric compressed tensors). An unknown method is refused by
name, because its tensors may look like another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ktransformers.ground.errors import InputError

METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "mxfp8", "nvfp4", "modelopt", "fbgemm_fp8")
COMPRESSED_FORMATS = {  # of compressed-tensors
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
}  # fmt: skip


@dataclass(frozen=True)
class Quantisation:
    method: str = ""  # empty: config.json says nothing
    gptq_zero: int = 7  # as stored: the first format of GPTQ subtracts one
    bits: int = 4  # of GPTQ's values
    symmetric: bool = True  # GPTQ: one zero for all groups, in the middle of the range
    desc_act: bool = False  # GPTQ: columns were quantised in order of activation, and groups follow that order


NONE = Quantisation()


def describe(words: Mapping[str, Any]) -> str:
    """'fp8' (weight_block_size [128, 128]): the method, and what tells its kinds apart."""
    details = [
        f"{key} {words[key]}"
        for key in ("format", "fmt", "bits", "group_size", "weight_block_size")
        if words.get(key) is not None
    ]
    return f"{words.get('quant_method', 'an unnamed method')!r}" + (f" ({', '.join(details)})" if details else "")


def accept(where: str, words: Mapping[str, Any] | None) -> Quantisation:
    """Of config.json's `quantization_config`; `where` is for errors."""
    if words is None:
        return NONE
    method = words.get("quant_method")
    given = f"a checkpoint quantised with {describe(words)}"
    if method not in METHODS:
        raise InputError(where, given, "one of " + ", ".join(METHODS), "take another release of the model")
    for wrong, expected in _oddities(str(method), words):
        raise InputError(where, f"{given} and {wrong}", expected, "take another release of the model")
    symmetric = words.get("sym", True) is not False and method != "awq"
    desc_act = method == "gptq" and bool(words.get("desc_act"))
    zero = 8 if words.get("checkpoint_format") == "gptq_v2" else 7
    return Quantisation(str(method), zero, int(words.get("bits") or 4), symmetric, desc_act)


def _oddities(method: str, words: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what cannot be read, what could be)."""
    if method == "gptq":
        if words.get("bits") not in (4, 8):
            yield f"bits {words.get('bits')}", "bits 4 or 8"
        form = words.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            yield f"checkpoint_format {form!r}", "'gptq' or 'gptq_v2'"
    if method == "awq":
        if words.get("bits") != 4:
            yield f"bits {words.get('bits')}", "bits 4"
        if str(words.get("version", "gemm")).lower() != "gemm":
            yield f"version {words.get('version')!r}", "'gemm', whose order of values is read"
        if words.get("zero_point", True) is False:
            yield "zero_point false", "weights with zeros"
    if method == "fp8" and words.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        yield f"fmt {words['fmt']!r}", "'e4m3'"
    if method == "compressed-tensors":
        if words.get("format", "dense") not in COMPRESSED_FORMATS:
            yield f"format {words['format']!r}", "one of " + ", ".join(sorted(COMPRESSED_FORMATS))
        groups = words.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                continue
            if weights.get("symmetric") is False:
                yield "symmetric false", "symmetric weights"
            if weights.get("actorder") in ("group", "GROUP", True):
                yield f"actorder {weights['actorder']!r}", "columns in their own order"
