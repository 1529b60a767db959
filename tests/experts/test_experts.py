"""The experts implementation "kt" on models that stock transformers has loaded, and the modules that it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from ktransformers import _core
from ktransformers.experts.contract import expert_modules, read_contract
from ktransformers.experts.gate import Gate, probe_activation, probe_gate
from ktransformers.experts.interface import experts_forward, pack_module
from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore, attach
from tests.support import reference
from tests.support.tiny_models import build, tokens

E, H, I, T, K = 4, 32, 24, 7, 2  # noqa: E741


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    weights, ids = torch.randn(T, E).softmax(-1).topk(K)
    return torch.randn(T, H).to(dtype), ids, weights.to(dtype)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v4", "granitemoe"])
def test_attached_experts_match_the_stock_model(family: str) -> None:
    model = build(family)
    want = logits(model)
    attach(model, pool=_core.Pool(2))
    assert torch.equal(logits(model), want)  # packed, not yet asked for
    model.set_experts_implementation("kt")
    got = logits(model)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for module in expert_modules(model).values():
        assert isinstance(module.kt.store, ExpertStore)
        assert not any(parameter.requires_grad for parameter in module.parameters())
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model), want)


def test_attach_with_free_removes_the_parameters(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    want = logits(model)
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    attach(model, free=True, isa="generic")
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before
    placeholder_elements = sum(
        parameter.numel() for parameter in model.parameters() if isinstance(parameter, Placeholder)
    )
    assert placeholder_elements == 2 * 6 * 3 * 64 * 40
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    assert {module.kt.store.isa for module in expert_modules(model).values()} == {"generic"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)


def test_experts_are_packed_on_first_use() -> None:
    model = build("mixtral")
    want = logits(model)
    model.set_experts_implementation("kt")
    assert not any(hasattr(module, "kt") for module in expert_modules(model).values())
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    stores = [module.kt.store for module in expert_modules(model).values()]
    logits(model)
    assert [module.kt.store for module in expert_modules(model).values()] == stores


def swiglu(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda g, u: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def oai(alpha: float, limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda g, u: (g.clamp(max=limit) * torch.sigmoid(alpha * g.clamp(max=limit))) * (u.clamp(-limit, limit) + 1)


GATES: list[tuple[Gate, Callable[[Tensor, Tensor], Tensor]]] = [
    (Gate("silu"), lambda g, u: F.silu(g) * u),
    (Gate("silu"), lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype)),
    (Gate("silu"), lambda g, u: ACT2FN["silu"](g) * u),
    (Gate("gelu"), lambda g, u: F.gelu(g) * u),
    (Gate("gelu_tanh"), lambda g, u: ACT2FN["gelu_pytorch_tanh"](g) * u),
    (Gate("relu2"), lambda g, u: F.relu(g).square() * u),
    (Gate("silu", limit=7.0), swiglu(7.0)),
    (Gate("silu", limit=0.5), swiglu(0.5)),
    (Gate("silu", limit=10.0), swiglu(10.0)),
    (Gate("swiglu_oai", limit=7.0, alpha=1.702), oai(1.702, 7.0)),
    (Gate("swiglu_oai", limit=0.25, alpha=1.0), oai(1.0, 0.25)),
    (Gate("swiglu_oai", limit=0.0, alpha=1.702), oai(1.702, float("inf"))),
]


def joined(function: Callable[[Tensor, Tensor], Tensor], interleaved: bool) -> Callable[[Tensor], Tensor]:
    def apply_gate(columns: Tensor) -> Tensor:
        gate, up = (columns[..., ::2], columns[..., 1::2]) if interleaved else columns.chunk(2, dim=-1)
        return function(gate, up)

    return apply_gate


@pytest.mark.parametrize(("case", "interleaved"), list(itertools.product(range(len(GATES)), [False, True])))
def test_gates_are_identified_by_probing(case: int, interleaved: bool) -> None:
    want, function = GATES[case]
    with torch.device("meta"):  # as in from_pretrained
        torch.set_default_dtype(torch.bfloat16)
        try:
            got = probe_gate("module", joined(function, interleaved), interleaved)
        finally:
            torch.set_default_dtype(torch.float32)
    assert got.activation == want.activation
    assert got.limit == pytest.approx(want.limit, rel=1e-6) and got.alpha == pytest.approx(want.alpha, rel=1e-6)


UNKNOWN: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda g, u: F.relu(g) * u,
    lambda g, u: F.silu(u) * g,  # the halves exchanged
    lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    lambda g, u: F.silu(g) * (u + 2),
    lambda g, u: F.silu(g) * u * 1.01,
    lambda g, u: F.silu(g.clamp(-7, 7)) * u.clamp(-7, 7),  # gate clamped from below as well
    lambda g, u: F.silu(g) * u.clamp(-7, 7),
    lambda g, u: torch.zeros_like(g),
    lambda g, u: torch.full_like(g, float("nan")),
    lambda g, u: torch.cat((g, u), dim=-1),
]


@pytest.mark.parametrize("case", range(len(UNKNOWN)))
def test_unknown_gates_are_refused(case: int) -> None:
    with pytest.raises(InputError, match=r"(?s)layer \(X\): given an? (unknown )?gate.* expected one of silu, gelu"):
        probe_gate("layer (X)", joined(UNKNOWN[case], False), False)
    if case == 0:  # the layout counts: halves side by side are not halves in turns
        with pytest.raises(InputError, match="unknown gate"):
            probe_gate("layer (X)", joined(lambda g, u: F.silu(g) * u, False), True)


def test_activations_without_gate_are_identified() -> None:
    for name, function in reference.ACTIVATIONS.items():
        assert probe_activation("module", function) == Gate(name)
    with pytest.raises(InputError, match=r"module: given an unknown activation, expected one of silu"):
        probe_activation("module", torch.tanh)
    with pytest.raises(InputError, match="cannot be evaluated"):
        probe_activation("module", lambda x: x @ torch.ones(3, 3))


class Plain(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = E
        self.gate_up_proj = nn.Parameter((torch.randn(E, 2 * I, H) / 6).bfloat16().float())
        self.down_proj = nn.Parameter((torch.randn(E, H, I) / 5).bfloat16().float())
        self.act_fn = F.silu

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


def experts(kind: type[nn.Module] = Plain, implementation: str = "kt", **flags: bool) -> nn.Module:
    """A module as transformers makes it; the class is new each time, because the decorator changes it."""
    decorated = use_experts_implementation(type(kind.__name__, (kind,), {}), **flags)
    return decorated(SimpleNamespace(_experts_implementation=implementation))


def test_transformers_dispatches_to_kt() -> None:
    assert ALL_EXPERTS_FUNCTIONS["kt"] is experts_forward
    module = experts()
    layer = reference.ReferenceLayer(
        gate=module.gate_up_proj[:, :I], up=module.gate_up_proj[:, I:], down=module.down_proj
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden, ids, weights = batch(dtype)
        got = module(hidden, ids, weights)
        assert got.dtype == dtype and got.shape == hidden.shape
        want = reference.forward(layer, hidden, ids, weights)
        error = (got.double() - want).norm() / want.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    hidden, ids, weights = batch()
    ids[0] = E  # transformers' mark of an expert that lives elsewhere
    assert (module(hidden, ids, weights)[0] == 0).all()
    mixed = module(hidden.bfloat16(), ids, weights)
    assert mixed.dtype == torch.bfloat16


class InTurns(Plain):
    def _apply_gate(self, columns: Tensor) -> Tensor:
        return F.silu(columns[..., ::2]) * columns[..., 1::2]


def test_absent_flags_of_older_modules_have_defaults() -> None:
    module = experts()
    for flag in ("has_gate", "has_bias", "is_concatenated", "has_post_expert_norm"):
        delattr(module, flag)
    contract = read_contract("", module)
    assert contract.shape.gated and not contract.shape.biased and not contract.interleaved
    turns = experts(InTurns)
    del turns.is_concatenated
    assert read_contract("", turns).interleaved


class Scaled(Plain):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.per_expert_scale = nn.Parameter(torch.ones(E))


class Ragged(Plain):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * I, H + 1))


class QuickGelu(Plain):
    def _apply_gate(self, columns: Tensor) -> Tensor:
        gate, up = columns.chunk(2, dim=-1)
        return gate * torch.sigmoid(1.702 * gate) * up


REFUSED: list[tuple[type[nn.Module], dict[str, bool], str]] = [
    (Plain, {"has_post_expert_norm": True}, r"model\.0 \(Plain\): given has_post_expert_norm"),
    (Plain, {"has_gate": False}, r"model\.0 \(Plain\): given parameters \['down_proj', 'gate_up_proj'\]"),
    (Plain, {"has_bias": True}, r"model\.0 \(Plain\): given parameters .*expected \['down_proj', 'down_proj_bias'"),
    (Plain, {"is_transposed": True}, r"model\.0 \(Plain\)\.gate_up_proj: given shape"),
    (Plain, {"is_concatenated": False}, r"model\.0 \(Plain\): given an unknown gate, expected one of silu"),
    (Scaled, {}, r"model\.0 \(Scaled\): given parameters .*per_expert_scale"),
    (Ragged, {}, r"model\.0 \(Ragged\)\.gate_up_proj: given shape \[4, 48, 33\], expected \[4, 48, 32\]"),
    (QuickGelu, {}, r"model\.0 \(QuickGelu\): given an unknown gate, expected one of silu"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_unsupported_modules_are_refused_by_name(case: int) -> None:
    kind, flags, message = REFUSED[case]
    module = experts(kind, **flags)
    with pytest.raises(InputError, match=message):
        pack_module(module, name="model.0")
    assert not hasattr(module, "kt") and module.down_proj.requires_grad
    with pytest.raises(InputError, match=kind.__name__):
        module(*batch())


def test_attach_refuses_a_model_without_experts() -> None:
    with pytest.raises(InputError, match="Linear: given no expert layers"):
        attach(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"Plain: given a module without transformers' experts interface"):
        pack_module(Plain(None))


@pytest.mark.gpu
def test_hidden_states_on_a_gpu_are_copied_to_the_host() -> None:
    model = build("qwen3_moe")
    want = logits(model)
    attach(model, free=True, isa="generic")  # activations in float32
    model.to("cuda")
    with torch.no_grad():
        got = model(tokens().cuda()).logits
    assert got.device.type == "cuda"
    torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)
