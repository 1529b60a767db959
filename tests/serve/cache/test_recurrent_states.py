"""Convolution and recurrent states of many sequences in one forward pass, against the stock model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ktransformers.ground.errors import InputError
from ktransformers.serve.cache import recurrent_states
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.cache.recurrent_states import SlotStates, StateBatch, StatefulForward
from ktransformers.serve.scheduler.forward import Chunk, Forward, SequentialForward, make_forward
from ktransformers.serve.scheduler.head import collect_rows
from ktransformers.serve.scheduler.lora import LinearLora, LoadedAdapter, LoraModules
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import RECURRENT_LAYERS, build

FAMILIES = [
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
    "zaya",
]
OF_EACH_KIND = ("jamba", "lfm2_moe", "minimax", "qwen3_next")  # of states: Mamba, convolutions, linear attention, both
LENGTHS = (31, 18, 26)
# (sequence, first, last) of each step: chunks and new tokens in every mixture, chunks of one token, sequences that join
# and leave the rows that decode together.
STEPS = (
    ((0, 0, 9), (1, 0, 1)),
    ((0, 9, 10), (1, 1, 6), (2, 0, 13)),
    ((0, 10, 11), (1, 6, 7), (2, 13, 14)),
    ((0, 11, 12), (1, 7, 8), (2, 14, 15)),
    ((2, 15, 16), (0, 12, 13)),
    ((0, 13, 29), (2, 16, 24), (1, 8, 9)),
    ((1, 9, 10),),
    ((0, 29, 30), (1, 10, 17), (2, 24, 25)),
    ((0, 30, 31), (1, 17, 18), (2, 25, 26)),
)


def tiny(family: str, **changes: Any) -> Any:
    return build(family, **RECURRENT_LAYERS.get(family, {}) | changes)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]


def stock_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def served_logits(forward: Any, adapters: tuple[LoadedAdapter | None, ...] = (None, None, None)) -> list[Tensor]:
    """Of every row of the three sequences, computed as STEPS says."""
    slots = KVSlot.together(len(LENGTHS), 64)
    rows: list[list[Tensor]] = [[] for _ in LENGTHS]
    for step in STEPS:
        forward.run(
            [Chunk(slots[one], prompts()[one][a:b], a, adapters[one], collect_rows(rows[one])) for one, a, b in step]
        )
    return [torch.cat(one) for one in rows]


@pytest.mark.parametrize("family", others_slow(FAMILIES, OF_EACH_KIND))
def test_mixed_batches_match_stock(family: str) -> None:
    model = tiny(family)
    expected = [stock_logits(model, prompt) for prompt in prompts()]
    forward = make_forward(model)
    assert isinstance(forward, Forward) and forward.states
    assert forward.check_against_stock() > 0 and forward.bytes_per_sequence > 0
    for actual, wanted in zip(served_logits(forward), expected, strict=True):
        assert torch.allclose(actual, wanted, atol=1e-4, rtol=1e-4)


def linear_adapter(model: Any, name: str, seed: int) -> tuple[LoadedAdapter, dict[str, Tensor]]:
    """LoRA on every linear layer of the modules with states; also by name, multiplied out."""
    generator = torch.Generator().manual_seed(seed)
    factors, merged = {}, {}
    for path, module in model.named_modules():
        inside = any(isinstance(model.get_submodule(stem).forward, StatefulForward) for stem in stems(path))
        if isinstance(module, nn.Linear) and inside and not path.endswith("dt_proj"):
            a = torch.randn(2, module.in_features, generator=generator) / 8
            b = torch.randn(2, module.out_features, generator=generator) / 4
            factors[module], merged[path] = LinearLora(a, b, 1.5), 1.5 * b.T @ a
    return LoadedAdapter(name, 1, name, factors, {}), merged


def stems(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@pytest.mark.parametrize("family", others_slow(FAMILIES, OF_EACH_KIND))
def test_adapters_apply_to_the_rows_of_their_sequences(family: str) -> None:
    """Two adapters and the base in one batch, against stock models with merged weights."""
    model = tiny(family)
    forward = make_forward(model)
    LoraModules(model)  # hooks
    made = [linear_adapter(model, name, seed) for name, seed in (("one", 1), ("two", 2))]
    assert made[0][1]
    actual = served_logits(forward, (made[0][0], None, made[1][0]))
    for logits, merged, prompt in zip(actual, (made[0][1], {}, made[1][1]), prompts(), strict=True):
        stock = tiny(family)
        for path, change in merged.items():
            stock.get_submodule(path).weight.data += change
        assert torch.allclose(logits, stock_logits(stock, prompt), atol=5e-4, rtol=1e-3)


def test_chunks_are_split_only_where_the_stock_forward_ignores_the_state_before_them() -> None:
    assert make_forward(tiny("jamba")).states == {"model.layers.0.mamba": True}
    assert make_forward(tiny("zaya")).states == dict.fromkeys(
        [f"model.layers.{layer}.self_attn.qkv_proj" for layer in range(2)], False
    )
    assert make_forward(tiny("qwen3_moe")).states == {}


def test_a_second_server_of_the_same_model_serves_it_as_well() -> None:
    model = tiny("qwen3_next")
    forward = make_forward(model)
    model.set_attn_implementation(forward.stock_attention)
    again = make_forward(model)
    assert again.states == forward.states and again.check_against_stock() > 0


def test_attention_that_needs_its_own_cache_is_computed_sequence_by_sequence() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for model in (build("qwen3_moe", rope_parameters=rope), build("inkling_text")):
        forward = make_forward(model)
        assert isinstance(forward, SequentialForward) and forward.check_against_stock() > 0


def forget_states(states: Any, layer: int, name: str) -> None:
    states._states.pop((layer, name), None)


def mix_sequences(states: Any, layer: int, name: str) -> None:
    states._states[layer, name] = states._states[layer, name].flip(0)


def scale_states(states: Any, layer: int, name: str) -> None:
    states._states[layer, name] = states._states[layer, name] * 1.5


@pytest.mark.parametrize("damage", [forget_states, mix_sequences, scale_states])
@pytest.mark.parametrize("kind", ["convolution0", "recurrent0"])
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_wrong_states_are_refused(family: str, kind: str, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = make_forward(tiny(family))
    store = StateBatch.store

    def damaged(states: Any) -> None:
        for layer, name in list(states._states):
            if name == kind and states._rows.started:
                damage(states, layer, name)
        store(states)

    monkeypatch.setattr(StateBatch, "store", damaged)
    with pytest.raises(InputError, match=f"{family}.*differ by"):
        forward.check_against_stock()


def test_states_that_are_not_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that keeps a state where no contract names it."""
    monkeypatch.setattr("ktransformers.serve.scheduler.forward.serve_states", lambda model, restore: {})
    with pytest.raises(InputError, match=r"qwen3_next.*differ by"):
        make_forward(tiny("qwen3_next")).check_against_stock()


