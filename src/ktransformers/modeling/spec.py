"""What a verb is told about a model, resolved once for all of them: the directory of a name (`locate_model`), the words
of dtypes and devices, and `ModelSpec`, by which `open_model` (`modeling/load.py`) loads.

`kt serve`, `kt train`, `kt eval`, `kt prove`, LLaMA-Factory, `kt_kernel.sft` and expert nodes fill a `ModelSpec` from
their own flags, keys or arguments. Rules are of a higher layer: `operators/load.py` adds them to a spec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ktransformers.checkpoint import Shards, find_experts
from ktransformers.checkpoint.gguf_directory import is_gguf_directory, model_directory
from ktransformers.checkpoint.hub import fetch_snapshot
from ktransformers.checkpoint.small_model import resolve_model
from ktransformers.ground import model_registry, system
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import path_exists
from ktransformers.ground.linear_storage import AS_RELEASED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ktransformers import _core
    from ktransformers.experts.partition import ExpertShard
    from ktransformers.experts.recoded_layer import ExpertFormats

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPES |= {"half": torch.float16, "float": torch.float32, "bf16": torch.bfloat16}
OnLoaded = Callable[["PreTrainedModel"], Collection[str]]  # returns names of modules whose weights it has decided
Progress = Callable[[int, int], None]  # layers of experts that are loaded, of how many


@dataclass(frozen=True)
class ModelSpec:
    """A model on this machine and how it is loaded; `load_model` explains each field."""

    path: Path
    experts: str | Path | None = None
    dtype: torch.dtype | str = torch.bfloat16
    device: str | torch.device = "cpu"
    rest: str = "bf16"
    formats: ExpertFormats | None = None
    precision: str = "bf16"
    isa: str | None = None
    pool: _core.Pool | None = None
    pages: str = "lazy"
    verify: bool | None = None
    widen: bool = True
    shard: ExpertShard | None = None
    later_gpus: Sequence[str] = ()
    on_loaded: OnLoaded | None = None
    progress: Progress | None = None

    @property
    def has_experts(self) -> bool:
        """False for a dense model, which stock transformers loads alone."""
        return is_gguf_directory(self.path) or bool(find_experts(Shards.of_directory(self.path).names))


def locate_model(given: str, option: str = "model", **hub: Any) -> Path:
    """The directory of a model given by path (of a directory or a GGUF file), registered or short name, or hub id; a
    hub id is downloaded. `hub`: revision, cache_dir and token of `snapshot_download`."""
    name, path = _resolve(given, option)
    if path is not None:
        return path
    try:
        return fetch_snapshot(name, **hub)
    except Exception as error:  # the hub client raises many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        given = f"{given}, which is no folder here, and {name} cannot be fetched from the hub ({reason})"
        raise InputError(option, given, "a folder, or a hub id that can be fetched") from error


def find_model(given: str, option: str = "model", **hub: Any) -> Path | None:
    """As `locate_model`, without a download; None: it is on the hub alone."""
    name, path = _resolve(given, option)
    try:
        return path or fetch_snapshot(name, local_files_only=True, **hub)
    except Exception:  # the hub client raises many types
        return None


def _resolve(given: str, option: str) -> tuple[str, Path | None]:
    """(a hub id, None) or (the given name, its directory)."""
    name = resolve_model(given)
    path = model_directory(Path(name).expanduser())
    if path_exists(path) and path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(option, f"{given}, a folder without config.json", "a model or a training output")
        return name, path
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        hint = model_registry.name_hint(given)
        raise InputError(option, f"{given}, which does not exist", "a folder, a hub id or a short name", hint)
    return name, None


def parse_dtype(word: str, device: str = "cpu") -> torch.dtype:
    """The dtype of a word; "auto": bf16 if the device has instructions for it, float32 otherwise."""
    if word == "auto":
        return torch.bfloat16 if system.bf16_is_fast(device) else torch.float32
    if word not in DTYPES:
        raise InputError("dtype", word, f"auto or one of {', '.join(DTYPES)}")
    return DTYPES[word]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_for(
    asked: str | None,
    *,
    uses_gpu: bool = True,
    option: str = "--device",
    remedy: str = "--device cpu, or CUDA_VISIBLE_DEVICES with another GPU",
) -> str:
    """The device that `option` asks for; without one a visible GPU, unless the caller has no use for it."""
    if asked is not None:
        system.require_supported(asked, option, remedy)
        return asked
    return "cuda" if uses_gpu and system.has_gpu() else "cpu"


def check_rest(rest: str, dtype: torch.dtype, device: str) -> None:
    """Refuse a format of dense weights that does not exist, or that a model of `dtype` cannot have, before anything is
    loaded."""
    from ktransformers.quantized import weight

    if rest in AS_RELEASED:
        return
    weight.rest_format(rest)
    allowed = weight.DTYPES if device == "cpu" else (torch.bfloat16,)
    if dtype not in allowed:
        given = f"{rest} with dtype {dtype_name(dtype)} on {device}"
        raise InputError("rest", given, f"dtype {' or '.join(map(dtype_name, allowed))}")
