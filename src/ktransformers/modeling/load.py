"""`open_model`: a stock transformers model by its `ModelSpec`, with its experts in stores instead of parameters;
`load_model` is the same for programs, by keyword arguments.

Stock `from_pretrained` loads everything but the experts: it chooses the class, renames tensors, casts dtypes, ties
weights and computes buffers. `modeling/quantizer.py` removes the experts from it. If the other weights are quantised
too, or the checkpoint is not safetensors, `from_pretrained` gets a dictionary of lazy tensors, each dequantised to bf16
when transformers indexes it. A missing tensor, which stock transformers initialises randomly with a warning, is an
error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ktransformers import _core
from ktransformers.checkpoint.matrix import SPELLED
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.sources import PlainTensor, Source, open_source
from ktransformers.experts.partition import ExpertShard
from ktransformers.experts.recoded_layer import ExpertFormats
from ktransformers.experts.scaled_input_experts import adapt_experts
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import AS_RELEASED, NUMBERS_SHARE, rest_word
from ktransformers.ground.out_of_memory import free_bytes
from ktransformers.modeling import load
from ktransformers.modeling.prepare import config_file, open_expert_source, read_checkpoint_facts
from ktransformers.modeling.pretrained import naming_config, read_generation_config, read_pretrained_config
from ktransformers.modeling.quantizer import KTConfig, is_host_only
from ktransformers.modeling.same_model import check_same_model
from ktransformers.modeling.spec import ModelSpec, OnLoaded, Progress
from ktransformers.quantized.weight import (
    DTYPES,
    check_on_device,
    keep_embedding_on_host,
    keep_quantized_linears,
    load_quantized,
    quantize_linears,
    rest_format,
)


def load_model(
    path: str | Path,
    *,
    experts: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    precision: str = "bf16",
    progress: Progress | None = None,
    pages: str = "lazy",
    verify: bool | None = None,
    widen: bool = True,
    rest: str = "bf16",
    shard: ExpertShard | None = None,
    formats: ExpertFormats | None = None,
    on_loaded: OnLoaded | None = None,
    later_gpus: Sequence[str] = (),
) -> PreTrainedModel:
    """The model in `path`, ready to run: experts in host memory, other weights in `dtype` on `device` (None: the CPU).

    `path` is a model's directory or a GGUF file. `experts` names another source of the experts: a GGUF file, a packed
    directory, the output of kt-kernel's converter, another release of the same model. `precision` is that of the
    experts: "bf16", or "f32" and "f64", which compute with the unrounded values of the files. `progress(done, layers)`
    is called after each expert layer. For a packed directory `pages` says when its pages are read ("lazy", "prefault"
    or "lock"). Its experts are compared with their checksums when they are first read; with `verify` every file is
    hashed before that, and with `verify=False` nothing is compared. On a CPU without bf16 products other weights stay
    in bf16 and are widened when they are multiplied (`quantized/dense_layers.py`), unless `widen` is False: for a model
    that is moved to a GPU afterwards. `rest` says how dense (non-expert) linear layers are stored: "bf16", as
    dense; "keep", as quantized in the files; or a format to quantize them to
    (`quantized/weight.py`). Codes are packed in host memory and then moved to `device`; on a GPU the model must be
    bf16, and the table of the input embedding stays in host memory (`quantized/host_rows.py`), unless the head shares
    it. `shard`: one rank's part of the experts, if several ranks divide them (`experts/partition.py`); the others'
    bytes are neither read nor packed, and `connect` (`parallel/exchange.py`) must be called before the model computes.
    `formats` are those that experts are encoded in on the way, one for all or by the name of their module; None: as
    they are in the files. `on_loaded` is called with the model before `rest` is applied, and names the linear layers
    that `rest` leaves as they then are. `later_gpus`: the caller moves the layers to these GPUs afterwards
    (`place/device_map.py`), for which formats are chosen as for one."""
    spec = ModelSpec(
        Path(path),
        experts=experts,
        dtype=dtype,
        device="cpu" if device is None else device,
        rest=rest,
        formats=formats,
        precision=precision,
        isa=isa,
        pool=pool,
        pages=pages,
        verify=verify,
        widen=widen,
        shard=shard,
        later_gpus=later_gpus,
        on_loaded=on_loaded,
        progress=progress,
    )
    return open_model(spec)


def load_dense(spec: ModelSpec) -> PreTrainedModel:
    """A model without experts, by stock transformers."""
    read_pretrained_config(spec.path)  # raises if it is broken, and names it
    model: Any = AutoModelForCausalLM.from_pretrained(spec.path, dtype=spec.dtype)
    decided = () if spec.on_loaded is None else spec.on_loaded(model)
    if spec.rest not in AS_RELEASED:
        quantize_linears(model, spec.rest, left=decided)
    loaded: PreTrainedModel = model.to(spec.device)
    check_on_device(loaded)
    return loaded


def open_model(spec: ModelSpec, config: PreTrainedConfig | None = None, device_map: Any = None) -> PreTrainedModel:
    """The model of a spec, ready to run. A program that has changed the configuration, or has a device map of its own,
    passes them."""
    # Words are checked and files opened before anything is built.
    rest, path = rest_word(spec.rest), spec.path
    if rest not in AS_RELEASED:
        rest_format(rest)
    config = load_config(path) if config is None else config
    read_generation_config(path if path.is_dir() else path.parent)  # a broken one: from_pretrained would use defaults
    quantizer = quantizer_of(spec)
    source = open_files(path, quantizer, spec.experts)
    if spec.experts is not None:
        check_same_model(source, quantizer.weights or open_source(Path(spec.experts)))
    if device_map is None and str(spec.device) != "cpu":
        device_map = {"": torch.device(spec.device)}

    # Quantized weights are packed in host memory and moved to the GPU at the end.
    device = packed_device(device_map, spec.dtype, rest, source)
    if spec.later_gpus:
        rest = rest_on_gpus(rest, source, spec.dtype, spec.later_gpus)
    on_gpu = device is not None or (bool(spec.later_gpus) and rest != "bf16")
    if on_gpu:
        device_map, quantizer.widen = None, False

    # transformers loads all but the experts, which are loaded by the quantizer.
    dtype = spec.dtype
    if source.quantised:
        if spec.experts is None and is_packed(path):
            quantizer.packed_directory = path
        quantizer.weights = quantizer.weights or source
        if dtype == "auto":  # from_pretrained would read it from a tensor of the files
            dtype = getattr(config, "dtype", None) or torch.bfloat16
    arguments = {"dtype": dtype, "device_map": device_map, "config": config, "output_loading_info": True}
    if source.quantised:
        keeps = rest == "keep" and spec.on_loaded is None and dtype in DTYPES and is_host_only(device_map)
        model, info = _from_tensors(path, source, quantizer, arguments, keeps)
    else:
        auto: Any = AutoModelForCausalLM if _is_causal(config) else AutoModelForImageTextToText
        model, info = auto.from_pretrained(path, quantization_config=quantizer, **arguments)
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(missing[0], f"{len(missing)} tensors missing in {path}", "every tensor of the model")
    loaded: PreTrainedModel = model

    # Operators of rules get dense weights; the others are quantized after them.
    decided = () if spec.on_loaded is None else spec.on_loaded(loaded)
    if rest == "keep" and spec.on_loaded is not None:
        keep_quantized_linears(loaded, source.rest(), spec.pool, left=decided)
    elif rest not in AS_RELEASED:
        quantize_linears(loaded, rest, spec.pool, left=decided)
    if on_gpu:
        keep_embedding_on_host(loaded, pin=torch.cuda.is_available())
    if device is not None:
        torch.nn.Module.to(loaded, device)
        check_on_device(loaded)
    return loaded


def quantizer_of(spec: ModelSpec) -> KTConfig:
    """What the experts of a spec are loaded by."""
    return KTConfig(
        isa=spec.isa,
        pool=spec.pool,
        progress=spec.progress,
        precision=spec.precision,
        pages=spec.pages,
        verify=spec.verify,
        widen=spec.widen and not spec.later_gpus,
        shard=spec.shard,
        formats=spec.formats,
    )


def packed_device(device_map: Any, dtype: torch.dtype | str, rest: str, source: Source) -> torch.device | None:
    """The GPU to which packed weights are moved. None if the model is loaded where it stays. With "keep"
    numbers are preferred while they take less than NUMBERS_SHARE of the free memory."""
    if rest == "bf16" or (rest == "keep" and not source.quantised) or is_host_only(device_map):
        return None
    devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else {str(device_map)}
    if len(devices) > 1 or torch.device(*devices).type != "cuda" or dtype not in ("auto", torch.bfloat16):
        if rest != "keep":
            given = f"{rest} with {dtype} on {', '.join(sorted(devices))}"
            raise InputError("rest", given, "one device, a GPU with bfloat16 or the CPU", "pass rest='bf16'")
        return None
    device = torch.device(*devices)
    if rest == "keep" and _prefers_numbers(source, [device]):
        return None
    return device


def rest_on_gpus(rest: str, source: Source, dtype: torch.dtype | str, gpus: Sequence[str]) -> str:
    """What becomes of `rest` where layers go to these GPUs: "bf16" where "keep" has no quantized weights or dense
    weights are preferred."""
    codes_fit = dtype in ("auto", torch.bfloat16)
    if rest not in AS_RELEASED and not codes_fit:
        given = f"{rest} with {dtype} on {', '.join(gpus)}"
        raise InputError("rest", given, "bfloat16 on GPUs", "pass rest='bf16'")
    if rest != "keep":
        return rest
    devices = [torch.device(gpu) for gpu in gpus]
    return "keep" if source.quantised and codes_fit and not _prefers_numbers(source, devices) else "bf16"


def _prefers_numbers(source: Source, devices: Sequence[torch.device]) -> bool:
    """Whether all numbers in bf16 take less than NUMBERS_SHARE of the free memory of these GPUs."""
    numbers = 2 * sum(torch.Size(tensor.shape).numel() for tensor in source.rest())
    return numbers < NUMBERS_SHARE * sum(free_bytes(device) for device in devices)


def open_files(path: Path, quantizer: KTConfig, experts: str | Path | None) -> Source:
    """The source of the model's weights, whose headers are read; `quantizer` gets that of the experts."""
    facts = read_checkpoint_facts(path)
    source = open_source(path, facts.rest)  # reports a broken download before anything is built
    experts_path = None if experts is None else Path(experts)
    packed = experts_path is not None and is_packed(experts_path)
    quantizer.source, quantizer.weights = facts.rest, open_expert_source(facts, None if packed else experts_path)
    quantizer.packed_directory = experts_path if packed else None
    return source


