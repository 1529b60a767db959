"""Operators on tiny models: logits of the stock model, the same numbers as the same format chosen by other means,
training with stock PEFT on top, serving, and the two operators of the tutorial."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.partition import ExpertShard, by_experts
from ktransformers.ground.errors import InputError
from ktransformers.modeling.load import meta_model
from ktransformers.nn import load_model
from ktransformers.operators import BaseInjectedModule, KLinearBase, KTransformersLinear, Loader, load_by_rules
from ktransformers.operators.load import apply_operators
from ktransformers.operators.plan import plan_operators
from ktransformers.operators.rules import read_rules
from ktransformers.quant.convert import convert
from ktransformers.quant.plan import make_plan, parse_formats
from ktransformers.quantized.weight import QuantizedWeight
from tests.support.packing import as_fp8
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER, RunRecorder, recipe

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "examples" / "operators"
EXPERTS_INT8 = """
- match: {name: "\\\\.mlp\\\\.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KSFTExpertsCPU, out_device: cuda, backend: AMXInt8}
  recursive: False
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for codes, with a tokenizer."""
    folder = tmp_path_factory.mktemp("operators") / "tiny"
    save(build("qwen3_moe", vocab_size=6400, hidden_size=256, head_dim=64, max_position_embeddings=512), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def int8_experts(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `kt quant` writes them."""
    out = tmp_path_factory.mktemp("operators") / "int8"
    convert(make_plan(directory, parse_formats("int8")), out)
    return out


@pytest.fixture(autouse=True)
def _tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TUTORIAL))


def logits(model: Any) -> Tensor:
    tokens = torch.randint(3, 6400, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return torch.as_tensor(model.eval()(tokens).logits)


def by_rules(directory: Path, tmp_path: Path, text: str) -> Any:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return load_by_rules(directory, file, dtype=torch.float32)


def linear_rule(op: str, name: str = ".") -> str:
    kwargs = f"{{generate_device: cuda, generate_op: {op}, prefill_op: KLinearTorch}}"
    kind = "ktransformers.operators.linear.KTransformersLinear"
    return f"- {{match: {{name: '{name}', class: torch.nn.Linear}}, replace: {{class: {kind}, kwargs: {kwargs}}}}}\n"


def test_experts_of_a_backend_are_those_of_kt_quant(directory: Path, int8_experts: Path, tmp_path: Path) -> None:
    model = by_rules(directory, tmp_path, EXPERTS_INT8)
    for module in expert_modules(model).values():
        assert set(module.kt.store.formats.values()) == {"int8"}  # type: ignore[union-attr]
    packed = load_model(int8_experts, dtype=torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(logits(model), logits(packed))
    weight = stock.model.layers[0].mlp.experts.down_proj[0].float()
    decoded = model.model.layers[0].mlp.experts.kt.store.decode("down", 0).float()
    assert 0 < (decoded - weight).norm() < 0.01 * weight.norm()
    part = load_model(directory, dtype=torch.float32, formats="int8", shard=ExpertShard(by_experts(2, 6, 2), 1))
    for module, whole in zip(expert_modules(part).values(), expert_modules(model).values(), strict=True):
        decoded, expected = module.kt.store.decode("up", 0), whole.kt.store.decode("up", 3)  # type: ignore[union-attr]
        assert torch.equal(decoded, expected), "experts of one rank"
    with pytest.raises(InputError, match=r"int4:32, where .* is packed in int8"):
        load_model(int8_experts, formats="int4:32")
    with pytest.raises(InputError, match="a format that can be written"):
        load_model(directory, formats="q4_k")


def test_linears_have_the_numbers_of_their_format(directory: Path, tmp_path: Path) -> None:
    """As loaded, and in int8 as with `rest`."""
    plain = load_model(directory, dtype=torch.float32)
    assert torch.equal(logits(by_rules(directory, tmp_path, linear_rule("KLinearTorch"))), logits(plain))
    model = by_rules(directory, tmp_path, linear_rule("KLinearQ8"))
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, KTransformersLinear) and isinstance(layer.weight, QuantizedWeight)
    assert (layer.weight.spec, layer.key, layer.in_features) == ("int8", "model.layers.0.self_attn.q_proj", 256)
    assert torch.equal(logits(model), logits(load_model(directory, dtype=torch.float32, rest="int8")))
    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in model.named_parameters()} == names, "names stay those of the stock model"
    kept = by_rules(directory, tmp_path, linear_rule("KLinearCPUInfer"))
    assert torch.equal(logits(kept), logits(plain)), "nothing is quantised in these files"


