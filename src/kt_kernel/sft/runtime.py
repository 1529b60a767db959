"""What kt-kernel's programs ask before they train on a weight format: the kernel that computes it and the layout that
it reads. Every CPU variant here computes every format, so the answer is always there; it names the variant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kt_kernel.kt_kernel_ext import LAYOUTS
from ktransformers import _core
from ktransformers.ground.errors import InputError, KTError


class KTAMXError(KTError):
    """Base class of errors of expert training."""


class KTAMXNotAvailableError(KTAMXError, InputError, RuntimeError):
    """Something of kt-kernel that does not exist here; the message names what to use instead."""


class KTAMXModelNotSupportedError(KTAMXError, InputError):
    """A model whose experts cannot be computed."""


class KTAMXConfigError(KTAMXError, InputError):
    """A field of `KTConfig`, or a combination of fields, that cannot be used."""


class KTActivationPolicyError(KTAMXConfigError, NotImplementedError):
    """The one combination of activation policies that means nothing; kt-kernel raises a NotImplementedError."""


class KTArtifactError(InputError, RuntimeError):
    """Files of an adapter that are missing, damaged, or of another model."""


MXFP4_LAYOUT = "mxfp4-e2m1-e8m0-g32"


@dataclass(frozen=True)
class KTRuntime:
    expert_weight_format: str
    kernel: str  # the CPU variant
    weight_layout: str  # kt-kernel's name of the layout in the files


@dataclass(frozen=True)
class RAWINT4CheckpointContract:
    """How compressed-tensors stores 4-bit experts that can be read as they are."""

    num_bits: int
    group_size: int
    symmetric: bool
    weight_layout: str = LAYOUTS["__rawint4_weight_layout__"]


def _runtime(weight_format: str) -> KTRuntime:
    layout = LAYOUTS.get(f"__{weight_format}_weight_layout__", MXFP4_LAYOUT)
    return KTRuntime(weight_format, _core.isa(), layout)


get_int8_runtime, get_fp8_runtime = partial(_runtime, "int8"), partial(_runtime, "fp8")
get_rawint4_runtime, get_mxfp4_runtime = partial(_runtime, "rawint4"), partial(_runtime, "mxfp4")


def get_rawint4_checkpoint_contract(model_config: Any) -> RAWINT4CheckpointContract:
    """Of a model's configuration, an object or the contents of config.json; raises unless its experts are 4-bit
    integers in groups of 32 with symmetric scales."""
    from ktransformers.modeling.prepare import split_quantisation

    fields = model_config if isinstance(model_config, dict) else model_config.to_dict()
    _, quantisation = split_quantisation(fields)
    quantisation = quantisation or {}
    groups = quantisation.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    given = {key: weights.get(key) for key in ("num_bits", "type", "symmetric", "group_size")}
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    if quantisation.get("quant_method") != "compressed-tensors" or given != expected:
        found = f"{quantisation.get('quant_method')} with {given}"
        remedy = "load_weights reads every format of docs/formats.md"
        raise KTAMXModelNotSupportedError("quantization_config", found, f"compressed-tensors with {expected}", remedy)
    return RAWINT4CheckpointContract(4, 32, True)
