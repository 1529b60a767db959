"""The decoders against the native core: what it packed, decoded here and there, has equal bits, in every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.encoder import encode
from ktransformers.nn import ExpertStore
from ktransformers.quantized.gpu.dequantize import TRITON, decode
from ktransformers.quantized.gpu.layout import geometry
from tests.support.formats import SPECS
from tests.support.gguf_blocks import HALVES, random_blocks
from tests.support.triton_devices import triton_devices

E, H, I = 3, 512, 256  # noqa: E741
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


def blocks(spec: str, rows: int, columns: int, random: np.random.Generator) -> Encoded:
    return Encoded(spec, torch.from_numpy(random_blocks(spec, (E, rows), columns, random)), None, columns=columns)


@devices
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("spec", ["bf16", "bf16:12", *SPECS, *HALVES])
def test_equal_bits(spec: str, gated: bool, device: str) -> None:
    random = np.random.default_rng(0)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    if not gated:
        del shapes["gate"]
    if spec in HALVES:
        matrices = {name: blocks(spec, *shape, random) for name, shape in shapes.items()}
    else:
        torch.manual_seed(0)
        matrices = {name: torch.randn(E, *shape) for name, shape in shapes.items()}
        if spec != "bf16":
            matrices = {name: encode(matrix, spec) for name, matrix in matrices.items()}
    store = ExpertStore(E, H, I, gated=gated, formats=spec)
    store.pack(**matrices)
    sizes, memory = geometry(E, H, I, gated, store.formats), store.memory()
    chosen = [2, 0]
    slots = torch.tensor(chosen, dtype=torch.int32, device=device)
    for name, matrix, parts in (
        ("gate_up", sizes.first, ["gate", "up"] if gated else ["up"]),
        ("down", sizes.down, ["down"]),
    ):
        assert memory[name].numel() == E * matrix.expert_bytes
        out = torch.full((2, matrix.out_rows, matrix.columns), torch.nan, dtype=torch.bfloat16, device=device)
        decode(memory[name].view(E, -1).to(device), chosen, slots, matrix, out)
        want = torch.stack([torch.cat([store.decode(part, expert) for part in parts]) for expert in chosen])
        assert torch.equal(out.cpu().view(torch.int16), want.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "bf16:12", "int4:32", "nvfp4", "q6_k"])
def test_by_distance(spec: str) -> None:
    """Experts before and behind the buffer that is named, and a place that nobody wants anything in."""
    random = np.random.default_rng(1)
    torch.manual_seed(1)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    if spec in HALVES:
        matrices = {name: blocks(spec, *shape, random) for name, shape in shapes.items()}
    else:
        matrices = {name: torch.randn(E, *shape) for name, shape in shapes.items()}
        if spec != "bf16":
            matrices = {name: encode(matrix, spec) for name, matrix in matrices.items()}
    store = ExpertStore(E, H, I, formats=spec)
    store.pack(**matrices)
    matrix, size = geometry(E, H, I, True, store.formats).down, store.memory()["down"].numel() // E
    packed = store.memory()["down"].view(E, -1).cuda()
    where = torch.tensor([size, -1, -size], device="cuda:0")
    out = torch.full((3, matrix.out_rows, matrix.columns), torch.nan, dtype=torch.bfloat16, device="cuda:0")
    decode(packed[1:2], (), where, matrix, out)
    for place, expert in ((0, 2), (2, 0)):
        assert torch.equal(out[place].cpu().view(torch.int16), store.decode("down", expert).view(torch.int16))
    assert out[1].isnan().all()


@triton_devices
@pytest.mark.parametrize("gated", [True, False])
def test_lossless_bf16_with_patches(gated: bool, device: str) -> None:
    """Numbers of rare exponents in some places, so that strips have patches; halves that are not full."""
    kernels = pytest.importorskip(TRITON)
    torch.manual_seed(0)
    shapes = {"gate": (48, 160), "up": (48, 160), "down": (160, 48)}
    if not gated:
        del shapes["gate"]
    matrices = {name: (0.02 * torch.randn(E, *shape)).bfloat16() for name, shape in shapes.items()}
    for matrix in matrices.values():
        rare = matrix.view(-1)[:: 151 if matrix.shape[2] == 160 else 61]
        rare.copy_(torch.ldexp(torch.randn(len(rare)), torch.randint(-100, 100, (len(rare),))).bfloat16())
    store = ExpertStore(E, 160, 48, gated=gated, formats="bf16:12")
    store.pack(**{name: encode(matrix, "bf16:12") for name, matrix in matrices.items()})
    sizes, memory = geometry(E, 160, 48, gated, store.formats), store.memory()
    where = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    for name, matrix, parts in (
        ("gate_up", sizes.first, ["gate", "up"] if gated else ["up"]),
        ("down", sizes.down, ["down"]),
    ):
        strip, first_strips = matrix.strip(0), memory[name].view(E, matrix.blocks, -1)
        area = first_strips[:, :, strip.patches_at : strip.patches_at + 4 * strip.patches].contiguous()
        assert kernels.supports(matrix) and (area.view(torch.int32) != -1).any(), "strips have patches"
        out = torch.zeros(E, matrix.out_rows, matrix.columns, dtype=torch.bfloat16, device=device)
        kernels.decode(memory[name].view(E, -1).to(device), where, matrix, out)
        want = torch.cat([matrices[part] for part in parts], dim=1)[[1, 2, 0]]
        assert torch.equal(out.cpu().view(torch.int16), want.view(torch.int16))
