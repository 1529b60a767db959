"""Attention that is replayed gives what stock attention gives, forward and back, whatever a training step does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ktransformers.nn.attention_graphs import replay, signature
from ktransformers.nn.attention_graphs.replay import LOST, GraphedAttention, GraphPair, record_attention
from tests.support.tiny_models import VOCABULARY, build

CPU = torch.device("cpu")
LENGTH = 40  # of a sequence, in a place for 64
FAMILIES = ("qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next")


def make(family: str = "qwen3_moe", dropout: float = 0.0, reentrant: bool = False, device: torch.device = CPU) -> Any:
    torch.manual_seed(0)
    model = build(family).to(device)
    config = LoraConfig(r=4, target_modules=r".*self_attn\.(q|k|v|o|kv_b|q_a)_proj", lora_dropout=dropout)
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    peft.enable_input_require_grads()
    return peft.train()


def batch(
    seed: int, length: int = LENGTH, padded: int = 0, device: torch.device = CPU, count: int = 2
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -padded:] = 0
    words = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    if padded:
        words["attention_mask"] = mask
    return {name: tensor.to(device) for name, tensor in words.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


def compare(model: nn.Module, stock: nn.Module, given: dict[str, Tensor], rtol: float = 1e-4) -> None:
    losses = []
    for one in (model, stock):
        loss = one(**given).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    got, want = gradients(model), gradients(stock)
    assert got.keys() == want.keys() and got
    for name in want:
        assert want[name].norm() > 0
        assert (got[name] - want[name]).norm() <= rtol * want[name].norm(), name


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is replayed from now on, in the order in which it comes."""
    found: list[str] = []
    for name in ("compute", "differentiate"):
        inner = getattr(GraphPair, name)

        def noted(self: GraphPair, *args: Any, inner: Any = inner, name: str = name) -> Any:
            found.append(name)
            return inner(self, *args)

        monkeypatch.setattr(GraphPair, name, noted)
    return found


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return watch(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_stock_attention(family: str, replayed: list[str]) -> None:
    """Lengths of one size in turn: the third call of a kind is recorded, in both passes and back."""
    stock, model = make(family), make(family)
    found = record_attention(model, [CPU])
    assert len(found) == {"qwen3_next": 1}.get(family, 2)
    layers = len(found)
    for step, length in enumerate((LENGTH, 33, LENGTH, 64, 47)):
        replayed.clear()
        compare(model, stock, batch(step, length))
        wanted = ["compute"] * layers + ["compute", "differentiate"] * layers
        assert replayed == (wanted if step >= 2 else [])


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_masks(how: str, replayed: list[str]) -> None:
    stock, model = make(), make()
    for one in (stock, model):
        one.get_base_model().set_attn_implementation(how)
    record_attention(model, [CPU])
    for step, (length, padded) in enumerate(((LENGTH, 5), (34, 9), (LENGTH, 11), (64, 1), (47, 2))):
        compare(model, stock, batch(step, length, padded))
    assert replayed.count("differentiate") == 2 * 3


@pytest.mark.parametrize("padded", [0, 6])
def test_pieces(padded: int, replayed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than a graph has room for, the last piece short; all of it is one kind of call."""
    monkeypatch.setattr(signature, "PIECE", 128)
    stock, model = make(), make()
    found = record_attention(model, [CPU])
    for step, count in enumerate((5, 2, 3, 7, 4)):
        compare(model, stock, batch(step, 40 + step, padded, count=count))
    assert replayed.count("differentiate") == 2 * 3 and [len(one.known) for one in found] == [1, 1]


def test_steps_in_any_order(replayed: list[str]) -> None:
    """Two passes before either goes back: a pass is repeated the way it went, or checkpointing would complain."""
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


def test_a_pass_that_never_goes_back(replayed: list[str]) -> None:
    """It is waited for, but not for ever."""
    stock, model = make(), make()
    (one, _) = record_attention(model, [CPU])
    model(**batch(0))
    for step in range(4):
        compare(model, stock, batch(step))
    assert not replayed
    (noted,) = one._noted.values()
    noted.seen = LOST - 2
    for layer in (one, _):
        for other in layer._noted.values():
            other.seen, other.lowest = LOST - 2, other.pending
    for step in range(3):
        compare(model, stock, batch(step))
    assert replayed


def test_parameters_that_are_others(replayed: list[str]) -> None:
    """Replaced by another object of the same memory, shared by two projections, or of an adapter that is not active."""
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


def test_attention_that_looks_ahead(replayed: list[str]) -> None:
    """Filled up it would see what is nobody's, so it is not; a length that needs nothing is."""
    stock, model = make(), make()
    record_attention(model, [CPU])
    for step in range(4):
        compare(model, stock, batch(step) | {"is_causal": False})  # type: ignore[dict-item]
    assert not replayed
    for step in range(4):
        compare(model, stock, batch(step, 64) | {"is_causal": False})  # type: ignore[dict-item]
    assert replayed


def test_inference_mode(replayed: list[str]) -> None:
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
def test_other_results(family: str, replayed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Three values, or a tensor alone: such a module goes on as it was, and others are recorded."""
    stock, model = make(family), make(family)
    found = record_attention(model, [CPU])
    for step in range(4):
        compare(model, stock, batch(step, 64))
    odd = [one for one in found if one.barred]
    assert odd and "something else than an output and weights" in caplog.text
    assert replayed if family == "kimi_linear" else not replayed


def test_adapters_that_are_switched(replayed: list[str]) -> None:
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


def test_what_changes_is_another_kind(replayed: list[str]) -> None:
    """Parameters that moved, a scale, a switch: nothing is replayed that took the old one for granted."""
    stock, model = make(), make()
    found = record_attention(model, [CPU])
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
    assert [len(one.known) for one in found] == [2, 1]


def test_what_is_left_alone(replayed: list[str]) -> None:
    """Hooks inside, evaluation, other devices, no checkpointing, reentrant checkpointing's second pass."""
    stock, model = make(), make()
    found = record_attention(model, [CPU])
    seen: list[int] = []
    hook = model.get_base_model().model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))
    for step in range(4):
        compare(model, stock, batch(step))
    assert len(seen) == 8 and [len(one.known) for one in found] == [0, 1]
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
    assert not record_attention(model, [torch.device("meta")]) and not record_attention(model, [CPU]), "they are"


def test_reentrant_checkpointing(replayed: list[str]) -> None:
    stock, model = make(reentrant=True), make(reentrant=True)
    record_attention(model, [CPU])
    for step in range(5):
        compare(model, stock, batch(step))
    assert set(replayed) == {"compute"} and len(replayed) == 3 * 2  # the pass without gradients


def test_weights_that_somebody_watches(replayed: list[str]) -> None:
    """Eager attention gives them: with a hook on the module nothing is replayed."""
    model = make()
    model.get_base_model().set_attn_implementation("eager")
    found = record_attention(model, [CPU])
    shapes = []
    found[0].module.register_forward_hook(lambda module, args, out: shapes.append(out[1].shape))
    for step in range(4):
        model(**batch(step)).loss.backward()
    assert set(shapes) == {(2, 4, LENGTH, LENGTH)} and [len(one.known) for one in found] == [0, 1]


def test_large_batches_and_many_kinds(replayed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = make(), make()
    (one, _) = record_attention(model, [CPU])
    monkeypatch.setattr(replay, "TOKENS", 100)
    for step in range(4):
        compare(model, stock, batch(step))
    assert not replayed
    monkeypatch.setattr(replay, "TOKENS", 4096)
    monkeypatch.setattr(replay, "MOST", 1)
    for step in range(4):
        compare(model, stock, batch(step))
        compare(model, stock, batch(step, 70))
    assert len(one.known) == 1


def test_gradients_are_nobodys_buffers(replayed: list[str]) -> None:
    """Two pieces of a step add up; what was handed out is not written again."""
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


def test_copies_and_an_end() -> None:
    model = make()
    found = record_attention(model, [CPU])
    for step in range(3):
        model(**batch(step)).loss.backward()
    twin = copy.deepcopy(model)
    assert not any(isinstance(module.__dict__.get("forward"), GraphedAttention) for module in twin.modules())
    for one, other in zip(found, twin.get_base_model().model.layers, strict=True):
        assert other.self_attn.forward.__self__ is other.self_attn is not one.module
    for one in found:
        one.close()
        assert one.module.forward == one.stock and not one.known and "forward" not in vars(one.module)


def test_autocast_is_part_of_a_kind(replayed: list[str]) -> None:
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
