"""Keys: honoured, mapped, moot or refused, and never silently ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_overrides
from ktransformers.operators.rules import summarise_for_training, summary_of_name
from ktransformers.place.backends import format_of_backend
from ktransformers.train.arguments import bf16_note, dtype_of, trainer_arguments
from ktransformers.train.keys import DERIVED_KEYS, NO_EFFECT_KEYS, RENAMED_KEYS, UNSUPPORTED_KEYS
from ktransformers.train.resolve import TRANSLATED_KEYS, isa_of_backend, known_keys, read_settings, trainer_fields
from ktransformers.train.settings import SECTION_OF_KEY
from tests.support.training_files import SEEDS

LEAST = {"model_name_or_path": "m", "output_dir": "o", "dataset": "identity"}


@pytest.mark.parametrize("name", SEEDS)
def test_published_files_are_accepted_unchanged(name: str, tmp_path: Path) -> None:
    import yaml

    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(SEEDS[name], sort_keys=False))
    settings = read_settings(file, [f"model_name_or_path={tmp_path}"])
    seed = SEEDS[name]
    assert settings.model.model_name_or_path == str(tmp_path)
    assert settings.data.stage == seed["stage"]
    assert settings.lora.lora_rank == 8 and settings.lora.lora_target == ("all",)
    assert settings.data.dataset == tuple(word.strip() for word in seed["dataset"].split(","))
    assert settings.trainer["learning_rate"] == seed["learning_rate"]
    assert settings.trainer["warmup_steps"] == 0.1
    assert settings.run.overwrite_output_dir and settings.run.plot_loss
    threads = seed.get("cpu_infer") or seed["kt_config"]["kt_num_threads"]
    assert settings.experts.kt_num_threads == threads
    # every key that was given is somewhere, or a line says what became of it
    notes = " ".join(settings.notes)
    given = {key for key in seed if key != "kt_config"} | set(seed.get("kt_config", {}))
    for key in given - {"resume_from_checkpoint"}:
        assert key in SECTION_OF_KEY or key in settings.trainer or f"{key}:" in notes, key


def test_key_tables_do_not_overlap() -> None:
    tables: list[set[str]] = [
        set(SECTION_OF_KEY),
        set(NO_EFFECT_KEYS),
        set(UNSUPPORTED_KEYS),
        set(RENAMED_KEYS),
        set(TRANSLATED_KEYS),
        set(DERIVED_KEYS),
    ]
    for index, table in enumerate(tables):
        for other in tables[index + 1 :]:
            assert not table & other
    assert not set(NO_EFFECT_KEYS) & set(trainer_fields())


def test_every_key_of_the_trainer_is_accepted() -> None:
    for key, default in trainer_fields().items():
        if key == "output_dir" or key == "do_train":
            continue
        settings = read_settings(LEAST | {key: default})
        if default is not None and key not in SECTION_OF_KEY:
            assert settings.trainer[key] == default, key


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_rnk": 8}, "lora_rnk: given a key that is not known, expected `lora_rank`, perhaps"),
        ({"learing_rate": 1}, "expected `learning_rate`, perhaps"),
        ({"use_dora": True}, "use_dora: given True, expected a run without it"),
        ({"quantization_bit": 4}, "quantization_bit: given 4"),
        ({"finetuning_type": "full"}, "finetuning_type: given 'full', expected 'lora'"),
        ({"pref_loss": "kto"}, "'sigmoid', 'orpo', 'simpo', 'ipo' or 'hinge'"),
        ({"stage": "ppo"}, "stage: given 'ppo', expected 'sft' or 'dpo'"),
        ({"learning_rate": "fast"}, "learning_rate: given 'fast', expected float"),
        ({"learning_rate": -1}, "learning_rate: given -1.0, expected a number, at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate: given nan"),
        ({"learning_rate": [1, 2]}, "learning_rate: given [1, 2]"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: given 0, expected a number, at least 1"),
        ({"lora_rank": 0}, "lora_rank: given 0"),
        ({"kt_config": {"kt_backend": "AMXINT9"}}, "kt_backend: given AMXINT9"),
        ({"kt_config": {"kt_lora_rank": 8}}, "kt_lora_rank: given 8, expected nothing"),
        ({"kt_config": 3}, "kt_config: given 3"),
        ({"kt_expert_weight_format": "int3"}, "kt_expert_weight_format: given 'int3'"),
        ({"kt_weight_path": "/x"}, "kt_weight_path: given /x"),
        ({"use_kt": False}, "use_kt: given False"),
        ({"do_train": False}, "do_train: given False"),
        ({"warmup_ratio": 2}, "warmup_ratio: given 2"),
        ({"packing": True, "stage": "dpo"}, "packing: given True"),
        ({"packing": True, "kt_tokens_per_batch": 4096}, "kt_tokens_per_batch: given 4096"),
        ({"kt_tokens_per_batch": 64}, "at least cutoff_len, 2048"),
        ({"moe_aux_loss_coef": 0.1, "kt_tokens_per_batch": 4096}, "moe_aux_loss_coef"),
        (
            {"kt_tokens_per_batch": "many"},
            "kt_tokens_per_batch: given 'many', expected a number of tokens, auto or off",
        ),
        ({"kt_tokens_per_batch": True}, "kt_tokens_per_batch: given True, expected a number of tokens, auto or off"),
        ({"kt_tokens_per_batch": -1}, "kt_tokens_per_batch: given -1"),
        ({"kt_tokens_per_batch": 4096.5}, "kt_tokens_per_batch: given 4096.5"),
        ({"mask_history": True, "train_on_prompt": True}, "mask_history"),
        ({"bf16": True, "fp16": True}, "fp16"),
        ({"dataset": ""}, "dataset: given nothing"),
        ({"output_dir": None}, "output_dir: given nothing"),
    ],
)
def test_invalid_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_settings(LEAST | keys)
    assert message in str(error.value)


def test_values_are_converted_to_their_type() -> None:
    words = ["learning_rate=1e-4", "bf16=yes", "save_steps=100", "lora_target=q_proj, v_proj", "warmup_steps=10"]
    settings = read_settings(LEAST | {"num_train_epochs": "2", "warmup_ratio": 0.1}, words)
    assert settings.trainer["learning_rate"] == 1e-4 and settings.trainer["bf16"] is True
    assert settings.trainer["num_train_epochs"] == 2.0
    assert settings.trainer["warmup_steps"] == 10, "a count wins over a share"
    assert settings.lora.lora_target == ("q_proj", "v_proj")


def test_tokens_per_batch_accepts_number_auto_and_off() -> None:
    for given in (False, 0, "off", "Off", "0"):
        experts = read_settings(LEAST | {"kt_tokens_per_batch": given, "packing": True}).experts
        assert experts.kt_tokens_per_batch == "off" and experts.tokens_per_pass is None
    assert read_settings(LEAST, ["kt_tokens_per_batch=off"]).experts.kt_tokens_per_batch == "off"
    for given in (4096, "4096"):
        assert read_settings(LEAST | {"kt_tokens_per_batch": given}).experts.tokens_per_pass == 4096
    for keys in ({}, {"kt_tokens_per_batch": None}, {"kt_tokens_per_batch": "auto", "moe_aux_loss_coef": 0.1}):
        experts = read_settings(LEAST | keys).experts
        assert experts.kt_tokens_per_batch == "auto" and experts.tokens_per_pass is None


def test_fractions_lists_and_no_are_parsed() -> None:
    words = ["save_steps=0.25", "eval_strategy=no", "report_to=[wandb, tensorboard]", "save_strategy=false"]
    found = read_settings(LEAST, words).trainer
    assert found["save_steps"] == 0.25 and found["eval_strategy"] == "no" == found["save_strategy"]
    assert found["report_to"] == ["wandb", "tensorboard"]


def test_overrides_set_keys_of_kt_config() -> None:
    assert read_overrides(["kt_config.kt_backend=auto", "--seed=3"]) == {"kt_config": {"kt_backend": "auto"}, "seed": 3}
    file = LEAST | {"kt_config": {"kt_num_threads": 4, "kt_tp_enabled": True}}
    settings = read_settings(file, ["kt_config.kt_num_threads=8"])
    assert settings.experts.kt_num_threads == 8
    assert "kt_tp_enabled: has no effect, experts are always split over NUMA nodes" in settings.notes
    with pytest.raises(InputError, match="key=value"):
        read_overrides(["lora_rank"])


def test_file_without_mapping_is_refused(tmp_path: Path) -> None:
    for text in ("- a\n- b\n", "a: [1\n", "just words"):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(InputError, match=r"x\.yaml"):
            read_settings(tmp_path / "x.yaml")
    with pytest.raises(InputError, match="no such file"):
        read_settings(tmp_path / "y.yaml")


def test_optimize_rule_is_read_from_its_name() -> None:
    rule = summary_of_name("examples/DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml")
    assert (rule.backend, rule.gpus, rule.training) == ("amx", 4, True)
    assert summary_of_name("DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml").gpus == 2
    assert summary_of_name("DeepSeek-V2-Lite-Chat-sft.yaml").backend == "any"
    assert summary_of_name("DeepSeek-V2-Lite-Chat-sft-amx.yaml").gpus == 1


def test_optimize_rule_is_read_from_its_file(tmp_path: Path) -> None:
    def rule(backend: str) -> str:
        return (
            '- match:\n    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"\n  replace:\n'
            "    class: ktransformers.operators.experts.KTransformersExperts\n    kwargs:\n"
            f'      prefill_device: "cpu"\n      out_device: "cuda:1"\n      backend: "{backend}"\n'
        )

    file = tmp_path / "rule.yaml"
    file.write_text(rule("AMXBF16"))
    found, line = summarise_for_training(str(file))
    assert (found.source, found.backend, found.gpus) == ("file", "amx", 2), "cuda:1 is the second"
    assert "from the file" in line
    file.write_text(rule("AMXInt8"))
    assert summarise_for_training(str(file))[0].backend == "amx"
    found, _ = summarise_for_training("examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml")
    assert (found.source, found.backend, found.gpus) == ("file", "amx", 4), "one of the package"
    file.write_text("nothing: here")
    with pytest.raises(InputError, match="holds no list"):
        summarise_for_training(str(file))


def test_kt_backend_names_a_cpu_variant() -> None:
    assert isa_of_backend(None) is None and isa_of_backend("auto") is None and isa_of_backend("AMXBF16") is None
    assert (
        isa_of_backend("AVX512BF16") == "avx512"
        and isa_of_backend("AVX2") == "avx2"
        and isa_of_backend("AVX512_BF16") == "avx512_bf16"
        and isa_of_backend("AVX512_VNNI") == "avx512_vnni"
        and isa_of_backend("NEON") == "neon"
    )


def test_kt_backend_names_a_format() -> None:
    assert isa_of_backend("AMXInt8") is None and format_of_backend("AMXInt8") == "int8"
    assert format_of_backend("amxint4") == "int4:32" and format_of_backend("AMXBF16") is None


def test_number_of_known_keys() -> None:
    assert {"learning_rate", "kt_config", "cpu_infer", "lora_rank", "use_dora"} <= known_keys()


@pytest.mark.parametrize("products", ["bfloat16", "widened"])
def test_bf16_means_float32_where_bf16_is_slow(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "forced_dense_products", products)
    fast, dtype = products == "bfloat16", torch.bfloat16 if products == "bfloat16" else torch.float32
    keys = {"model_name_or_path": "a/b", "output_dir": "out", "dataset": "identity", "use_cpu": True}
    mixed, pure, silent = (read_settings(keys | added) for added in ({"bf16": True}, {"pure_bf16": True}, {}))
    assert dtype_of(mixed, {}) == dtype_of(silent, {}) == dtype and dtype_of(pure, {}) == torch.bfloat16
    assert trainer_arguments(mixed).bf16 is fast and not trainer_arguments(pure).bf16
    assert (bf16_note(mixed) is None) is fast and bf16_note(pure) is bf16_note(silent) is None
