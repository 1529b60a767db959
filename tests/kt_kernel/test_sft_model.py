"""`kt_kernel.sft` on tiny stock models: wrapping, expert LoRA of kt-kernel's form and of PEFT, checkpointing, adapter
directories, loaders."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kt_kernel import sft
from kt_kernel.sft import KTAMXConfigError, KTArtifactError, KTConfig
from kt_kernel.sft.base import LORA_NAMES
from kt_kernel.sft.convert_kt_to_sglang_adapter import convert_kt_to_sglang_adapter
from kt_kernel.sft.wrapper import place_gpu_experts
from ktransformers.adapters import convert, read_adapter
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from tests.support.tiny_models import build, save, tokens

RANK, ALPHA = 4, 8
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a KTConfig writes OMP_NUM_THREADS."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def lora_config(targets: list[str], **options: Any) -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", **options)


def wrapped(family: str = "qwen3_moe", **settings: Any) -> Any:
    model = build(family)
    sft.wrap_moe_layers_with_kt_wrapper(model, KTConfig(**settings))
    return model


def fill(parameters: list[nn.Parameter], seed: int = 3) -> None:
    """Numbers that bf16 holds exactly."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_((torch.randn(parameter.shape, generator=chance) * 0.1).bfloat16())


def adapted(targets: list[str] = ATTENTION, **settings: Any) -> Any:
    """A wrapped model with PEFT's LoRA on attention and kt-kernel's on the experts, with numbers everywhere."""
    torch.manual_seed(1)
    model = get_peft_model(wrapped(**settings), lora_config(targets))
    sft.kt_adapt_peft_lora(model)
    fill([parameter for name, parameter in model.named_parameters() if "lora_" in name])
    fill(sft.get_kt_lora_params(model), seed=4)
    return model


def stock_twin(model: Any) -> Any:
    """Stock transformers and PEFT with the same LoRA: gate_up_proj with twice the rank holds gate and up apart."""
    torch.manual_seed(1)
    twin = get_peft_model(build("qwen3_moe"), lora_config([*ATTENTION, *EXPERTS]))
    own = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    experts = {name.split(".")[2] + "." + name.rpartition(".")[2]: p for name, p in sft.get_kt_lora_named_params(model)}
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in own:
                parameter.copy_(own[name])
            elif "experts" in name and "lora_" in name:
                layer, inner = name.split("layers.")[1].split(".")[0], "base_layer" in name
                part = {role: experts[f"{layer}.{role}"].float() for role in LORA_NAMES}
                parameter.copy_(_fused(part, inner, "lora_A" in name))
                ones = _fused({role: torch.ones_like(tensor) for role, tensor in part.items()}, inner, "lora_A" in name)
                parameter.register_hook(lambda grad, ones=ones: grad * ones)  # zeros off the diagonal stay zeros
    return twin


def _fused(part: dict[str, Tensor], inner: bool, is_a: bool) -> Tensor:
    if is_a:
        a = torch.cat([part["gate_lora_a"], part["up_lora_a"]], 1) if inner else part["down_lora_a"]
        return a.reshape(-1, a.shape[-1])
    gate, up = part["gate_lora_b"], part["up_lora_b"]
    upper, lower = torch.cat([gate, 0 * gate], 2), torch.cat([0 * up, up], 2)
    b = torch.cat([upper, lower], 1) if inner else part["down_lora_b"]
    return b.permute(1, 2, 0).reshape(b.shape[1], -1)


def loss_of(model: Any) -> Tensor:
    return model(input_ids=tokens(), labels=tokens()).loss  # type: ignore[no-any-return]


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits  # type: ignore[no-any-return]


def close(given: Tensor, expected: Tensor, limit: float = 5e-3) -> None:
    assert float((given.float() - expected.float()).norm()) <= limit * float(expected.float().norm()) + 1e-8


