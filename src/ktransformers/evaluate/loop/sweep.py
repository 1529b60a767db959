"""The runs of a sweep: every combination of the given values, each a loop of its own in a folder of the sweep's.

An axis is a key of `kt train`, or one of SHORT_NAMES. A run is named by its values (`rank8-lr1e-4`): its folder, its
adapter and its model name in requests. Model, tasks, server, base and comparison are shared; the keys that decide those
cannot be swept.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktransformers.evaluate.loop.settings import RESERVED_NAMES, Loop
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import merge_mappings, parse_yaml

SHORT_NAMES = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target": "lora_target",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "warmup": "warmup_ratio",
    "decay": "weight_decay",
}
MAX_NAME_BYTES = 200  # of a run; file systems allow 255 for `train-NAME.log`
SHARED_KEYS = ("model_name_or_path", "model_revision", "output_dir", "kt_weight_path", "kt_config")


def key_of(axis: str) -> str:
    return SHORT_NAMES.get(axis, axis)


def read_axis(word: str) -> tuple[str, list[Any]]:
    """`rank=8,16` as ("rank", [8, 16]). A value in brackets is a list: `target=[q_proj,v_proj],all`."""
    axis, sign, text = word.partition("=")
    axis = axis.strip()
    if not sign or not axis:
        raise InputError("--sweep", repr(word), "NAME=VALUE,VALUE, as in rank=8,16")
    return axis, parse_yaml(f"[{text}]", f"--sweep {axis}", "values with commas between them") or []


def read_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for word in words:
        axis, values = read_axis(word)
        if axis in axes:
            raise InputError("--sweep", f"{axis} twice", "all values of a name after one sign")
        axes[axis] = values
    return axes


def _check_axes(axes: dict[str, list[Any]]) -> None:
    keys = [key_of(axis) for axis in axes]
    for axis, values in axes.items():
        if key_of(axis) in SHARED_KEYS:
            raise InputError("sweep", axis, "a key that model, server and base do not depend on", "they are shared")
        if keys.count(key_of(axis)) > 1:
            raise InputError(
                "sweep", " and ".join(name for name in axes if key_of(name) == key_of(axis)), "one of them"
            )
        texts = [str(value) for value in values]
        if not values or None in values or "" in texts:
            raise InputError(f"sweep.{axis}", values, "at least one value, and none empty")
        if len(set(map(_compared, values))) < len(texts):
            raise InputError(f"sweep.{axis}", ", ".join(texts), "every value once")


def _compared(value: Any) -> str:
    """Equal for two spellings of one number: YAML reads 1e-4 as text and 0.0001 as a number."""
    try:
        return str(value if isinstance(value, (bool, list, dict)) else float(value))
    except ValueError:
        return str(value)


def _label(axis: str, value: Any) -> str:
    text = "_".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.-]+", "_", f"{axis}{text}")


def run_settings(loop: Loop) -> dict[str, dict[str, Any]]:
    """Name of a run -> axis -> value, in the order of the axes; empty without a sweep."""
    if not loop.sweep:
        return {}
    _check_axes(loop.sweep)
    settings: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*loop.sweep.values()):
        chosen = dict(zip(loop.sweep, values, strict=True))
        name = "-".join(_label(axis, value) for axis, value in chosen.items())
        if len(name.encode()) > MAX_NAME_BYTES:
            raise InputError(
                "sweep", name, f"values of at most {MAX_NAME_BYTES} letters together", "they name a folder"
            )
        if name in settings or name in RESERVED_NAMES:
            raise InputError("sweep", f"two runs named {name}", "values whose letters and digits differ")
        settings[name] = chosen
    return settings


def sweep_runs(loop: Loop) -> tuple[Loop, ...]:
    """The runs as loops: their own folder, name and keys of `kt train`."""
    runs = []
    for name, chosen in run_settings(loop).items():
        keys = merge_mappings(loop.train.keys, {key_of(axis): value for axis, value in chosen.items()})
        train = loop.train.model_copy(update={"keys": keys})
        runs.append(loop.model_copy(update={"run": str(Path(loop.run) / name), "name": name, "train": train}))
    return tuple(runs)
