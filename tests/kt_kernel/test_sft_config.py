"""`kt_kernel.sft.KTConfig`: fields, environment, refusals; and the names of `kt_kernel.sft`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from kt_kernel import sft
from kt_kernel.sft import KTActivationPolicy, KTAMXConfigError, KTAMXError, KTAMXNotAvailableError, KTConfig
from kt_kernel.sft.config import configure_omp_threads

FIELDS = {
    "kt_backend", "kt_expert_weight_format", "kt_num_threads", "kt_tp_enabled", "kt_threadpool_count",
    "kt_weight_path", "kt_expert_checkpoint_path", "kt_non_expert_weight_path", "kt_weight_lifecycle",
    "kt_num_gpu_experts", "kt_skip_expert_loading", "kt_share_backward_bb", "kt_share_cache_pool",
    "kt_force_fused_expert_lora", "kt_max_cache_depth", "kt_model_max_length", "kt_activation_policy", "kt_lora_rank",
    "kt_lora_alpha", "kt_lora_dropout", "kt_train_mode", "kt_full_weight_grad", "kt_use_lora_experts",
    "kt_lora_expert_num", "kt_lora_expert_intermediate_size", "kt_checkpoint_files", "kt_sharded_metadata",
    "kt_wrap_fn", "kt_wrap_kwargs",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a KTConfig writes OMP_NUM_THREADS."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def test_fields_and_defaults_are_those_of_kt_kernel() -> None:
    assert {entry.name for entry in fields(KTConfig)} == FIELDS
    config = KTConfig()
    assert (config.kt_backend, config.kt_expert_weight_format, config.kt_train_mode) == ("AMXBF16", "bf16", "lora")
    assert (config.kt_num_threads, config.kt_threadpool_count, config.kt_max_cache_depth) == (1, 1, 2)
    assert (config.kt_tp_enabled, config.kt_num_gpu_experts, config.kt_share_backward_bb) == (False, 0, True)
    assert config.kt_activation_policy == KTActivationPolicy("recompute", "recompute")
    assert (config.kt_lora_rank, config.kt_lora_alpha, config.kt_lora_dropout) == (None, None, 0.0)
    assert (config.kt_weight_lifecycle, config.kt_full_weight_grad, config.given) == ("persistent", False, frozenset())
    assert KTConfig(kt_lora_rank=8).kt_lora_alpha == 16.0
    assert KTConfig(kt_expert_weight_format="mxfp4").kt_share_backward_bb is False
    assert KTConfig(kt_expert_weight_format="int8").kt_backend == "auto"


def test_given_values_precede_the_environment_and_that_precedes_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"NUM_THREADS": "6", "TP_ENABLED": "true", "LORA_DROPOUT": "0.25", "WEIGHT_PATH": "/weights"}
    settings |= {"ACTIVATION_POLICY": '{"cpu": "retain", "gpu": "recompute"}', "CHECKPOINT_FILES": "a,b"}
    for name, value in settings.items():
        monkeypatch.setenv(f"ACCELERATE_KT_{name}", value)
    config = KTConfig(kt_num_threads=3)
    assert (config.kt_num_threads, config.kt_tp_enabled, config.kt_lora_dropout) == (3, True, 0.25)
    assert config.kt_weight_path == "/weights" and config.kt_checkpoint_files == ["a", "b"]
    assert config.kt_activation_policy == KTActivationPolicy("retain", "recompute")
    assert config.kt_share_cache_pool is False
    assert {"kt_num_threads", "kt_weight_path"} <= config.given and "kt_lora_rank" not in config.given
    monkeypatch.setenv("ACCELERATE_KT_NUM_THREADS", "many")
    with pytest.raises(KTAMXConfigError, match=r"kt_num_threads.*'many'"):
        KTConfig()


def test_config_from_mappings_and_holders() -> None:
    config = KTConfig.from_object({"enabled": True, "kt_lora_rank": 4})
    assert config.kt_lora_rank == 4
    assert KTConfig.from_object(config) is config
    for holder in (SimpleNamespace(kt_config=config), SimpleNamespace(config={"kt_lora_rank": 4})):
        assert KTConfig.from_object(holder).kt_lora_rank == 4
    with pytest.raises(TypeError, match="kt_lora_rnak"):
        KTConfig.from_object({"kt_lora_rnak": 4})
    with pytest.raises(TypeError, match="kt_lora_rnak"):
        KTConfig(kt_lora_rnak=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="expected a KTConfig"):
        KTConfig.from_object(SimpleNamespace())


def test_backends_name_formats() -> None:
    for backend, weight_format in (("amxbf16", "bf16"), ("INT8", "int8"), ("fp8", "fp8"), ("RAWINT4", "rawint4")):
        assert KTConfig(kt_backend=backend).kt_expert_weight_format == weight_format
    with pytest.warns(FutureWarning, match="INT8"):
        config = KTConfig(kt_backend="AMXINT8")
    assert (config.kt_backend, config.kt_expert_weight_format, config.trains_experts) == ("INT8", "int8", True)
    assert not KTConfig(kt_backend="AMXBF16_SkipLoRA").trains_experts
    for wrong in ({"kt_backend": "CUDA"}, {"kt_backend": "FP8", "kt_expert_weight_format": "int8"}):
        with pytest.raises(KTAMXConfigError):
            KTConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ({"kt_train_mode": "full"}, "train LoRA"),
        ({"kt_full_weight_grad": True}, "train LoRA"),
        ({"kt_use_lora_experts": True}, "kt_lora_rank"),
        ({"kt_weight_lifecycle": "ephemeral"}, "persistent"),
        ({"kt_lora_dropout": 1.0}, "less than 1"),
        ({"kt_lora_rank": 0}, "1 or more"),
        ({"kt_expert_weight_format": "int3"}, "rawint4"),
        ({"kt_activation_policy": {"cpu": "keep"}}, "retain or recompute"),
        ({"kt_tp_enabled": "perhaps"}, "true or false"),
    ],
)
def test_what_cannot_be_done_is_refused(wrong: dict[str, Any], instead: str) -> None:
    with pytest.raises(KTAMXConfigError, match=instead) as caught:
        KTConfig(**wrong)
    assert isinstance(caught.value, KTAMXError) and isinstance(caught.value, ValueError)


def test_recomputing_experts_without_checkpointing_is_refused() -> None:
    """With the class that programs written for kt-kernel catch, and with ours."""
    with pytest.raises(NotImplementedError, match="cpu=retain") as caught:
        KTActivationPolicy(cpu="recompute", gpu="retain")
    assert isinstance(caught.value, KTAMXConfigError)


def test_deprecated_variable_retains_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_REUSE_CHECKPOINT_FORWARD", "1")
    assert KTConfig().kt_activation_policy == KTActivationPolicy("retain", "recompute")


def test_openmp_threads_follow_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert configure_omp_threads() == 3
    monkeypatch.setenv("ACCELERATE_KT_OMP_NUM_THREADS", "5")
    assert configure_omp_threads() == 5 and os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("ACCELERATE_KT_OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert configure_omp_threads() == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert configure_omp_threads() >= 1


def test_every_exported_name_exists_and_others_say_what_to_use() -> None:
    for name in sft.__all__:
        assert getattr(sft, name) is not None
    for name, instead in sft._INSTEAD.items():
        with pytest.raises(KTAMXNotAvailableError, match=name) as caught:
            getattr(sft, name)
        assert instead in str(caught.value)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sft.no_such_name


def test_importing_sft_imports_no_torch() -> None:
    program = (
        "import sys, ktransformers, kt_kernel.sft; kt_kernel.sft.KTConfig(); assert ktransformers.has_sft_support()"
    )
    program += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
