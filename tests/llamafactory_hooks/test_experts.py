"""Packed experts as LLaMA-Factory gets them: loading, LoRA on them, checkpointing, the check at the end of a run, and
the form of the adapter; its functions are made up, models and PEFT are real."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ktransformers.experts.peft_lora import expert_adapters
from ktransformers.ground.errors import InputError, KTError
from ktransformers.modeling.spec import ModelSpec
from ktransformers.parallel.sharding import ShardOptions
from ktransformers.train.adapter_form import stored_as_peft
from ktransformers.train.callbacks import GradientCheck
from ktransformers.train.divided_trainer import DividedModel
from ktransformers.train.llamafactory import adapter, loading, sharded, training
from tests.support.tiny_models import build, save

TOKENS = torch.arange(1, 25).view(2, 12)


def model_arguments(path: Path, **keys: Any) -> Any:
    values: dict[str, Any] = {"model_name_or_path": str(path), "model_revision": "main", "cache_dir": None}
    return types.SimpleNamespace(**values, use_kt=True, **keys)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3_moe"), tmp_path_factory.mktemp("model"))


def fake_loader(loaded: list[Any]) -> Any:
    """`llamafactory.model.loader`, whose load_model does what the real one does with its own functions."""
    module = types.SimpleNamespace(
        AutoModelForCausalLM=AutoModelForCausalLM,
        AutoModelForImageTextToText=AutoModelForCausalLM,
        AutoModelForSeq2SeqLM=AutoModelForCausalLM,
        _get_init_kwargs=lambda model_args: {},
        load_config=lambda model_args: None,
        patch_config=lambda config, tokenizer, model_args, init_kwargs, is_trainable: None,
    )

    def load_model(tokenizer: Any, model_args: Any, is_trainable: bool = False) -> Any:
        config, init_kwargs = module.load_config(model_args), {"device_map": {"": torch.device("cpu")}}
        module.patch_config(config, tokenizer, model_args, init_kwargs, is_trainable)
        name = {"pretrained_model_name_or_path": model_args.model_name_or_path, "torch_dtype": "auto"}
        loaded.append(module.AutoModelForCausalLM.from_pretrained(**init_kwargs, **name, config=config))
        return loaded[-1]

    module.load_model = load_model
    loading.load_packed_experts(module)
    return module


@pytest.fixture
def packed(directory: Path) -> Any:
    return fake_loader([]).load_model(None, model_arguments(directory), True)


def test_experts_are_packed_from_the_released_directory(directory: Path, packed: Any) -> None:
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert adapter.has_packed_experts(packed) and not adapter.has_packed_experts(stock)
    with torch.no_grad():
        torch.testing.assert_close(packed.eval()(TOKENS).logits, stock(TOKENS).logits, rtol=1e-3, atol=1e-3)
    assert packed.name_or_path == str(directory)


def test_model_does_not_look_quantised(packed: Any) -> None:
    assert getattr(packed, "hf_quantizer", None) is None and not getattr(packed, "is_quantized", False)
    assert getattr(packed, "quantization_method", None) is None
    assert getattr(packed.config, "quantization_config", None) is None


def test_packed_model_refuses_to_be_saved(packed: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="llamafactory-cli export"):
        packed.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_without_use_kt_the_stock_model_is_loaded(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_args = model_arguments(directory)
    model_args.use_kt = False
    loaded = fake_loader([]).load_model(None, model_args, True)
    assert not adapter.has_packed_experts(loaded)


def test_dense_model_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    save(LlamaForCausalLM(config), tmp_path)
    with pytest.raises(InputError, match="no expert layers"):
        fake_loader([]).load_model(None, model_arguments(tmp_path), True)


def test_model_that_bypasses_from_pretrained_is_refused(directory: Path) -> None:
    module = fake_loader([])
    module.AutoModelForCausalLM = AutoModelForCausalLM  # as if LLaMA-Factory loaded it by other means
    module.patch_config = lambda *args: None
    with pytest.raises(InputError, match="without packed experts"):
        module.load_model(None, model_arguments(directory), True)


@pytest.mark.parametrize("name", ["use_unsloth", "quantization_bit", "train_from_scratch"])
def test_other_ways_to_load_are_refused(name: str, directory: Path) -> None:
    with pytest.raises(InputError, match=f"use_kt excludes {name}"):
        fake_loader([]).load_model(None, model_arguments(directory, **{name: 4}), True)


def fake_adapter_module() -> Any:
    """`llamafactory.model.adapter`: the part of it that makes a new adapter."""
    module = types.SimpleNamespace(get_peft_model=get_peft_model, _load_kt_inference_adapter_artifacts=None)

    def setup_lora_tuning(config: Any, model: Any, model_args: Any, finetuning_args: Any) -> Any:
        target = finetuning_args.lora_target
        linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if type(layer).__name__ == "Linear"}
        names = sorted(linear - {"lm_head"}) if target == ["all"] else target
        options = {"lora_alpha": 8, "lora_dropout": finetuning_args.lora_dropout, "target_modules": names}
        return module.get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **options))

    module._setup_lora_tuning = setup_lora_tuning
    adapter.adapt_experts(module)
    return module


def adapted(model: Any, *target: str, dropout: float = 0.0) -> Any:
    finetuning_args = types.SimpleNamespace(lora_target=list(target), lora_dropout=dropout)
    return fake_adapter_module()._setup_lora_tuning(None, model, None, finetuning_args)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if tensor.requires_grad}


NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_linear_layers_are_numbers_on_a_gpu_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ktransformers"):
        assert loading.linear_storage("keep", on_gpu=True) == "bf16"
    assert "dequantized to bf16 on a GPU" in caplog.text
    assert (
        loading.linear_storage("keep", on_gpu=False) == "keep"
        and loading.linear_storage("int4", on_gpu=False) == "int4"
    )
    with pytest.raises(InputError, match="rest: given int4"):
        loading.linear_storage("int4", on_gpu=True)


def test_all_and_names_reach_the_experts_as_peft_does_it(directory: Path) -> None:
    """PEFT converts the names for the stock model by itself: the same tensors."""
    module = fake_loader([])

    def packed() -> Any:
        return module.load_model(None, model_arguments(directory), True)

    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = shapes(adapted(stock, *NAMES))
    assert shapes(adapted(packed(), "all")) == expected
    assert shapes(adapted(packed(), *NAMES)) == expected
    assert sum("experts" in name for name in expected) == 8


def test_shared_experts_and_dense_layers_stay_targets(tmp_path: Path) -> None:
    save(build("deepseek_v3"), tmp_path)
    names = shapes(adapted(fake_loader([]).load_model(None, model_arguments(tmp_path), True), "all"))
    blocks = {
        block for block in ("mlp.experts", "shared_experts", "layers.0.mlp", "self_attn") for n in names if block in n
    }
    assert blocks == {"mlp.experts", "shared_experts", "layers.0.mlp", "self_attn"}


def test_dropout_beside_experts(packed: Any) -> None:
    """PEFT refuses it in its configuration."""
    model = adapted(packed, "all", dropout=0.25)
    assert model.peft_config["default"].lora_dropout == 0
    linear = model.base_model.model.model.layers[0].self_attn.q_proj
    assert linear.lora_dropout["default"].p == 0.25
    assert next(iter(expert_adapters(model).values())).get_base_layer().kt.lora_dropout == 0.25


@pytest.mark.parametrize(
    ("target", "why"),
    [(("q_proj", "v_proj"), "gate_proj,up_proj,down_proj among the names"), (("gate_proj",), "up_proj together")],
)
def test_target_without_experts_is_refused(target: tuple[str, ...], why: str, packed: Any) -> None:
    with pytest.raises(InputError, match=why):
        adapted(packed, *target)


def test_stock_model_keeps_its_targets(directory: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert all("experts" not in name for name in shapes(adapted(stock, "q_proj")))


def step(model: Any, check: GradientCheck, optimizer: Any) -> None:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    check.on_pre_optimizer_step(None, None, None)
    optimizer.step()
    optimizer.zero_grad()


def test_trained_experts_are_accepted_and_untrained_ones_refused(packed: Any) -> None:
    model = adapted(packed, "all").train()
    check = GradientCheck(model)
    with pytest.raises(KTError, match="4 of 4 LoRA pairs on experts never received a gradient"):
        training.require_trained_experts(check, steps=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        step(model, check, optimizer)
    training.require_trained_experts(check, steps=2)
    training.require_trained_experts(GradientCheck(model), steps=0)  # a finished run that is resumed


def test_adapter_without_experts_is_refused_at_the_end(directory: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    check = GradientCheck(adapted(stock, "q_proj"))
    with pytest.raises(KTError, match="no LoRA on experts"):
        training.require_trained_experts(check, steps=2)


def test_callback_raises_at_the_end_of_a_run_without_gradients(packed: Any) -> None:
    callback = training.ExpertTraining(batch_tokens=24)
    state = types.SimpleNamespace(global_step=0)
    callback.on_train_begin(None, state, None, model=adapted(packed, "all"))
    callback.on_pre_optimizer_step(None, state, None)
    state.global_step = 1
    callback.on_step_end(None, state, None)
    with pytest.raises(KTError, match="never received a gradient"):
        callback.on_train_end(None, state, None)


def test_checkpointing_keeps_experts_on_request() -> None:
    assert training.checkpoint_options("recompute") == {"use_reentrant": False}
    assert set(training.checkpoint_options("retain")) == {"use_reentrant", "context_fn"}


def test_checkpointing_of_llamafactory_is_replaced(packed: Any) -> None:
    enabled: list[Any] = []

    def prepare(model: Any, model_args: Any) -> None:
        enabled.append({"use_reentrant": model_args.use_reentrant_gc})

    module = types.SimpleNamespace(prepare_model_for_training=prepare)
    training.use_checkpoint_context(module)
    model = types.SimpleNamespace(
        gradient_checkpointing_enable=lambda gradient_checkpointing_kwargs: enabled.append(
            gradient_checkpointing_kwargs
        )
    )
    keys = {"use_kt": True, "use_reentrant_gc": True, "disable_gradient_checkpointing": False}
    module.prepare_model_for_training(model, types.SimpleNamespace(**keys, kt_cpu_activation=None))
    assert enabled == [{"use_reentrant": False}, {"use_reentrant": False}]
    keys["use_kt"] = False
    module.prepare_model_for_training(model, types.SimpleNamespace(**keys, kt_cpu_activation=None))
    assert enabled[2:] == [{"use_reentrant": True}]


@pytest.fixture
def saved(packed: Any, tmp_path: Path) -> Path:
    """An adapter with numbers in all of its tensors."""
    model = adapted(packed, "all")
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn_like(parameter) / 8).bfloat16().float()
    model.save_pretrained(tmp_path / "out")
    return tmp_path / "out"


def logits(directory: Path, folder: str | Path) -> torch.Tensor:
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        result: torch.Tensor = PeftModel.from_pretrained(stock, folder)(TOKENS).logits
    return result


def test_kt_form_and_back(directory: Path, saved: Path) -> None:
    expected = logits(directory, saved)
    assert stored_as_peft(str(saved)) == str(saved)
    training.write_kt_form(saved)
    assert (saved / "kt_adapter_manifest.json").is_file() and not list(saved.glob(".kt_*"))
    assert not any("experts" in name for name in load_file(saved / "adapter_model.safetensors"))
    fused = load_file(saved / "fused_expert_lora.safetensors")
    assert len(fused) == 2 * 6 and fused["layers.0.experts.gate_lora_a"].dtype == torch.bfloat16
    again = stored_as_peft(str(saved))
    assert again != str(saved)
    torch.testing.assert_close(logits(directory, again), expected, rtol=1e-3, atol=1e-3)


def test_gguf_adapter_is_converted(directory: Path, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from ktransformers.adapters import convert

    convert(saved, tmp_path / "gguf", "gguf", base_model_name_or_path=str(directory))
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    again = stored_as_peft(str(file))
    torch.testing.assert_close(logits(directory, again), logits(directory, saved), rtol=1e-3, atol=1e-3)


class FakeTuner(types.SimpleNamespace):
    """`llamafactory.train.tuner`."""


def fake_tuner(output: Path, callbacks: list[Any], **keys: Any) -> Any:
    values = {"use_kt": True, "kt_adapter_format": "peft", **keys}
    model_args = types.SimpleNamespace(**values)
    data_args = types.SimpleNamespace(cutoff_len=16)
    training_args = types.SimpleNamespace(
        per_device_train_batch_size=2, n_gpu=0, fsdp=[], deepspeed=None, do_train=True, should_save=True, use_cpu=True
    )
    training_args.optim, training_args.fp16 = keys.get("optim", "adamw_torch"), False
    training_args.output_dir = str(output)
    finetuning_args = types.SimpleNamespace(finetuning_type=keys.get("finetuning_type", "lora"))
    finetuning_args.stage, model_args.model_name_or_path = keys.get("stage", "sft"), "model"
    module = FakeTuner(
        get_train_args=lambda args=None: (model_args, data_args, training_args, finetuning_args, None),
        get_infer_args=lambda args=None: (model_args, data_args, finetuning_args, None),
    )

    def run(config: Any) -> None:
        module.get_train_args(config["args"])
        callbacks.extend(config["callbacks"])

    module._training_function = run
    training.check_runs(module)
    return module


def test_run_gets_the_callback_and_the_form(saved: Path) -> None:
    callbacks: list[Any] = []
    fake_tuner(saved, callbacks, kt_adapter_format="kt")._training_function({"args": None, "callbacks": []})
    assert [type(callback) for callback in callbacks] == [training.ExpertTraining]
    assert (saved / "fused_expert_lora.safetensors").is_file()


def test_run_without_use_kt_is_left_alone(saved: Path) -> None:
    callbacks: list[Any] = []
    fake_tuner(saved, callbacks, use_kt=False)._training_function({"args": None, "callbacks": []})
    assert callbacks == [] and not (saved / "fused_expert_lora.safetensors").is_file()


def test_other_finetuning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finetuning_type: given freeze, expected lora with use_kt"):
        fake_tuner(tmp_path, [], finetuning_type="freeze")._training_function({"args": None, "callbacks": []})


class FakeTrainer:
    """LLaMA-Factory's, of which the options of sharding are recorded."""

    def __init__(self, given: int) -> None:
        self.given = given


