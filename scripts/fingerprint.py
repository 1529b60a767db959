"""Hashes of what the product computes, by which a refactoring proves that it changed no number.

    python scripts/fingerprint.py --out before.json       # on the old tree
    python scripts/fingerprint.py --against before.json   # on the new one: lists the keys that differ, and exits 1

A document is made on one machine with one set of packages and compared on the same: results of torch, and of the native
variant that is the best one, belong to both. Seeds and thread counts are fixed. Each section runs in a process of its
own, because the CPU variant (`KT_ISA`) and torch's deterministic mode are chosen once for a process: `core` once for
each variant of the build, emulated ones included; `model` loads stock models; `train` is what `kt train` runs; `serve`
decodes base and adapters in one batch; `place` is the placement engine with torch's CPU device in the place of a GPU,
`gpu` and `gpu-graphs` are it on a GPU, with and without deterministic algorithms, which exclude CUDA graphs. These two
run twice each, and keys that differ between the runs are listed as unstable and not compared. A section whose packages
or device are missing is named under `skipped`. The policy `auto` is in none: its split follows measured times.

Sections are in `fingerprint_cpu.py` and `fingerprint_gpu.py`, what they compute with in `fingerprint_inputs.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fingerprint_cpu import core, model, serve, train
from fingerprint_gpu import gpu, gpu_graphs, place
from fingerprint_inputs import THREADS, Keys, Skip, allow_missing_pydantic

# What computes it, and how often it is run; `core` for each variant of the build.
SECTIONS: dict[str, tuple[Callable[[], Keys], int]] = {
    "core": (core, 1),
    "model": (model, 1),
    "train": (train, 1),
    "serve": (serve, 1),
    "place": (place, 1),
    "gpu": (gpu, 2),
    "gpu-graphs": (gpu_graphs, 2),
}
FIXED = {
    "KT_THREADS": str(THREADS),
    "OMP_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def digest(value: Any) -> str:
    """Of a tensor its dtype, shape and bytes, of a list of tensors those of all; of anything else its JSON."""
    import torch

    made = hashlib.sha256()
    many = value if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(one, torch.Tensor) for one in many):
        for one in many:
            plain = one.detach().cpu().contiguous()
            made.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            made.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        made.update(json.dumps(value, sort_keys=True).encode())
    return made.hexdigest()[:24]


def run_section(name: str) -> dict[str, Any]:
    """In this process."""
    import torch

    allow_missing_pydantic()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    hashes: dict[str, str] = {}
    try:
        for key, value in SECTIONS[name][0]():
            hashes[key] = digest(value)
    except (Skip, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("ktransformers"):
            raise
        return {"hashes": hashes, "skipped": str(error)}
    return {"hashes": hashes, "skipped": ""}


def start(name: str, variant: str) -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        environment = os.environ | FIXED | ({"KT_ISA": variant} if variant else {})
        words = [sys.executable, __file__, "--section", name, "--out", file.name]
        subprocess.run(words, env=environment, check=True, stdout=sys.stderr)
        made: dict[str, Any] = json.loads(Path(file.name).read_text())
        return made


def make_document(names: list[str]) -> dict[str, Any]:
    import ktransformers
    from ktransformers import _core

    runnable = [variant["name"] for variant in _core.variants() if variant["native"] or variant["emulated"]]
    if not Path(ktransformers.__file__).is_relative_to(Path(__file__).resolve().parents[1]):
        print(f"these are the numbers of {ktransformers.__file__}, which is another tree", file=sys.stderr)
    versions = {"ktransformers": ktransformers.__version__, "python": platform.python_version(), "isa": _core.isa()}
    document: dict[str, Any] = {"made_by": versions, "skipped": {}, "unstable": [], "hashes": {}}
    for name in names:
        for variant in runnable if name == "core" else [""]:
            begun, full = time.perf_counter(), f"{name}/{variant}" if variant else name
            made = [start(name, variant)]
            if not made[0]["skipped"]:
                made += [start(name, variant) for _ in range(SECTIONS[name][1] - 1)]
            keys = sorted(set().union(*(one["hashes"] for one in made)))
            unstable = {key for key in keys if len({one["hashes"].get(key) for one in made}) > 1}
            document["unstable"] += [f"{full}/{key}" for key in keys if key in unstable]
            document["hashes"] |= {f"{full}/{key}": made[0]["hashes"][key] for key in keys if key not in unstable}
            if made[0]["skipped"]:
                document["skipped"][full] = made[0]["skipped"]
            seconds = time.perf_counter() - begun
            print(f"{full}: {len(keys)} keys, {seconds:.0f} s {made[0]['skipped']}", file=sys.stderr)
    return document


def compare(now: dict[str, Any], before: dict[str, Any], names: list[str]) -> int:
    """Prints the keys that differ or are missing; their number."""
    moving = {*now["unstable"], *before["unstable"]}
    asked = {key: one for key, one in before["hashes"].items() if key.split("/")[0] in names and key not in moving}
    missing = sorted(key for key in asked if key not in now["hashes"])
    differing = sorted(key for key in asked if now["hashes"].get(key, asked[key]) != asked[key])
    for word, keys in (("missing", missing), ("differs", differing)):
        for key in keys:
            print(f"{word}: {key}")
    print(f"{len(asked)} keys compared, {len(differing)} differ, {len(missing)} missing, {len(moving)} unstable")
    return len(missing) + len(differing)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hashes of what the product computes.")
    parser.add_argument("--out", type=Path, help="where the document goes; without, it is printed")
    parser.add_argument("--against", type=Path, help="a document of before: exit 1 where a key differs or is missing")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="these sections alone")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    document = run_section(given.section) if given.section else make_document(given.only)
    text = json.dumps(document, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    elif not given.against:
        print(text)
    if given.against and compare(document, json.loads(given.against.read_text()), given.only):
        sys.exit(1)


if __name__ == "__main__":
    main()