def test_wrapped_model_keeps_its_modules_and_logits() -> None:
    stock = build("qwen3_moe")
    model = wrapped()
    assert {name for name, _ in model.named_modules()} == {name for name, _ in stock.named_modules()}
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in stock.named_parameters()}
    close(logits_of(model), logits_of(stock))
    assert [wrapper.layer_idx for wrapper in model._kt_wrappers] == [0, 1]
    assert model._kt_train_mode == "lora" and model._kt_expert_weight_format == "bf16"
    placeholders = sft.get_kt_expert_placeholders(model)
    assert set(placeholders) == {
        f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")
    }
    assert all(map(sft.is_kt_routed_expert_base_parameter, placeholders.values()))
    assert all(map(sft.is_kt_routed_expert_parameter_name, placeholders))
    assert not sft.is_kt_routed_expert_parameter_name("model.layers.0.mlp.gate.weight")
    assert sft.is_kt_supported_moe_model(model) and sft.get_expert_device(model) == "cpu"


def test_adaptation_creates_six_parameters_for_each_layer_outside_of_the_model() -> None:
    model = get_peft_model(wrapped(), lora_config(ATTENTION))
    assert sft.get_kt_lora_params(model) == []
    result = sft.adapt_peft_lora(model)
    assert (result.adapted_layers, result.already_adapted_layers) == (2, 0)
    named = dict(result.named_optimizer_parameters)
    assert list(named)[:6] == [f"kt.layers.0.experts.fused_lora.{name}" for name in LORA_NAMES] and len(named) == 12
    assert named["kt.layers.1.experts.fused_lora.gate_lora_a"].shape == (6, RANK, 64)
    assert named["kt.layers.1.experts.fused_lora.gate_lora_b"].shape == (6, 40, RANK)
    assert named["kt.layers.1.experts.fused_lora.down_lora_a"].shape == (6, RANK, 40)
    assert named["kt.layers.1.experts.fused_lora.down_lora_b"].shape == (6, 64, RANK)
    assert all(parameter.dtype == torch.bfloat16 for parameter in named.values())
    assert all(bool(parameter.any()) == name.endswith("_a") for name, parameter in named.items())
    inside = {id(parameter) for parameter in model.parameters()}
    assert not inside & {id(parameter) for parameter in sft.get_kt_trainable_params(model)}
    assert sft.get_kt_rank_local_parameter_names(model) == tuple(sft.get_kt_expert_placeholders(model))
    again = sft.kt_adapt_peft_lora(model)
    assert (again.adapted_layers, again.already_adapted_layers) == (0, 2)
    assert dict(again.named_optimizer_parameters) == named