def test_fsdp2_of_accelerate_is_taken_from_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("KT_GRAPHS", "")
    monkeypatch.setattr(sharded, "_requested", {"options": None})
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    shards: list[Any] = []
    monkeypatch.setattr(DividedModel, "shard", lambda self, options: shards.append(options))
    module = types.SimpleNamespace(CustomSeq2SeqTrainer=FakeTrainer)
    sharded.shard_on_request(module)
    assert module.CustomSeq2SeqTrainer(1).given == 1 and shards == []
    for refused, message in (({"stage": "dpo"}, "dpo under FSDP2"), ({"optim": "adafactor"}, "optim: given adafactor")):
        for name, value in asked.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=message):
            fake_tuner(tmp_path, [], **refused)._training_function({"args": None, "callbacks": []})
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    fake_tuner(tmp_path, [])._training_function({"args": None, "callbacks": []})
    module.CustomSeq2SeqTrainer(2)
    assert shards == [ShardOptions(reshard_after_forward=False)]
    assert not {"ACCELERATE_USE_FSDP", "FSDP_VERSION"} & os.environ.keys()


def test_export_loads_the_stock_model(tmp_path: Path) -> None:
    model_args, *_ = fake_tuner(tmp_path, []).get_infer_args()
    assert model_args.use_kt is False and model_args.kt_exporting


@pytest.mark.parametrize("later_gpus", [0, 2])
def test_weights_that_go_to_several_gpus_are_not_widened(
    directory: Path, later_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are loaded into host memory first, as they are for a model that stays there."""
    made: list[Any] = []

    class Placed:
        loading_device = torch.device("cpu" if later_gpus else "cuda")

        def __init__(self, *_: Any) -> None:
            self.later_gpus = self.gpus = later_gpus

        def model_loaded(self, model: Any) -> None: ...

    def load(spec: ModelSpec, config: Any, device_map: Any) -> Any:
        made.append(spec)
        return build("qwen3_moe")

    monkeypatch.setattr("ktransformers.train.placement.TrainPlacement", Placed)
    monkeypatch.setattr("ktransformers.modeling.load.open_model", load)
    monkeypatch.setattr("ktransformers.train.model.pool_for", lambda *_, **__: None)
    loading.load_packed(model_arguments(directory), None, {"": "cuda:0"}, training=True)
    assert [spec.widen for spec in made] == [later_gpus == 0]
