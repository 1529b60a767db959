"""Matrices in the formats of releases, with random bits, and their decoded values.

Every function returns (tensors by ending, float32 `[N, K]`). The values are computed from the descriptions of the
formats, independently of the package's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

Release = tuple[dict[str, Tensor], Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _scales(shape: tuple[int, ...], seed: int, size: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.rand(shape, generator=_random(seed + 1)) + 0.5) * size).to(dtype)


def _fp8(n: int, k: int, seed: int) -> Tensor:
    return (torch.randn(n, k, generator=_random(seed)) * 60).clamp(-400, 400).to(torch.float8_e4m3fn)


def fp8_block(n: int, k: int, seed: int) -> Release:
    weight = _fp8(n, k, seed)
    scale = _scales((-(-n // 128), -(-k // 128)), seed, 1.0 / 60 / k**0.5)
    rows, columns = torch.arange(n) // 128, torch.arange(k) // 128
    return {"weight": weight, "weight_scale_inv": scale}, weight.float() * scale[rows][:, columns]


def fp8_row(n: int, k: int, seed: int) -> Release:
    weight = _fp8(n, k, seed)
    scale = _scales((n, 1), seed, 1.0 / 60 / k**0.5, torch.bfloat16)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale.float()


def fp8_tensor(n: int, k: int, seed: int) -> Release:
    weight, scale = _fp8(n, k, seed), _scales((), seed, 1.0 / 60 / k**0.5)
    return {"weight": weight, "weight_scale": scale, "input_scale": torch.ones(())}, weight.float() * scale


def mxfp8(n: int, k: int, seed: int) -> Release:
    weight = _fp8(n, k, seed)
    scale = torch.randint(114, 119, (n, k // 32), dtype=torch.uint8, generator=_random(seed + 1))
    power = torch.pow(2.0, scale.double() - 127).float()
    return {"weight": weight, "weight_scale_inv": scale}, weight.float() * power.repeat_interleave(32, 1)


def packed_int4(n: int, k: int, seed: int, group: int = 32) -> Release:
    """compressed-tensors: value + 8, eight in a word, the first in the lowest bits."""
    value = torch.randint(-8, 8, (n, k), generator=_random(seed))
    word = sum(((value[:, i::8] + 8) << (4 * i)) for i in range(8))
    assert isinstance(word, Tensor)
    scale = _scales((n, k // group), seed, 0.25 / k**0.5, torch.bfloat16)
    parts = {
        "weight_packed": torch.where(word >= 2**31, word - 2**32, word).to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    return parts, value.float() * scale.float().repeat_interleave(group, 1)


def int8_row(n: int, k: int, seed: int) -> Release:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=_random(seed))
    scale = _scales((n, 1), seed, 1.0 / 70 / k**0.5)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def gptq(n: int, k: int, seed: int, group: int = 32) -> Release:
    """Eight codes of a column in a word, from the top down; the zero is stored one lower than it is."""
    value = torch.randint(0, 16, (n, k), generator=_random(seed))
    word = sum((value.T[i::8] << (4 * i)) for i in range(8))
    assert isinstance(word, Tensor)
    scale = _scales((k // group, n), seed, 0.25 / k**0.5, torch.float16)
    parts = {
        "qweight": torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous(),
        "scales": scale,
        "qzeros": torch.full((k // group, n // 8), 0x77777777, dtype=torch.int32),
        "g_idx": (torch.arange(k) // group).to(torch.int32),
    }
    return parts, (value - 8).float() * scale.float().T.repeat_interleave(group, 1)


def _e2m1(n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    code = torch.randint(0, 16, (n, k), generator=_random(seed))
    return (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8), E2M1[code]


def mxfp4(n: int, k: int, seed: int) -> Release:
    """As DeepSeek-V4 has it: int8 for two codes, e8m0 in a dtype of its own."""
    codes, value = _e2m1(n, k, seed)
    scale = torch.randint(121, 125, (n, k // 32), dtype=torch.uint8, generator=_random(seed + 1))
    power = torch.pow(2.0, scale.double() - 127).float()
    parts = {"weight": codes.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    return parts, value * power.repeat_interleave(32, 1)


def _nvfp4(n: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, value = _e2m1(n, k, seed)
    scale = _scales((n, k // 16), seed, 100.0).to(torch.float8_e4m3fn)
    return codes, value, scale


def nvfp4_modelopt(n: int, k: int, seed: int) -> Release:
    codes, value, scale = _nvfp4(n, k, seed)
    outer = torch.tensor(0.0037 / k**0.5)
    parts = {"weight": codes, "weight_scale": scale, "weight_scale_2": outer, "input_scale": torch.ones(())}
    return parts, value * (scale.float() * outer).repeat_interleave(16, 1)


def nvfp4_compressed(n: int, k: int, seed: int) -> Release:
    codes, value, scale = _nvfp4(n, k, seed)
    outer = torch.tensor([4096.0])  # divides
    parts = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": outer}
    return parts, value * (scale.float() / outer).repeat_interleave(16, 1)


Make = Callable[[int, int, int], Release]
# kind -> (how, format that it must be read as, config.json's quantization_config)
KINDS: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "fp8 blocks": (fp8_block, "fp8:128x128", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 rows": (fp8_row, "fp8:row", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8 tensor": (fp8_tensor, "fp8:row", {"quant_method": "fp8", "activation_scheme": "static"}),
    "mxfp8": (mxfp8, "mxfp8", {"quant_method": "mxfp8"}),
    "compressed int4": (packed_int4, "int4:32", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "compressed int8": (int8_row, "int8", {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "gptq": (gptq, "int4:32:f16", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "mxfp4": (mxfp4, "mxfp4", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4 modelopt": (nvfp4_modelopt, "nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 compressed": (
        nvfp4_compressed,
        "nvfp4",
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
}


def kt_tiles(codes: Tensor, method: str) -> Tensor:
    """kt-kernel's order of an int8 matrix [n, k], by its formula for every single element."""
    n, k = codes.shape
    n_block, k_step = {"INT8": (64, 64), "INT4": (128, 128)}[method]
    row, column = numpy.meshgrid(numpy.arange(n), numpy.arange(k), indexing="ij")
    nb, kb = row // n_block * n_block, column // 3584 * 3584
    nbs, kbs = numpy.minimum(n_block, n - nb), numpy.minimum(3584, k - kb)
    ns, ks = (row - nb) // 32 * 32, (column - kb) // k_step * k_step
    step = nb * k + kb * nbs + ns * kbs + ks * 32  # in elements
    inside, tile, lane = (column - kb) % k_step, (row - nb - ns) // 16, row % 16
    byte = inside % 64
    at = step // (k_step // 64) + tile * 1024 + byte // 4 * 64 + lane * 4 + byte % 4
    actual = numpy.zeros(n * k // (k_step // 64), dtype=numpy.uint8)
    values = codes.numpy().view(numpy.uint8)
    if method == "INT8":
        actual[at] = values
        return torch.from_numpy(actual)
    low = inside < 64
    numpy.bitwise_or.at(actual, at[low], values[low] & 15)
    numpy.bitwise_or.at(actual, at[~low], (values[~low] & 15) << 4)
    return torch.from_numpy(actual)


def kt_parts(
    n: int, k: int, role: str, method: str, parts: int, seed: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """[(bytes, scales)] of a matrix cut for so many NUMA nodes, and its numbers."""
    actual, numbers = [], []
    rows, columns = (n // parts, k) if role != "down" else (n, k // parts)
    for part in range(parts):
        limit = 127 if method == "INT8" else 7
        codes = torch.randint(-limit, limit + 1, (rows, columns), generator=_random(seed * 31 + part)).to(torch.int8)
        scale = _scales((rows,), seed * 31 + part, 1.0 / (70 if method == "INT8" else 64) / k**0.5)
        actual.append((kt_tiles(codes, method), scale))
        numbers.append(codes.float() * (1 if method == "INT8" else 16) * scale[:, None])
    return actual, torch.cat(numbers, 0 if role != "down" else 1)


def write_kt_tree(
    directory: Path, layer: int, expert: int, role: str, method: str, parts: list[tuple[Tensor, Tensor]]
) -> None:
    for part, (codes, scale) in enumerate(parts):
        folder = directory / f"_layer_{layer}" / f"_numa_{part}"
        folder.mkdir(parents=True, exist_ok=True)
        for kind, data in (("quant", codes), ("scale", scale.view(torch.uint8))):
            (folder / f"{method}_{role}_{expert}_{len(data)}Byte_{kind}_.kt").write_bytes(data.numpy().tobytes())


def write_gguf(file: Path, arch: str, fields: dict[str, Any], tensors: dict[str, tuple[Any, str]]) -> None:
    """Tensors are (float array, type), or (bytes of blocks, type)."""
    import gguf

    writer = gguf.GGUFWriter(str(file), arch)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    for name, (data, kind) in tensors.items():
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
