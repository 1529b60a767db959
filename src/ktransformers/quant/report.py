"""The quantization report of a conversion: the error of each matrix and, given a text, its effect on the model.

The error of a matrix is the Frobenius norm of the difference over that of the source, over all experts of a layer. With
a text, source and result are evaluated on the same windows: perplexity of both, the divergence KL(source || result) of
their next-token distributions, and how often their top tokens agree. The two models are loaded one after the other, and
the source's log-probabilities are kept in a file, so that peak memory is that of one model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import parse_json, read_json_object, validate, write_json
from ktransformers.ground.files import read_text as read_document
from ktransformers.ground.progress import counted
from ktransformers.ground.system import memory

QUALITY_FILE = "quality.json"
VERSION = 1
WINDOW_TOKENS = 512
MAX_TOKENS = 8192  # of the text
RESERVE_BYTES = 2 << 30  # memory for activations and logits, in addition to the model's weights


@dataclass(frozen=True)
class MatrixQuality:
    source: str  # format
    format: str
    kept: bool  # the same bytes
    error: float


@dataclass(frozen=True)
class LayerQuality:
    module: str
    number: int
    matrices: dict[str, MatrixQuality]


@dataclass(frozen=True)
class LinearQuality:
    name: str  # of the weight
    quality: MatrixQuality


@dataclass(frozen=True)
class Calibration:
    text: str  # the file's name
    tokens: int  # number of predictions
    perplexity: float
    source_perplexity: float
    kl: float  # nats per token
    same_top: float  # share of tokens


@dataclass(frozen=True)
class QuantizationReport:
    conversion: str
    formats: dict[str, str]
    layers: list[LayerQuality]
    calibration: Calibration | None = None
    skipped: str | None = None  # why a requested calibration is missing
    linears: list[LinearQuality] = field(default_factory=list)  # quantized dense linear layers

    def summary(self) -> dict[str, dict[str, Any]]:
        """For each matrix of the experts, and for the rest: formats, mean and largest error, and the layer with the
        largest, or the name of the weight."""
        by_matrix: dict[str, list[tuple[MatrixQuality, int | str]]] = {}
        for role in self.formats:
            by_matrix[role] = [(layer.matrices[role], layer.number) for layer in self.layers if role in layer.matrices]
        by_matrix["rest"] = [(linear.quality, linear.name) for linear in self.linears]
        return {role: _summary_row(rows) for role, rows in by_matrix.items() if rows}

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self), "summary": self.summary()}


def _summary_row(rows: list[tuple[MatrixQuality, int | str]]) -> dict[str, Any]:
    worst, worst_layer = max(rows, key=lambda row: row[0].error)
    return {
        "source": sorted({row.source for row, _ in rows}),
        "format": sorted({row.format for row, _ in rows}),
        "kept": sum(row.kept for row, _ in rows),
        "layers": len(rows),
        "mean": math.fsum(row.error for row, _ in rows) / len(rows),
        "largest": worst.error,
        "layer": worst_layer,
    }


def quality_row(source: str, format: str, kept: bool, moved: float, norm: float) -> dict[str, Any]:
    """The fields of a `MatrixQuality`, from the sums of squares of the difference and of the source."""
    return {"source": source, "format": format, "kept": kept, "error": math.sqrt(moved / norm) if norm else 0.0}


def build_report(
    conversion: str, formats: dict[str, str], details: Mapping[str, Mapping[str, Any]]
) -> QuantizationReport:
    """The quantization report of the layers in the journal; `details` is file -> what the journal records of it."""
    layers = [
        LayerQuality(
            entry["layer"]["module"],
            entry["number"],
            {role: MatrixQuality(**quality) for role, quality in entry["quality"].items()},
        )
        for entry in details.values()
        if "layer" in entry
    ]
    linears = [
        LinearQuality(name, MatrixQuality(**quality))
        for entry in details.values()
        if "linears" in entry
        for name, quality in entry["quality"].items()
    ]
    return QuantizationReport(conversion, formats, sorted(layers, key=lambda layer: layer.number), linears=linears)


def read_report(directory: Path) -> QuantizationReport:
    file = directory / QUALITY_FILE
    return validate(QuantizationReport, read_json_object(file, "the report of a conversion"), str(file))


def write_report(directory: Path, report: QuantizationReport) -> None:
    write_json(directory / QUALITY_FILE, report.to_json())


def read_text(file: Path) -> str:
    """A text file, or JSON lines with `text`, `content` or `prompt`."""
    text = read_document(file, "calib: a text file or JSON lines")
    if file.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        text = "\n\n".join(_line(file, number, line) for number, line in lines)
    if not text.strip():
        raise InputError("calib", f"{file}, which is empty", "text")
    return text


def _line(file: Path, number: int, line: str) -> str:
    entry = parse_json(line, f"{file}, line {number}", "a JSON object")
    for key in ("text", "content", "prompt"):
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            return str(entry[key])
    raise InputError("calib", f"line {number} of {file}", "an object with text, content or prompt")


def split_windows(tokens: Tensor, count: int = MAX_TOKENS) -> list[Tensor]:
    """Windows `[1, up to WINDOW_TOKENS]` of the first `count` tokens; a window of one token has nothing to predict and
    is dropped."""
    windows = [
        tokens[None, first : min(first + WINDOW_TOKENS, count)]
        for first in range(0, min(len(tokens), count), WINDOW_TOKENS)
    ]
    return [window for window in windows if window.shape[1] > 1]


def calibrate(
    source: Path,
    packed: Path,
    text: Path,
    *,
    experts: Path | None = None,
    tokens: int = MAX_TOKENS,
    source_bytes: int = 0,
) -> Calibration:
    """Evaluate both models on the text; InputError if there is not enough memory to load the source."""
    windows = read_windows(packed, text, tokens, source_bytes, "source")
    with tempfile.TemporaryDirectory(prefix=".kt-calib-", dir=packed) as scratch:
        return _compare((source, experts), packed, text.name, windows, Path(scratch))


def read_windows(model: Path, text: Path, tokens: int, bytes_to_load: int, loaded: str) -> list[Tensor]:
    """The windows of a text by the tokenizer of `model`; InputError if the larger of two models, whose weights have
    `bytes_to_load`, does not fit in memory."""
    from ktransformers.modeling.pretrained import read_tokenizer

    free = memory().available
    if bytes_to_load + RESERVE_BYTES > free:
        given = f"{free / 1e9:.1f} GB of free memory"
        raise InputError("calib", given, f"about {(bytes_to_load + RESERVE_BYTES) / 1e9:.1f} GB to load the {loaded}")
    tokenizer = read_tokenizer(model)
    ids: Tensor = tokenizer(read_text(text), return_tensors="pt", add_special_tokens=True).input_ids[0]
    windows = split_windows(ids, tokens)
    if not windows:
        raise InputError("calib", f"{text}, {len(ids)} token", "two or more")
    return windows


def _compare(
    source: tuple[Path, Path | None], packed: Path, name: str, windows: list[Tensor], scratch: Path
) -> Calibration:
    count = sum(window.shape[1] - 1 for window in windows)
    source_nll = 0.0
    model = open_to_compare(*source)
    for number, window in enumerate(counted("Comparing: the source", windows)):
        logprobs = next_logprobs(model, window)
        source_nll += nll(logprobs, window)
        logprobs.numpy().tofile(scratch / f"{number}")
    del model
    packed_nll = divergence = same_top = 0.0
    model = open_to_compare(packed)
    for number, window in enumerate(counted("Comparing: the packed model", windows)):
        after = next_logprobs(model, window)
        packed_nll += nll(after, window)
        before = take_logprobs(scratch / f"{number}", after)
        divergence += float((before.exp() * (before - after)).double().sum())
        same_top += float((before.argmax(-1) == after.argmax(-1)).sum())
    return Calibration(
        name,
        count,
        math.exp(packed_nll / count),
        math.exp(source_nll / count),
        max(0.0, divergence / count),
        same_top / count,
    )


def open_to_compare(path: Path, experts: Path | None = None) -> Any:
    from ktransformers.modeling.load import load_model
    from ktransformers.modeling.spec import parse_dtype

    model: Any = load_model(path, experts=experts, dtype=parse_dtype("auto"))
    return model.eval()


@torch.no_grad()
def next_logprobs(model: Any, window: Tensor) -> Tensor:
    """Log-probabilities of the next token, `[tokens - 1, vocabulary]`."""
    logits: Tensor = model(window, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).contiguous()


def nll(logprobs: Tensor, window: Tensor) -> float:
    return -float(logprobs.gather(1, window[0, 1:, None]).double().sum())


def take_logprobs(file: Path, like: Tensor) -> Tensor:
    """What an earlier pass has stored, float32 of the shape of `like`; the file is removed."""
    stored = torch.from_file(str(file), size=like.numel(), dtype=torch.float32).view_as(like)
    file.unlink()
    return stored
