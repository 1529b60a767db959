"""`kt_optimize_rule`, the older way to say where things are computed: what it means is taken over, nothing is injected.

Where the file exists it is read: backend, devices. Where it does not, its name says the same, as in
`DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml`: fine-tuning, AMX, four GPUs (two where no number stands). Without `amx` the
name means llamafile, that is, any CPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ktransformers.errors import InputError

BACKENDS = {"amxbf16": "amx", "amxint8": "amx", "amxint4": "amx", "llamafile": "any", "auto": "any"}


@dataclass(frozen=True)
class RuleSummary:
    source: str  # "file" or "name"
    backend: str  # "amx" or "any"
    gpus: int  # 0: the rule keeps everything on the CPU
    training: bool


def from_name(path: str) -> RuleSummary:
    name = Path(path).stem.lower()
    several = re.search(r"multi-gpu(?:-(\d+))?", name)
    gpus = int(several[1] or 2) if several else 1
    return RuleSummary("name", "amx" if re.search(r"(^|-)amx(-|$)", name) else "any", gpus, "-sft-" in f"-{name}-")


def from_file(path: Path) -> RuleSummary:
    try:
        entries: Any = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            "kt_optimize_rule", f"{path}, which is no YAML ({error})", "a list of match/replace"
        ) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError("kt_optimize_rule", f"{path}, which holds no list", "a list of match/replace entries")
    backend, devices = "any", set()
    for entry in entries:
        replace = entry.get("replace")
        kwargs = (replace.get("kwargs") if isinstance(replace, dict) else None) or {}
        devices |= {str(value) for key, value in kwargs.items() if key.endswith("device")}
        word = kwargs.get("backend")
        if word is None:
            continue
        if str(word).lower() not in BACKENDS:
            raise InputError("kt_optimize_rule", f"backend {word} in {path}", "one of " + ", ".join(BACKENDS))
        if "int" in str(word).lower():
            raise InputError(
                "kt_optimize_rule", f"backend {word} in {path}", "AMXBF16 or llamafile", "experts train in bf16"
            )
        backend = BACKENDS[str(word).lower()]
    gpus = {device for device in devices if device.startswith("cuda")}
    return RuleSummary("file", backend, len(gpus), True)


def read_rule(path: str) -> tuple[RuleSummary, str]:
    """The rule and the line that says what was taken from it."""
    file = Path(path)
    rule = from_file(file) if file.is_file() else from_name(path)
    where = "its name, as there is no such file" if rule.source == "name" else "the file"
    cpu = "AMX where the CPU has it" if rule.backend == "amx" else "whatever the CPU has"
    gpus = (
        f"layers spread over {rule.gpus} GPUs, or as many of them as are here"
        if rule.gpus > 1
        else "one GPU, where there is one"
    )
    return rule, f"kt_optimize_rule: from {where}: {cpu}; {gpus}"
