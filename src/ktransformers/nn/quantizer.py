"""How stock `from_pretrained` is told to leave the experts to us: as a quantisation method named "kt".

transformers asks an out-of-tree quantizer twice. Before weights are loaded the model is a skeleton on the meta device:
the experts are found, checked against the checkpoint's headers, and their parameters removed, so that transformers
reads everything else and never the experts. Afterwards they go from the files into stores, a layer at a time. Nothing
is quantised: the name is that of the door. With a quantizer transformers no longer compares shapes, so that is done
here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktransformers import _core
from ktransformers.checkpoint import ExpertTensors, Shards, check, find_experts, locate, read
from ktransformers.errors import InputError
from ktransformers.log import logger
from ktransformers.nn.contract import IMPLEMENTATION, Contract, expert_modules, read_contract
from ktransformers.nn.distributed import keep_from_ddp
from ktransformers.nn.experts import new_store, pack_module, pack_piece, select, settle, strip
from ktransformers.nn.prepare import refuse_quantised

Progress = Callable[[int, int], None]  # layers done, layers in all

log = logger(__name__)


@register_quantization_config(IMPLEMENTATION)
class KTConfig(QuantizationConfigMixin):
    """Pass it as `quantization_config`. Of what it holds `isa`, `precision` and `source` are written to files.

    `source` is the quantisation that the files themselves have, as `prepare` records it.
    """

    def __init__(
        self,
        isa: str | None = None,
        pool: _core.Pool | None = None,
        progress: Progress | None = None,
        source: dict[str, Any] | None = None,
        quant_method: str = IMPLEMENTATION,
        precision: str = "bf16",
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # stock: one of its own names
        self.isa = isa
        self.precision = precision
        self.source = source
        self.pool = pool
        self.progress = progress

    def to_dict(self) -> dict[str, Any]:
        found = {"quant_method": self.quant_method, "isa": self.isa, "source": self.source}
        if self.precision != "bf16":
            found["precision"] = self.precision
        return {key: value for key, value in found.items() if value is not None}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> KTConfig:
        return self  # a pool of threads has no copy; nothing in here changes


@dataclass(frozen=True)
class Layer:
    """One layer of experts on its way from the files into a store."""

    name: str
    module: nn.Module
    contract: Contract
    tensors: ExpertTensors
    dtypes: dict[str, torch.dtype]  # of the parameters that were there


@register_quantizer(IMPLEMENTATION)
class KTQuantizer(HfQuantizer):
    requires_calibration = False

    def __init__(self, quantization_config: KTConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._config = quantization_config
        self._layers: list[Layer] = []
        self._shapes: dict[str, torch.Size] = {}
        self._shards: Shards | None = None
        self._inside = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Asked before anything is built."""
        refuse_quantised("quantization_config", self._config.source)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise InputError("checkpoint", "no files", "a safetensors checkpoint", "pass a directory or a model id")
        self._shards = Shards(checkpoint_files)
        found = find_experts(self._shards.names)
        modules = expert_modules(model)
        if not modules:
            raise _no_experts(model)
        for name, module in modules.items():
            contract = read_contract(name, module)
            tensors = locate(found, name)
            check(self._shards, tensors, contract.shape)
            self._layers.append(Layer(name, module, contract, tensors, strip(module, contract)))
            module._is_hf_initialized = True  # type: ignore[assignment]
        names = self._shards.names
        self._inside = not hasattr(model, "language_model") and any(
            name.startswith("language_model.") for name in names
        )
        if self._inside:
            _ignore_unexpected(model, r"^(vision_tower|mm_projector)\.")
        _ignore_unexpected(model, r"\.experts\.")
        _ignore_unexpected(model, r"\.block_sparse_moe\.(input|output)_linear")
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._shards.release()

    def get_weight_conversions(self) -> list[Any]:
        """A text model from the files of the vision model around it: their names have one word more."""
        found = list(super().get_weight_conversions())  # type: ignore[no-untyped-call]
        if self._inside:
            found.append(WeightRenaming(source_patterns=r"^language_model\.", target_patterns=""))
        return found

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tensor.shape != expected:
                raise InputError(name, f"shape {list(tensor.shape)}", f"{list(expected)}, as config.json says")
        config, shards = self._config, self._shards
        assert shards is not None
        for done, layer in enumerate(self._layers, 1):
            store = new_store(layer.contract, pool=config.pool, isa=config.isa, precision=config.precision)
            for piece in read(shards, layer.tensors, layer.contract.shape):
                pack_piece(store, layer.contract, piece)
            shards.release()
            settle(layer.module, layer.contract, store, layer.dtypes)
            log.info("%s: %d experts, %d bytes packed", layer.name, store.num_experts, store.packed_bytes)
            if config.progress is not None:
                config.progress(done, len(self._layers))
        self._layers, self._shapes, self._shards = [], {}, None
        select(model)
        keep_from_ddp(model)
        return model

    def is_serializable(self) -> bool:
        """`save_pretrained` would write a checkpoint without experts; transformers refuses it."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Adapters are: gradients pass through the experts, which are frozen themselves."""
        return True


def attach(
    model: PreTrainedModel,
    *,
    free: bool = False,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
) -> None:
    """Pack the experts of a model that was loaded the stock way; `model.set_experts_implementation("kt")` then uses
    them.

    Their parameters are frozen. With `free` they are removed, each layer as soon as it is packed: the model can then
    be computed by "kt" only, and not be saved. `precision` as in `load_model`.
    """
    modules = expert_modules(model)
    if not modules:
        raise _no_experts(model)
    for name, module in modules.items():
        read_contract(name, module)
    for name, module in modules.items():
        pack_module(module, name=name, free=free, pool=pool, isa=isa, precision=precision)
    keep_from_ddp(model)
    if free:
        model.hf_quantizer = KTQuantizer(KTConfig(isa=isa, precision=precision))  # type: ignore[assignment]
        select(model)


def _no_experts(model: PreTrainedModel) -> InputError:
    given = "no expert layers behind transformers' experts interface"
    return InputError(type(model).__name__, given, "at least one", "load it the stock way")


def _ignore_unexpected(model: PreTrainedModel, pattern: str) -> None:
    """Experts that the files have and the model lacks are as they should be. Older versions keep a list here."""
    known = model._keys_to_ignore_on_load_unexpected
    model._keys_to_ignore_on_load_unexpected = (
        known | {pattern} if isinstance(known, set) else [*(known or ()), pattern]
    )