@pytest.mark.parametrize("rest", ["int8", "keep"])
def test_rest_leaves_layers_that_have_an_operator(rest: str, directory: Path, tmp_path: Path) -> None:
    """`KLinearTorch` is numbers, whatever the others are: formats of `rest`, and codes of the files."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(linear_rule("KLinearTorch", "q_proj$"))
    folder = directory if rest == "int8" else as_fp8(shutil.copytree(directory, tmp_path / "fp8"))
    plan = plan_operators(meta_model(folder), read_rules(rules))
    numbers = load_model(folder, dtype=torch.float32, rest="bf16", widen=False)
    model: Any = load_model(
        folder,
        dtype=torch.float32,
        rest=rest,
        widen=False,
        on_loaded=lambda loaded: apply_operators(loaded, plan, Loader(folder)),
    )
    for layer, plain in zip(model.model.layers, numbers.model.layers, strict=True):
        weight = layer.self_attn.q_proj.weight
        assert isinstance(layer.self_attn.q_proj, KTransformersLinear) and not isinstance(weight, QuantizedWeight)
        assert torch.equal(weight, plain.self_attn.q_proj.weight)
        assert isinstance(layer.self_attn.o_proj.weight, QuantizedWeight)


def test_an_injected_module_is_the_original_to_everything_else(directory: Path) -> None:
    original = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    original.extra = "word"  # type: ignore[assignment]

    class Own(BaseInjectedModule):
        pass

    own = Own("a.b", Loader(directory), None, original, "cpu", more=1)  # type: ignore[arg-type]
    assert (own.key, own.device, own.kwargs, own.extra) == ("a.b", "cpu", {"more": 1}, "word")
    assert own.orig_module is original
    assert list(own.state_dict()) == list(original.state_dict()) and [n for n, _ in own.named_children()] == ["0", "1"]
    own.eval()
    assert not original.training and not original[1].training
    x = torch.randn(2, 4)
    assert torch.equal(own(x), original(x))
    setattr(own, "0", nn.Linear(4, 3, bias=False))
    assert original[0].bias is None and torch.equal(own(x), original(x))
    with pytest.raises(AttributeError, match="absent"):
        _ = own.absent
    own.to(torch.float64)
    assert original[0].weight.dtype == torch.float64


def test_loader_reads_any_tensor_by_name(directory: Path) -> None:
    loader = Loader(directory)
    weight = loader.load_tensor("model.layers.0.self_attn.q_proj.weight", dtype=torch.float64)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(weight.float(), stock.model.layers[0].self_attn.q_proj.weight)
    assert loader.codes("model.norm.weight") is None and loader.has_tensor("lm_head.weight")
    with pytest.raises(InputError, match=r"`model.norm.weight`, perhaps"):
        loader.load_tensor("model.norms.weight")


class LinearTorchInject(BaseInjectedModule, KLinearBase):
    """The guide's own operator, as it is printed there."""

    def __init__(
        self,
        key: Any,
        gguf_loader: Any,
        config: Any,
        orig_module: Any = None,
        generate_device: str = "cuda",
        **kwargs: Any,
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module, generate_device, **kwargs)
        KLinearBase.__init__(self)
        self.has_bias = False
        self.dtype = torch.get_default_dtype()
        self.w: Any = None

    def load(self, w: Any = None, device: Any = None) -> None:
        if device is None:
            device = self.device
        if w is None:
            w = self.load_weight(device=device)
        if isinstance(w, nn.Parameter):
            self.w = w.to(dtype=self.dtype).view(self.out_features, self.in_features).T
        else:
            self.w = w[0].to(dtype=self.dtype).view(self.out_features, self.in_features).T
            self.bias = w[1].to(dtype=self.dtype)
            self.has_bias = True
        self.w = self.w.to(device)

    def unload(self) -> None:
        self.w = None

    def forward(self, x: Tensor) -> Tensor:
        dtype, out_device = x.dtype, x.device
        x = x.to(device=self.device, dtype=self.dtype) @ self.w
        if self.has_bias:
            x = x + self.bias
        return x.to(dtype=dtype, device=out_device)


