"""Keys of older recipes and `kt_config` in the arguments of LLaMA-Factory, on made-up classes with its structure."""

from __future__ import annotations

import pickle
import sys
import types
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from ktransformers.ground.errors import InputError
from ktransformers.train.llamafactory import arguments, configuration
from tests.support.training_files import SEEDS


class EngineName(StrEnum):
    HF = "huggingface"
    VLLM = "vllm"


@dataclass
class ModelArguments:
    model_name_or_path: str | None = None
    adapter_name_or_path: str | None = None
    infer_backend: EngineName = EngineName.HF
    use_kt: bool = False
    kt_weight_path: str | None = None
    disable_gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.adapter_name_or_path is not None:
            self.adapter_name_or_path = self.adapter_name_or_path.split(",")  # type: ignore[assignment]


@dataclass
class TrainingArguments:
    output_dir: str = "."

    def __post_init__(self) -> None:
        self.checked = True


def extended(monkeypatch: pytest.MonkeyPatch, release: str) -> tuple[Any, Any]:
    """(model arguments, training arguments) of a release."""
    monkeypatch.setattr(arguments, "llamafactory_version", lambda: release)
    module = types.SimpleNamespace(
        ModelArguments=ModelArguments, TrainingArguments=TrainingArguments, EngineName=EngineName
    )
    arguments.extend_model_arguments(module)
    arguments.extend_training_arguments(module)
    return module.ModelArguments, module.TrainingArguments


@pytest.fixture(autouse=True)
def fresh_configuration() -> Any:
    yield
    configuration.configure_kt({})


@pytest.mark.parametrize("release", ["0.9.5", "0.9.6.dev0"])
@pytest.mark.parametrize("name", SEEDS)
def test_kt_keys_of_published_recipes_are_fields(name: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = HfArgumentParser(list(extended(monkeypatch, release)))  # type: ignore[arg-type]
    stock_keys = {"model_name_or_path", "output_dir"}
    keys = {key: value for key, value in SEEDS[name].items() if "kt" in key or key in stock_keys}
    keys |= {key: SEEDS[name][key] for key in ("cpu_infer", "chunk_size") if key in SEEDS[name]}
    model_args, training_args = parser.parse_dict(keys)
    mapping = getattr(model_args if release == "0.9.5" else training_args, "kt_config", None)
    assert mapping == SEEDS[name].get("kt_config")
    settings = configuration.read_kt_settings(model_args, on_gpu=False, training=True)
    assert settings.experts.kt_num_threads == SEEDS[name].get("cpu_infer") or mapping is not None
    assert settings.place.kt_optimize_rule == SEEDS[name].get("kt_optimize_rule")


@pytest.mark.parametrize("release", ["0.9.5", "0.9.6.dev0"])
def test_keys_on_the_command_line(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = HfArgumentParser([extended(monkeypatch, release)[0]])  # type: ignore[arg-type]
    words = ["--use_kt", "true", "--cpu_infer", "4", "--infer_backend", "ktransformers", "--kt_use_cuda_graph", "true"]
    (model_args,) = parser.parse_args_into_dataclasses(words)
    assert model_args.cpu_infer == 4 and model_args.infer_backend == EngineName.HF
    assert model_args.kt_use_cuda_graph is True and model_args.kt_adapter_format == "peft"


def test_backend_of_older_releases_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, _ = extended(monkeypatch, "0.9.5")
    assert model_class(use_kt=True, infer_backend="ktransformers").infer_backend == EngineName.HF
    assert model_class(infer_backend="vllm").infer_backend == EngineName.VLLM
    with pytest.raises(InputError, match=r"infer_backend: given vllm, expected huggingface .*--engine sglang"):
        model_class(use_kt=True, infer_backend="vllm")


@pytest.mark.parametrize(
    "keys",
    [{"infer_backend": "ktransformers"}, {"cpu_infer": 8}, {"kt_optimize_rule": "x.yaml"}, {"kt_config": {}}],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_without_use_kt_are_refused(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, _ = extended(monkeypatch, "0.9.5")
    with pytest.raises(InputError, match=f"{next(iter(keys))}: .*`use_kt: true` with it"):
        model_class(**keys)


def test_fields_of_the_release_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, training_class = extended(monkeypatch, "0.9.6.dev0")
    assert issubclass(model_class, ModelArguments) and model_class(kt_weight_path="p").kt_weight_path == "p"
    assert model_class.__name__ == "ModelArguments" and model_class.__module__ == ModelArguments.__module__
    assert training_class(output_dir="o").checked


def test_training_arguments_pass_the_mapping_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, training_class = extended(monkeypatch, "0.9.6.dev0")
    training_args = training_class(kt_config={"kt_num_threads": 3})
    training_args.update_kt_config({"kt_backend": "auto", "kt_lora_rank": 8, "kt_train_mode": "lora"})
    assert training_args.hf_kt_config._kt_config["kt_lora_rank"] == 8
    model_args = types.SimpleNamespace(model_name_or_path="m", use_kt=True)
    settings = configuration.read_kt_settings(model_args, on_gpu=False, training=True)
    assert (settings.experts.kt_num_threads, settings.experts.kt_backend) == (3, "auto")


def test_training_arguments_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer writes them to training_args.bin."""
    _, training_class = extended(monkeypatch, "0.9.6.dev0")
    monkeypatch.setattr(sys.modules[__name__], "TrainingArguments", training_class)
    again = pickle.loads(pickle.dumps(training_class(kt_config={"kt_backend": "auto"})))
    assert again.hf_kt_config._kt_config == {"kt_backend": "auto"}


def test_full_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, training_class = extended(monkeypatch, "0.9.6.dev0")
    with pytest.raises(InputError, match="finetuning_type: given full, expected lora"):
        training_class().update_kt_config({"kt_train_mode": "full"})


@pytest.mark.parametrize(
    ("mapping", "why"),
    [({"kt_bakend": "auto"}, "kt_bakend.*`kt_backend`, perhaps"), ({"kt_lora_expert_num": 2}, "no experts are added")],
)
def test_keys_of_the_mapping_are_those_of_kt_train(mapping: dict[str, Any], why: str) -> None:
    model_args = types.SimpleNamespace(model_name_or_path="m", use_kt=True, kt_config=mapping)
    with pytest.raises(InputError, match=why):
        configuration.read_kt_settings(model_args, on_gpu=False, training=True)


def test_mapping_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, _ = extended(monkeypatch, "0.9.5")
    assert model_class(use_kt=True, kt_config='{"kt_num_threads": 2}').kt_config == {"kt_num_threads": 2}
    with pytest.raises(InputError, match="kt_config: given '7', expected a mapping"):
        model_class(use_kt=True, kt_config="7")


@pytest.mark.parametrize(
    ("given", "training", "policy"),
    [
        ({}, True, "stream"),
        ({}, False, "cpu"),
        ({"kt_num_gpu_experts": 2}, True, None),
        ({"kt_place": "cpu"}, True, "cpu"),
    ],
)
def test_policy_with_a_gpu(given: dict[str, Any], training: bool, policy: str | None, tmp_path: Path) -> None:
    model_args = types.SimpleNamespace(model_name_or_path="m", use_kt=True, kt_config=given)
    settings = configuration.read_kt_settings(model_args, on_gpu=True, training=training)
    assert settings.place.kt_place == policy