def test_sequences_that_decode_together_keep_their_states_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = make_forward(tiny("qwen3_next"))
    slots = KVSlot.together(3, 64)
    forward.run([Chunk(slot, prompts()[one][:5], 0, None) for one, slot in enumerate(slots)])
    gathered: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(recurrent_states.torch, "stack", lambda states: gathered.append(1) or stack(states))

    def decode(position: int, *order: int) -> int:
        gathered.clear()
        forward.run([Chunk(slots[one], [prompts()[one][position]], position, None) for one in order])
        return len(gathered)

    assert [decode(5, 0, 1, 2), decode(6, 0, 1, 2), decode(7, 0, 1, 2)] == [2, 0, 0]
    storages = {slot.states[0]["recurrent0"].untyped_storage().data_ptr() for slot in slots}
    assert len(storages) == 1
    assert [decode(8, 0, 2), decode(8, 1), decode(9, 2, 1, 0)] == [0, 0, 2]


@pytest.mark.parametrize("family", others_slow(FAMILIES, OF_EACH_KIND))
def test_states_hold_no_activations_of_a_chunk(family: str) -> None:
    forward, slot = make_forward(tiny(family)), KVSlot.alone(64)
    forward.run([Chunk(slot, prompts()[0], 0, None)])
    for states in slot.states.values():
        assert all(state.untyped_storage().nbytes() == state.nbytes for state in states.values())


def test_states_have_the_names_of_older_releases() -> None:
    """Up to transformers 5.17 modules read `layers[i].conv_states[j]` and `layers[i].recurrent_states[j]`."""
    slot = KVSlot.alone(0)
    batch = StateBatch(SlotStates([slot], started=False))
    batch.update_conv_state(torch.ones(1, 4, 2), 3, conv_kernel_size=4)
    batch.update_recurrent_state(torch.full((1, 2, 2), 5.0), 3, state_idx=1)
    assert torch.equal(batch.layers[3].conv_states[0], batch.get_conv_state(3))
    assert torch.equal(batch.layers[3].recurrent_states[1], torch.full((1, 2, 2), 5.0))
    assert batch.layers[3].recurrent_states[0] is None and batch.layers[3].record_past is False
