"""Expert fine-tuning under kt-kernel's names (0.6.1 to 0.7.2): `KTConfig`, wrapping of a stock model, expert LoRA,
adapter directories, gradient checkpointing. docs/kt_kernel_sft.md says what each function does here.

Names are imported when they are first used. A name of kt-kernel that has no counterpart raises
`KTAMXNotAvailableError`, whose message says what to use instead.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kt_kernel.sft.runtime import (
    KTAMXConfigError,
    KTAMXError,
    KTAMXModelNotSupportedError,
    KTAMXNotAvailableError,
    KTArtifactError,
)

if TYPE_CHECKING:
    from kt_kernel.sft.config import KTActivationPolicy, KTConfig

_MODULES = {
    "amx": "AMXSFTMoEWrapper",
    "arch": "MOEArchConfig detect_fused_experts get_moe_arch_config get_moe_module",
    "artifacts": "KTAdapterManifest is_kt_routed_expert_base_parameter is_kt_routed_expert_parameter_name "
    "is_kt_supported_moe_model load_kt_adapter_artifacts load_kt_moe_from_adapter save_kt_adapter_artifacts "
    "save_kt_moe_to_adapter",
    "autograd": "KTMoEFunction",
    "base": "BaseSFTMoEWrapper",
    "weights": "BlockFP8ExpertWeights INT8ExpertWeights RAWINT4ExpertWeights extract_moe_weights "
    "load_block_fp8_experts_from_checkpoint_files load_experts_from_checkpoint_files load_experts_from_kt_weight_path "
    "load_rawint4_experts_from_checkpoint_files validate_persistent_int8_weights",
    "config": "KTActivationPolicy KTConfig configure_omp_threads",
    "layer": "KTMoELayerWrapper get_activation_checkpoint_context_fn set_activation_policy",
    "wrapper": "build_kt_device_map build_kt_device_map_simplified get_expert_device get_kt_loading_kwargs "
    "load_kt_model move_non_experts_to_gpu wrap_moe_layers_with_kt_wrapper",
    "lora": "KTAdaptationResult adapt_peft_lora get_kt_expert_placeholders get_kt_fused_lora_exclude_modules "
    "get_kt_lora_named_params get_kt_lora_params get_kt_named_trainable_params get_kt_rank_local_parameter_names "
    "get_kt_trainable_params kt_adapt_peft_lora sync_kt_lora_gradients update_kt_lora_pointers",
    "runtime": "get_fp8_runtime get_int8_runtime get_mxfp4_runtime get_rawint4_checkpoint_contract get_rawint4_runtime",
}
_MODULE_OF = {name: f"kt_kernel.sft.{module}" for module, names in _MODULES.items() for name in names.split()}

_FROM_PRETRAINED = "stock from_pretrained needs no hook: use ktransformers.nn.load_model, or `kt model prepare`"
_DEVICE_MAP = "packed experts stay in host memory whatever moves the model: use a stock device_map, or model.to()"
_GPU_EXPERTS = "no experts are added to a model: train LoRA on its own (kt_adapt_peft_lora)"
_PROFILE = "use torch.profiler, or KT_LOG=info"
# kt-kernel's name -> what to use instead.
_INSTEAD = {
    "KTRoutedExpertsWrapper": "wrap_moe_layers_with_kt_wrapper keeps the model's own modules",
    "LoRAExpertMLP": _GPU_EXPERTS,
    "LoRAExperts": _GPU_EXPERTS,
    "save_lora_experts_to_adapter": _GPU_EXPERTS,
    "load_lora_experts_from_adapter": _GPU_EXPERTS,
    "resolve_kt_pretrained_artifacts": _FROM_PRETRAINED,
    "validate_kt_pretrained_load": _FROM_PRETRAINED,
    "validate_kt_prequantized_loading_info": _FROM_PRETRAINED,
    "should_disable_kt_source_quantizer": _FROM_PRETRAINED,
    "write_kt_non_expert_cache_manifest": "`kt model prepare` writes the other weights in bf16",
    "claim_kt_routed_expert_subtrees": _DEVICE_MAP,
    "project_kt_routed_experts_out_of_device_map": _DEVICE_MAP,
    "prepare_kt_non_expert_device_map": _DEVICE_MAP,
    "hide_kt_routed_experts_from_dispatch": _DEVICE_MAP,
    "collect_kt_sft_profile": _PROFILE,
    "format_kt_sft_profile": _PROFILE,
    "reset_kt_sft_profile": _PROFILE,
    "patch_vlm_conv3d": "no torch release that this library accepts needs the patch: leave the call out",
    "is_vlm_conv3d_compatible": "no torch release that this library accepts needs the patch: leave the call out",
    "export_dsv4_sglang_adapter": "`kt convert --to sglang` writes adapters of every family",
}

__all__ = [
    "KTAMXConfigError",
    "KTAMXError",
    "KTAMXModelNotSupportedError",
    "KTAMXNotAvailableError",
    "KTActivationPolicy",
    "KTArtifactError",
    "KTConfig",
]
__all__ += sorted(_MODULE_OF.keys() - set(__all__))


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _INSTEAD:
        raise KTAMXNotAvailableError(
            f"kt_kernel.sft.{name}", "a name of kt-kernel", "one that exists here", _INSTEAD[name]
        )
    raise AttributeError(f"module 'kt_kernel.sft' has no attribute {name!r}; docs/kt_kernel_sft.md lists its names")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