def test_the_operator_of_the_guide(directory: Path, tmp_path: Path) -> None:
    """Without changes: with a bias, without one, and in a dtype of its own."""
    text = (
        "- {match: {class: torch.nn.Linear}, replace: {class: tests.operators.test_operators.LinearTorchInject, "
        "kwargs: {generate_device: cuda}}}\n"
    )
    model = by_rules(directory, tmp_path, text)
    assert type(model.lm_head).__name__ == "LinearTorchInject" and model.lm_head.device == "cpu"
    plain = load_model(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    expected = layer(torch.ones(1, 4, dtype=torch.bfloat16))
    own = LinearTorchInject("x", Loader(directory), None, layer, "cpu")
    own.load()
    torch.testing.assert_close(own(torch.ones(1, 4, dtype=torch.bfloat16)), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", ["KLinearTorch", "KLinearQ8"])
def test_unload_drops_weights_and_load_reads_them_again(op: str, directory: Path, tmp_path: Path) -> None:
    model = by_rules(directory, tmp_path, linear_rule(op))
    expected, layer = logits(model), model.model.layers[0].self_attn.q_proj
    numbers = weakref.ref(layer.weight)
    layer.unload()
    gc.collect()
    assert numbers() is None and layer.weight is None and layer.orig_module.weight is None
    layer.load()
    assert isinstance(layer.weight, QuantizedWeight) == (op == "KLinearQ8") and layer.weight.dtype == torch.float32
    assert torch.equal(logits(model), expected)


def test_load_weight_reads_what_an_operator_of_ones_own_has_dropped(directory: Path) -> None:
    from my_operators import ThreeBitLinear

    layer = nn.Linear(256, 512, bias=False, dtype=torch.float32)
    own = ThreeBitLinear("model.layers.0.self_attn.q_proj", Loader(directory), None, layer, "cpu")
    own.load()
    own.unload()
    assert own.weight is None
    own.load()
    assert own.weight.dtype == torch.float32 and not own.weight.requires_grad


def test_operators_of_the_tutorial(directory: Path, tmp_path: Path) -> None:
    from my_operators import CountingLinear, three_bits  # type: ignore[import-not-found]

    plain = load_model(directory, dtype=torch.float32)
    counting = load_by_rules(directory, TUTORIAL / "counting.yaml", dtype=torch.float32)
    expected = logits(plain)
    assert torch.equal(logits(counting), expected)
    counters = [module for module in counting.modules() if isinstance(module, CountingLinear)]
    assert len(counters) == 8 and {module.calls for module in counters} == {1}
    rounded = load_by_rules(directory, TUTORIAL / "three_bits.yaml", dtype=torch.float32)
    for name, module in plain.named_modules():
        if ".self_attn." in name and isinstance(module, nn.Linear):
            module.weight = nn.Parameter(three_bits(module.weight.detach(), 32))
    got = logits(rounded)
    torch.testing.assert_close(got, logits(plain), rtol=1e-4, atol=1e-4)
    assert (got - expected).norm() > 0.001 * expected.norm()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((TUTORIAL / "three_bits.yaml").read_text().replace("group:", "groups:"))
    with pytest.raises(InputError, match="`group`, perhaps"):
        load_by_rules(directory, wrong)


def test_training_by_rules(directory: Path, int8_experts: Path, tmp_path: Path) -> None:
    """Experts in int8 by rule, by `kt_backend` and as `kt quant` wrote them have the same losses, with an operator of
    one's own under PEFT; stock PEFT loads the adapter."""
    pytest.importorskip("trl")
    from peft import PeftModel

    from ktransformers.serve.target import resolve_target
    from tests.support.training_runs import adapter, difference, run

    rules = tmp_path / "rules.yaml"
    rules.write_text((TUTORIAL / "counting.yaml").read_text() + EXPERTS_INT8)
    runs = {
        "rule": {"kt_optimize_rule": str(rules)},
        "backend": {"kt_config": {"kt_backend": "AMXInt8"}},
        "quant": {"kt_weight_path": str(int8_experts)},
    }
    losses = {}
    for name, keys in runs.items():
        watcher = RunRecorder()
        result = run(recipe(directory, tmp_path / name, max_steps=2, use_cpu=True, **keys), watcher)
        losses[name] = [step.values["loss"] for step in watcher.steps if "loss" in step.values]
        assert result.manifest["experts"]["format"] == "int8"
        if name == "rule":
            assert any("everything is computed on the CPU" in note for note in watcher.plans[-1].notes)
    assert len(losses["rule"]) == 2 and losses["rule"] == losses["backend"] == losses["quant"]
    for name in runs:
        target = resolve_target(str(tmp_path / name))
        assert target.expert_format == (None if name == "quant" else "int8"), "a server computes with the same experts"
        assert (target.experts is None) == (name != "quant")
    saved = adapter(tmp_path / "rule")
    assert difference(saved, adapter(tmp_path / "quant")) == 0
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), str(tmp_path / "rule")
    )
    assert logits(stock).isfinite().all()


