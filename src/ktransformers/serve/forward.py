"""One forward pass for many sequences: pieces of them, laid one after the other in a single row of tokens.

Pieces of the same adapter are laid side by side, so that an adapter's rows are one slice. Logits `[n, V]` come back for
those rows only that were asked for. `check` runs two sequences in pieces through the served model and compares them
with the stock model: what a family does beyond attention over a sequence's own past (a recurrent state, keys shared
between layers, positions counted by a cache) shows there and is refused before the server starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktransformers.errors import InputError
from ktransformers.nn.mixed import mixed
from ktransformers.serve.attention import NAME, Span, spans
from ktransformers.serve.lora import Resident, Share, expert_shares, linear_shares
from ktransformers.serve.slots import Slot

CARRIES = {"full_attention", "sliding_attention", "attention"}  # layer types whose past is keys and values
MOVING = {"dynamic", "longrope"}  # rotary embeddings that change with the longest sequence of a batch
LIMITS = {torch.float32: 1e-3}  # of the difference between served and stock logits, relative
ROUGH = 0.1  # for 16-bit types


@dataclass(frozen=True)
class Piece:
    slot: Slot
    tokens: Sequence[int]
    position: int
    adapter: Resident | None
    scores: bool = False  # logits of every row, else of the last
    last: bool = True  # of the last row: not wanted in the middle of a prompt


class Forward:
    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_unknown_past(model)
        self.model: Any = model
        nn.Module.eval(model)
        self.device = next(model.parameters()).device
        self.stock = model.config._attn_implementation
        self._picks = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        model.set_attn_implementation(NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
            raise InputError(model.config.model_type, "attention of its own", "transformers' attention interface")

    def run(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        """Logits per piece, float32: `[rows, V]` with scores, `[1, V]` of the last row, or None."""
        order = sorted(range(len(pieces)), key=lambda at: _rank(pieces[at].adapter))
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[Span] = []
        shares: list[Share] = []
        picked: list[int] = []
        counts: dict[int, int] = {}
        for at in order:
            piece, first = pieces[at], len(tokens)
            tokens += piece.tokens
            positions += range(piece.position, piece.position + len(piece.tokens))
            rows.append(Span(piece.slot, first, len(tokens), piece.position))
            if piece.adapter is not None:
                if shares and shares[-1].adapter is piece.adapter:
                    first = shares.pop().first
                shares.append(Share(piece.adapter, first, len(tokens)))
            wanted = range(rows[-1].first, len(tokens)) if piece.scores else range(len(tokens) - 1, len(tokens))
            wanted = wanted if piece.scores or piece.last else range(0)
            counts[at] = len(wanted)
            picked += wanted
        logits = self._call(tokens, positions, rows, shares, picked)
        found: list[Tensor | None] = [None] * len(pieces)
        start = 0
        for at in order:
            if counts[at]:
                found[at] = logits[start : start + counts[at]]
            start += counts[at]
        for piece in pieces:
            piece.slot.tokens[piece.position :] = piece.tokens
        return found

    def _call(
        self, tokens: list[int], positions: list[int], rows: list[Span], shares: list[Share], picked: list[int]
    ) -> Tensor:
        keep = torch.tensor(picked or [0], device=self.device)
        options = {"logits_to_keep": keep} if self._picks else {}
        layers = expert_shares(shares, len(tokens))
        with torch.inference_mode(), spans(rows), linear_shares(shares, len(tokens)), mixed(layers):
            out = self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                **options,
            ).logits[0]
        logits: Tensor = out if self._picks else out[keep]
        return logits.float()

    def check(self) -> int:
        """Compare with the stock model; returns the bytes of keys and values per token."""
        kind = self.model.config.model_type
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        texts = [[(7 * at + 3) % vocabulary for at in range(24)], [(5 * at + 11) % vocabulary for at in range(13)]]
        self.model.set_attn_implementation(self.stock)
        try:
            with torch.inference_mode():
                ids = [torch.tensor([text], device=self.device) for text in texts]
                expected = [self.model(input_ids=one, use_cache=False).logits[0].float() for one in ids]
        finally:
            self.model.set_attn_implementation(NAME)
        slots = [Slot(None, capacity=24), Slot(None, capacity=24)]
        found: list[list[Tensor | None]] = [[], []]
        try:
            for step in (((0, 0, 7), (1, 0, 4)), ((0, 7, 8), (1, 4, 13)), ((0, 8, 24),)):
                pieces = [Piece(slots[at], texts[at][first:last], first, None, True) for at, first, last in step]
                live = [at for at, _, _ in step]
                for at, logits in zip(live, self.run(pieces), strict=True):
                    found[at].append(logits)
        except (InputError, RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise InputError("model", f"{kind} ({error})", "a family whose past is keys and values") from error
        limit = LIMITS.get(self.model.dtype, ROUGH)
        for parts, wanted in zip(found, expected, strict=True):
            got = torch.cat([part for part in parts if part is not None])
            error_ = float((got - wanted).norm() / wanted.norm())
            if not error_ <= limit:
                given = f"{kind}, whose logits differ by {error_:.2g} when it is computed in pieces"
                raise InputError("model", given, f"at most {limit:g}", "this family cannot be served")
        return slots[0].bytes() // slots[0].capacity


def _rank(adapter: Resident | None) -> tuple[str, int]:
    return ("", 0) if adapter is None else (adapter.name, adapter.version)


def _refuse_unknown_past(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    odd = sorted(set(getattr(config, "layer_types", None) or []) - CARRIES)
    if odd:
        given = f"{kind}, with layers of {', '.join(odd)}"
        raise InputError("model", given, "layers whose past is keys and values", "`kt eval` and `kt train` take it")
    if getattr(config, "index_topk", None) is not None:
        raise InputError("model", f"{kind}, with an index of keys", "attention to all keys", "it cannot be served yet")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    moving = sorted({str(part["rope_type"]) for part in parts if part.get("rope_type") in MOVING})
    if moving:
        given = f"{kind}, with {moving[0]} rotary embeddings"
        raise InputError("model", given, "embeddings that depend on a token's own position", "it cannot be served yet")
