"""Resolves the MODEL argument: a model, the output directory of a training run, or a YAML file of training or
inference.

A training output is an adapter and names its base; a training YAML names both; an inference YAML (`infer_backend:
ktransformers` or `sglang`) has adapter_name_or_path. In each case the base is served with the adapter, under the name
of its directory. If training read experts from elsewhere (`kt_weight_path`), the same experts are served, because
others would give other results. A model may be a directory, a name of `kt model list`, a hub id, or a short name of `kt
model known`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ktransformers.adapters.manifest import read_manifest
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import find_example, path_exists, read_json_object, read_yaml_mapping
from ktransformers.ground.linear_storage import AS_RELEASED, KEEP
from ktransformers.modeling.spec import locate_model
from ktransformers.serve.flags import Launch
from ktransformers.serve.yaml_keys import check_keys, flat_keys


@dataclass(frozen=True)
class Target:
    model: Path
    adapters: tuple[tuple[str, str], ...] = ()
    name: str = ""  # of the base in requests
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the YAML file, if MODEL is one
    experts: Path | None = None  # that training used, if not the model's own
    precision: str = "bf16"  # in which training computed the experts
    expert_format: str | None = None  # that training encoded the experts in while they were loaded
    rest: str | None = None  # how training stored the dense linear layers; None: not known
    operators: list[Any] | None = None  # of the rules of training (operators/rules.py); None: not known

    def choose_experts(self, given: Path | None) -> Path | None:
        """The directory of the experts: `given` on the launch line, else that of training; None: the model's own."""
        experts = given or self.experts
        if experts is None or experts.resolve() == self.model.resolve():  # guides for kt-kernel pass the model itself
            return None
        if given is None and not experts.exists():
            raise InputError(
                "experts of the training", f"{experts}, which does not exist", "that directory", "pass --kt-weight-path"
            )
        return experts

    def choose_expert_format(self, given: str | None, experts: Path | None) -> str | None:
        """What experts are encoded in on load: as `given`, else as in training unless `experts` come from elsewhere;
        None: they keep the format of their files."""
        return given or (self.expert_format if experts is None else None)


def resolve_target(given: str) -> Target:
    path = find_example(Path(given).expanduser())
    if path.suffix in (".yaml", ".yml"):
        return _target_of_yaml(path)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        return _target_of_adapter(path)
    model = locate_model(given)
    return Target(model, name=_base_name(given))


def _base_name(given: str) -> str:
    return given.rstrip("/").rpartition("/")[2] or "model"


def base_of_adapter(path: Path) -> str:
    """The base that the adapter's configuration names."""
    base = read_json_object(path / "adapter_config.json", "PEFT's, a JSON object").get("base_model_name_or_path")
    if not base:
        raise InputError(str(path), "an adapter that names no base", "base_model_name_or_path in adapter_config.json")
    return str(base)


def _target_of_adapter(path: Path) -> Target:
    base = base_of_adapter(path)
    document = read_manifest(path) or {}
    manifest_experts = document.get("experts") or {}
    experts, precision = manifest_experts.get("path"), str(manifest_experts.get("precision") or "bf16")
    adapters = ((_adapter_name(path.name), str(path)),)
    experts_path = Path(experts) if experts else None
    encoded = manifest_experts.get("encoded")
    return Target(
        locate_model(base),
        adapters,
        _base_name(base),
        experts=experts_path,
        precision=precision,
        expert_format=None if encoded is None else str(encoded),
        rest=document.get("rest"),
        operators=document.get("operators"),
    )


def _target_of_yaml(path: Path) -> Target:
    if not path.is_file():
        raise InputError("model", f"{path}, which does not exist", "a YAML file of a training or of inference")
    keys = read_yaml_mapping(path)
    base = keys.get("model_name_or_path")
    if base:
        check_keys(path, keys)
    if not base:
        raise InputError(str(path), "no model_name_or_path", "a YAML file of a training or of inference")
    backend = keys.get("infer_backend", "ktransformers")
    if backend not in ("ktransformers", "huggingface", "sglang"):
        raise InputError(f"{path}: infer_backend", backend, "ktransformers, or sglang for `--engine sglang`")
    listed = keys.get("adapter_name_or_path")
    directories = [part.strip() for part in listed.split(",")] if isinstance(listed, str) else list(listed or [])
    output = keys.get("output_dir")
    if not directories and output and (Path(output) / "adapter_config.json").is_file():
        directories = [str(output)]
    if not directories and keys.get("do_train"):
        raise InputError(f"{path}: output_dir", output, "a finished training", f"run `kt train {path}` first")
    adapters = tuple((_adapter_name(Path(directory).name), directory) for directory in directories)
    experts = flat_keys(keys).get("kt_weight_path")
    return Target(locate_model(base), adapters, _base_name(base), keys, Path(experts) if experts else None)


def _adapter_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name) or "adapter"


def check_adapters(launch: Launch, target: Target) -> None:
    """Adapters are read when the model is loaded; one that is not there is an error before."""
    for name, directory in (*target.adapters, *launch.lora_paths):
        if not path_exists(directory):
            given = f"{name}={directory}, which does not exist"
            raise InputError("lora-paths", given, "the directory or the GGUF file of an adapter")


def as_trained(launch: Launch, target: Target) -> Launch:
    """A training output is served on the weights that it was trained on, unless the line names others."""
    if launch.rest != KEEP or target.rest is None:
        return launch
    return replace(launch, rest=target.rest)


def differences_from_training(launch: Launch, target: Target, rules: str | None) -> list[str]:
    """Lines on what changes numbers and is not as in the training of the adapter that is served."""
    from ktransformers.operators.rules import operators_of

    lines = []
    trained_codes = target.rest if target.rest is not None and target.rest not in AS_RELEASED else None
    if target.rest is not None and (launch.rest if launch.rest not in AS_RELEASED else None) != trained_codes:
        lines.append(f"--rest {launch.rest}: the adapter was trained with `rest: {target.rest}`, on other numbers")
    if target.operators is not None and target.operators != operators_of(rules):
        given = "no rules" if rules is None else f"the rules of {Path(rules).name}"
        lines.append(f"kt_optimize_rule: the adapter was trained with other operators than {given}")
    return lines
