"""kt_proof.safetensors: what the trainer's own model said of a few rows when it was saved, for `kt prove` to compare
with, and the cheap half of that comparison, made before the file is trusted.

Per row: `rows.N.tokens` int64 `[T]`, `rows.N.base` and `rows.N.adapter` float32 `[T - 1]`, and `marks.N.MODULE`
`[T, 4]` with the adapter on. The cheap half fills every trained number with NaN and reads the saved file back, so a
tensor that the file lacks, or that finds no place, cannot hide behind the value that is still in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.comparison import (
    LogprobDifference,
    LogprobsAndNorms,
    adapted_modules,
    difference,
    first_deviating_module,
    measure,
)
from ktransformers.errors import InputError, KTError

PROOF_FILE = "kt_proof.safetensors"
MAX_PROOF_ROWS, TOKENS = 4, 256  # at most that many rows of that many tokens
PROOF_FORMAT = "ktransformers-proof"


@dataclass(frozen=True)
class ProofRecord:
    rows: tuple[tuple[int, ...], ...]
    base: LogprobsAndNorms
    adapter: LogprobsAndNorms
    dtype: str  # of everything but experts and adapter, when it was recorded
    held_out: bool  # the rows were not trained on


def sample_rows(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """A few of them, cut; the last ones, which a run that ends early has seen least often."""
    cut = [list(row[:TOKENS]) for row in rows if len(row) > 1]
    return cut[-MAX_PROOF_ROWS:]


def record(model: Any, rows: Sequence[Sequence[int]], *, held_out: bool) -> ProofRecord:
    """Of PEFT's model as it is now; `rows` are token ids."""
    taken = sample_rows(rows)
    if not taken:
        raise InputError("rows", "none of two tokens or more", "rows to prove the adapter with")
    with model.disable_adapter():
        base = measure(model, taken)
    adapter = measure(model, taken, adapted_modules(model))
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return ProofRecord(tuple(tuple(row) for row in taken), base, adapter, dtype, held_out)


def write_record(path: Path, made: ProofRecord) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for at, row in enumerate(made.rows):
        tensors[f"rows.{at}.tokens"] = torch.tensor(row)
        tensors[f"rows.{at}.base"] = made.base.logprobs[at].contiguous()
        tensors[f"rows.{at}.adapter"] = made.adapter.logprobs[at].contiguous()
        for name, marks in made.adapter.marks.items():
            tensors[f"marks.{at}.{name}"] = marks[at].contiguous()
    modules = "\n".join(made.adapter.marks)  # a safetensors file does not keep the order
    about = {"format": PROOF_FORMAT, "dtype": made.dtype, "held_out": str(int(made.held_out)), "modules": modules}
    save_file(tensors, path, metadata=about)


def read_record(directory: Path) -> ProofRecord | None:
    from safetensors import SafetensorError, safe_open

    file = directory / PROOF_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            about = stored.metadata() or {}
            if about.get("format") != PROOF_FORMAT:
                raise InputError(str(file), f"format {about.get('format')!r}", PROOF_FORMAT, "delete it")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        count = sum(name.endswith(".tokens") for name in tensors)
        places = range(count)
        marks = {name: [tensors[f"marks.{at}.{name}"] for at in places] for name in about["modules"].split("\n")}
        return ProofRecord(
            tuple(tuple(tensors[f"rows.{at}.tokens"].tolist()) for at in places),
            LogprobsAndNorms(tuple(tensors[f"rows.{at}.base"] for at in places)),
            LogprobsAndNorms(tuple(tensors[f"rows.{at}.adapter"] for at in places), marks),
            about["dtype"],
            about["held_out"] == "1",
        )
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(str(file), f"what does not read ({error})", "what `kt train` wrote", "delete it") from error


@dataclass(frozen=True)
class ReloadCheck:
    """What reading the saved adapter back has shown."""

    tensors: int
    rows: int
    tokens: int
    difference: LogprobDifference
    held_out: bool

    def __str__(self) -> str:
        apart = self.difference
        same = "to the bit" if apart.none else f"within {apart.max:.2g}"
        row = "row" if self.rows == 1 else "rows"
        kind = f"held-out {row}" if self.held_out else f"{row} (none held out)"
        return (
            f"reloaded: {self.tensors} tensors trained, saved and read back; {self.tokens} log-probabilities of "
            f"{self.rows} {kind} are the same {same}"
        )


def check_reload(model: Any, folder: Path, made: ProofRecord) -> ReloadCheck:
    """Read `folder`'s adapter into the very model that saved it, all its numbers forgotten first."""
    from peft import load_peft_weights, set_peft_model_state_dict

    trained = {name.replace(".default.", "."): one for name, one in model.named_parameters() if one.requires_grad}
    for parameter in trained.values():
        parameter.data.fill_(torch.nan)
    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    for name, parameter in trained.items():
        if not bool(torch.isfinite(parameter).all()):
            raise KTError(f"{name}: trained, and not read back from {folder}; the adapter was not saved whole")
    after = measure(model, made.rows, list(made.adapter.marks))
    apart = difference(after, made.adapter)
    if not apart.none:
        noise = difference(measure(model, made.rows), after)
        if not apart.within(noise):
            where = first_deviating_module(after.marks, made.adapter.marks, {}) or "the output"
            raise KTError(
                f"{where}: after the saved adapter was read back, log-probabilities differ by {apart.max:.3g}, "
                f"where computing twice makes {noise.max:.3g}; the file is not what was trained"
            )
    return ReloadCheck(len(trained), len(made.rows), after.tokens, apart, made.held_out)
