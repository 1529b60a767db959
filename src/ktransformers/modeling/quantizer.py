"""The quantisation method "kt" of transformers: `from_pretrained` loads everything but the experts, this the experts.

transformers calls an out-of-tree quantizer twice. Before weights are loaded the model is on the meta device: the expert
layers are found, checked against the checkpoint's headers, and their parameters removed, so that transformers never
reads the experts. After loading they go from the files into stores, layer by layer, in the formats of the files, or in
one that was asked for (`experts/recoded_layer.py`). The quantizer interface is used because it is the hook that
`from_pretrained` offers. With a quantizer transformers does not compare shapes, so this module does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktransformers import _core
from ktransformers.checkpoint.quantisation import accept
from ktransformers.checkpoint.sources import LayerSource, Source, open_source
from ktransformers.experts.contract import IMPLEMENTATION, Contract, expert_modules, read_contract
from ktransformers.experts.interface import (
    attach_store,
    pack_layer,
    pack_module,
    remove_parameters,
    select_implementation,
)
from ktransformers.experts.packed import PackedExperts, open_packed
from ktransformers.experts.partition import ExpertShard, LayerShard
from ktransformers.experts.recoded_layer import (
    ExpertFormats,
    check_formats,
    check_packed,
    format_of_layer,
    recoded_layer,
)
from ktransformers.experts.scaled_input_experts import adapt_experts
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.ground.progress import report
from ktransformers.modeling.spec import Progress
from ktransformers.parallel.distributed import exclude_from_ddp
from ktransformers.quantized.dense_layers import attach_widened, expect_stored_weights
from ktransformers.quantized.weight import dequantize_unsuitable

LAYER_NAME = re.compile(r".*?\.layers\.\d+(?=\.)")

log = logger(__name__)


@register_quantization_config(IMPLEMENTATION)
@dataclass(eq=False)
class KTConfig(QuantizationConfigMixin):
    """Passed as `quantization_config`; `to_dict` gives the fields that are written to config.json.

    `source` is the quantisation of the files themselves, and `experts` the path of the experts if they are not with the
    other weights, both as `prepare` records them; `weights` is either of them, opened. `packed` is the section that `kt
    quant` writes for a packed directory, to whose files `pages` (lazy, prefault, lock) and `verify` (checksums, as for
    `load_model`) apply. `widen`: dense (non-expert) weights may stay in bf16 on a CPU that widens them
    (`quantized/dense_layers.py`); not if the model is moved to a GPU later. `shard`: the experts that this rank loads;
    None, all of them. `formats`: what experts are encoded in while they are loaded, all of them or by module; None: the
    formats of the files."""

    quant_method: str = IMPLEMENTATION  # type: ignore[assignment]  # stock: one of its own names
    isa: str | None = None
    pool: _core.Pool | None = None
    progress: Progress | None = None
    source: dict[str, Any] | None = None
    precision: str = "bf16"
    experts: str | None = None
    weights: Source | None = None
    packed: dict[str, Any] | None = None
    pages: str = "lazy"
    verify: bool | None = None
    widen: bool = True
    shard: ExpertShard | None = None
    formats: ExpertFormats | None = None
    packed_directory: Path | None = None  # of packed experts that are not with the other weights

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("quant_method", "isa", "source", "experts", "packed")}
        if self.precision != "bf16":
            fields["precision"] = self.precision
        return {name: value for name, value in fields.items() if value is not None}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> KTConfig:
        return self  # a thread pool cannot be copied, and the fields do not change


@dataclass(frozen=True)
class PendingLayer:
    """An expert layer between the two calls of transformers: parameters removed, experts not yet in a store."""

    name: str
    module: nn.Module
    contract: Contract
    experts: LayerSource | None  # None: packed
    dtypes: dict[str, torch.dtype]  # of the removed parameters


@register_quantizer(IMPLEMENTATION)
class KTQuantizer(HfQuantizer):
    requires_calibration = False

    def __init__(self, quantization_config: KTConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._config = quantization_config
        self._layers: list[PendingLayer] = []
        self._shapes: dict[str, torch.Size] = {}
        self._source: Source | None = None
        self._packed: PackedExperts | None = None
        self._widened: dict[str, torch.dtype] = {}  # weights that stay in bf16, with the dtype of the model
        self._text_only = False  # a text model is loaded from the files of the vision model around it

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Called before the model is built; refuses a quantisation that cannot be read."""
        check_formats(self._config.formats)
        if self._config.packed is None:
            accept("quantization_config", self._config.source)

    def open_layers(self, model: PreTrainedModel, files: list[str]) -> None:
        """Find the expert layers of a model on the meta device whose other weights are not loaded."""
        self._process_model_before_weight_loading(model, files)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        source = self._open(checkpoint_files)
        adapt_experts(model)
        modules = expert_modules(model)
        if not modules:
            raise _no_experts(model)
        _check_one_group(model, list(modules))
        for number, (name, module) in enumerate(modules.items()):
            contract = read_contract(name, module)
            if self._config.shard is not None:
                _check_shard(self._config.shard, len(modules), number, name, contract)
            wanted = format_of_layer(self._config.formats, name)
            if self._packed is not None:
                check_packed(name, self._packed.check(name, contract).formats, wanted)
            experts = None if self._packed else source.layer(name, contract.shape, contract.interleaved)
            experts = None if experts is None else recoded_layer(name, experts, contract, wanted)
            if experts is not None:
                check_computable(name, experts.formats, self._config)
            self._layers.append(PendingLayer(name, module, contract, experts, remove_parameters(module, contract)))
            # Some families initialise experts in the block around them, which would miss the removed parameters.
            for initialised in (module, model.get_submodule(name.rpartition(".")[0])):
                initialised._is_hf_initialized = True  # type: ignore[assignment]
        rest = source.rest()
        if self._config.widen and is_host_only(kwargs.get("device_map")):
            self._widened = expect_stored_weights(model, rest)
        names = [tensor.name for tensor in rest]
        self._text_only = not hasattr(model, "language_model") and any(
            name.startswith("language_model.") for name in names
        )
        if self._text_only:
            _ignore_unexpected(model, r"^(vision_tower|mm_projector)\.")
        _ignore_unexpected(model, r"\.experts\.")
        _ignore_unexpected(model, r"\.block_sparse_moe\.(input|output)_linear")
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        source.release()

    def _open(self, files: list[str] | None) -> Source:
        """Open the source of the experts: the loaded files, or the path that the configuration names."""
        config = self._config
        if config.packed_directory is not None:
            self._packed = PackedExperts(config.packed_directory, pages=config.pages, verify=config.verify)
        if config.weights is not None:
            self._source = config.weights
        elif config.experts is not None:
            self._source = open_source(config.experts, config.source)
        elif files:
            self._packed = self._packed or open_packed(files, pages=config.pages, verify=config.verify)
            if self._packed is not None and self._packed.has_quantized_linears:
                given = "quantized dense linear layers, which from_pretrained does not read"
                raise InputError(str(self._packed.directory), given, "numbers", "use ktransformers.nn.load_model")
            self._source = open_source(Path(files[0]).parent, config.source, files=files)
        else:
            raise InputError("checkpoint", "no files", "a safetensors checkpoint", "pass a directory or a model id")
        return self._source

    def get_weight_conversions(self) -> list[Any]:
        """Strips the prefix `language_model.` if a text model is loaded from a vision model's files."""
        conversions = list(super().get_weight_conversions())  # type: ignore[no-untyped-call]
        if self._text_only:
            conversions.append(WeightRenaming(source_patterns=r"^language_model\.", target_patterns=""))
        return conversions

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tensor.shape != expected:
                raise InputError(name, f"shape {list(tensor.shape)}", f"{list(expected)}, as config.json says")
        for layer, shard, store in self.load_stores():
            attach_store(layer.module, layer.contract, store, layer.dtypes, shard)
        dequantize_unsuitable(model)
        count = attach_widened(model, self._widened)
        log.info("%d weights in bf16 are multiplied in float32", count)
        self._shapes = {}
        select_implementation(model)
        exclude_from_ddp(model)
        return model

    def load_stores(self) -> Iterator[tuple[PendingLayer, LayerShard | None, ExpertStore | None]]:
        """Every layer with its experts, or with this rank's; then the files are released."""
        config, source = self._config, self._source
        assert source is not None
        for done, layer in enumerate(self._layers, 1):
            shard = None if config.shard is None else config.shard.layer(done - 1)
            store = self._load_store(layer, None if shard is None else shard.experts)
            source.release()
            count, size = (0, 0) if store is None else (store.num_experts, store.packed_bytes)
            log.info("%s: %d experts, %d bytes packed", layer.name, count, size)
            yield layer, shard, store
            if config.progress is not None:
                config.progress(done, len(self._layers))
            else:
                report("Packing experts", done, len(self._layers))
        self._layers, self._source, config.weights = [], None, None

    def _load_store(self, layer: PendingLayer, experts: Sequence[int] | None) -> ExpertStore | None:
        """The layer's experts, or these of them; None if these are none."""
        if experts is not None and not experts:
            return None
        config = self._config
        options: Any = {"pool": config.pool, "isa": config.isa, "precision": config.precision}
        if layer.experts is not None:
            return pack_layer(layer.contract, layer.experts, **options, only=experts)
        assert self._packed is not None
        return self._packed.store(layer.name, layer.contract, **options, order=experts)

    def is_serializable(self) -> bool:
        """False: `save_pretrained` would write a checkpoint without experts, and transformers refuses it."""
        return False

    @property
    def is_trainable(self) -> bool:
        """True for adapters: gradients pass through the frozen experts."""
        return True


