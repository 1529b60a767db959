"""Adapters that are continued or loaded by PEFT and are stored in another form: kt-kernel's two files, or GGUF. This
file imports nothing heavy, because every process of LLaMA-Factory reads it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from ktransformers.ground.log import logger

log = logger(__name__)


def stored_as_peft(path: str) -> str:
    """The directory of an adapter in PEFT's form: the given one, or a temporary conversion of kt-kernel's two files or
    of a GGUF file. PEFT would load kt-kernel's directory without its experts and not say so."""
    from ktransformers.adapters.formats.kt import EXPERT_FILE

    given = Path(path).expanduser()
    return str(_converted(given)) if given.is_file() or (given / EXPERT_FILE).is_file() else path


@functools.cache
def _converted(given: Path) -> Path:
    from ktransformers.adapters import convert

    folder = Path(tempfile.mkdtemp(prefix="kt_adapter_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    converted = convert(given, folder / "peft", "peft")
    log.info("%s: %s adapter, converted for PEFT (%d tensors)", given, converted.source, converted.merged.tensors)
    return folder / "peft"
