"""Replayed attention computes what stock attention computes, forward and backward, in any order of passes; on a CPU the
captured function is called again instead of a graph (tests/modeling/test_gpu_attention_graphs.py has real ones)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ktransformers.modeling.attention_graphs import replay, signature
from ktransformers.modeling.attention_graphs.replay import RECOMPUTE_WINDOW, GraphedAttention, record_attention
from ktransformers.modeling.cuda_graphs import GraphPool
from tests.support.attention_models import CPU, FAMILIES, LENGTH, batch, compare, gradients, make, watch
from tests.support.slow_cases import others_slow


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return watch(monkeypatch)


@pytest.mark.parametrize("family", others_slow(FAMILIES, ("qwen3_moe", "deepseek_v2")))
def test_numbers_are_those_of_stock_attention(family: str, replayed: list[str]) -> None:
    """Lengths of one padded size in turn: the third call is captured, and replayed in both passes and backward."""
    stock, model = make(family), make(family)
    wrapped = record_attention(model, [CPU])
    assert len(wrapped) == {"qwen3_next": 1}.get(family, 2)
    layers = len(wrapped)
    for step, length in enumerate((LENGTH, 33, LENGTH, 64, 47)):
        replayed.clear()
        compare(model, stock, batch(step, length))
        wanted = ["compute"] * layers + ["compute", "differentiate"] * layers
        assert replayed == (wanted if step >= 2 else [])


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_masks_with_padding(how: str, replayed: list[str]) -> None:
    stock, model = make(), make()
    for one in (stock, model):
        one.get_base_model().set_attn_implementation(how)
    record_attention(model, [CPU])
    for step, (length, padded) in enumerate(((LENGTH, 5), (34, 9), (LENGTH, 11), (64, 1), (47, 2))):
        compare(model, stock, batch(step, length, padded))
    assert replayed.count("differentiate") == 2 * 3


@pytest.mark.parametrize("padded", [0, 6])
def test_calls_larger_than_a_piece_are_cut(padded: int, replayed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than fit a graph, the last piece short; all of them have one key."""
    monkeypatch.setattr(signature, "PIECE_TOKENS", 128)
    stock, model = make(), make()
    wrapped = record_attention(model, [CPU])
    for step, count in enumerate((5, 2, 3, 7, 4)):
        compare(model, stock, batch(step, 40 + step, padded, count=count))
    assert replayed.count("differentiate") == 2 * 3 and [len(one.graphs.captured) for one in wrapped] == [1, 1]


def test_two_forward_passes_before_the_first_backward(replayed: list[str]) -> None:
    """A pass that was launched is recomputed by launches, or checkpointing would raise."""
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        for one in (stock, model):
            first, second = (one(**batch(10 * step + at)).loss for at in (0, 1))
            second.backward()
            first.backward()
        got, want = gradients(model), gradients(stock)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)
    assert replayed.count("differentiate") == 2 * 2 * 3


def test_pass_without_backward_delays_the_capture_for_a_while_only(replayed: list[str]) -> None:
    stock, model = make(), make()
    wrapped = record_attention(model, [CPU])
    model(**batch(0))
    for step in range(4):
        compare(model, stock, batch(step))
    assert not replayed
    for one in wrapped:
        (recomputes,) = one._recomputes.values()
        recomputes.calls, recomputes.lowest = RECOMPUTE_WINDOW - 2, recomputes.pending
    for step in range(3):
        compare(model, stock, batch(step))
    assert replayed


def test_replaced_shared_and_inactive_parameters(replayed: list[str]) -> None:
    """Shared by two projections, replaced by another object with the same memory, of an adapter that is not active."""
    stock, model = make(), make()
    record_attention(model, [CPU])
    for one in (stock, model):
        for layer in one.get_base_model().model.layers:
            layer.self_attn.v_proj.lora_A["default"] = layer.self_attn.k_proj.lora_A["default"]
    for step in range(4):
        compare(model, stock, batch(step))
    assert replayed
    for one in (stock, model):
        lora = one.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
        lora.weight = nn.Parameter(lora.weight.data)
    for step in range(4):
        compare(model, stock, batch(step))
    for one in (stock, model):
        torch.manual_seed(5)
        one.add_adapter("other", one.peft_config["default"])
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("lora_" in name)
    for step in range(4):
        replayed.clear()
        compare(model, stock, batch(step))  # whose gradients have the same names
    assert replayed


def test_attention_that_is_not_causal_is_replayed_only_without_padding(replayed: list[str]) -> None:
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        compare(model, stock, batch(step) | {"is_causal": False})  # type: ignore[dict-item]
    assert not replayed
    for step in range(4):
        compare(model, stock, batch(step, 64) | {"is_causal": False})  # type: ignore[dict-item]
    assert replayed


def test_inference_mode_is_not_captured(replayed: list[str]) -> None:
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        with torch.inference_mode():
            model(**batch(step))
    assert not replayed
    for step in range(4):
        compare(model, stock, batch(step))
    assert replayed