def _check_shard(shard: ExpertShard, layers: int, number: int, name: str, contract: Contract) -> None:
    owners = shard.partition.owners
    if len(owners) != layers:
        raise InputError("shard", f"a partition of {len(owners)} layers", f"one of {layers} layers of experts")
    if len(owners[number]) != contract.shape.num_experts:
        given = f"a partition of {len(owners[number])} experts"
        raise InputError(name, given, f"one of {contract.shape.num_experts} experts")


def is_host_only(device_map: Any) -> bool:
    """Whether `device_map`, as transformers takes it, leaves every weight on the CPU."""
    if device_map is None:
        return True
    devices = device_map.values() if isinstance(device_map, dict) else [device_map]
    return all(str(device) == "cpu" for device in devices)


def check_computable(name: str, formats: dict[str, str], config: KTConfig) -> None:
    """Refuse, before anything is loaded, a format without a kernel: a one-expert store of these formats is created."""
    if set(formats.values()) == {"bf16"}:
        return
    try:
        gated = "gate" in formats
        options: Any = {"pool": config.pool, "isa": config.isa, "precision": config.precision, "gated": gated}
        ExpertStore(1, 256, 256, formats=formats, **options)
    except ValueError as error:
        given = ", ".join(f"{role} in {format}" for role, format in formats.items())
        remedy = "`kt quant` writes the model in a format that can be"
        raise InputError(name, given, f"what can be computed ({error})", remedy) from error


