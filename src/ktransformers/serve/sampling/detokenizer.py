"""Streaming detokenisation: text is emitted once its characters are complete, and no part of a stop string is emitted.

A token may hold part of a UTF-8 character, and its text depends on its neighbours (spaces, joined words). So a few
tokens are decoded together, and only what they add to the text before them is emitted. While a decode ends in the
replacement character, more tokens are awaited. Text that may be the beginning of a stop string is held back until it is
one or cannot become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT_CHARACTER = "\ufffd"


class StreamingText:
    """The text of one completion."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), keep_special: bool = False) -> None:
        self._tokenizer, self._stops, self._keep_special = tokenizer, [stop for stop in stops if stop], keep_special
        self._tokens: list[int] = []
        self._emitted = 0  # tokens whose text was emitted or held back
        self._context = 0  # first token to decode, so that neighbours count
        self._held = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def add(self, token: int) -> str:
        """The text that can be emitted now."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._emitted])
        after = self._decode(self._tokens[self._context :])
        if after.endswith(REPLACEMENT_CHARACTER) and len(self._tokens) - self._emitted < 8:
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return self._cut_at_stop(after[len(before) :])

    def end(self) -> str:
        """The text that was held back; no token follows."""
        if self.stopped is not None:
            return ""
        before = self._decode(self._tokens[self._context : self._emitted])
        rest = self._decode(self._tokens[self._context :])[len(before) :]
        self._emitted = self._context = len(self._tokens)
        ready = self._cut_at_stop(rest)
        if self.stopped is None:
            ready, self._held = ready + self._held, ""
        return ready

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not self._keep_special)) if tokens else ""

    def _cut_at_stop(self, new_text: str) -> str:
        text = self._held + new_text
        if not self._stops:
            return text
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            start, self.stopped = min(matches)
            self._held = ""
            return text[:start]
        held_size = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), held_size, -1):
                if text.endswith(stop[:size]):
                    held_size = size
                    break
        self._held = text[len(text) - held_size :]
        return text[: len(text) - held_size]