@pytest.mark.parametrize("family", ["glm_moe_dsa", "kimi_linear"])
def test_module_with_other_results_is_refused_once(
    family: str, replayed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Three values, or a tensor alone: such a module goes on as it was, and others are captured."""
    stock, model = make(family), make(family)
    wrapped = record_attention(model, [CPU])
    for step in range(4):
        compare(model, stock, batch(step, 64))
    assert any(one.graphs.closed for one in wrapped)
    lines = [line for line in caplog.messages if "something else than an output and weights" in line]
    assert len(lines) == 1 and "run eagerly instead" in lines[0]
    assert replayed if family == "kimi_linear" else not replayed


def test_switched_off_adapters_have_graphs_of_their_own(replayed: list[str]) -> None:
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        given = batch(step)
        found = []
        for one in (model, stock):
            with torch.no_grad(), one.disable_adapter():
                found.append(one(**given).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        compare(model, stock, given)
    assert replayed.count("compute") == 2 * 2 + 4 * 2 and replayed.count("differentiate") == 2 * 2


def test_moved_parameters_and_new_scales_are_another_key(replayed: list[str]) -> None:
    stock, model = make(), make()
    wrapped = record_attention(model, [CPU])
    for step in range(3):
        compare(model, stock, batch(step))
    assert replayed
    for one in (model, stock):
        projection = one.get_base_model().model.layers[0].self_attn.q_proj
        projection.scaling["default"] *= 2
        weight = projection.lora_A["default"].weight
        weight.data = weight.data * 3
    for step in range(4):
        compare(model, stock, batch(step))
    assert [len(one.graphs.captured) for one in wrapped] == [2, 1]


def test_hooks_evaluation_and_no_checkpointing_are_not_replayed(replayed: list[str]) -> None:
    stock, model = make(), make()
    wrapped = record_attention(model, [CPU])
    seen: list[int] = []
    hook = model.get_base_model().model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))
    for step in range(4):
        compare(model, stock, batch(step))
    assert len(seen) == 8 and [len(one.graphs.captured) for one in wrapped] == [0, 1]
    hook.remove()
    model.eval()
    replayed.clear()
    with torch.no_grad():
        model(**batch(0))
    assert not replayed
    model.train()
    model.gradient_checkpointing_disable()
    stock.gradient_checkpointing_disable()
    for step in range(4):
        compare(model, stock, batch(step))
    assert not replayed
    assert not record_attention(model, [torch.device("meta")])
    assert not record_attention(model, [CPU]), "modules are wrapped already"


def test_reentrant_checkpointing_replays_the_first_pass(replayed: list[str]) -> None:
    stock, model = make(reentrant=True), make(reentrant=True)
    record_attention(model, [CPU])
    for step in range(5):
        compare(model, stock, batch(step))
    assert set(replayed) == {"compute"} and len(replayed) == 3 * 2  # the pass without gradients


def test_hook_on_eager_attention_gets_its_weights(replayed: list[str]) -> None:
    model = make()
    model.get_base_model().set_attn_implementation("eager")
    wrapped = record_attention(model, [CPU])
    shapes = []
    wrapped[0].module.register_forward_hook(lambda module, args, out: shapes.append(out[1].shape))
    for step in range(4):
        model(**batch(step)).loss.backward()
    assert set(shapes) == {(2, 4, LENGTH, LENGTH)} and [len(one.graphs.captured) for one in wrapped] == [0, 1]


def test_large_batches_and_many_keys_are_not_captured(replayed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = make(), make()
    (one, _) = record_attention(model, [CPU])
    monkeypatch.setattr(replay, "MAX_TOKENS", 100)
    for step in range(4):
        compare(model, stock, batch(step))
    assert not replayed
    monkeypatch.setattr(replay, "MAX_TOKENS", 4096)
    one.graphs.max_graphs = 1
    for step in range(4):
        compare(model, stock, batch(step))
        compare(model, stock, batch(step, 70))
    assert len(one.graphs.captured) == 1


def test_gradients_accumulate_and_are_not_overwritten(replayed: list[str]) -> None:
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        for one in (model, stock):
            for piece in range(2):
                one(**batch(10 * step + piece)).loss.backward()
        kept = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        before = {name: grad.clone() for name, grad in kept.items()}
        with torch.no_grad():
            model(**batch(99))
        for name, grad in kept.items():
            assert torch.equal(grad, before[name])
        got, want = gradients(model), gradients(stock)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)
    assert replayed


def test_copies_of_a_model_are_stock_and_close_restores_it() -> None:
    model = make()
    wrapped = record_attention(model, [CPU])
    for step in range(3):
        model(**batch(step)).loss.backward()
    twin = copy.deepcopy(model)
    assert not any(isinstance(module.__dict__.get("forward"), GraphedAttention) for module in twin.modules())
    for one, other in zip(wrapped, twin.get_base_model().model.layers, strict=True):
        assert other.self_attn.forward.__self__ is other.self_attn is not one.module
    for one in wrapped:
        one.close()
        assert one.module.forward == one.stock and not one.graphs.captured and "forward" not in vars(one.module)


def test_autocast_is_part_of_the_key(replayed: list[str]) -> None:
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [one(**batch(step)).loss for one in (model, stock)]
        for loss in losses:
            loss.backward()
        got, want = gradients(model), gradients(stock)
        for name in want:
            assert (got[name] - want[name]).norm() <= 0.05 * want[name].norm(), name
    assert replayed.count("differentiate") == 4


def test_out_of_memory_ends_captures_in_all_layers_and_keeps_graphs(
    replayed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock, model = make(), make()
    wrapped = record_attention(model, [CPU])
    for step in range(3):
        compare(model, stock, batch(step))
    assert replayed

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GraphPool, "record", no_memory)
    for step in range(4):
        compare(model, stock, batch(step, 70))
    assert [len(one.graphs.captured) for one in wrapped] == [1, 1] and all(one.graphs.closed for one in wrapped)
    assert sum("no GPU memory is left" in line for line in caplog.messages) == 1
    replayed.clear()
    compare(model, stock, batch(7))
    assert replayed, "graphs that exist are replayed"


def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_GRAPHS", "experts,decode")
    assert not record_attention(make(), [CPU])
