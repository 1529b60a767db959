"""One forward pass for many sequences: pieces of them, laid one after the other in a single row of tokens.

Pieces of the same adapter are laid side by side, so that an adapter's rows are one slice. Logits come back of a piece's
last row, in the model's own type; where no more than the most likely token is wanted, it is looked for in all of them
at once. Who wants the logits of every row reads them some rows at a time (`head.py`). `Forward` wants a past of keys
and values alone. What a family does beyond that (a recurrent state, an index of its own, embeddings that look at the
longest sequence) `SequentialForward` computes, one sequence at a time, each with transformers' own cache. On a GPU,
steps of new tokens alone may be replayed from CUDA graphs (`graphs.py`), which are asked first. `check` runs two
sequences in pieces and compares them with the stock model: a family that neither way computes rightly is refused by
name before the server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ktransformers.errors import InputError
from ktransformers.nn.linear import patch_linears
from ktransformers.nn.mixed_lora import use_mixed_lora
from ktransformers.nn.norm import patch_norms
from ktransformers.nn.pool import default_pool
from ktransformers.serve.engine.attention import NAME, Span, spans
from ktransformers.serve.engine.head import LogitsHead, Reader, ScoredRows, collect
from ktransformers.serve.engine.kv_cache import KVSlot
from ktransformers.serve.engine.lora import AdapterRows, LoadedAdapter, expert_shares, linear_shares

if TYPE_CHECKING:
    from ktransformers.serve.graphs.decode_graphs import DecodeGraphs

CARRIES = {"full_attention", "sliding_attention", "attention"}  # layer types whose past is keys and values
MOVING = {"dynamic", "longrope"}  # rotary embeddings that change with the longest sequence of a batch
LIMITS = {torch.float32: 1e-3}  # of the difference between served and stock logits, relative
ROUGH = 0.1  # for 16-bit types


@dataclass(frozen=True)
class Chunk:
    slot: KVSlot
    tokens: Sequence[int]
    position: int
    adapter: LoadedAdapter | None
    read: Reader | None = None  # gets the logits of every row, some at a time
    last: bool = True  # of the last row: not wanted in the middle of a prompt
    greedy: bool = False  # of the last row no more than the most likely token


@dataclass(frozen=True)
class ForwardResult:
    logits: Tensor  # [V], of the last row
    token: int | None = None  # the most likely one, where the piece is greedy


class Forward:
    whole_prefixes = False  # a slot may be cut back to any of its tokens

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        nn.Module.eval(model)
        self.device = next(model.parameters()).device
        self.stock = model.config._attn_implementation
        self._head = LogitsHead(model)
        self.graphs: DecodeGraphs | None = None  # where new tokens alone are replayed
        model.set_attn_implementation(NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
            raise InputError(model.config.model_type, "attention of its own", "transformers' attention interface")

    def run(self, pieces: Sequence[Chunk]) -> list[ForwardResult | None]:
        """For each piece; None where nothing is wanted of it. Logits are to be read before the next call."""
        found = None if self.graphs is None else self.graphs.run(pieces)
        if found is None:
            found = self._launch(pieces)
        for piece in pieces:
            piece.slot.tokens[piece.position :] = piece.tokens
        return found

    def _launch(self, pieces: Sequence[Chunk]) -> list[ForwardResult | None]:
        """Kernel by kernel."""
        order = sorted(range(len(pieces)), key=lambda at: _rank(pieces[at].adapter))
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[Span] = []
        shares: list[AdapterRows] = []
        picked: dict[int, int] = {}  # piece -> its last row
        scored: list[ScoredRows] = []
        for at in order:
            piece, first = pieces[at], len(tokens)
            tokens += piece.tokens
            positions += range(piece.position, piece.position + len(piece.tokens))
            rows.append(Span(piece.slot, first, len(tokens), piece.position))
            if piece.adapter is not None:
                if shares and shares[-1].adapter is piece.adapter:
                    first = shares.pop().first
                shares.append(AdapterRows(piece.adapter, first, len(tokens)))
            if piece.read is not None:
                scored.append(ScoredRows(rows[-1].first, len(tokens), piece.read))
            if piece.last:
                picked[at] = len(tokens) - 1
        logits = self._call(tokens, positions, rows, shares, list(picked.values()), scored)
        place = {at: row for row, at in enumerate(picked)}
        greedy = [at for at in picked if pieces[at].greedy]
        tokens_of = dict(zip(greedy, most_likely(logits, [place[at] for at in greedy]), strict=True))
        found: list[ForwardResult | None] = [None] * len(pieces)
        for at, row in place.items():
            found[at] = ForwardResult(logits[row], tokens_of.get(at))
        return found

    def _call(
        self,
        tokens: list[int],
        positions: list[int],
        rows: list[Span],
        shares: list[AdapterRows],
        picked: list[int],
        scored: list[ScoredRows],
    ) -> Tensor:
        words = {
            "input_ids": torch.tensor([tokens], device=self.device),
            "position_ids": torch.tensor([positions], device=self.device),
            "use_cache": False,
        }
        layers = expert_shares(shares, len(tokens))
        with torch.inference_mode(), spans(rows), linear_shares(shares, len(tokens)), use_mixed_lora(layers):
            return self._head.logits(picked, scored, words)

    def check(self) -> int:
        """Compare with the stock model; returns the bytes of keys and values per token."""
        self.model.set_attn_implementation(self.stock)
        try:
            expected = _stock_logits(self.model, self.device)
        finally:
            self.model.set_attn_implementation(NAME)
        slot = _compare(self, expected)
        return slot.bytes() // slot.capacity


class SequentialForward:
    """One sequence at a time, its past in a cache of transformers' own."""

    whole_prefixes = True  # a state cannot be cut back: a slot is continued where it ends, or not at all
    graphs: DecodeGraphs | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        nn.Module.eval(model)
        self.device = next(model.parameters()).device
        self._head = LogitsHead(model)

    def run(self, pieces: Sequence[Chunk]) -> list[ForwardResult | None]:
        return [self._one(piece) for piece in pieces]

    def _one(self, piece: Chunk) -> ForwardResult | None:
        slot, count = piece.slot, len(piece.tokens)
        if slot.cache is None or not piece.position:
            slot.cache = DynamicCache(config=self.model.config)
        shares = [] if piece.adapter is None else [AdapterRows(piece.adapter, 0, count)]
        positions = torch.arange(piece.position, piece.position + count, device=self.device)[None]
        words = {
            "input_ids": torch.tensor([list(piece.tokens)], device=self.device),
            "position_ids": positions,
            "past_key_values": slot.cache,
            "use_cache": True,
        }
        scored = [] if piece.read is None else [ScoredRows(0, count, piece.read)]
        with torch.inference_mode(), linear_shares(shares, count), use_mixed_lora(expert_shares(shares, count)):
            logits = self._head.logits([count - 1], scored, words)
        slot.tokens[piece.position :] = piece.tokens
        return ForwardResult(logits[0], *most_likely(logits, [0] if piece.greedy else [])) if piece.last else None

    def check(self) -> int:
        slot = _compare(self, _stock_logits(self.model, self.device))
        held = [getattr(layer, name, None) for layer in slot.cache.layers for name in ("keys", "values")]
        size = sum(int(one.numel() * one.element_size()) for one in held if one is not None)
        return max(1, size // slot.length)


def open_forward(model: PreTrainedModel) -> Forward | SequentialForward:
    """The way that fits the family, by what its configuration says; `check` has the last word."""
    patch_linears(model)
    patch_norms(model)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "index_topk", None) is not None:
        kind = model.config.model_type
        raise InputError("model", f"{kind}, with an index of keys", "attention to all keys", "it cannot be served yet")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    moving = any(part.get("rope_type") in MOVING for part in parts)
    plain = set(getattr(config, "layer_types", None) or []) <= CARRIES
    return Forward(model) if plain and not moving else SequentialForward(model)


