"""Regular expressions that come with a downloaded file (`target_modules` of an adapter, rules, tasks), in bounded time.

A pattern such as `((a)+)+!` takes Python years on a name of forty characters, and no other thread runs meanwhile;
`a{999999999}` takes other engines all memory. So such a pattern runs in a child process with limits on time and memory,
in Python's own `re`, whose answers are those of PEFT. Names without operators, the usual case, need no process.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short

MATCH_SECONDS = 3.0  # for one answer of the process; the patterns of one key get FILE_SECONDS together
FILE_SECONDS = 10.0
START_SECONDS = 60.0  # for the start of the process on a busy machine, which says nothing about the patterns
MAX_PATTERN_CHARACTERS = 50_000
MAX_PLAIN_CHARACTERS = 1000  # of a text that is matched without the process
PLAIN = re.compile(r"(?:[\w.\-/ ]|\\[^\w\s])*")  # no repetition, group or alternative: matched in linear time
METHODS = ("fullmatch", "match", "search", "last")

CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
def answer(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
answer(None)
patterns, method = json.loads(sys.stdin.readline())
compiled = []
for index, pattern in enumerate(patterns):
    try:
        compiled.append(re.compile(pattern))
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        answer([index, str(error) or type(error).__name__])
        sys.exit()
answer(None)
def last(pattern, text):
    found = None
    for found in pattern.finditer(text):
        pass
    return None if found is None else (found[1] if pattern.groups else found[0]) or ""
for line in sys.stdin:
    results = []
    for text in json.loads(line):
        if method == "last":
            results.append(last(compiled[0], text))
        else:
            fits = (number for number, pattern in enumerate(compiled) if getattr(pattern, method)(text))
            results.append(next(fits, None))
    answer(results)
"""


class FilePatterns:
    """Patterns of one key of a file, in order. `method` is that of `re.Pattern`, or `last` for the last match."""

    def __init__(self, where: str, patterns: Sequence[str], method: str = "fullmatch", template: str = "{}") -> None:
        """`where` names file and key; every pattern replaces the braces of `template`. An invalid one is refused."""
        assert method in METHODS
        self.where, self._patterns, self._method, self._template = where, tuple(patterns), method, template
        self._answers: dict[str, Any] = {}
        self._seconds = FILE_SECONDS
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        for pattern in patterns:
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                given = f"a regular expression of {len(pattern)} characters"
                raise InputError(where, given, f"at most {MAX_PATTERN_CHARACTERS}", "list the names instead")
        self._plain = method != "last" and all(PLAIN.fullmatch(pattern) for pattern in patterns)
        spelled = [template.replace("{}", pattern) for pattern in self._patterns]
        if self._plain:
            self._compiled = [re.compile(pattern) for pattern in spelled]
        else:
            self._spelled = spelled
            with self._lock:
                self._start()

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
        """Ask for many texts at once, because an answer of the process takes a hundred microseconds."""
        if self._plain:
            texts = [text for text in texts if len(text) > MAX_PLAIN_CHARACTERS]
        with self._lock:
            unknown = [text for text in dict.fromkeys(texts) if text not in self._answers]
            for first in range(0, len(unknown), 1000):
                block = unknown[first : first + 1000]
                self._answers.update(zip(block, self._ask(block), strict=True))

    def close(self) -> None:
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _start(self) -> None:
        if self._plain:
            self._spelled = [pattern.pattern for pattern in self._compiled]
        command = [sys.executable, "-I", "-S", "-c", CHILD]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._wait(START_SECONDS)
        invalid = self._exchange([self._spelled, self._method])
        if invalid is not None:
            index, reason = invalid
            self._stop()
            given = f"{short(self._patterns[index])}, which is no regular expression ({reason})"
            raise InputError(self.where, given, "a regular expression", "quote special characters with a backslash")

    def _ask(self, texts: list[str]) -> Any:
        if self._child is None:
            self._start()
        return self._exchange(texts)

    def _exchange(self, message: Any) -> Any:
        """One line to the process and one back, within the time that is left."""
        assert self._child is not None and self._child.stdin is not None
        start = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it ran out of memory
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        answer = self._wait(min(MATCH_SECONDS, self._seconds))
        self._seconds -= time.monotonic() - start
        return answer

    def _wait(self, seconds: float) -> Any:
        assert self._child is not None and self._child.stdout is not None
        poll = select.poll()  # unlike select, for any number of open files
        poll.register(self._child.stdout, select.POLLIN)
        answer = self._child.stdout.readline() if seconds > 0 and poll.poll(1000 * seconds) else ""
        if not answer:
            self._stop()
            shown = short(self._patterns[0] if len(self._patterns) == 1 else list(self._patterns))
            given = f"the regular expression {shown}, which takes more than {MATCH_SECONDS:g} s or 1 GiB"
            raise InputError(self.where, given, "one that is matched at once", "list the names instead")
        return json.loads(answer)

    def _stop(self) -> None:
        child = getattr(self, "_child", None)
        if child is not None:
            self._child = None
            child.kill()
            for stream in (child.stdin, child.stdout):
                stream.close()
            child.wait()