def test_serving_by_rules(directory: Path, tmp_path: Path) -> None:
    """A server has the operators, checks itself against the model that they make, and serves an adapter on them."""
    from my_operators import CountingLinear

    from ktransformers.serve.flags import Launch
    from ktransformers.serve.loading import open_service
    from ktransformers.serve.target import resolve_target

    rules = tmp_path / "rules.yaml"
    rules.write_text((TUTORIAL / "counting.yaml").read_text() + EXPERTS_INT8 + linear_rule("KLinearQ8", "lm_head"))
    file = tmp_path / "infer.yaml"
    file.write_text(json.dumps({"model_name_or_path": str(directory), "kt_optimize_rule": str(rules)}))
    lines: list[str] = []
    launch = Launch(str(file), device="cpu", dtype="bfloat16", max_total_tokens=256, prepare_workers=1)
    service = open_service(launch, resolve_target(str(file)), lines.append)
    model = service.engine.forward.model
    counters = [module for module in model.modules() if isinstance(module, CountingLinear)]
    assert len(counters) == 8 and all(module.calls > 1 for module in counters)
    assert model.lm_head.weight.spec == "int8"
    assert {spec for module in expert_modules(model).values() for spec in module.kt.store.formats.values()} == {"int8"}
    assert any("everything is computed on the CPU" in line for line in lines)
    modules = service.registry._modules._linears
    assert sum(isinstance(module, CountingLinear) for module in modules.values()) == 8


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "spec"), [("KLinearQ8", "int8"), ("KLinearMarlin", "int4:32")])
def test_linear_operators_on_a_gpu(op: str, spec: str, directory: Path, tmp_path: Path) -> None:
    """Encoded in host memory and moved: the same numbers as on the CPU, read by captured steps."""
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.loading import open_service
    from ktransformers.serve.target import resolve_target

    rules = tmp_path / "rules.yaml"
    rules.write_text(linear_rule(op))
    file = tmp_path / "infer.yaml"
    file.write_text(json.dumps({"model_name_or_path": str(directory), "kt_optimize_rule": str(rules)}))
    lines: list[str] = []
    launch = Launch(str(file), device="cuda", dtype="bfloat16", max_total_tokens=256, prepare_workers=1)
    service = open_service(launch, resolve_target(str(file)), lines.append)
    model = service.engine.forward.model
    layer, name = model.model.layers[0].self_attn.q_proj, "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(layer, KTransformersLinear) and isinstance(layer.weight, QuantizedWeight)
    assert (layer.weight.spec, layer.weight.device.type) == (spec, "cuda")
    expected = load_model(directory, rest=spec, widen=False).get_parameter(name)
    assert torch.equal((layer.weight + 0).cpu(), expected + 0)
    assert service.approximations["kt_optimize_rule"] == "rules.yaml"
    assert any(f"quantized dense linear layers ({spec}" in line for line in lines), lines
