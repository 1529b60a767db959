"""kt_manifest.json: what was trained on what, so that whoever uses the adapter can check that all of it arrived.

The form is that of `adapters.manifest`, so that whatever reads the adapter checks every tensor against it. Besides
shape, dtype, norm and sha256 each tensor says whether it got a gradient; the base by a hash of its config and of the
headers, sizes and a few pages of its shards (hundreds of gigabytes are not read for it); the experts by their formats
and, where they did not come from the base, by their own path; template, data, seed, versions, ISA.
"""

from __future__ import annotations

import hashlib
import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from ktransformers import system
from ktransformers.adapters.manifest import MANIFEST_FILE, MANIFEST_FORMAT, MANIFEST_VERSION
from ktransformers.adapters.write import record_tensor
from ktransformers.errors import KTError
from ktransformers.train.callbacks import GradientCheck
from ktransformers.train.settings import TrainSettings

HASHED_PAGES = 8  # of a shard that its hash reads
PACKAGES = ("ktransformers", "torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers")


def base_hash(directory: Path) -> str:
    """Of config.json, and of every shard's name, size, header and some pages: two tunings of one model differ there."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for shard in sorted(directory.glob("*.safetensors")):
        size = shard.stat().st_size
        digest.update(f"{shard.name} {size}".encode())
        with shard.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, 2**28)))
            for part in range(1, HASHED_PAGES + 1):
                stream.seek(part * size // (HASHED_PAGES + 1))
                digest.update(stream.read(4096))
    return f"sha256:{digest.hexdigest()}"


def experts_source(settings: TrainSettings, directory: Path) -> str | None:
    """Where the experts came from, if not from the base."""
    given = settings.experts.kt_weight_path
    return None if given is None or Path(given).resolve() == directory.resolve() else str(Path(given).absolute())


def expert_formats(model: nn.Module) -> str:
    """What the experts are stored in; layers and matrices may differ."""
    found: set[str] = set()
    for module in model.modules():
        store = getattr(module, "kt_store", None)
        found |= set(store.formats.values()) if store is not None else set()
    return ", ".join(sorted(found))


def trained_tensors(model: nn.Module, witness: GradientCheck) -> dict[str, dict[str, Any]]:
    """Name in the adapter's file -> what training knows of it."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module, _, part = name.partition(".lora_")
            trace = witness.traces[module]
            seen = trace.b_seen if part.startswith("B") else trace.a_seen
            found[name.replace(".default.", ".")] = {"shape": list(parameter.shape), "gradient_seen": seen}
    return found


def add_saved_tensors(manifest: dict[str, Any], file: Path) -> None:
    """Dtype, norm and sha256 of each tensor as it was saved. What was trained must be what is in the file."""
    from safetensors import safe_open

    trained = manifest["tensors"]
    with safe_open(file, framework="pt") as saved:
        names = set(saved.keys())
        if names != set(trained):
            wrong = sorted(names ^ set(trained))
            raise KTError(f"{file}: {wrong[0]} was trained and not saved, or the reverse ({len(wrong)} tensors)")
        for name, known in trained.items():
            one = record_tensor(name, file.name, saved.get_tensor(name))
            if list(one.shape) != known["shape"]:
                raise KTError(f"{file}: {name} was saved as {list(one.shape)}, trained as {known['shape']}")
            known |= {"file": one.file, "dtype": one.dtype, "norm": one.norm, "sha256": one.sha256}


def check_saved_tensors(manifest: dict[str, Any], model: nn.Module) -> None:
    """The numbers in the file are those of the model, bit for bit."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spelled = name.replace(".default.", ".")
            known = manifest["tensors"][spelled]
            now = record_tensor(spelled, known["file"], parameter.detach().cpu().contiguous())
            if now.sha256 != known["sha256"]:
                raise KTError(f"{spelled}: saved with norm {known['norm']:.6g}, trained with {now.norm:.6g}")


def check_gradients(witness: GradientCheck, steps: int) -> None:
    """A targeted tensor without a gradient is an error: the adapter would say more than it learned."""
    dead = witness.dead()
    if dead and steps:
        shown = ", ".join(name.removeprefix("base_model.model.") for name in dead[:8])
        more = f" and {len(dead) - 8} more" if len(dead) > 8 else ""
        raise KTError(
            f"{len(dead)} of {len(witness.traces)} adapted modules never got a gradient: {shown}{more}; "
            "leave them out of lora_target, or report it: nothing in the model depends on them"
        )


def make_manifest(
    model: nn.Module, settings: TrainSettings, witness: GradientCheck, directory: Path, facts: dict[str, Any]
) -> dict[str, Any]:
    """`facts` are what the run knows: rows, steps, the template's hash."""
    from ktransformers import _core

    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "base": {"path": settings.model.model_name_or_path, "hash": base_hash(directory)},
        "experts": {
            "path": experts_source(settings, directory),
            "format": expert_formats(model),
            "precision": settings.experts.precision,
            "isa": _core.isa(),
        },
        "lora_dropout": settings.lora.lora_dropout,
        "seed": int(settings.trainer.get("seed", 42)),
        "kt_tokens_per_batch": settings.experts.tokens_at_once,
        "stage": settings.data.stage,
        "dataset": list(settings.data.dataset),
        **facts,
        "versions": {name: system.version_of(name) for name in PACKAGES} | {"python": platform.python_version()},
        "tensors": trained_tensors(model, witness),
        "experts_without_gradient": {
            name.removeprefix("base_model.model."): experts for name, experts in witness.unvisited().items()
        },
    }


def text_hash(text: str | None) -> str | None:
    return None if text is None else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_manifest(folder: Path) -> dict[str, Any]:
    words: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text())
    return words
