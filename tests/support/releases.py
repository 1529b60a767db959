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


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., n]`, several in a word, the first in the lowest bits."""
    in_word = 32 // bits
    word = sum((codes[..., i::in_word].long() << (bits * i)) for i in range(in_word))
    assert isinstance(word, Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous()


def gptq_with_zeros(n: int, k: int, seed: int, bits: int = 4, group: int = 32, desc_act: bool = False) -> Release:
    """GPTQ with a zero for each group, stored one lower than it is; with `desc_act` the columns of a group are those
    that were quantised one after the other."""
    value = torch.randint(0, 2**bits, (n, k), generator=_random(seed))
    zero = torch.randint(1, 2**bits, (n, k // group), generator=_random(seed + 2))
    scale = _scales((k // group, n), seed, 4.0 / 2**bits / k**0.5, torch.float16)
    groups = torch.arange(k) // group
    if desc_act:
        groups = groups[torch.randperm(k, generator=_random(seed + 3))]
    parts = {
        "qweight": _words(value, bits).T.contiguous(),
        "scales": scale,
        "qzeros": _words((zero - 1).T, bits),
        "g_idx": groups.to(torch.int32),
    }
    return parts, (value - zero[:, groups]).float() * scale.float().T[:, groups]


def gptq_int8(n: int, k: int, seed: int) -> Release:
    return gptq_with_zeros(n, k, seed, bits=8)


def gptq_desc_act(n: int, k: int, seed: int) -> Release:
    return gptq_with_zeros(n, k, seed, desc_act=True)


def awq(n: int, k: int, seed: int, group: int = 32) -> Release:
    """Eight rows of the matrix in a word, even ones in its lower half, odd ones in its upper."""
    value = torch.randint(0, 16, (n, k), generator=_random(seed))
    zero = torch.randint(0, 16, (n, k // group), generator=_random(seed + 2))
    scale = _scales((k // group, n), seed, 0.25 / k**0.5, torch.float16)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(codes: Tensor) -> Tensor:  # [N, any]
        return _words(codes.T.reshape(codes.shape[1], -1, 8)[..., order].flatten(1), 4)

    parts = {"qweight": packed(value), "scales": scale, "qzeros": packed(zero)}
    spread = torch.arange(k) // group
    return parts, (value - zero[:, spread]).float() * scale.float().T[:, spread]


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
    "gptq zeros": (
        gptq_with_zeros,
        "uint4:32:f16",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    ),
    "gptq 8 bits": (
        gptq_int8,
        "uint8:32:f16",
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False},
    ),
    "awq": (awq, "uint4:32:f16", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
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
