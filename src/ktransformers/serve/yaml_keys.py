"""Keys of a YAML file that `kt serve` and `kt run` open in place of a model: LLaMA-Factory's file for inference, or the
recipe of a training.

Every key of a file for inference has its effect or is refused. In the recipe of a training the keys that belong to
training had their effect there and are passed over. Keys under `kt_config` count as keys of the file. A flag of the
command line overrides the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.adapters.chat_templates import template_text, with_defaults
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.field import options_of
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.ground.options.serving import ServingOptions
from ktransformers.place.backends import format_of_backend, isa_of_backend

if TYPE_CHECKING:
    from ktransformers.serve.flags import Launch

TARGET_KEYS = (
    "model_name_or_path",
    "adapter_name_or_path",
    "output_dir",
    "infer_backend",
    "kt_weight_path",
    "kt_config",
)
TEMPLATE_KEYS = ("template", "default_system", "enable_thinking")
LAUNCH_KEYS = {key: option for option in options_of(ServingOptions).values() for key in option.keys}
SWITCH_KEYS = ("kt_backend", "kt_use_cuda_graph")
PLACEMENT_KEYS = tuple(options_of(PlacementOptions))
# Keys with one meaning here -> the values that ask for it.
FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "use_kt": (True,),
    "stage": ("sft", "dpo", None),
    "do_train": (False, None),
    "finetuning_type": ("lora", None),
    "trust_remote_code": (True, False, None),
    "kt_mode": ("normal", None),
    "mode": ("normal", None),
    "kt_force_think": (False, None),
    "flash_attn": ("auto", "sdpa", None),
    "use_kv_cache": (True, None),
}
REQUEST_KEYS = ("temperature", "top_p", "top_k", "do_sample", "max_new_tokens", "max_length", "repetition_penalty")
KNOWN_KEYS = (*TARGET_KEYS, *TEMPLATE_KEYS, *LAUNCH_KEYS, *SWITCH_KEYS, *PLACEMENT_KEYS, *FIXED_KEYS)


def flat_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    nested = keys.get("kt_config")
    return {**keys, **(nested if isinstance(nested, Mapping) else {})}


def is_training(keys: Mapping[str, Any]) -> bool:
    return bool(keys.get("do_train") or keys.get("dataset"))


def check_keys(path: Path, keys: Mapping[str, Any]) -> None:
    """Raises InputError for a key of inference that has no effect here, or at a value that has none."""
    for name, value in flat_keys(keys).items():
        if is_training(keys) and (name not in KNOWN_KEYS or name in FIXED_KEYS):
            continue
        if name in FIXED_KEYS and value not in FIXED_KEYS[name]:
            expected = " or ".join(str(known) for known in FIXED_KEYS[name] if known is not None)
            raise InputError(f"{path}: {name}", value, expected, "leave it out")
        if name in REQUEST_KEYS:
            raise InputError(f"{path}: {name}", value, "keys of the server", "requests set it, with OpenAI's names")
        if name not in KNOWN_KEYS:
            matches = difflib.get_close_matches(str(name), KNOWN_KEYS, n=1)
            expected = f"`{matches[0]}`, perhaps" if matches else "a key of inference"
            raise InputError(f"{path}: {name}", value, expected, "docs/serve.md lists the keys")
    if keys.get("template") is not None and not is_training(keys):
        template_text(str(keys["template"]))
    isa_of_backend(flat_keys(keys).get("kt_backend"))
    for name in (name for name, option in LAUNCH_KEYS.items() if option.kind is int):
        value = flat_keys(keys).get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{path}: {name}", repr(value), "a number, 1 or more")


def with_yaml_keys(launch: Launch, keys: Mapping[str, Any]) -> Launch:
    """The launch line with the keys of the file where the line says nothing."""
    flat = flat_keys(keys)
    for name, option in LAUNCH_KEYS.items():
        if flat.get(name) is not None and getattr(launch, option.name) == option.default:
            launch = replace(launch, **{option.name: option.kind(flat[name])})
    if flat.get("trust_remote_code") is True:
        launch = replace(launch, trust_remote_code=True)
    if flat.get("kt_use_cuda_graph") is False:
        launch = replace(launch, disable_cuda_graph=True)
    if flat.get("infer_backend") == "sglang":
        launch = replace(launch, engine="sglang")
    backend = flat.get("kt_backend")
    encoded = launch.expert_format or format_of_backend(backend)
    return replace(launch, isa=launch.isa or isa_of_backend(backend), expert_format=encoded)


def yaml_template(keys: Mapping[str, Any], fallback: str | None) -> str | None:
    """The Jinja template that the file asks for; `fallback` is the model's own. None: the file asks for none."""
    name, system, thinking = (keys.get(key) for key in TEMPLATE_KEYS)
    if name is None and system is None and thinking is None:
        return None
    text = fallback if name is None else template_text(str(name))
    if text is None:
        raise InputError("default_system", system, "a model with a chat template", "name a `template`")
    return with_defaults(text, system, thinking)
