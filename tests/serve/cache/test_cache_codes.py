"""Keys and values in codes of e4m3: the code itself, the core's attention over it, families, tiers and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers.ground.errors import InputError
from ktransformers.plan.model_shape import shape_from_config
from ktransformers.serve.cache.cache_codes import CODE_DTYPE, NO_NUMBER, decode, encode, round_trip
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.scheduler.forward import Chunk, Forward, SequentialForward, make_forward
from ktransformers.serve.scheduler.head import collect_rows
from tests.serve.cache.test_cache_tiers_families import Family, check_tiers
from tests.support.cache_tiers import tiered_engine
from tests.support.tiny_models import build

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v3": {},  # latents
    "gpt_oss": {"sliding_window": 20},  # with sinks
    "mixtral": {"sliding_window": 20},
    "deepseek_v32": {},  # latents that an indexer selects
    "qwen3_next": {},  # with recurrent states
}
PROMPTS = [[(7 * at + 3) % 96 for at in range(60)], [(11 * at + 5) % 96 for at in range(43)]]
STEPS = [((0, 0, 20), (1, 0, 38)), ((0, 20, 53), (1, 38, 40)), ((0, 53, 54), (1, 40, 41)), ((0, 54, 55), (1, 41, 43))]


def logits_of(forward: Any, **options: bool) -> list[Tensor]:
    slots = KVSlot.together(len(PROMPTS), 64, **options)
    rows: list[list[Tensor]] = [[], []]
    for step in STEPS:
        forward.run([Chunk(slots[i], PROMPTS[i][a:b], a, None, collect_rows(rows[i])) for i, a, b in step])
    return [torch.cat(one).float() for one in rows]


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 300.0, 1e30])
def test_scale_is_the_smallest_that_fits(size: float) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(3, 50, 64) * size).float()
    codes, scales = encode(rows)
    assert codes.dtype == CODE_DTYPE and scales.dtype == torch.uint8 and scales.shape == (3, 50, 1)
    step = torch.exp2(scales.double() - 127)
    largest = rows.double().abs().amax(-1, keepdim=True)
    assert bool((largest <= 448 * step).all()) and bool((largest > 224 * step).all())
    error = (decode(codes, scales, torch.float32).double() - rows.double()).abs()
    bound = torch.maximum(rows.double().abs() * 2**-4, step * 2**-10)
    assert bool((error <= bound).all())
    assert torch.equal(decode(codes, scales, torch.bfloat16).float(), decode(codes, scales, torch.float32))


def test_edges_of_the_code() -> None:
    step = 2.0**-20  # 448 and 448.5 of it lie beside a power of two of the scale
    rows = torch.tensor([[[0.0, 0.0], [448 * step, -step], [449 * step, step], [0.0, torch.inf], [torch.nan, 1.0]]])
    scales = encode(rows)[1]
    assert scales[0, :, 0].tolist() == [1, 107, 108, NO_NUMBER, NO_NUMBER]
    assert torch.equal(round_trip(rows)[0, :2], rows[0, :2])
    assert not bool(round_trip(rows)[0, 3:].isfinite().any(-1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_core_writes_and_reads_the_codes_of_torch(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64, "head_dim": 16}
    changes = sizes if family == "deepseek_v3" else {"head_dim": 16} | FAMILIES[family]
    forward = Forward(build(family, **changes).to(dtype))

    def slot_after() -> KVSlot:
        slot = KVSlot.alone(64, fp8=True)
        for first, last in ((0, 30), (30, 31), (31, 32)):
            forward.run([Chunk(slot, PROMPTS[0][first:last], first, None)])
        return slot

    core = slot_after()
    monkeypatch.setattr("ktransformers.serve.attention.attention._core_decodes", lambda *_: False)
    expected = slot_after()
    parts = core.memory.parts
    assert parts["keys"][0].dtype == torch.uint8 and parts["key_scales"][0].shape[-1] == 1
    for part, buffers in parts.items():
        for layer, held in buffers.items():
            mine, torchs = (one.flatten(1, 2)[:, :32] for one in (held, expected.memory.parts[part][layer]))
            assert torch.equal(mine, torchs) if layer == 0 else mine.shape == torchs.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_compute_what_rounded_numbers_compute(family: str) -> None:
    """Slots of codes against slots of numbers that were rounded when they were stored: only sums differ."""
    forward = make_forward(build(family, **FAMILIES[family]), fp8_cache=True)
    assert isinstance(forward, Forward) and forward.fp8_cache
    coded, rounded, numbers = logits_of(forward, fp8=True), logits_of(forward, rounded=True), logits_of(forward)
    for one, other, plain in zip(coded, rounded, numbers, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4
        assert 1e-3 < float((one - plain).norm() / plain.norm()) < 0.5  # tiny random models choose other experts


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32", "qwen3_next"])
def test_check_and_plan_count_codes(family: str) -> None:
    model = build(family, **FAMILIES[family])
    numbers = make_forward(build(family, **FAMILIES[family])).check_against_stock()
    forward = make_forward(model, fp8_cache=True)
    coded = forward.check_against_stock()
    assert 0 < forward.fp8_error < 0.5
    shape = shape_from_config(model.config.to_dict(), family)
    assert coded == shape.cached_bytes(4, fp8=True) < numbers == shape.cached_bytes(4, fp8=False)
    assert shape.read_bytes(5, 4, fp8=True) == pytest.approx(5 * coded)
    assert forward.block_layout is not None
    assert {place.dtype for place in forward.block_layout.places if place.part == "keys"} == {torch.uint8}


def test_check_refuses_codes_that_are_decoded_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = make_forward(build("qwen3_moe"), fp8_cache=True)
    monkeypatch.setattr("ktransformers.serve.cache.kv_cache.decode", lambda *given: 1.01 * decode(*given))
    with pytest.raises(InputError, match="kv-cache-dtype: given fp8 with qwen3_moe, whose logits differ by"):
        forward.check_against_stock()


def test_families_with_a_cache_of_transformers_are_refused() -> None:
    assert isinstance(make_forward(build("deepseek_v4")), SequentialForward)
    with pytest.raises(
        InputError, match="fp8 with deepseek_v4, which is computed one sequence at a time: it has layers"
    ):
        make_forward(build("deepseek_v4"), fp8_cache=True)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_prefixes_from_each_tier(name: str, tmp_path: Path) -> None:
    """And a file of numbers is not read by a server of codes."""
    family: Any = Family(name)
    with tiered_engine(family, disk=tmp_path / "kv") as engine:
        family.ask(engine)
    coded = Family(name, fp8=True)
    assert coded.bytes_per_token < 0.3 * family.bytes_per_token
    harness: Any = coded
    with tiered_engine(harness, disk=tmp_path / "kv") as engine:
        assert coded.ask(engine).events[-1].cached == 0
    (tmp_path / "kv").unlink()
    check_tiers(coded, tmp_path / "kv")
