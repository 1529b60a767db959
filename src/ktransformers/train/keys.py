"""Keys of LLaMA-Factory and transformers that have no effect, are unsupported, or were renamed, with the message that
the user reads.

NO_EFFECT_KEYS are accepted with one line, because the design makes them unnecessary. UNSUPPORTED_KEYS are accepted at
the values that request nothing and are an error otherwise. RENAMED_KEYS have another name now. Covers LLaMA-Factory
0.9.4, 0.9.5 and later, and keys that transformers 5 removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Reason -> keys.
_NO_EFFECT: dict[str, tuple[str, ...]] = {
    "rows are read in every run, there is no cache": ("overwrite_cache",),
    "rows are tokenised by one process, hundreds per second": ("preprocessing_num_workers",),
    "rows are tokenised one by one": ("preprocessing_batch_size",),
    "every process reads the files": ("data_shared_file_system",),
    "experts never become parameters": ("low_cpu_mem_usage",),
    "kt_manifest.json lists every trained tensor": ("print_param_status",),
    "padding never has a loss": ("ignore_pad_token_for_loss",),
    "belongs to inference": (
        *("infer_backend", "infer_dtype", "use_kv_cache", "mode", "kt_maxlen", "kt_use_cuda_graph", "kt_mode"),
        *("kt_force_think", "generation_max_length", "generation_num_beams"),
    ),
    "nothing is offloaded to disk": ("offload_folder",),
    "special tokens in data are read as text": ("split_special_tokens",),
    "the token of `hf auth login` is used": ("hf_hub_token",),
    "models come from the Hugging Face hub or from a directory": ("ms_hub_token", "om_hub_token"),
    "a call of any size is split by the kernels themselves": ("chunk_size",),
    "experts are named in lora_target": ("kt_use_lora_experts",),
    "experts are always split over NUMA nodes": ("kt_tp_enabled",),
    "autograd keeps what backward needs": ("kt_max_cache_depth", "kt_share_cache_pool"),
    "backward reads the one packed copy": ("kt_share_backward_bb",),
    "the packed experts live as long as the model": ("kt_weight_lifecycle",),
    "buffers grow with the batch": ("kt_model_max_length",),
    "one adapter file contains the experts too": ("kt_force_fused_expert_lora",),
    "experts are read straight into the packed store": ("kt_skip_expert_loading",),
    "everything but the experts is read from the model directory": ("kt_non_expert_weight_path",),
    "nothing else is written": ("save_safetensors",),
    "torch's autocast is the only one": ("half_precision_backend", "fp16_backend", "fp16_opt_level"),
    "removed from transformers": (
        *("use_legacy_prediction_loop", "use_ipex", "jit_mode_eval", "ray_scope", "past_index", "mp_parameters"),
        *("use_mps_device", "tpu_num_cores", "tpu_metrics_debug", "sortish_sampler"),
    ),
    "tokens per second are always logged, without padding": ("include_effective_tokens_per_second",),
    "tokens per second are always logged": ("include_tokens_per_second",),
    "one evaluation set holds all": ("eval_on_each_dataset",),
}
NO_EFFECT_KEYS = {key: reason for reason, keys in _NO_EFFECT.items() for key in keys}


@dataclass(frozen=True)
class UnsupportedKey:
    """The values that request nothing, and what to do instead of the others."""

    values: tuple[Any, ...]
    remedy: str


_FALSE_OR_NONE = (False, None)
UNSUPPORTED_KEYS: dict[str, UnsupportedKey] = {
    "quantization_bit": UnsupportedKey((None,), "give a checkpoint in the format that it was released in"),
    "quantization_method": UnsupportedKey((None, "bnb"), "give a checkpoint in the format that it was released in"),
    "quantization_type": UnsupportedKey((None, "nf4"), "leave it out"),
    "double_quantization": UnsupportedKey((True, False, None), "leave it out"),
    "quantization_device_map": UnsupportedKey((None,), "leave it out"),
    "use_unsloth": UnsupportedKey(_FALSE_OR_NONE, "leave it out; the experts have kernels of their own"),
    "use_unsloth_gc": UnsupportedKey(_FALSE_OR_NONE, "leave it out; gradient checkpointing is on by default"),
    "enable_liger_kernel": UnsupportedKey(_FALSE_OR_NONE, "leave it out; TRL computes the loss in chunks already"),
    "shift_attn": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "mixture_of_depths": UnsupportedKey((None,), "leave it out"),
    "rope_scaling": UnsupportedKey((None,), "set it in the model's config.json"),
    "resize_vocab": UnsupportedKey(_FALSE_OR_NONE, "tokens cannot be added to a frozen model"),
    "add_tokens": UnsupportedKey((None, ""), "tokens cannot be added to a frozen model"),
    "add_special_tokens": UnsupportedKey((None, ""), "tokens cannot be added to a frozen model"),
    "new_special_tokens_config": UnsupportedKey((None,), "tokens cannot be added to a frozen model"),
    "train_from_scratch": UnsupportedKey(_FALSE_OR_NONE, "experts are frozen; train an adapter"),
    "upcast_layernorm": UnsupportedKey(_FALSE_OR_NONE, "norms are frozen; use bf16"),
    "upcast_lmhead_output": UnsupportedKey(_FALSE_OR_NONE, "log-probabilities are computed in f32 already"),
    "use_dora": UnsupportedKey(_FALSE_OR_NONE, "use lora; experts do not support DoRA"),
    "pissa_init": UnsupportedKey(_FALSE_OR_NONE, "it would change the frozen weights"),
    "pissa_iter": UnsupportedKey((None, 16), "leave it out"),
    "pissa_convert": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "additional_target": UnsupportedKey((None, "", ()), "only adapters are trained"),
    "create_new_adapter": UnsupportedKey(_FALSE_OR_NONE, "leave adapter_name_or_path out to start a new adapter"),
    "adapter_folder": UnsupportedKey((None,), "give the whole path in adapter_name_or_path"),
    "loraplus_lr_embedding": UnsupportedKey((None, 1e-6), "embeddings are not trained"),
    "use_galore": UnsupportedKey(_FALSE_OR_NONE, "leave it out; adapters are small"),
    "use_apollo": UnsupportedKey(_FALSE_OR_NONE, "leave it out; adapters are small"),
    "use_badam": UnsupportedKey(_FALSE_OR_NONE, "leave it out; adapters are small"),
    "use_adam_mini": UnsupportedKey(_FALSE_OR_NONE, "choose one by `optim`"),
    "use_muon": UnsupportedKey(_FALSE_OR_NONE, "choose one by `optim`"),
    "use_mca": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "use_llama_pro": UnsupportedKey(_FALSE_OR_NONE, "use finetuning_type: lora"),
    "use_swanlab": UnsupportedKey(_FALSE_OR_NONE, "use report_to: swanlab"),
    "use_dft_loss": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "use_asft_loss": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "use_eaft_loss": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "freeze_vision_tower": UnsupportedKey((True, None), "only the language model's adapters are trained"),
    "freeze_multi_modal_projector": UnsupportedKey((True, None), "only the language model's adapters are trained"),
    "freeze_language_model": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "compute_accuracy": UnsupportedKey(_FALSE_OR_NONE, "TRL logs mean_token_accuracy anyway"),
    "predict_with_generate": UnsupportedKey(_FALSE_OR_NONE, "evaluate the adapter after training"),
    "do_predict": UnsupportedKey(_FALSE_OR_NONE, "evaluate the adapter after training"),
    "streaming": UnsupportedKey(_FALSE_OR_NONE, "leave it out; files are read at once"),
    "buffer_size": UnsupportedKey((None, 16384), "leave it out"),
    "tokenized_path": UnsupportedKey((None,), "leave it out; tokenising takes little time"),
    "media_dir": UnsupportedKey((None,), "only text is trained"),
    "tool_format": UnsupportedKey((None,), "leave `template` out: the tokenizer's own template knows its tools"),
    "ref_model": UnsupportedKey((None,), "the reference is the base with the adapter off"),
    "ref_model_adapters": UnsupportedKey((None,), "the reference is the base with the adapter off"),
    "ref_model_quantization_bit": UnsupportedKey((None,), "the reference is the base with the adapter off"),
    "reward_model": UnsupportedKey((None,), "stage is sft or dpo"),
    "pref_bco_weight": UnsupportedKey((0, 0.0, None), "leave it out"),
    "ld_alpha": UnsupportedKey((None,), "leave it out"),
    "kt_max_deferred_experts_per_token": UnsupportedKey(
        (0, None), "it approximates results; training computes all experts"
    ),
    "kt_w8a8": UnsupportedKey(_FALSE_OR_NONE, "it approximates results; training uses full precision"),
    "kt_lora_expert_num": UnsupportedKey((None, 0), "no experts are added; name experts in lora_target"),
    "kt_lora_expert_intermediate_size": UnsupportedKey((None, 0), "no experts are added; name experts in lora_target"),
    "deepspeed": UnsupportedKey((None, ""), "experts are in host memory already; fsdp: true shards the rest"),
    "torch_compile": UnsupportedKey(_FALSE_OR_NONE, "leave it out"),
    "use_liger_kernel": UnsupportedKey(_FALSE_OR_NONE, "leave it out; TRL computes the loss in chunks already"),
    "auto_find_batch_size": UnsupportedKey(_FALSE_OR_NONE, "leave it out; kt_tokens_per_batch: auto takes what fits"),
    "push_to_hub": UnsupportedKey(_FALSE_OR_NONE, "`hf upload` the output directory when the run has ended"),
}

# LLaMA-Factory derives these from other keys and does not let the user set them either.
DERIVED_KEYS = (
    "kt_lora_rank",
    "kt_lora_alpha",
    "kt_lora_dropout",
    "kt_train_mode",
    "kt_full_weight_grad",
    "kt_activation_policy",
)

# Old name -> new name; the value is unchanged.
RENAMED_KEYS: dict[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "cpu_infer": "kt_num_threads",
    "kt_expert_checkpoint_path": "kt_weight_path",
}
