"""Tokens to text while they come: a letter is given out when it is whole, and a stop string is never given out in part.

One token may hold a piece of a letter, and what a token reads depends on its neighbours (spaces, joined words). So a
few tokens are decoded together, and only what they add to the text before them counts. While a decode ends in the
replacement character, its letter is waited for. Text that might be the beginning of a stop string is held back until it
is one or cannot become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"


class StreamingText:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), keep_special: bool = False) -> None:
        self._tokenizer, self._stops, self._keep_special = tokenizer, [stop for stop in stops if stop], keep_special
        self._tokens: list[int] = []
        self._known = 0  # tokens whose text has been taken
        self._context = 0  # where decoding begins, so that neighbours are seen
        self._held = ""
        self.stopped: str | None = None  # the stop string that was met

    def add(self, token: int) -> str:
        """The text that is ready now."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._known])
        after = self._decode(self._tokens[self._context :])
        if after.endswith(BROKEN) and len(self._tokens) - self._known < 8:
            return ""
        self._context, self._known = self._known, len(self._tokens)
        return self._check(after[len(before) :])

    def end(self) -> str:
        """What was held back, now that no more comes."""
        if self.stopped is not None:
            return ""
        before = self._decode(self._tokens[self._context : self._known])
        rest = self._decode(self._tokens[self._context :])[len(before) :]
        self._known = self._context = len(self._tokens)
        ready = self._check(rest)
        if self.stopped is None:
            ready, self._held = ready + self._held, ""
        return ready

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not self._keep_special)) if tokens else ""

    def _check(self, more: str) -> str:
        text = self._held + more
        if not self._stops:
            return text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        hold = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), hold, -1):
                if text.endswith(stop[:size]):
                    hold = size
                    break
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
