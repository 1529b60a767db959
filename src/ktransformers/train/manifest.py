"""kt_manifest.json: what was trained from what, so that a reader of the adapter can verify that it is complete.

The format is that of `adapters.manifest`, so every reader checks each tensor against it. Besides shape, dtype, norm and
SHA-256, each tensor records whether it received a gradient. The base is identified by a hash of its config and of the
headers, sizes and a few pages of its shards (reading hundreds of gigabytes would take too long); the experts by their
formats, by the format that they were encoded in while they were loaded, if any, and, if they did not come from the
base, by their path. Template, data, seed, versions and ISA are included.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ktransformers.adapters.manifest import MANIFEST_FORMAT, MANIFEST_VERSION
from ktransformers.adapters.write import record_tensor
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.lora_shards import factor_shards
from ktransformers.ground import system
from ktransformers.ground.errors import KTError
from ktransformers.operators.rules import operators_of
from ktransformers.place.backends import encoded_format
from ktransformers.train.arguments import rest_of
from ktransformers.train.callbacks import GradientCheck
from ktransformers.train.settings import TrainSettings

HASHED_PAGES = 8  # of a shard that enter its hash
PACKAGES = ("ktransformers", "torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers")


def base_hash(directory: Path) -> str:
    """Hash of config.json and of every shard's name, size, header and some pages, which differ between two tunings of
    one model."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for shard in sorted([*directory.glob("*.safetensors"), *directory.glob("*.gguf")]):
        size = shard.stat().st_size
        digest.update(f"{shard.name} {size}".encode())
        with shard.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, 2**28)))
            for part in range(1, HASHED_PAGES + 1):
                stream.seek(part * size // (HASHED_PAGES + 1))
                digest.update(stream.read(4096))
    return f"sha256:{digest.hexdigest()}"


def files_hash(path: str | None) -> str | None:
    """Hash of the name, size and some pages of a file, or of the files of a directory; None without one."""
    if path is None:
        return None
    given = Path(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in given.rglob("*") if file.is_file()) if given.is_dir() else [given]:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(given.parent if given.is_file() else given)} {size}".encode())
        with file.open("rb") as stream:
            for part in range(HASHED_PAGES):
                stream.seek(part * size // HASHED_PAGES)
                digest.update(stream.read(4096))
    return f"sha256:{digest.hexdigest()}"


def experts_source(settings: TrainSettings, directory: Path) -> str | None:
    """Path of the experts if they do not come from the base."""
    path = settings.experts.kt_weight_path
    return None if path is None or Path(path).resolve() == directory.resolve() else str(Path(path).absolute())


def expert_formats(model: nn.Module) -> str:
    """Storage formats of the experts; layers and matrices may differ."""
    formats: set[str] = set()
    for module in model.modules():
        kt = packed_experts(module)
        formats |= set(kt.store.formats.values()) if kt is not None and kt.store is not None else set()
    return ", ".join(sorted(formats))


def trained_tensors(model: nn.Module, gradient_check: GradientCheck) -> dict[str, dict[str, Any]]:
    """Name in the adapter's file -> shape and whether a gradient was seen."""
    tensors = {}
    shards = factor_shards(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module, _, part = name.partition(".lora_")
            trace = gradient_check.traces[module]
            gradient_seen = trace.b_seen if part.startswith("B") else trace.a_seen
            shape = list(shards[name].whole_shape(parameter) if name in shards else parameter.shape)
            tensors[name.replace(".default.", ".")] = {"shape": shape, "gradient_seen": gradient_seen}
    return tensors


def add_saved_tensors(manifest: dict[str, Any], file: Path) -> None:
    """Adds dtype, norm and SHA-256 of each tensor as saved; the file must contain exactly the trained tensors."""
    from safetensors import safe_open

    trained = manifest["tensors"]
    with safe_open(file, framework="pt") as saved:
        names = set(saved.keys())
        if names != set(trained):
            wrong = sorted(names ^ set(trained))
            raise KTError(f"{file}: {wrong[0]} was trained and not saved, or the reverse ({len(wrong)} tensors)")
        for name, entry in trained.items():
            record = record_tensor(name, file.name, saved.get_tensor(name))
            if list(record.shape) != entry["shape"]:
                raise KTError(f"{file}: {name} was saved as {list(record.shape)}, trained as {entry['shape']}")
            entry |= {"file": record.file, "dtype": record.dtype, "norm": record.norm, "sha256": record.sha256}


def check_saved_tensors(manifest: dict[str, Any], trained: Mapping[str, Tensor]) -> None:
    """Checks that the file equals the trained parameters bit for bit."""
    for name, parameter in trained.items():
        saved_name = name.replace(".default.", ".")
        entry = manifest["tensors"][saved_name]
        current = record_tensor(saved_name, entry["file"], parameter.detach().cpu().contiguous())
        if current.sha256 != entry["sha256"]:
            raise KTError(f"{saved_name}: saved with norm {entry['norm']:.6g}, trained with {current.norm:.6g}")


def check_gradients(gradient_check: GradientCheck, steps: int) -> None:
    """A targeted module without a gradient is an error, because the adapter would claim more than was trained."""
    dead = gradient_check.dead()
    if dead and steps:
        shown = ", ".join(name.removeprefix("base_model.model.") for name in dead[:8])
        more = f" and {len(dead) - 8} more" if len(dead) > 8 else ""
        raise KTError(
            f"{len(dead)} of {len(gradient_check.traces)} adapted modules never got a gradient: {shown}{more}; "
            "leave them out of lora_target, or report it: nothing in the model depends on them"
        )


def make_manifest(
    model: nn.Module, settings: TrainSettings, gradient_check: GradientCheck, directory: Path, facts: dict[str, Any]
) -> dict[str, Any]:
    """`facts` come from the run: rows, steps, the template's hash."""
    from ktransformers import _core

    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "base": {"path": settings.model.model_name_or_path, "hash": base_hash(directory)},
        "experts": {
            "path": experts_source(settings, directory),
            "format": expert_formats(model),
            "encoded": encoded_format(settings.place, settings.experts.kt_backend),
            "precision": settings.experts.precision,
            "isa": _core.isa(),
        },
        "rest": rest_of(settings),
        "operators": operators_of(settings.place.kt_optimize_rule),
        "lora_dropout": settings.lora.lora_dropout,
        "seed": int(settings.trainer.get("seed", 42)),
        "kt_tokens_per_batch": settings.experts.tokens_per_pass,
        "stage": settings.data.stage,
        "dataset": list(settings.data.dataset),
        **facts,
        "versions": {name: system.version_of(name) for name in PACKAGES} | {"python": platform.python_version()},
        "tensors": trained_tensors(model, gradient_check),
        "experts_without_gradient": {
            name.removeprefix("base_model.model."): experts for name, experts in gradient_check.unvisited().items()
        },
    }


def text_hash(text: str | None) -> str | None:
    return None if text is None else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
