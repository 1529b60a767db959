"""Layers on several devices: spread by the plan, or placed by KTransformers' rules, and a model that runs so. The
second device is the GPU if there is one; otherwise the same code runs with everything on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import pack_module, select_implementation
from ktransformers.ground.errors import InputError
from ktransformers.operators.plan import first_rules
from ktransformers.operators.rules import devices_of, read_rules
from ktransformers.place import attach, device_map
from ktransformers.place.device_map import (
    DeviceMap,
    find_decoder_layers,
    make_current,
    move_to_devices,
    run_on,
    spread_layers,
)
from ktransformers.place.placement import device_of
from ktransformers.place.rule_devices import devices_by_rules
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.host_rows import HostRows
from ktransformers.quantized.weight import QuantizedWeight
from tests.support.coded_models import codes_of
from tests.support.placed_experts import tiny_packed_model
from tests.support.tiny_models import build

# KTransformers' guide, "Multi-GPU", for six layers instead of sixty.
GUIDE = r"""
- match:
    name: "^model\\.layers\\.(0|1|2)\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda:0"
  recursive: False
- match:
    name: "^model\\.layers\\.([345])\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda:1"
  recursive: False
- match:
    name: "^model$"
  replace:
    class: "ktransformers.operators.models.KDeepseekV2Model"
    kwargs:
      transfer_map:
        3: "cuda:1"
- match:
    name: "^model\\.layers\\.(?!.*self_attn).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      generate_op: "QuantizedLinearMarlin"
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs:
      generate_device: "cpu"
"""


def skeleton(layers: int = 6, **more: Any) -> torch.nn.Module:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        **more,
    )
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def rules(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return read_rules(file)


def test_layers_are_spread_in_equal_runs() -> None:
    assert spread_layers(5, ["a", "b"]) == ["a", "a", "b", "b", "b"]
    assert spread_layers(3, ["a"]) == ["a"] * 3
    assert spread_layers(2, ["a", "b", "c"]) == ["b", "c"]
    decoder_layers = find_decoder_layers(skeleton(mlp_only_layers=[0]))
    assert (decoder_layers.name, decoder_layers.count) == ("model.layers", 6)
    assert decoder_layers.number_of("model.layers.12.mlp") == 12 and decoder_layers.number_of("model.norm") is None


def test_rules_of_the_ktransformers_guide(tmp_path: Path) -> None:
    found = rules(tmp_path, GUIDE)
    placed = devices_by_rules(skeleton(), found, ["cuda:0"])
    assert placed.layers == ("cuda:0",) * 3 + ("cuda:1",) * 3
    assert (placed.embedding, placed.head, placed.spans_devices) == ("cpu", "cuda:0", True)
    assert placed.experts == {f"model.layers.{at}.mlp.experts": "cpu" for at in range(6)}
    assert devices_of(found) == {"cuda:0", "cuda:1"}


def test_first_matching_rule_wins(tmp_path: Path) -> None:
    """And a rule that is not recursive closes what is below it; a class is matched by its last word."""
    text = r"""
- {match: {name: "layers\\.1\\.self_attn$"}, replace: {kwargs: {generate_device: "cuda:1"}}, recursive: false}
- {match: {class: torch.nn.Linear}, replace: {class: default, kwargs: {generate_device: "cuda:2"}}}
- {match: {name: "^model\\.layers\\."}, replace: {class: default, kwargs: {generate_device: "cuda:3"}}}
"""
    found = first_rules(skeleton(), rules(tmp_path, text))
    assert found["model.layers.1.self_attn.q_proj"].device == "cuda:1"
    assert found["model.layers.2.self_attn.q_proj"].device == "cuda:2"
    assert found["model.layers.2.self_attn"].device == "cuda:3"
    with pytest.raises(InputError, match="one device for all of a layer"):
        devices_by_rules(skeleton(), rules(tmp_path, text), ["cuda:0"])
    whole = r"""
- match: {name: "layers\\.[45]\\.mlp\\.experts$"}
  replace: {class: ktransformers.operators.experts.KTransformersExperts, kwargs: {generate_device: cuda}}
