"""Packed bytes of every format are those of `LAYOUT_VERSION`: what one version packed, every other one computes with.

The checksums were recorded from a packer that went code by code, as csrc/kernels/format.h says. Sources come from a
formula, so that they are the same in every version of torch. Sizes fill no strip and no k tile where
the format allows it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktransformers import _core
from ktransformers.checkpoint.encoded import Encoded, format_of
from ktransformers.nn import ExpertStore

E = 2
# CRC-32C of the two experts' gate_up and down.
CHECKSUMS = {
    "bf16": [724142174, 2794279646],
    "int8": [1466284393, 1043131617],
    "int4:32": [2988384282, 3741672206],
    "fp8:128x128": [2630506289, 1725524801],
    "fp8:1x128": [3240047636, 308760078],
    "fp8:row": [2398008200, 2998526773],
    "mxfp8": [1648497062, 628922176],
    "mxfp4": [2153774263, 2490820648],
    "nvfp4": [1825682765, 3739313519],
    "q8_0": [2782884102, 2831244213],
    "q4_0": [540599131, 2931643009],
    "q4_1": [1518096602, 3877253055],
    "q5_0": [166637405, 838317475],
    "q5_1": [3127886593, 1734601239],
    "q2_k": [541653867, 1080308049],
    "q3_k": [891825710, 1941646004],
    "q4_k": [1739110640, 853537655],
    "q5_k": [3264257327, 3678846961],
    "q6_k": [829878079, 4184168837],
    "iq4_nl": [540599131, 2931643009],
    "iq4_xs": [3356305831, 74707768],
    "tq2_0": [3026138651, 900326665],
    "tq1_0": [2406964364, 3839451008],
    "iq1_s": [694154818, 2194265548],
    "iq1_m": [2020750177, 1854641923],
    "iq2_xxs": [1121534017, 4280146856],
    "iq2_xs": [3166567398, 2009930751],
    "iq2_s": [1243655957, 1535257943],
    "iq3_xxs": [1683339019, 3639694276],
    "iq3_s": [2450875516, 2952940306],
}


def random_bytes(count: int, seed: int) -> torch.Tensor:
    state = np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)
    with np.errstate(over="ignore"):
        for _ in range(3):
            state = (state ^ (state >> np.uint64(29))) * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return torch.from_numpy((state >> np.uint64(56)).astype(np.uint8))


def made_up(spec: str, rows: int, columns: int, seed: int) -> torch.Tensor | Encoded:
    """Any bytes as codes and scales: packing looks at no number."""
    if spec == "bf16":
        return random_bytes(E * rows * columns * 2, seed).view(torch.bfloat16).reshape(E, rows, columns)
    form = format_of(spec)
    codes = random_bytes(E * rows * form.row_bytes(columns), seed).view(form.code_dtype).reshape(E, rows, -1)
    shape = form.scale_shape(rows, columns)
    scales = None
    if shape is not None and form.scale_dtype is not None:
        scales = random_bytes(E * int(np.prod(shape)) * form.scale_dtype.itemsize, seed + 1).view(form.scale_dtype)
        scales = scales.reshape(E, *shape)
    outer = random_bytes(4 * E, seed + 2).view(torch.float32) if form.tensor_scale else None
    return Encoded(spec, codes, scales, outer, columns=columns)


def packed(spec: str, isa: str, threads: int) -> ExpertStore:
    hidden, intermediate = (512, 256) if spec != "bf16" and not format_of(spec).per_byte else (96, 160)
    if spec in ("bf16", "int8"):
        hidden, intermediate = 90, 166
    pool = _core.Pool(threads=threads, groups=1)
    store = ExpertStore(E, hidden, intermediate, formats=spec, isa=isa, pool=pool)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    matrices = {role: made_up(spec, *shape, 10 * place) for place, (role, shape) in enumerate(shapes.items())}
    store.pack(**matrices)  # type: ignore[arg-type]
    return store


@pytest.mark.parametrize("spec", CHECKSUMS)
def test_packed_bytes_stay_the_same(spec: str) -> None:
    native = [row["name"] for row in _core.variants() if row["native"] or row["emulated"]]
    for isa in native if spec == "bf16" else native[:1]:  # the others are packed by code that all variants share
        assert packed(spec, isa, 2).checksums() == CHECKSUMS[spec], isa
