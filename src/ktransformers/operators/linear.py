"""Linear layers by rule: `KLinearBase`, which a linear operator of one's own derives from together with
`BaseInjectedModule`, and `KTransformersLinear`, whose `generate_op` names the format that its weights are stored in.

Both are an `nn.Linear`, so stock PEFT puts LoRA on them, `lora_target` finds them and a server adds the adapters of its
requests. `KTransformersLinear` has the product of `nn.Linear` over a `QuantizedWeight` (`quantized/weight.py`): prefill
and decoding multiply the same numbers, so there is one set of weights, that of `generate_op`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktransformers.ground.errors import InputError, nearest
from ktransformers.operators.base_operator import BaseInjectedModule, Match, Outcome
from ktransformers.operators.loader import Loader
from ktransformers.quantized.weight import MIN_WEIGHTS, keep_quantized_linear, quantize_linear, rest_format

KEEP = "keep"  # as quantized in the files
# Operators of KTransformers -> the format of the weights; None: as loaded.
LINEAR_OPS: dict[str, str | None] = {
    "KLinearTorch": None,
    "KLinearMarlin": "int4:32",
    "QuantizedLinearMarlin": "int4:32",  # its earlier name
    "KLinearFP8": "fp8:128x128",
    "KLinearQ8": "int8",
    "KLinearCPUInfer": KEEP,
}
DEFAULT_OP = "KLinearMarlin"

Weights = nn.Parameter | tuple[nn.Parameter, nn.Parameter]


class KLinearBase(nn.Linear):
    """Of a linear operator: sizes of the original layer, and its weights."""

    gguf_loader: Loader
    key: str
    orig_module: nn.Module

    def __init__(self) -> None:
        """After `BaseInjectedModule.__init__`, which gives this module the weights of the original."""
        weight = self._parameters.get("weight")
        self.has_bias = self._parameters.get("bias") is not None
        self.weight_dtype = None if weight is None else weight.dtype

    def load_weight(self, override_key: str | None = None, device: str | torch.device | None = None) -> Weights:
        """The weight `[out, in]` in the model's dtype, with a bias a pair of both. Those of the loaded layer, or with
        `override_key` those of another layer of the files; after `unload` those of its own layer there."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if override_key is None and weight is None and self.gguf_loader.has_tensor(f"{self.key}.weight"):
            override_key = self.key
        if override_key is not None:
            dtype = self.weight_dtype
            weight = _frozen(self.gguf_loader.load_tensor(f"{override_key}.weight", dtype=dtype))
            name = f"{override_key}.bias"
            bias = (
                _frozen(self.gguf_loader.load_tensor(name, dtype=dtype)) if self.gguf_loader.has_tensor(name) else None
            )
        if weight is None:
            raise InputError(self.key, "a layer without a weight", "a linear layer", "match `class: torch.nn.Linear`")
        weight = _frozen(weight if device is None else weight.to(device))
        return weight if bias is None else (weight, _frozen(bias if device is None else bias.to(device)))

    def load(self, w: Weights | None = None, device: str | torch.device | None = None) -> None:
        """Make of the weights what `forward` multiplies with; a class without a `load` of its own multiplies with the
        weights of the original layer."""


def _frozen(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


class KTransformersLinear(BaseInjectedModule, KLinearBase):
    """A linear layer whose weights are stored in the format of `generate_op`."""

    def __init__(
        self,
        key: str,
        gguf_loader: Loader,
        config: PreTrainedConfig,
        orig_module: nn.Module | None = None,
        generate_device: str = "cuda",
        generate_op: str = DEFAULT_OP,
        prefill_device: str | None = None,
        prefill_op: str | None = None,
    ) -> None:
        super().__init__(key, gguf_loader, config, orig_module, generate_device, prefill_device)
        KLinearBase.__init__(self)
        self.generate_op, self.prefill_op = generate_op, prefill_op

    forward = nn.Linear.forward

    @classmethod
    def check(cls, match: Match) -> Outcome:
        if not isinstance(match.module, nn.Linear):
            given = f"{match.name}, a {type(match.module).__name__}"
            raise InputError(match.where, given, "a linear layer", "add `class: torch.nn.Linear` to match")
        for word in ("generate_op", "prefill_op"):
            known_op(match, word, LINEAR_OPS)
        wanted = LINEAR_OPS[match.arguments.get("generate_op") or DEFAULT_OP]
        reason = None if wanted is None else _why_as_loaded(match, wanted)
        if reason is not None:
            return Outcome(note=reason)
        return Outcome(format=wanted)

    def load(self, w: Any = None, device: str | torch.device | None = None) -> None:
        super().load()
        wanted = LINEAR_OPS[self.generate_op]
        released = None if wanted is None else self.gguf_loader.codes(f"{self.key}.weight")
        if wanted == KEEP:
            keep_quantized_linear(self.key, self, released)
        elif wanted is not None:
            quantize_linear(self.key, self, wanted, released)

    @classmethod
    def inject(cls, match: Match, loader: Loader, config: PreTrainedConfig) -> nn.Module:
        if match.outcome.format is not None:
            return super().inject(match, loader, config)
        arguments = dict(match.arguments) | {"generate_op": "KLinearTorch"}  # as loaded
        arguments.pop("generate_device", None)
        return cls(match.name, loader, config, match.module, generate_device=match.device, **arguments)


class KTransformersLinearLora(KTransformersLinear):
    """The class that KTransformers trains; stock PEFT adds LoRA to a `KTransformersLinear` itself."""


def known_op(match: Match, word: str, known: dict[str, Any]) -> None:
    given = match.arguments.get(word)
    if given is not None and given not in known:
        raise InputError(f"{match.where}: {word}", given, nearest(given, known, "one of " + ", ".join(known)))


def _why_as_loaded(match: Match, wanted: str) -> str | None:
    """Why a layer keeps the numbers that it was loaded with; None: it does not."""
    weight = match.module.weight
    assert isinstance(weight, Tensor)
    if match.name not in match.model.quantizable_names:
        return "as loaded: a router or an indexer"
    if weight.numel() < MIN_WEIGHTS:
        return f"as loaded: fewer than {MIN_WEIGHTS} weights"
    if wanted != KEEP and weight.shape[1] % rest_format(wanted).multiple:
        return f"as loaded: {weight.shape[1]} columns do not fill groups of {wanted}"
    return None