"""
    placed = devices_by_rules(skeleton(), rules(tmp_path, whole), ["cuda:0", "cuda:1"])
    assert placed.layers == ("cuda:0",) * 3 + ("cuda:1",) * 3
    assert placed.experts == {f"model.layers.{at}.mlp.experts": "cuda:1" for at in (4, 5)}
    assert placed.resident_layers == list(placed.experts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: b", "holds no list"),
        ("- [", "YAML list"),
        ("- {match: {}, replace: {class: default}}", "an empty match"),
        ("- {match: {name: '('}, replace: {class: default}}", "match.name: given '\\('"),
        ("- {match: {name: a, size: 3}, replace: {class: default}}", "match.size"),
        ("- {match: {name: a}, replace: {class: default, kwargs: {generate_device: tpu}}}", "cpu, cuda"),
        ("- {match: {name: a}, replace: {class: default, kwargs: {transfer_map: {x: 'cuda:1'}}}}", "numbers of layers"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        rules(tmp_path, text)
    with pytest.raises(InputError, match="YAML list"):
        read_rules(tmp_path / "absent.yaml")


def test_model_on_two_devices_computes_the_same() -> None:
    """On one device: hooks and moves change nothing."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model = tiny_packed_model().eval()
    with torch.inference_mode():
        want = model(tokens).logits
    move_to_devices(model, DeviceMap(("cpu",) * 3, "cpu", "cpu", {}))
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, want)
    assert not hasattr(model, "hf_device_map")


def test_the_gpu_of_a_module_is_current_while_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device; also after an error, and while one module calls another."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(int(getattr(device, "index", device))))
    seen: list[int] = []

    class Layer(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module | None = None, fails: bool = False) -> None:
            super().__init__()
            self.inner, self.fails = inner, fails

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if self.inner is None else self.inner(x)
            seen.append(current[-1])
            if self.fails:
                raise ValueError("in the layer")
            return x

    inner, failing = Layer(), Layer(fails=True)
    outer = Layer(inner)
    for module, place in ((inner, 2), (outer, 1), (failing, 3)):
        make_current(module, torch.device("cuda", place))
    outer(torch.ones(1))
    assert seen == [2, 1] and current[-1] == 0
    with pytest.raises(ValueError, match="in the layer"):
        failing(torch.ones(1))
    assert seen[-1] == 3 and current[-1] == 0


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Moves to a GPU are left out; the stack of current ones is returned."""
    current, to = [0], torch.nn.Module.to
    monkeypatch.setattr(torch.nn.Module, "to", lambda one, device: one if "cuda" in str(device) else to(one, device))
    monkeypatch.setattr(device_map, "_move_own", lambda module, device: None)
    monkeypatch.setattr(device_map, "_to", lambda value, device: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(int(getattr(device, "index", device))))
    return current


@pytest.mark.parametrize("by", ["rules", "load"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_model_on_one_gpu_that_is_not_the_first(number: int, by: str, fake_gpus: list[int]) -> None:
    """It is the current one for Triton, and the HF Trainer leaves the model there."""
    model, gpu, seen = tiny_packed_model().eval(), f"cuda:{number}", list[int]()
    for module in (model.model.layers[1], model.lm_head):
        module.register_forward_hook(lambda *_: seen.append(fake_gpus[-1]))
    if by == "rules":
        move_to_devices(model, DeviceMap((gpu,) * 3, gpu, gpu, {}))
        assert getattr(model, "hf_device_map", {}).get("model.layers.0") == (gpu if number else None)
    else:
        run_on(model, gpu)
    with torch.inference_mode():
        model(torch.arange(8)[None])
    assert seen == [number] * 2 and fake_gpus[-1] == 0
    with torch.inference_mode():
        model.lm_head(torch.ones(1, model.config.hidden_size, dtype=torch.bfloat16))
    assert seen[-1] == number and fake_gpus[-1] == 0


def test_a_table_in_host_memory_is_looked_up_on_the_gpu_of_the_first_layer(
    fake_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the model is on one device, as decode graphs ask; a head that shares the table takes it along."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: rows)
    model, gpu = tiny_packed_model().eval(), "cuda:0"
    moved: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    monkeypatch.setattr(torch.nn.Module, "to", lambda one, device: moved.update({names[one]: str(device)}))
    move_to_devices(model, DeviceMap((gpu,) * 3, "cpu", gpu, {}))
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, QuantizedWeight) and isinstance(weight.impl, HostRows)
    assert moved["model.embed_tokens"] == gpu and not hasattr(model, "hf_device_map")
    tied = tiny_packed_model().eval()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    names |= {module: name for name, module in tied.named_modules()}
    move_to_devices(tied, DeviceMap((gpu,) * 3, "cpu", gpu, {}))
    assert (moved["model.embed_tokens"], moved["lm_head"]) == (gpu, gpu)
    assert not isinstance(tied.lm_head.weight, QuantizedWeight)


def test_an_embedding_that_the_head_shares_is_on_the_device_of_the_head(tmp_path: Path) -> None:
    found = rules(tmp_path, GUIDE)
    devices = devices_by_rules(skeleton(tie_word_embeddings=True), found, ["cuda:0"])
    assert (devices.embedding, devices.head) == ("cuda:0", "cuda:0")


@pytest.mark.parametrize("gpu", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_codes_are_moved_with_their_layers(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer stays on the CPU, the others go to a GPU, for which the CPU stands in: each linear layer's codes
    are on its module's device, those of `kv_b_proj` too."""
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 10)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model: Any = build("deepseek_v3", num_hidden_layers=3).to(torch.bfloat16 if gpu != "cpu" else torch.float32).eval()
    for module in expert_modules(model).values():
        pack_module(module, free=True)
    select_implementation(model)
    assert quantized_weight.quantize_linears(model, "int8")
    assert quantized_weight.keep_embedding_on_host(model, pin=gpu != "cpu")
    with torch.inference_mode():
        wanted = model(tokens).logits.float()
    move_to_devices(model, DeviceMap(("cpu", gpu, gpu), gpu, gpu, {}))
    quantized_weight.check_on_device(model)
    assert all(isinstance(layer.self_attn.kv_b_proj.weight, QuantizedWeight) for layer in model.model.layers)
    for name, weight in codes_of(model).items():
        expected = "cpu" if "layers.0." in name else gpu
        assert str(weight.device) == expected, name
    with torch.inference_mode():
        logits = model(tokens.to(gpu)).logits.float().cpu()
    assert float((logits - wanted).norm() / wanted.norm()) < (2e-2 if gpu != "cpu" else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["stream", "resident"])