def test_training_follows_the_stock_model_step_by_step() -> None:
    model = adapted()
    twin = stock_twin(model)
    optimizers = []
    for each, extra in ((model, sft.get_kt_lora_params(model)), (twin, [])):
        inside = [parameter for parameter in each.parameters() if parameter.requires_grad]
        optimizers.append(torch.optim.SGD([*inside, *extra], lr=0.05))
    losses: list[list[float]] = [[], []]
    for _ in range(4):
        for each, optimizer, seen in zip((model, twin), optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = loss_of(each)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        with torch.no_grad():  # the expert LoRA of kt-kernel's form is bf16
            for name, parameter in twin.named_parameters():
                if "experts" in name and "lora_" in name:
                    parameter.copy_(parameter.bfloat16())
        sft.sync_kt_lora_gradients(model)
        sft.update_kt_lora_pointers(model)
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_gradients_of_expert_lora_are_those_of_the_stock_model_and_accumulate() -> None:
    model = adapted()
    twin = stock_twin(model)
    for each in (model, twin):
        loss_of(each).backward()
    grads = {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}
    mine = {name.removeprefix("kt.layers."): p.grad for name, p in sft.get_kt_lora_named_params(model)}
    for layer in (0, 1):
        prefix, path = f"{layer}.experts.fused_lora", f"base_model.model.model.layers.{layer}.mlp.experts"
        inner = grads[f"{path}.base_layer.lora_A.default.weight"].view(6, 2 * RANK, 64)
        close(mine[f"{prefix}.gate_lora_a"], inner[:, :RANK], 8e-3)
        close(mine[f"{prefix}.up_lora_a"], inner[:, RANK:], 8e-3)
        outer = grads[f"{path}.lora_B.default.weight"].view(64, RANK, 6).permute(2, 0, 1)
        close(mine[f"{prefix}.down_lora_b"], outer, 8e-3)
    first = {name: grad.float() for name, grad in mine.items()}
    loss_of(model).backward()
    for name, parameter in sft.get_kt_lora_named_params(model):
        close(parameter.grad, 2 * first[name.removeprefix("kt.layers.")])  # type: ignore[arg-type]


def test_experts_that_peft_adapts_stay_with_peft() -> None:
    model = get_peft_model(wrapped(), lora_config([*ATTENTION, *EXPERTS]))
    result = sft.kt_adapt_peft_lora(model)
    assert (result.adapted_layers, result.already_adapted_layers) == (0, 2)
    named = dict(model.named_parameters())
    assert len(result.named_optimizer_parameters) == 8
    assert all(named[name] is parameter for name, parameter in result.named_optimizer_parameters)
    assert set(dict(result.named_optimizer_parameters)) < set(sft.get_kt_rank_local_parameter_names(model))
    assert sft.save_kt_adapter_artifacts(model, "unused") is None and not Path("unused").exists()
    with pytest.raises(KTAMXConfigError, match="get_kt_fused_lora_exclude_modules"):
        forced = get_peft_model(wrapped(kt_force_fused_expert_lora=True), lora_config([*ATTENTION, *EXPERTS]))
        sft.kt_adapt_peft_lora(forced)


def test_forced_fused_lora_excludes_the_experts_from_peft() -> None:
    model = wrapped(kt_force_fused_expert_lora=True)
    pattern = sft.get_kt_fused_lora_exclude_modules(model._kt_config, model)
    assert sft.get_kt_fused_lora_exclude_modules({}, model) is None
    peft = get_peft_model(model, lora_config(ATTENTION, exclude_modules=pattern))
    assert sft.kt_adapt_peft_lora(peft).adapted_layers == 2


def test_backends_without_lora_leave_the_experts_frozen() -> None:
    model = get_peft_model(wrapped(kt_backend="AMXBF16_SkipLoRA"), lora_config(ATTENTION))
    assert sft.kt_adapt_peft_lora(model).named_optimizer_parameters == ()
    loss_of(model).backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_B" in name)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    for settings, message in (({"kt_lora_rank": 2}, "kt_lora_rank"), ({"kt_lora_alpha": 3}, "kt_lora_alpha")):
        model = get_peft_model(wrapped(**settings), lora_config(ATTENTION))
        with pytest.raises(KTAMXConfigError, match=message):
            sft.kt_adapt_peft_lora(model)
    with pytest.raises(KTAMXConfigError, match="kt_lora_rank"):
        sft.kt_adapt_peft_lora(wrapped())
    alone = wrapped(kt_lora_rank=2)
    assert sft.kt_adapt_peft_lora(alone).adapted_layers == 2
    with pytest.raises(InputError, match="wrap_moe_layers_with_kt_wrapper"):
        sft.kt_adapt_peft_lora(build("qwen3_moe"))


def test_experts_that_stay_on_the_gpu_change_no_result() -> None:
    """With the CPU in the place of the GPU, which the placement engine accepts for tests."""
    results = []
    for count in (0, 2):
        model = adapted(kt_num_gpu_experts=count)
        inner = model.get_base_model()
        if count:
            place_gpu_experts(inner, count, device="cpu")
            caches = inner._kt_placement.engines[0].executor.residents
            assert {layer: cache.present(layer) for layer, cache in caches.items()} == {0: {0, 1}, 1: {0, 1}}
        loss_of(model).backward()
        results.append([parameter.grad for parameter in sft.get_kt_lora_params(model)])
    for one, other in zip(*results, strict=True):
        close(other, one, 2e-2)  # the engine multiplies bf16 activations
    if not torch.cuda.is_available():
        with pytest.raises(KTAMXConfigError, match="move_non_experts_to_gpu"):
            place_gpu_experts(model.get_base_model(), 2)


def test_dropout_acts_in_training_alone() -> None:
    model = adapted(kt_lora_dropout=0.5)
    plain = logits_of(adapted())
    model.eval()
    close(logits_of(model), plain, 1e-6)
    model.train()
    close(logits_of(model), plain, 1e-6)  # no gradients, no dropout
    torch.manual_seed(0)
    dropped = model(input_ids=tokens()).logits
    torch.manual_seed(0)
    assert torch.equal(model(input_ids=tokens()).logits, dropped)
    assert float((dropped - plain).norm() / plain.norm()) > 0.01


@pytest.mark.parametrize("policy", ["retain", "recompute"])
@pytest.mark.parametrize("with_context", [True, False])
def test_checkpointing_changes_no_gradient(policy: str, with_context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.experts.store import ExpertStore

    gradients, calls = [], []
    forward = ExpertStore.forward
    monkeypatch.setattr(ExpertStore, "forward", lambda *args, **kw: calls.append(1) or forward(*args, **kw))
    for checkpoints in (False, True):
        model = adapted(kt_lora_dropout=0.25, kt_activation_policy={"cpu": policy, "gpu": "recompute"})
        model.train()
        if checkpoints:
            options: dict[str, Any] = {"use_reentrant": False}
            if with_context:
                options["context_fn"] = sft.get_activation_checkpoint_context_fn()
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        torch.manual_seed(2)
        calls.clear()
        loss_of(model).backward()
        inside = [parameter.grad for name, parameter in model.named_parameters() if "lora_" in name]
        gradients.append([*inside, *(parameter.grad for parameter in sft.get_kt_lora_params(model))])
    assert len(calls) == (2 if policy == "retain" and with_context else 4)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_adapter_directory_is_loaded_again_and_read_by_others(tmp_path: Path) -> None:
    model = adapted()
    expected = logits_of(model)
    base = tmp_path / "base"
    save(build("qwen3_moe"), base)
    directory = tmp_path / "adapter"
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(directory)
    manifest = sft.save_kt_adapter_artifacts(model, directory)
    assert manifest is not None and manifest.document == json.loads(
        (directory / "kt_adapter_manifest.json").read_text()
    )
    assert manifest.document["lora"] == {"rank": RANK, "alpha": ALPHA} and manifest.document["status"] == "ready"
    assert set(manifest.document["artifacts"]) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "fused_expert_lora.safetensors",
    }
    stored = load_file(directory / "fused_expert_lora.safetensors")
    assert set(stored) == {f"layers.{layer}.experts.{name}" for layer in (0, 1) for name in LORA_NAMES}
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())

    # into a model whose expert LoRA does not exist yet, and into one whose LoRA exists
    fresh = PeftModel.from_pretrained(wrapped(), directory)
    sft.load_kt_adapter_artifacts(fresh, directory)
    assert torch.equal(logits_of(fresh), expected)
    ready = PeftModel.from_pretrained(wrapped(), directory)
    sft.kt_adapt_peft_lora(ready)
    sft.load_kt_adapter_artifacts(ready, directory)
    assert torch.equal(logits_of(ready), expected)

    # our adapter format, and stock PEFT on the stock model after a conversion
    adapter = read_adapter(directory)
    assert len(adapter.experts) == 2 and adapter.experts[0].experts == 6
    convert(directory, tmp_path / "peft", "peft")
    close(logits_of(PeftModel.from_pretrained(build("qwen3_moe"), tmp_path / "peft")), expected)
    summary = convert_kt_to_sglang_adapter(directory, tmp_path / "sglang", base_model_name_or_path=str(base))
    assert summary["merged"]["tensors"] == 2 * 6 * 6 + 8