def _texts(model: Any) -> list[list[int]]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [[(7 * at + 3) % vocabulary for at in range(24)], [(5 * at + 11) % vocabulary for at in range(13)]]


def _stock_logits(model: Any, device: torch.device) -> list[Tensor]:
    with torch.inference_mode():
        ids = [torch.tensor([text], device=device) for text in _texts(model)]
        return [model(input_ids=one, use_cache=False).logits[0].float() for one in ids]


def _compare(forward: Forward | SequentialForward, expected: list[Tensor]) -> KVSlot:
    """Two sequences in uneven pieces against the stock model; a slot that holds one of them."""
    kind, texts = forward.model.config.model_type, _texts(forward.model)
    slots = [KVSlot(None, capacity=24), KVSlot(None, capacity=24)]
    found: list[list[Tensor]] = [[], []]
    steps = (((0, 0, 7), (1, 0, 4)), ((0, 7, 8), (1, 4, 12)), ((0, 8, 23), (1, 12, 13)), ((0, 23, 24),))
    try:
        for step in steps:
            forward.run([Chunk(slots[at], texts[at][a:b], a, None, collect(found[at])) for at, a, b in step])
    except (InputError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        raise InputError("model", f"{kind} ({error})", "a family that can be computed in pieces") from error
    limit = LIMITS.get(forward.model.dtype, ROUGH)
    for parts, wanted in zip(found, expected, strict=True):
        got = torch.cat(parts).float()
        apart = float((got - wanted).norm() / wanted.norm())
        if not apart <= limit:
            given = f"{kind}, whose logits differ by {apart:.2g} when it is computed in pieces"
            raise InputError("model", given, f"at most {limit:g}", "this family cannot be served")
    return slots[0]


def most_likely(logits: Tensor, rows: list[int]) -> list[int]:
    """The first of the largest in each of these rows; rounded to fewer bits or not, it is the same."""
    if not rows:
        return []
    picked = logits if rows == list(range(logits.shape[0])) else logits[rows]
    if picked.is_cpu and picked.dtype in (torch.bfloat16, torch.float32):
        return default_pool().argmax(picked)
    found: list[int] = picked.argmax(-1).tolist()
    return found


def _rank(adapter: LoadedAdapter | None) -> tuple[str, int]:
    return ("", 0) if adapter is None else (adapter.name, adapter.version)
