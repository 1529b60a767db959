"""Measures what a merge loses: the KL divergence of the merged model from the base model with the adapter.

A text is read in windows of 512 tokens by the base with the adapter, by the base alone (the adapter's own effect, for
scale), and by the merged model. Divergences are KL(base + adapter || other) in nats per token. The two models are
loaded one after the other and the log-probabilities are kept in a file between them, so peak memory is that of one
model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from ktransformers.adapters.config import check_for_peft
from ktransformers.adapters.content import open_content
from ktransformers.adapters.convert import read_adapter, write_adapter
from ktransformers.adapters.formats import detect_format
from ktransformers.ground.errors import InputError
from ktransformers.ground.progress import counted
from ktransformers.quant.report import Calibration, next_logprobs, nll, open_to_compare, read_windows, take_logprobs

CALIBRATION_FILE = "calibration.txt"  # in the package: prose, a dialogue, a recipe, figures and code
CALIBRATION_TOKENS = 4096  # at most, of a text
MAX_KL = 0.1  # nats per token; raises perplexity by about a tenth


@dataclass(frozen=True)
class Divergence:
    text: str  # the file's name
    tokens: int  # predicted
    kl: float  # of the merged model, nats per token
    effect: float  # KL of the base alone: the adapter's own effect
    same_top: float  # share of tokens with the same argmax
    perplexity: float  # of the merged model
    reference_perplexity: float  # of the base with the adapter
    base_perplexity: float

    def calibration(self) -> Calibration:
        """The same numbers as a quantization report's calibration, with the base plus adapter as the source."""
        return Calibration(self.text, self.tokens, self.perplexity, self.reference_perplexity, self.kl, self.same_top)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def calibration_text(path: Path | None) -> Iterator[Path]:
    """The text to read: the caller's, or the packaged one."""
    if path is not None:
        yield path
        return
    with resources.as_file(resources.files("ktransformers.adapters") / "data" / CALIBRATION_FILE) as packaged:
        yield packaged


def measure_divergence(
    base: Path, adapter: Path, merged: Path, text: Path, *, tokens: int = CALIBRATION_TOKENS, base_bytes: int = 0
) -> Divergence:
    """Raises InputError if the base does not fit in memory or has no tokenizer."""
    pieces = read_windows(merged, text, tokens, base_bytes, "base")
    with tempfile.TemporaryDirectory(prefix=".kt-merge-", dir=merged.parent) as scratch:
        folder = _as_peft(adapter, merged, Path(scratch))
        return _compare(base, folder, merged, text.name, pieces, Path(scratch))


def check_divergence(divergence: Divergence, limit: float) -> None:
    if divergence.kl <= limit:
        return
    measured = (
        f"KL {divergence.kl:.4g} nats per token from the base with the adapter ({divergence.tokens} tokens of "
        f"{divergence.text}; the adapter itself makes {divergence.effect:.4g})"
    )
    remedy = "use a wider --format (int8) or a larger --max-kl; nothing was written"
    raise InputError("merge", measured, f"at most {limit:g}", remedy)


def _as_peft(adapter: Path, merged: Path, scratch: Path) -> Path:
    """A directory with the adapter in PEFT's format, converted if necessary."""
    content = open_content(adapter)
    if detect_format(content).name == "peft" and content.path.is_dir():
        return content.path
    write_adapter(read_adapter(adapter, model=str(merged)), scratch / "peft", "peft")
    return scratch / "peft"


def _compare(base: Path, folder: Path, merged: Path, name: str, pieces: list[Tensor], scratch: Path) -> Divergence:
    from peft import PeftModel

    count = sum(piece.shape[1] - 1 for piece in pieces)
    effect = kl = same = 0.0
    losses = [0.0, 0.0, 0.0]  # merged, reference, base
    stock = open_to_compare(base)
    check_for_peft(folder, stock)
    model: Any = PeftModel.from_pretrained(stock, str(folder)).eval()
    for number, piece in enumerate(counted("Comparing: base and adapter", pieces)):
        reference = next_logprobs(model, piece)
        with model.disable_adapter():
            base_logprobs = next_logprobs(model, piece)
        effect += _kl(reference, base_logprobs)
        losses[1] += nll(reference, piece)
        losses[2] += nll(base_logprobs, piece)
        reference.numpy().tofile(scratch / f"{number}")
        del reference, base_logprobs
    del model
    model = open_to_compare(merged)
    for number, piece in enumerate(counted("Comparing: the merged model", pieces)):
        logprobs = next_logprobs(model, piece)
        stored = take_logprobs(scratch / f"{number}", logprobs)
        kl += _kl(stored, logprobs)
        same += float((stored.argmax(-1) == logprobs.argmax(-1)).sum())
        losses[0] += nll(logprobs, piece)
    perplexities = [math.exp(min(loss / count, 700.0)) for loss in losses]
    return Divergence(name, count, kl / count, effect / count, same / count, *perplexities)


def _kl(reference: Tensor, other: Tensor) -> float:
    """Summed over tokens; clamped at 0, below which only rounding can take it."""
    return max(0.0, float((reference.exp() * (reference - other)).double().sum()))