def test_adapter_directory_is_loaded_into_experts_that_peft_adapts(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    sft.save_kt_adapter_artifacts(model, tmp_path)
    own = get_peft_model(wrapped(), lora_config([*ATTENTION, *EXPERTS]))
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, parameter in own.named_parameters():
            if "lora_" in name and name in parameters:
                parameter.copy_(parameters[name])
    sft.load_kt_adapter_artifacts(own, tmp_path)
    close(logits_of(own), logits_of(model), 1e-3)
    narrow = get_peft_model(wrapped(), LoraConfig(r=2, lora_alpha=4, target_modules=[*ATTENTION, *EXPERTS]))
    with pytest.raises(KTArtifactError, match="kt convert"):
        sft.load_kt_adapter_artifacts(narrow, tmp_path)


def test_expert_lora_alone_is_saved_with_a_configuration(tmp_path: Path) -> None:
    model = wrapped(kt_lora_rank=2)
    sft.kt_adapt_peft_lora(model)
    fill(sft.get_kt_lora_params(model))
    sft.save_kt_adapter_artifacts(model, tmp_path)
    fresh = wrapped()
    sft.load_kt_adapter_artifacts(fresh, tmp_path)
    assert torch.equal(logits_of(fresh), logits_of(model))
    sft.load_kt_moe_from_adapter(fresh, tmp_path)


def test_damaged_adapter_directories_are_refused(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    sft.save_kt_adapter_artifacts(model, tmp_path)
    file = tmp_path / "fused_expert_lora.safetensors"
    good = load_file(file)
    save_file(good | {"layers.0.experts.up_lora_a": good["layers.0.experts.up_lora_a"] * 2}, file)
    with pytest.raises(KTArtifactError, match="manifest"):
        sft.load_kt_adapter_artifacts(model, tmp_path)
    (tmp_path / "kt_adapter_manifest.json").unlink()
    changes: dict[str, dict[str, Tensor]] = {
        "no layers.1": {key: tensor for key, tensor in good.items() if key != "layers.1.experts.up_lora_b"},
        "layers.7": good | {"layers.7.experts.up_lora_a": good["layers.0.experts.up_lora_a"].clone()},
        "F32": good | {"layers.0.experts.up_lora_a": good["layers.0.experts.up_lora_a"].float()},
        "BF16 .6, 2, 64.": good | {"layers.0.experts.up_lora_a": good["layers.0.experts.up_lora_a"][:, :2].clone()},
    }
    before = copy.deepcopy([parameter.detach() for parameter in sft.get_kt_lora_params(model)])
    for message, tensors in changes.items():
        save_file(tensors, file)
        with pytest.raises(KTArtifactError, match=message):
            sft.load_kt_adapter_artifacts(model, tmp_path)
    after = sft.get_kt_lora_params(model)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    added = {"base_model.model.model.layers.0.mlp.lora_experts.0.le_gate.weight": torch.ones(2)}
    save_file(added, tmp_path / "adapter_model.safetensors")
    with pytest.raises(KTArtifactError, match="kt_use_lora_experts"):
        sft.load_kt_adapter_artifacts(model, tmp_path)
    with pytest.raises(KTArtifactError, match="no such directory"):
        sft.load_kt_adapter_artifacts(model, tmp_path / "none")


def test_experts_come_from_the_path_that_is_named(tmp_path: Path) -> None:
    save(build("qwen3_moe", seed=5), tmp_path / "other")
    other = build("qwen3_moe", seed=5)
    model = build("qwen3_moe", seed=5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.zero_()
    sft.wrap_moe_layers_with_kt_wrapper(model, {"kt_weight_path": str(tmp_path / "other")})
    close(logits_of(model), logits_of(other))
    files = [str(file) for file in sorted((tmp_path / "other").glob("*.safetensors"))]
    again = build("qwen3_moe", seed=5)
    sft.wrap_moe_layers_with_kt_wrapper(again, {"kt_checkpoint_files": files})
    assert torch.equal(logits_of(again), logits_of(model))
    with pytest.raises(KTAMXConfigError, match="does not exist"):
        wrapped(kt_weight_path=str(tmp_path / "nowhere"))


def test_experts_that_kt_kernel_trained_fully_are_a_source_of_weights(tmp_path: Path) -> None:
    trained = build("qwen3_moe", seed=5)
    arch, layers = sft.get_moe_arch_config(trained.config), {}
    for index, layer in enumerate(trained.model.layers):
        gate, up, down = sft.extract_moe_weights(layer.mlp, arch)
        tensors = {"gate_proj": gate.bfloat16(), "up_proj": up.bfloat16(), "down_proj": down.bfloat16()}
        file = tmp_path / f"kt_full_experts-7-layer-{index:05d}.safetensors"
        save_file(tensors, file)
        layers[str(index)] = {"file": file.name, "size_bytes": file.stat().st_size, "shapes": {}}
    index_file = tmp_path / "kt_full_experts.index.json"
    document = {"format": "kt_full_experts", "version": 1, "dtype": "BF16", "generation": 7, "layers": layers}
    index_file.write_text(json.dumps(document))
    model = build("qwen3_moe", seed=5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.zero_()
    sft.wrap_moe_layers_with_kt_wrapper(model, {"kt_weight_path": str(tmp_path)})
    close(logits_of(model), logits_of(trained))
    with pytest.raises(KTArtifactError, match="kt_weight_path"):
        sft.load_kt_adapter_artifacts(model, tmp_path)
    del layers["1"]
    index_file.write_text(json.dumps(document))
    with pytest.raises(KTArtifactError, match="no layer 1"):
        wrapped(kt_weight_path=str(tmp_path))


def test_formats_that_are_asked_for_are_encoded_from_parameters_and_never_from_files(tmp_path: Path) -> None:
    stock = logits_of(build("qwen3_moe"))
    for settings, prefix, limit in (({"kt_backend": "INT8"}, "int8", 0.05), ({"kt_backend": "AMXINT4"}, "int4", 0.5)):
        model = wrapped(**settings)
        assert all(value.startswith(prefix) for value in model._kt_wrappers[0].wrapper.formats.values())
        close(logits_of(model), stock, limit)
    save(build("qwen3_moe"), tmp_path / "bf16")
    with pytest.raises(KTAMXConfigError, match="kt quant"):
        wrapped(kt_expert_weight_format="int8", kt_weight_path=str(tmp_path / "bf16"))


def test_models_are_loaded_with_packed_experts(tmp_path: Path) -> None:
    stock = build("qwen3_moe")
    save(stock, tmp_path / "model")
    model: Any = sft.load_kt_model(
        stock.config, kt_plugin={"kt_lora_rank": 2}, model_name_or_path=str(tmp_path / "model")
    )
    assert len(model._kt_wrappers) == 2
    with pytest.raises(KTAMXConfigError, match="train LoRA"):
        sft.load_kt_model(
            stock.config, None, type("Args", (), {"finetuning_type": "full"}), {}, str(tmp_path / "model")
        )
    packed = get_peft_model(load_model(tmp_path / "model"), lora_config(ATTENTION))
    assert sft.kt_adapt_peft_lora(packed).adapted_layers == 2
    device_map = sft.build_kt_device_map(stock.config, {}, "cuda:0")
    assert device_map["model.layers.0.mlp.experts"] == "cpu" and device_map["lm_head"] == "cuda:0"
    assert device_map["model.layers.1.mlp.gate"] == "cuda:0"
    assert sft.build_kt_device_map_simplified(stock.config, {}) == device_map
    options = sft.get_kt_loading_kwargs(stock.config, {}, torch.float32)
    again = type(stock).from_pretrained(tmp_path / "model", **options)
    sft.wrap_moe_layers_with_kt_wrapper(again, {})
    close(logits_of(again), logits_of(stock))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_5_moe_text"])
def test_weights_are_read_from_modules_and_from_files(family: str, tmp_path: Path) -> None:
    stock = build(family)
    save(stock, tmp_path)
    arch = sft.get_moe_arch_config(stock.config)
    layer = stock.model.layers[1]
    block = sft.get_moe_module(layer, arch)
    assert block is not None and sft.detect_fused_experts(block.experts)
    matrices = sft.extract_moe_weights(block, arch)
    files = sorted(tmp_path.glob("*.safetensors"))
    read = sft.load_experts_from_checkpoint_files(files, None, "model.layers", arch, 1)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(matrices, read, strict=True))
    assert arch.expert_num == matrices[0].shape[0] and arch.intermediate_size == matrices[0].shape[1]
    with pytest.raises(InputError, match="bf16"):
        sft.load_block_fp8_experts_from_checkpoint_files(files, None, "model.layers", arch, 1, 64)


def test_runtimes_name_the_kernel_and_the_layout() -> None:
    assert sft.get_fp8_runtime().weight_layout == "block-e4m3-128x128"
    assert sft.get_int8_runtime().kernel == sft.get_mxfp4_runtime().kernel == sft.get_rawint4_runtime().kernel
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    quantisation: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    assert sft.get_rawint4_checkpoint_contract({"quantization_config": quantisation}).group_size == 32
    weights["group_size"] = 128
    with pytest.raises(InputError, match="group_size"):
        sft.get_rawint4_checkpoint_contract({"text_config": {"quantization_config": quantisation}})
