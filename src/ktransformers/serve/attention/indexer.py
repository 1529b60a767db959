"""Indexers of stock attention modules over slots (DeepSeek sparse attention).

An indexer projects every token to a small key, scores all cached keys of a sequence for every query and returns the
positions of the best `index_topk`. The stock module computes one sequence; here its row of tokens holds the chunks of
many. Projections, norms and rotary embeddings depend on a token alone and run once for all rows, LoRA of requests
included. At `update_indexer` the stock code asks its cache for all keys: the new keys are written into the slots
(part `index_keys`), and the answer is a `SpanTensors`, one tensor for every sequence, to which torch's functions apply
span by span, some rows at a time. So scores, mask and top-k are computed by the stock code, each sequence against its
own keys. Sequences of at most `index_topk` tokens are left out: all of their keys are selected. The result is a
`Selection`, which the stock attention passes on to the attention function, and to later layers in families that share
it between layers.

An indexer is recognised by what it is called with (`attention_mask`, `past_key_values`) and its attributes
(`index_topk`, `layer_idx`), its attention module by `indexer`.

The check against the stock model needs a short `index_topk`, because its texts are short (`reduce_topk`), and must not
depend on ties: where scores tie or nearly tie, two correct computations select different keys, and all that follows
differs. So `compared_selections` records what the stock model selects, and the served model attends to the same keys if
by its own scores they are as good as the best; otherwise to its own, and the logits show the difference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktransformers.ground.errors import KTError
from ktransformers.modeling.substitute import Restore, Substitution, unprobed
from ktransformers.serve.attention.attention import NO_MASK
from ktransformers.serve.attention.selection import Selection
from ktransformers.serve.attention.step import Span, current_step
from ktransformers.serve.cache.kv_cache import KVSlot

INDEX_LAYER_TYPE = "indexed_attention"
INDEXER_ARGUMENTS = {"hidden_states", "attention_mask", "past_key_values"}
MAX_SCORES = 1 << 24  # numbers of the scores that are computed at a time: 64 MiB
ASSUMED_HEADS = 64  # of an indexer that does not say how many it has
REDUCED_TOPK = 8
MAX_UNREDUCED_TOPK = 12  # a text of 24 tokens has more keys than these
MAX_TIE = {torch.float32: 1e-3}  # of scores, relative to the largest; otherwise of 16 bits
MAX_TIE_16_BIT = 0.1


class TopK(NamedTuple):
    values: SpanTensors
    indices: SpanTensors


class SpanTensors:
    """A tensor `[1, rows, ...]` for every span. A function of torch is applied to each; arguments that have all rows of
    the batch (`[1, T, ...]`, at least three dimensions) are cut to the rows of the span. Nothing is computed before
    `topk`, and then one span after the other, so that the scores of only one are in memory."""

    def __init__(self, spans: Sequence[Span], part: Callable[[int], Tensor], rows: int) -> None:
        self.spans, self._rows, self._part = spans, rows, part
        self._first: Tensor | None = None  # of span 0, if its shape was asked for and it was not used yet

    def part(self, index: int) -> Tensor:
        """Of one span; computed again when it is asked for again."""
        first, self._first = self._first, None
        return first if first is not None and index == 0 else self._part(index)

    @property
    def parts(self) -> list[Tensor]:
        return [self.part(index) for index in range(len(self.spans))]

    @property
    def shape(self) -> torch.Size:
        return self._peek().shape if self.spans else torch.Size((1, 0, 0))

    @property
    def dtype(self) -> torch.dtype:
        return self._peek().dtype if self.spans else torch.bool

    def _peek(self) -> Tensor:
        self._first = self.part(0)
        return self._first

    def topk(self, k: int, dim: int = -1, **options: Any) -> TopK:
        compared = _compared.get()
        values, indices = [], []
        for index, span in enumerate(self.spans):
            scores = self.part(index)
            chosen = scores.topk(k, dim=dim, **options)
            values.append(chosen.values)
            indices.append(chosen.indices if compared is None else compared.replace(span, scores, chosen.indices))
        return TopK(self._with(values.__getitem__), self._with(indices.__getitem__))

    def __getattr__(self, name: str) -> Callable[..., SpanTensors]:
        method = getattr(Tensor, name)
        return lambda *args, **kwargs: self._apply(method, (self, *args), kwargs)

    def __mul__(self, other: Any) -> SpanTensors:
        return self._apply(torch.mul, (self, other), {})

    def __add__(self, other: Any) -> SpanTensors:
        return self._apply(torch.add, (self, other), {})

    def __invert__(self) -> SpanTensors:
        return self._apply(torch.bitwise_not, (self,), {})

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = next(arg for arg in args if isinstance(arg, SpanTensors))
        if func is torch.topk:
            return first.topk(*args[1:], **(kwargs or {}))
        return first._apply(func, args, kwargs or {})

    def _apply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpanTensors:
        def part(index: int) -> Any:
            named = {name: self._cut(value, index) for name, value in kwargs.items()}
            return func(*(self._cut(value, index) for value in args), **named)

        return self._with(part)

    def _cut(self, value: Any, index: int) -> Any:
        if isinstance(value, SpanTensors):
            return value.part(index)
        if isinstance(value, Tensor) and value.dim() >= 3 and value.shape[:2] == (1, self._rows):
            return value[:, self.spans[index].first : self.spans[index].last]
        return value

    def _with(self, part: Callable[[int], Tensor]) -> SpanTensors:
        return SpanTensors(self.spans, part, self._rows)


class SlotIndexCache:
    """In the place of transformers' cache, for one call of an indexer. `pieces`: of the spans that select."""

    def __init__(self, spans: Sequence[Span], pieces: Sequence[Span]) -> None:
        self._spans, self._pieces = spans, pieces

    def update_indexer(self, keys: Tensor, layer: int) -> SpanTensors:
        """New keys `[1, T, d]` of all spans -> all keys `[1, n, d]` of the spans that select."""
        cached = {}
        for span in self._spans:
            rows = keys[:, span.first : span.last]
            cached[id(span.slot)] = span.slot.write("index_keys", layer, span.position, rows)
        return SpanTensors(self._pieces, lambda index: cached[id(self._pieces[index].slot)], keys.shape[1])