def test_layers_on_two_devices(policy: str) -> None:
    """The first layer on the CPU, the others and the head on the GPU, the embedding on the CPU: hidden states go from
    one to the other and back, gradients too; the engine has the layers that are on its device."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model = tiny_packed_model().eval()
    with torch.inference_mode():
        want = model(tokens).logits.float()
    move_to_devices(model, DeviceMap(("cpu", "cuda:0", "cuda:0"), "cpu", "cuda:0", {}))
    names = list(expert_modules(model))
    assert [device_of(model, name) for name in names[1:]] == [torch.device("cuda:0")] * 2
    placement = attach(model, policy=policy)
    assert placement is not None and placement.names == names[1:] and names[0] in placement.left
    placement.place_residents(count=4)
    with torch.inference_mode():
        got = model(tokens).logits
    assert got.device == torch.device("cuda:0")
    assert (got.float().cpu() - want).norm() < 0.02 * want.norm()
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    (grad,) = torch.autograd.grad(model(inputs_embeds=embedded).logits.float().logsumexp(-1).sum(), embedded)
    placement.detach()
    assert grad.isfinite().all() and grad.any() and grad.device == embedded.device


@pytest.mark.gpu
def test_two_engines_on_one_gpu() -> None:
    """As two GPUs would have them: each its layers, its room and its residents, statistics in the model's order."""
    model = tiny_packed_model().to("cuda:0").eval()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)).to("cuda:0")
    names = list(expert_modules(model))
    with torch.inference_mode():
        want = model(tokens).logits.float()
        parts = [
            attach(model, policy="resident", device_by_layer={name: "cpu" for name in names if name not in mine})
            for mine in (names[:1], names[1:])
        ]
        for part in parts:
            assert part is not None
            part.place_residents(ratio=0.5)
        got = model(tokens).logits.float()
        assert (got - want).norm() < 0.02 * want.norm()
        assert [len(part.layers) for part in parts if part is not None] == [1, 2]
        for part in parts:
            assert part is not None
            part.detach()


def test_experts_under_peft_are_where_their_router_is() -> None:
    """LoRA on experts stays in host memory, beside a router that was moved."""
    from peft import LoraConfig, get_peft_model

    model = tiny_packed_model()
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"]))
    for name, module in peft.named_modules():
        if ".experts" not in name and not list(module.children()):
            module.to("meta")
    for name in expert_modules(peft):
        assert device_of(peft, name) == torch.device("meta"), name