def load_config(path: Path) -> PreTrainedConfig:
    """The model's configuration as stock transformers reads it, without quantisation."""
    file = config_file(path)
    if file is None:
        embedded = open_source(path).config()
        if embedded is None:
            raise InputError(
                str(path), "experts alone", "a model", "pass them as `experts` together with the model's directory"
            )
        return _embedded_config(path, embedded)
    read_checkpoint_facts(path)
    config = read_pretrained_config(file.parent)
    for section in (config, config.get_text_config(decoder=True)):
        if getattr(section, "quantization_config", None) is not None:
            del section.quantization_config
    return config


def _embedded_config(path: Path, fields: dict[str, Any]) -> PreTrainedConfig:
    """Of weights that carry their configuration."""
    try:
        config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # transformers checks its configurations by many types of exceptions
        reason = " ".join(str(error).split())[:300]
        expected = "a configuration that transformers accepts"
        raise InputError(str(path), f"{type(error).__name__}: {reason}", expected) from error
    return config


def _is_causal(config: PreTrainedConfig) -> bool:
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


@dataclass(frozen=True)
class LazyTensor:
    """A tensor with the interface of a safetensors slice, dequantised when transformers indexes it; with `keeps` its
    weights are packed instead."""

    tensor: PlainTensor
    keeps: bool = False
    pool: _core.Pool | None = None
    verify: bool = True

    def get_dtype(self) -> str:
        return SPELLED[self.tensor.dtype]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, _: Any) -> Tensor:
        coded = load_quantized(self.tensor, self.pool, verify=self.verify) if self.keeps else None
        return self.tensor.read() if coded is None else coded


def _from_tensors(
    path: Path, source: Source, quantizer: KTConfig, options: dict[str, Any], keeps: bool
) -> tuple[Any, dict[str, Any]]:
    """`from_pretrained` with a state dict. It has no directory then, so generation_config.json is read here."""
    config = options["config"]
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING if _is_causal(config) else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    verify = quantizer.verify is not False
    tensors = {tensor.name: LazyTensor(tensor, keeps, quantizer.pool, verify) for tensor in source.rest()}
    model, info = classes[type(config)].from_pretrained(
        None, state_dict=tensors, quantization_config=quantizer, **options
    )
    directory = path if path.is_dir() else path.parent
    generation = read_generation_config(directory)
    if generation is not None:
        model.generation_config = generation
    model.name_or_path = model.config._name_or_path = str(path)
    return model, info


def model_from_config(directory: Path) -> PreTrainedModel:
    """With tensors of the default device; the class is the one that `load_model` loads."""
    config = load.load_config(directory)  # raises for models that cannot be opened
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with naming_config(directory):
        model: PreTrainedModel = auto.from_config(config)
    return model


def meta_model(directory: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model = model_from_config(directory)
    adapt_experts(model)
    return model