def selects(span: Span, topk: int) -> bool:
    """Whether the sequence has more keys than an indexer selects."""
    return span.position + span.rows > topk


def scored_pieces(span: Span, heads: int) -> list[Span]:
    """The rows of a span, in pieces whose scores are at most MAX_SCORES numbers."""
    step = max(1, MAX_SCORES // (heads * (span.position + span.rows)))
    return [
        Span(span.slot, first, min(first + step, span.last), span.position + first - span.first, span.adapter)
        for first in range(span.first, span.last, step)
    ]


class SlotIndexer:
    """In the place of an indexer's `forward`: the stock one, or while `is_served` the same over slots."""

    def __init__(self, indexer: nn.Module, is_served: Callable[[], bool]) -> None:
        stock: Any = indexer.forward
        self.stock: Callable[..., Any] = stock.stock if isinstance(stock, SlotIndexer) else stock
        self.signature = inspect.signature(self.stock)
        self._indexer: Any = indexer
        self._is_served = is_served

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | Selection:
        layer, topk, compared = self._indexer.layer_idx, self._indexer.index_topk, _compared.get()
        if not self._is_served():
            stock: Tensor = self.stock(*args, **kwargs)
            if compared is not None:
                compared.record(layer, stock)
            return stock
        step = current_step()
        if step is None:
            raise KTError("the model was called directly while it is served; submit requests to its engine")
        spans = step.spans
        if compared is not None:
            compared.layer = layer
        arguments = dict(self.signature.bind(*args, **kwargs).arguments)
        hidden_states: Tensor = arguments["hidden_states"]
        heads = getattr(self._indexer, "n_heads", ASSUMED_HEADS)
        pieces_of = {span.first: scored_pieces(span, heads) for span in spans if selects(span, topk)}
        pieces = [piece for of_span in pieces_of.values() for piece in of_span]
        lengths = {id(span.slot): span.position + span.rows for span in spans}
        masks = SpanTensors(
            pieces,
            lambda index: _causal_mask(pieces[index], lengths[id(pieces[index].slot)], hidden_states.device),
            hidden_states.shape[1],
        )
        arguments |= {"attention_mask": masks, "past_key_values": SlotIndexCache(spans, pieces)}
        indices: SpanTensors = self.stock(**arguments)
        parts = iter(indices.parts)
        return Selection({first: torch.cat([next(parts)[0].long() for _ in of]) for first, of in pieces_of.items()})


def use_indexers(is_served: Callable[[], bool]) -> Substitution[nn.Module, bool]:
    """Makes the indexers of all attention modules select keys of slots while `is_served`."""

    def recognise(model: nn.Module) -> Iterator[nn.Module]:
        return (module for module in model.modules() if is_indexer(getattr(module, "indexer", None)))

    def replace(module: Any, _: bool, restore: Restore) -> None:
        restore.put(module.indexer, "forward", SlotIndexer(module.indexer, is_served))
        hook = functools.partial(_pass_no_mask, is_served)
        restore.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    return Substitution("indexers", recognise, unprobed, replace)


def is_indexer(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return False
    numbers = (getattr(module, "index_topk", None), getattr(module, "layer_idx", None))
    if not all(type(number) is int for number in numbers):
        return False
    forward: Any = module.forward
    signature = forward.signature if isinstance(forward, SlotIndexer) else inspect.signature(forward)
    return set(signature.parameters) >= INDEXER_ARGUMENTS


def has_indexers(model: nn.Module) -> bool:
    """Whether every module that selects keys is an indexer that can be served."""
    selecting = [module for module in model.modules() if type(getattr(module, "index_topk", None)) is int]
    return bool(selecting) and all(map(is_indexer, selecting))


def _pass_no_mask(
    is_served: Callable[[], bool], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The stock module cuts its mask for the indexer, but a served model has none."""
    if not is_served() or "attention_mask" not in kwargs:
        return None
    return args, kwargs | {"attention_mask": NO_MASK}


def _causal_mask(span: Span, keys: int, device: torch.device) -> Tensor:
    """bool `[1, rows, keys]`"""
    positions = torch.arange(span.position, span.position + span.rows, device=device)[:, None]
    return (torch.arange(keys, device=device) <= positions)[None]


class ComparedSelections:
    """What the stock model selects in the texts of a check; the served model computes them in `slots`, in this order
    of their lengths."""

    def __init__(self, slots: Sequence[KVSlot], lengths: Sequence[int], tie: float) -> None:
        self._texts = {id(slot): length for slot, length in zip(slots, lengths, strict=True)}
        self._stock: dict[tuple[int, int], Tensor] = {}  # layer, length of the text -> [length, k]
        self._tie = tie
        self.layer = 0  # of the indexer that is called

    def record(self, layer: int, indices: Tensor) -> None:
        self._stock[layer, indices.shape[1]] = indices[0].long()

    def replace(self, span: Span, scores: Tensor, own: Tensor) -> Tensor:
        """`own`, or the stock model's where it is a tie; scores `[1, rows, n]`, masked with -inf."""
        stock = self._stock.get((self.layer, self._texts.get(id(span.slot), -1)))
        if stock is None:
            return own
        rows, replaced = stock[span.position : span.position + span.rows], own.clone()
        for row in range(span.rows):
            count = span.position + row + 1  # keys that this query may select
            selected = rows[row][rows[row] < count]
            of_row = scores[0, row, :count].float()
            if count <= own.shape[-1] or len(selected) != own.shape[-1] or bool((own[0, row] >= count).any()):
                continue
            best = of_row.topk(own.shape[-1]).values.min()
            if of_row[selected].min() >= best - self._tie * of_row.abs().max():
                replaced[0, row] = selected.to(own.dtype)
        return replaced


_compared: ContextVar[ComparedSelections | None] = ContextVar("kt_compared_selections", default=None)


@contextmanager
def compared_selections(slots: Sequence[KVSlot], lengths: Sequence[int], dtype: torch.dtype) -> Iterator[None]:
    """While this is open, ties between keys are selected as the stock model selected them in the same text. Texts have
    different lengths."""
    compared = ComparedSelections(slots, lengths, MAX_TIE.get(dtype, MAX_TIE_16_BIT))
    token = _compared.set(compared)
    try:
        yield
    finally:
        _compared.reset(token)


def reduce_topk(model: nn.Module, restore: Restore) -> None:
    """Until the end of a check, indexers select a few keys, so that a text of a few tokens has more."""
    modules: Any = model.modules()
    for module in modules:
        if is_indexer(module) and module.index_topk > MAX_UNREDUCED_TOPK:
            restore.put(module, "index_topk", REDUCED_TOPK)
