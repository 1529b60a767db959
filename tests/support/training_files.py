"""The training files that people have, as keys and values: what KTransformers' guides and LLaMA-Factory's examples say.

The path of the model is the only thing a run changes.
"""

from __future__ import annotations

from typing import Any

_OUTPUT: dict[str, Any] = {
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
}
_TRAIN: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
}
_LORA: dict[str, Any] = {"do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}
_DATA: dict[str, Any] = {
    "cutoff_len": 2048,
    "max_samples": 100000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
}
_KT: dict[str, Any] = {
    "kt_expert_weight_format": "bf16",
    "kt_backend": "AMXBF16",
    "kt_num_threads": 96,
    "kt_tp_enabled": True,
    "kt_threadpool_count": 2,
    "kt_max_cache_depth": 2,
}

SEEDS: dict[str, dict[str, Any]] = {
    "deepseek3_lora_sft_kt": {
        "model_name_or_path": "opensourcerelease/DeepSeek-V3-bf16",
        "trust_remote_code": True,
        "stage": "sft",
        **_LORA,
        "dataset": "identity",
        "template": "deepseek",
        **_DATA,
        "output_dir": "saves/Kllama_deepseekV3",
        **_OUTPUT,
        **_TRAIN,
        "resume_from_checkpoint": None,
        "use_kt": True,
        "kt_optimize_rule": "examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml",
        "cpu_infer": 32,
        "chunk_size": 8192,
    },
    "deepseek2_lora_dpo_kt": {
        "model_name_or_path": "deepseek-ai/DeepSeek-V2-Lite",
        "trust_remote_code": True,
        "stage": "dpo",
        **_LORA,
        "pref_beta": 0.1,
        "pref_loss": "sigmoid",
        "dataset": "dpo_en_demo",
        "template": "llama3",
        **_DATA,
        "max_samples": 1000,
        "output_dir": "saves/Kllama_deepseekV2_DPO",
        **_OUTPUT,
        **_TRAIN,
        "learning_rate": 5.0e-6,
        "num_train_epochs": 3,
        "resume_from_checkpoint": None,
        "use_kt": True,
        "kt_optimize_rule": "examples/kt_optimize_rules/DeepSeek-V2-Lite-Chat-sft-amx.yaml",
        "cpu_infer": 64,
        "chunk_size": 8192,
    },
    "qwen3moe_lora_sft_kt": {
        "model_name_or_path": "/path/to/Qwen3-235B-A22B-Instruct-2507-BF16",
        "trust_remote_code": True,
        "template": "qwen3",
        "stage": "sft",
        **_LORA,
        "lora_alpha": 32,
        "lora_dropout": 0.1,
        "dataset": "identity, alpaca_en_demo",
        **_DATA,
        "output_dir": "saves/qwen3moe_lora_sft_kt",
        **_OUTPUT,
        **_TRAIN,
        "use_kt": True,
        "kt_optimize_rule": "examples/kt_optimize_rules/<model>-sft-amx-<gpu-count>.yaml",
        "cpu_infer": 64,
        "chunk_size": 2048,
    },
    "qwen3_5moe_lora_sft_kt": {
        "model_name_or_path": "Qwen/Qwen3.5-397B-A17B",
        "trust_remote_code": True,
        "stage": "sft",
        **_LORA,
        "dataset": "identity, alpaca_en_demo",
        "template": "qwen3_5",
        **_DATA,
        "output_dir": "saves/KT_FT_qwen35Moe",
        **_OUTPUT,
        **_TRAIN,
        "resume_from_checkpoint": None,
        "use_kt": True,
        "kt_cpu_activation": "retain",
        "kt_config": {**_KT, "kt_model_max_length": 2176, "kt_share_backward_bb": True},
    },
}
