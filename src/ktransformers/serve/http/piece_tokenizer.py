"""Tokens of long prompts that share most of their text with prompts before them.

A tokenizer cuts a text at its special tokens before anything else, so a text from one special token to the next has the
same tokens wherever it stands. Such pieces are tokenised one by one, and the last ones are kept: the next prompt of a
conversation tokenises what is new in it. Tokenizers in Python may cut otherwise and get the text whole.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from ktransformers.serve.http.limits import PIECE_CHARACTERS, PIECE_SLACK

MAX_CHARACTERS = 2**24  # of pieces that are kept


class PieceTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A token that takes the white space before it belongs to the piece of that white space.
        self._cuts = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content and not (token.lstrip or token.single_word or token.normalized)
        }
        pattern = "|".join(map(re.escape, sorted(self._cuts.values(), key=len, reverse=True)))
        self._cut = re.compile(pattern or r"(?!)")
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._kept_characters = 0

    def encode(self, text: str, limit: int) -> array[int]:
        """The tokens of the text; of one with more than `limit` tokens the first ones, more than `limit`. The cost is
        that of the limit and not that of the text."""
        tokens = array("i")
        for piece in self._pieces(text):
            if len(tokens) > limit:
                break
            tokens += self._piece(piece, limit - len(tokens))
        return tokens

    def next_other(self, text: str, start: int, tokens: Iterable[int]) -> re.Match[str] | None:
        """The first special token in the text from `start` on that is not one of these."""
        these = {self._cuts[token] for token in set(tokens) & self._cuts.keys()}
        return next((found for found in self._cut.finditer(text, start) if found.group() not in these), None)

    def _pieces(self, text: str) -> Iterator[str]:
        cuts = self._cut.finditer(text) if self._tokenizer.is_fast else ()
        starts = [found.start() for found in cuts if found.start()]
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            yield text[start:end]

    def _piece(self, text: str, limit: int) -> array[int]:
        known = self._kept.get(text)
        if known is not None:
            self._kept.move_to_end(text)
            return known
        if len(text) > PIECE_CHARACTERS and (begin := self._beyond(text, limit)) is not None:
            return begin
        made = self._tokens(text)
        self._kept[text] = made
        self._kept_characters += len(text)
        while self._kept_characters > MAX_CHARACTERS:
            self._kept_characters -= len(self._kept.popitem(last=False)[0])
        return made

    def _beyond(self, text: str, limit: int) -> array[int] | None:
        """Tokens of the beginning of a text that surely has more than `limit`; None: it may have fewer."""
        if len(text) <= limit:
            return None
        tokens = array("i")
        for cuts, start in enumerate(range(0, len(text), PIECE_CHARACTERS)):
            tokens += self._tokens(text[start : start + PIECE_CHARACTERS])
            if len(tokens) > limit + cuts * PIECE_SLACK:
                return tokens
        return None

    def _tokens(self, text: str) -> array[int]:
        if self._tokenizer.is_fast:
            return array("i", self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return array("i", self._tokenizer(text, add_special_tokens=False)["input_ids"])
