"""Fields of LLaMA-Factory's arguments that its releases lack: keys of older releases, which the published recipes still
have, and the `kt_config` mapping, `hf_kt_config` and `update_kt_config` that it expects of its fork of transformers.

Its two dataclasses are replaced by subclasses of the same name, so that its parser knows the keys in YAML files and on
the command line. A key means what it means to `kt train` (`train/keys.py`, `train/settings.py`); one that is given
without `use_kt: true` is refused. The mapping belongs to the training arguments since 0.9.6; in 0.9.5, whose inference
has no training arguments, it is a field of the model arguments.
"""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.version import Version

from ktransformers.ground.errors import InputError
from ktransformers.train.adapter_form import stored_as_peft
from ktransformers.train.llamafactory.configuration import configure_kt
from ktransformers.train.llamafactory.versions import llamafactory_version

MAPPING_IN_TRAINING_ARGUMENTS = Version("0.9.6.dev0")
KT_ENGINE = "ktransformers"  # of `infer_backend`, in releases up to 0.9.4


@dataclass(frozen=True)
class AddedField:
    name: str
    type: Any
    help: str
    default: Any = None


MODEL_FIELDS = (
    AddedField("kt_optimize_rule", str | None, "Placement rules, or a name that says how many GPUs."),
    AddedField("cpu_infer", int | None, "Threads for the experts; kt_num_threads of kt_config."),
    AddedField("chunk_size", int | None, "No effect: calls of any size are divided by the kernels."),
    AddedField("mode", str | None, "No effect."),
    AddedField("kt_maxlen", int | None, "No effect: max_new_tokens bounds an answer."),
    AddedField("kt_use_cuda_graph", bool | None, "No effect."),
    AddedField("kt_mode", str | None, "No effect."),
    AddedField("kt_force_think", bool | None, "No effect: enable_thinking asks for it."),
    AddedField("kt_cpu_activation", Literal["retain", "recompute"] | None, "Keep the experts' results or not."),
    AddedField("kt_non_expert_weight_path", str | None, "No effect: read from the model's directory."),
    AddedField(
        "kt_adapter_format",
        Literal["peft", "kt"],
        "Form of the adapter in output_dir: PEFT's, or kt-kernel's with fused_expert_lora.safetensors.",
        "peft",
    ),
)
MAPPING = AddedField("kt_config", dict | None, "Settings of the experts, as in the kt_config of `kt train`.")


def _subclass(stock: type, added: tuple[AddedField, ...], members: dict[str, Any]) -> type:
    """A dataclass of the same name with the fields that `stock` lacks, or has with another type."""
    specifications = [
        (item.name, item.type, field(default=item.default, metadata={"help": item.help})) for item in added
    ]
    extended = dataclasses.make_dataclass(stock.__name__, specifications, bases=(stock,), namespace=members)
    extended.__module__, extended.__qualname__, extended.__doc__ = stock.__module__, stock.__qualname__, stock.__doc__
    return extended


def extend_model_arguments(module: Any) -> None:
    """In `llamafactory.hparams.model_args`."""
    stock = module.ModelArguments
    present = {item.name for item in dataclasses.fields(stock)}
    mapping_here = Version(llamafactory_version()) < MAPPING_IN_TRAINING_ARGUMENTS
    added = [item for item in (*MODEL_FIELDS, *([MAPPING] if mapping_here else [])) if item.name not in present]
    engines = tuple(str(engine.value) for engine in module.EngineName)
    backend = AddedField(
        "infer_backend", Literal[(*engines, KT_ENGINE)], "Backend engine used at inference.", engines[0]
    )

    def post_init(self: Any) -> None:
        if self.infer_backend == KT_ENGINE:
            self.infer_backend = engines[0]  # the engine that runs models of transformers
            _require_use_kt(self, "infer_backend", KT_ENGINE)
        elif self.use_kt and self.infer_backend != engines[0]:
            remedy = "or serve the file with `kt serve X.yaml --engine sglang`"
            raise InputError("infer_backend", str(self.infer_backend), f"{engines[0]} with use_kt: true", remedy)
        for item in added:
            value = getattr(self, item.name)
            if value != item.default:
                _require_use_kt(self, item.name, value)
        if mapping_here:
            self.kt_config = _read_mapping(self.kt_config)
        stock.__post_init__(self)
        if self.use_kt and self.adapter_name_or_path:
            self.adapter_name_or_path = [stored_as_peft(path) for path in self.adapter_name_or_path]

    module.ModelArguments = _subclass(stock, (backend, *added), {"__post_init__": post_init})


def _require_use_kt(arguments: Any, name: str, value: Any) -> None:
    if not arguments.use_kt:
        raise InputError(name, value, "`use_kt: true` with it", f"or leave {name} out")


def _read_mapping(value: Any) -> dict[str, Any] | None:
    """`kt_config` as it was given: a mapping, or one in JSON on the command line."""
    if value is None or isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InputError("kt_config", repr(value), "a mapping of kt_ keys")
    return parsed


def extend_training_arguments(module: Any) -> None:
    """In `llamafactory.hparams.training_args`."""
    stock = module.TrainingArguments
    mapping_here = Version(llamafactory_version()) >= MAPPING_IN_TRAINING_ARGUMENTS

    def post_init(self: Any) -> None:
        if mapping_here:
            self.kt_config = _read_mapping(self.kt_config)
        stock.__post_init__(self)
        self._kt_config_values = dict(getattr(self, "kt_config", None) or {})

    def hf_kt_config(self: Any) -> Any:
        return types.SimpleNamespace(_kt_config=self._kt_config_values)

    def update_kt_config(self: Any, values: dict[str, Any], adapter_name_or_path: str | None = None) -> None:
        self._kt_config_values.update(values)
        configure_kt(self._kt_config_values)

    members = {"__post_init__": post_init, "hf_kt_config": property(hf_kt_config), "update_kt_config": update_kt_config}
    module.TrainingArguments = _subclass(stock, (MAPPING,) if mapping_here else (), members)
