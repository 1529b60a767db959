"""What a merged model lost on the way: how far its distributions are from those of the base with the adapter on it.

A text is read in windows of 512 tokens, by the base with the adapter, by the base alone (the adapter's own effect, to
compare with), and by the merged model. Divergences are KL(base + adapter || other) in nats a token. The two models are
opened one after the other; between them the log-probabilities wait in a file, so memory is that of one model.
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

import torch
from torch import Tensor

from ktransformers.adapters.content import open_content
from ktransformers.adapters.convert import read_adapter, write_adapter
from ktransformers.adapters.dialects import detect
from ktransformers.errors import InputError
from ktransformers.quant.receipt import Calibration, read_text, split_windows
from ktransformers.system import bf16_is_fast, memory

TEXT = "calibration.txt"  # carried along: prose, a dialogue, a recipe, figures and code
TOKENS = 4096  # of a text, at most
RESERVE = 2 << 30  # bytes beside the base's own
MAX_KL = 0.1  # nats a token; costs about a tenth of perplexity


@dataclass(frozen=True)
class Divergence:
    text: str  # the file's name
    tokens: int  # that were predicted
    kl: float  # of the merged model, nats a token
    effect: float  # of the base alone: what the adapter changes
    same_top: float  # share of tokens with the same first choice
    perplexity: float  # of the merged model
    reference_perplexity: float  # of the base with the adapter
    base_perplexity: float

    def calibration(self) -> Calibration:
        """In the receipt's words, where the source is the base with the adapter."""
        return Calibration(self.text, self.tokens, self.perplexity, self.reference_perplexity, self.kl, self.same_top)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def calibration_text(given: Path | None) -> Iterator[Path]:
    """The file to read: the caller's, or ours."""
    if given is not None:
        yield given
        return
    with resources.as_file(resources.files("ktransformers.adapters") / "data" / TEXT) as own:
        yield own


def measure_divergence(
    base: Path, adapter: Path, merged: Path, text: Path, *, tokens: int = TOKENS, base_bytes: int = 0
) -> Divergence:
    """InputError where the base cannot be loaded here."""
    from transformers import AutoTokenizer

    free = memory().available
    if base_bytes + RESERVE > free:
        given = f"{free / 1e9:.1f} GB of free memory"
        raise InputError("calib", given, f"about {(base_bytes + RESERVE) / 1e9:.1f} GB to load the base")
    try:
        tokenizer = AutoTokenizer.from_pretrained(merged)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError("calib", f"no tokenizer in {base} ({said})", "one beside the model") from error
    ids: Tensor = tokenizer(read_text(text), return_tensors="pt", add_special_tokens=True).input_ids[0]
    pieces = split_windows(ids, tokens)
    if not pieces:
        raise InputError("calib", f"{text}, {len(ids)} token", "two or more")
    with tempfile.TemporaryDirectory(prefix=".kt-merge-", dir=merged.parent) as scratch:
        folder = _as_peft(adapter, merged, Path(scratch))
        return _compare(base, folder, merged, text.name, pieces, Path(scratch))


def check_divergence(found: Divergence, limit: float) -> None:
    if found.kl <= limit:
        return
    given = (
        f"KL {found.kl:.4g} nats a token from the base with the adapter ({found.tokens} tokens of {found.text}; "
        f"the adapter itself makes {found.effect:.4g})"
    )
    remedy = "a wider --format (int8), or a larger --max-kl; nothing was written"
    raise InputError("merge", given, f"at most {limit:g}", remedy)


def _as_peft(adapter: Path, merged: Path, scratch: Path) -> Path:
    """The adapter where PEFT can read it."""
    content = open_content(adapter)
    if detect(content).name == "peft" and content.path.is_dir():
        return content.path
    write_adapter(read_adapter(adapter, model=str(merged)), scratch / "peft", "peft")
    return scratch / "peft"


def _compare(base: Path, folder: Path, merged: Path, name: str, pieces: list[Tensor], scratch: Path) -> Divergence:
    from peft import PeftModel

    count = sum(piece.shape[1] - 1 for piece in pieces)
    effect = kl = same = 0.0
    losses = [0.0, 0.0, 0.0]  # merged, reference, base
    model: Any = PeftModel.from_pretrained(_open(base), str(folder)).eval()
    for number, piece in enumerate(pieces):
        reference = _distribution(model, piece)
        with model.disable_adapter():
            alone = _distribution(model, piece)
        effect += _kl(reference, alone)
        losses[1] += _loss(reference, piece)
        losses[2] += _loss(alone, piece)
        reference.numpy().tofile(scratch / f"{number}")
        del reference, alone
    del model
    model = _open(merged)
    for number, piece in enumerate(pieces):
        found = _distribution(model, piece)
        waited = torch.from_file(str(scratch / f"{number}"), size=found.numel(), dtype=torch.float32).view_as(found)
        kl += _kl(waited, found)
        same += float((waited.argmax(-1) == found.argmax(-1)).sum())
        losses[0] += _loss(found, piece)
        (scratch / f"{number}").unlink()
    perplexities = [math.exp(min(loss / count, 700.0)) for loss in losses]
    return Divergence(name, count, kl / count, effect / count, same / count, *perplexities)


def _open(path: Path) -> Any:
    from ktransformers.nn.load import load_model

    model: Any = load_model(path, dtype=torch.bfloat16 if bf16_is_fast("cpu") else torch.float32)
    return model.eval()


@torch.no_grad()
def _distribution(model: Any, piece: Tensor) -> Tensor:
    """Log-probabilities `[tokens - 1, vocabulary]` of what comes next."""
    logits: Tensor = model(input_ids=piece, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).contiguous()


def _kl(reference: Tensor, other: Tensor) -> float:
    """Summed over tokens; rounding can make it a little less than nothing."""
    return max(0.0, float((reference.exp() * (reference - other)).double().sum()))


def _loss(distribution: Tensor, piece: Tensor) -> float:
    return -float(distribution.gather(1, piece[0, 1:, None]).double().sum())