def attach(
    model: PreTrainedModel,
    *,
    free: bool = False,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
) -> None:
    """Pack the experts of a model that stock transformers has loaded; `model.set_experts_implementation("kt")` then
    uses them.

    Their parameters are frozen. With `free` they are removed, each layer's as soon as it is packed: the model then runs
    with "kt" only and cannot be saved. `precision` as in `load_model`.
    """
    adapt_experts(model)
    modules = expert_modules(model)
    if not modules:
        raise _no_experts(model)
    for name, module in modules.items():
        read_contract(name, module)
    for name, module in modules.items():
        pack_module(module, name=name, free=free, pool=pool, isa=isa, precision=precision)
    exclude_from_ddp(model)
    if free:
        model.hf_quantizer = KTQuantizer(KTConfig(isa=isa, precision=precision))  # type: ignore[assignment]
        select_implementation(model)


def hide_quantisation(model: PreTrainedModel, saving: str) -> None:
    """Remove the marks of a quantised model, for programs that refuse one although packed experts train and run like
    any others. `save_pretrained`, which transformers then would no longer refuse, raises an error that names `saving`
    as the way to write the model."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise InputError("save_pretrained", "a model with packed experts", "its adapter, or the stock model", saving)

    model.save_pretrained = refuse  # type: ignore[method-assign]


def _check_one_group(model: PreTrainedModel, names: list[str]) -> None:
    """Refuse layers with several groups of experts: checkpoints number them in one list, and sizes differ."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = LAYER_NAME.match(name)
        groups.setdefault(name if layer is None else layer[0], []).append(name)
    for prefix, found in groups.items():
        if len(found) > 1:
            listed = ", ".join(name.removeprefix(f"{prefix}.") for name in found)
            given = f"{len(found)} groups of experts in one layer ({listed})"
            raise InputError(f"{type(model).__name__}: {prefix}", given, "one", "load it the stock way")


def _no_experts(model: PreTrainedModel) -> InputError:
    given = "no expert layers behind transformers' experts interface"
    return InputError(type(model).__name__, given, "at least one", "load it the stock way")


def _ignore_unexpected(model: PreTrainedModel, pattern: str) -> None:
    """Do not warn about tensors that the files have and the model lacks. Older versions of transformers keep a list."""
    patterns = model._keys_to_ignore_on_load_unexpected
    model._keys_to_ignore_on_load_unexpected = (
        patterns | {pattern} if isinstance(patterns, set) else [*(patterns or ()), pattern]
    )
