"""Regular expressions that come with a downloaded file (`target_modules` of an adapter, rules, tasks), in bounded time.

A pattern such as `((a)+)+!` takes Python years on a name of forty characters, and no other thread runs meanwhile;
`a{999999999}` takes other engines all memory. So such a pattern runs in a child process with limits of time and memory
(`sandbox.py`), in Python's own `re`, whose answers are those of PEFT. Names without operators, the usual case, need no
process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short
from ktransformers.ground.sandbox import SandboxError, run_sandboxed

# CPU time of one process; the patterns of one key get FILE_SECONDS together.
MATCH_SECONDS, FILE_SECONDS = 3.0, 10.0
MAX_PATTERN_CHARACTERS = 50_000
MAX_PLAIN_CHARACTERS = 1000  # of a text that is matched without the process
PLAIN = re.compile(r"(?:[\w.\-/ ]|\\[^\w\s])*")  # no repetition, group or alternative: matched in linear time
METHODS = ("fullmatch", "match", "search", "last")

PROGRAM = """
import re, time
def last(pattern, text):
    found = None
    for found in pattern.finditer(text):
        pass
    return None if found is None else (found[1] if pattern.groups else found[0]) or ""
def answer(request):
    patterns, method, texts = request
    compiled = []
    for index, pattern in enumerate(patterns):
        try:
            compiled.append(re.compile(pattern))
        except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            return {"invalid": [index, str(error) or type(error).__name__]}
    def first(text):
        return next((number for number, pattern in enumerate(compiled) if getattr(pattern, method)(text)), None)
    results = [last(compiled[0], text) if method == "last" else first(text) for text in texts]
    return {"results": results, "seconds": time.process_time()}
"""


class FilePatterns:
    """Patterns of one key of a file, in order. `method` is that of `re.Pattern`, or `last` for the last match."""

    def __init__(self, where: str, patterns: Sequence[str], method: str = "fullmatch", template: str = "{}") -> None:
        """`where` names file and key; every pattern replaces the braces of `template`. An invalid one is refused."""
        assert method in METHODS
        self.where, self._patterns, self._method, self._template = where, tuple(patterns), method, template
        self._answers: dict[str, Any] = {}
        self._seconds = FILE_SECONDS
        for pattern in patterns:
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                given = f"a regular expression of {len(pattern)} characters"
                raise InputError(where, given, f"at most {MAX_PATTERN_CHARACTERS}", "list the names instead")
        self._plain = method != "last" and all(PLAIN.fullmatch(pattern) for pattern in patterns)
        self._spelled = [template.replace("{}", pattern) for pattern in self._patterns]
        if self._plain:
            self._compiled = [re.compile(pattern) for pattern in self._spelled]
        else:
            self._ask([])

    def first(self, text: str) -> int | None:
        """Index of the first pattern that fits the text, None for none."""
        if self._plain and len(text) <= MAX_PLAIN_CHARACTERS:
            matches = (index for index, item in enumerate(self._compiled) if getattr(item, self._method)(text))
            return next(matches, None)
        self.prefetch([text])
        index: int | None = self._answers[text]
        return index

    def fits(self, text: str) -> bool:
        return self.first(text) is not None

    def last(self, text: str) -> str | None:
        """The last match: its first group, or all of it without groups."""
        self.prefetch([text])
        found: str | None = self._answers[text]
        return found

    def prefetch(self, texts: Iterable[str]) -> None:
        """Ask for many texts at once, because the start of a process takes some hundredths of a second."""
        if self._plain:
            texts = [text for text in texts if len(text) > MAX_PLAIN_CHARACTERS]
        unknown = [text for text in dict.fromkeys(texts) if text not in self._answers]
        for first in range(0, len(unknown), 1000):
            block = unknown[first : first + 1000]
            self._answers.update(zip(block, self._ask(block), strict=True))

    def _ask(self, texts: list[str]) -> list[Any]:
        """Within the time that is left. Refuses an invalid pattern."""
        try:
            if self._seconds <= 0:
                raise SandboxError
            request = [self._spelled, self._method, texts]
            answer = run_sandboxed(PROGRAM, request, seconds=min(MATCH_SECONDS, self._seconds))
        except SandboxError as error:
            shown = short(self._patterns[0] if len(self._patterns) == 1 else list(self._patterns))
            given = f"the regular expression {shown}, which takes more than {MATCH_SECONDS:g} s or 1 GiB"
            raise InputError(self.where, given, "one that is matched at once", "list the names instead") from error
        if "invalid" in answer:
            index, reason = answer["invalid"]
            given = f"{short(self._patterns[index])}, which is no regular expression ({reason})"
            raise InputError(self.where, given, "a regular expression", "quote special characters with a backslash")
        self._seconds -= answer["seconds"]
        results: list[Any] = answer["results"]
        return results
