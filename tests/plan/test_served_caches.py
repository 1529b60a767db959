"""What the plan counts of a token and of a sequence is what the slots of a server hold, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.plan import Choice, Serving, profile
from ktransformers.plan.memory import predict_memory
from ktransformers.plan.model_shape import shape_from_config
from ktransformers.serve.attention.latent import LATENT_ATTRIBUTE
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, KVSlot
from ktransformers.serve.cache.snapshots import state_bytes
from ktransformers.serve.scheduler.forward import Chunk, SequentialForward, make_forward
from tests.support.family_checks import ALL_FAMILIES
from tests.support.measured_serving import CASES, measure
from tests.support.tiny_models import RECURRENT_LAYERS, build

# Refused by the server, or by the planner, which says so and leaves the server without a plan.
UNSERVED = {"diffusion_gemma", "doge", "unlimited_ocr"}
UNPLANNED = {"dbrx", "ernie4_5_vl_moe", "longcat_flash"}
# Computed one sequence at a time, in transformers' own caches, whose layers are of other kinds.
ONE_AT_A_TIME = {"deepseek_v4", "glm5_next", "inkling_text", "qwen4_exp_text"}
BATCHED = sorted(set(ALL_FAMILIES) - UNSERVED - UNPLANNED - ONE_AT_A_TIME)
TOKENS = 40  # more than every window of a tiny model that is shorter than a text can be


def model_of(family: str, **changes: Any) -> Any:
    return build(family, **RECURRENT_LAYERS.get(family, {}) | changes)


def check(model: Any, family: str) -> None:
    """A slot of a sequence against the lines of the plan."""
    shape = shape_from_config(model.config.to_dict(), family)
    forward = make_forward(model)
    assert not isinstance(forward, SequentialForward)
    bytes_per_token = forward.check_against_stock()
    slot = KVSlot.alone(TOKENS)
    forward.run([Chunk(slot, [3 + at % 90 for at in range(TOKENS)], 0, None)])
    work = Serving(context=TOKENS, prompt=TOKENS, rest_bytes=4)
    host = predict_memory(shape, work, Choice("bf16"), profile("arm2")).host
    assert host["KV cache"] == TOKENS * slot.memory.block_bytes // BLOCK_TOKENS == TOKENS * bytes_per_token > 0
    # The states of the sequence, and a copy of them.
    assert host.get("states", 0) == 2 * state_bytes(slot.states) == 2 * forward.bytes_per_sequence
    latents = [getattr(module, LATENT_ATTRIBUTE, None) for module in model.modules()]
    absorbed = sum(latent._numbers_of_keys.numel() for latent in latents if latent is not None)
    assert shape.absorbed_numbers == absorbed and bool(absorbed) == bool(shape.latent_width)


@pytest.mark.parametrize("family", BATCHED)
def test_slots_hold_what_the_plan_counts(family: str) -> None:
    check(model_of(family), family)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("phimoe", {"sliding_window": 8}),
        ("gpt_oss", {"head_dim": 32, "num_key_value_heads": 4}),
        ("mellum", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("gemma4_text", {"global_head_dim": 32}),
    ],
)
def test_windowed_layers_keep_every_token(family: str, changes: dict[str, Any]) -> None:
    check(model_of(family, **changes), family)


@pytest.mark.parametrize("family", sorted(UNPLANNED))
def test_families_without_a_plan_are_refused_by_name_of_the_missing_word(family: str) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        shape_from_config(model_of(family).config.to_dict(), family)


def test_new_tokens_read_the_window_alone() -> None:
    model = build("gpt_oss")
    shape = shape_from_config(model.config.to_dict(), "gpt_oss")
    assert shape.cached_numbers == 2 * 2 * 2 * 16 and shape.window_width == 2 * 2 * 16 and shape.window == 8
    assert shape.read_numbers(100) == 2 * 2 * 16 * (100 + 8)
    assert shape.read_numbers(5) == 5 * shape.cached_numbers


def test_states_are_counted_in_the_dtype_of_the_model() -> None:
    model: Any = model_of("qwen3_next").to(torch.bfloat16)
    shape = shape_from_config(model.config.to_dict(), "qwen3_next")
    forward = make_forward(model)
    assert forward.check_against_stock() == 2 * shape.cached_numbers
    assert shape.states.bytes(2) == forward.bytes_per_sequence


def test_scans_of_mamba_are_activations_of_a_server() -> None:
    """Mamba-1: three float32 tensors [inner, T, state]; Mamba-2: four [T, chunk, heads] and two [T, heads, state]."""
    names = ("jamba", "granitemoehybrid", "qwen3_next")
    jamba, granite, delta = (shape_from_config(model_of(name).config.to_dict(), name) for name in names)
    assert jamba.scan_width == 3 * 128 * 4 and granite.scan_width == 4 * (4 * 8 + 2 * 8) and delta.scan_width == 0
    work = Serving(context=64, prompt=32)
    with_scan, without = (
        predict_memory(shape, work, Choice("bf16"), profile("arm2")).host["activations"]
        for shape in (jamba, replace(jamba, scan_width=0))
    )
    assert with_scan - without == 32 * 3 * 128 * 4 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "lfm2_moe"])
def test_a_server_takes_no_more_than_predicted(name: str) -> None:
    """At most 5 % less; experts of the first are mapped from a packed directory, and are not in its memory."""
    found = measure(name)
    predicted, measured = (found["host memory"][word] for word in ("predicted", "measured"))
    assert measured <= predicted <= 1.05 * measured
    assert bool(found["planned"]["experts"]) == (name != "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_predicted_memory_of_a_server_is_measured_memory(name: str) -> None:
    found = measure(name)
    for what in ("cache", "host memory"):
        assert found[what]["measured"] == pytest.approx(found[what]["predicted"], rel=0.10), what
