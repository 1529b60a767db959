"""Regular expressions of a downloaded tokenizer: those that could take forever on some text are tried before use.

tokenizers matches with Oniguruma, which backtracks. It gives up after ten million steps of one match and ends with a
panic, a `BaseException`; many matches just below that limit take minutes. Released tokenizers repeat single characters
and classes only. A pattern that repeats a group with a repetition or alternatives in it, or that has many repetitions
in a row, is tried in a child process on texts of every kind of character, within a deadline; one that fails is refused.
That such a trial passes proves nothing about other texts: `kt serve` therefore tokenises in processes with a deadline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short
from ktransformers.ground.sandbox import GIB, SandboxError, run_sandboxed

COMPONENTS = ("normalizer", "pre_tokenizer", "decoder")
MAX_REPETITIONS = 3  # one after the other: released patterns have two
UNBOUNDED_FROM = 16  # {1,16} is counted like +
PROBE_SECONDS, PROBE_BYTES = 20.0, 8 * GIB
QUANTIFIER = re.compile(r"(?:[*+]|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}|\?)(?P<suffix>[?+]?)")

PROGRAM = r"""
import os
def answer(request):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_str(request["tokenizer"])
    kinds = ["a", "Z", "x", "0", " ", "\n", "\t", ".", "!", "'", "_", "/", "\u00e9", "\u4e2d", "\u0301", "\U0001f600"]
    kinds += sorted(set(request["characters"]) - set(kinds))[:48]
    texts = [kind * 400 + end for kind in kinds for end in ("", "\x01", "b")]
    texts += [(one + other) * 150 + "\x01" for one in kinds[:16] for other in kinds[:16] if one != other]
    for text in texts:
        tokenizer.decode(tokenizer.encode(text).ids)
"""


@dataclass
class _Group:
    repetitions: int = 0  # of the present branch
    most_repetitions: int = 0  # of any branch
    alternatives: bool = False
    atomic: bool = False

    def branch_ends(self) -> None:
        self.most_repetitions = max(self.most_repetitions, self.repetitions)
        self.repetitions = 0


def may_backtrack(pattern: str) -> bool:
    """Whether a group with a repetition or alternatives in it is repeated, or many repetitions follow each other."""
    groups, at, last = [_Group()], 0, None  # `last`: the group that ended just before
    while at < len(pattern):
        character, ended, last = pattern[at], last, None
        quantifier = QUANTIFIER.match(pattern, at)
        if character == "\\":
            at += 2
            if pattern[at - 1 : at] in ("p", "P") and pattern[at : at + 1] == "{":
                at = pattern.find("}", at) + 1 or len(pattern)
        elif character == "[":
            at = _class_end(pattern, at)
        elif character == "(":
            groups.append(_Group(atomic=pattern.startswith("(?>", at)))
            at += 1 + (pattern[at + 1 : at + 2] == "?")  # which is no quantifier here
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            last.branch_ends()
            if last.atomic:
                last = _Group()
            groups[-1].repetitions += last.most_repetitions
            at += 1
        elif character == "|":
            groups[-1].branch_ends()
            groups[-1].alternatives = True
            at += 1
        elif quantifier is not None and at:
            at = quantifier.end()
            if _is_unbounded(quantifier):
                groups[-1].repetitions += 1
                if ended is not None and (ended.most_repetitions or ended.alternatives):
                    return True
        else:
            at += 1
        if groups[-1].repetitions > MAX_REPETITIONS:
            return True
    return False


def _is_unbounded(quantifier: re.Match[str]) -> bool:
    if quantifier["suffix"] == "+":  # possessive: it gives nothing back
        return False
    if quantifier[0][0] != "{":
        return quantifier[0][0] in "*+"
    most = quantifier["most"] if quantifier["comma"] else quantifier["least"]
    return bool(quantifier["comma"]) and (not most or int(most) >= UNBOUNDED_FROM)


def _class_end(pattern: str, at: int) -> int:
    """Behind the bracket that ends the class; classes may be nested, and a bracket that comes first is a character."""
    depth, at = 1, at + 1
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)
    while at < len(pattern) and depth:
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] in "[]":
            depth += 1 if pattern[at] == "[" else -1
        at += 1
    return at


def patterns_of(tokenizer: Any) -> Iterator[str]:
    """Regular expressions of a tokenizer's components."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in COMPONENTS:
        component = getattr(backend, name, None)
        try:
            state = json.loads(component.__getstate__()) if component is not None else None
        except Exception:  # a component in Python has no state
            continue
        yield from _regexes(state)


def _regexes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        for part in value.values():
            yield from _regexes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _regexes(part)


def check_patterns(tokenizer: Any, directory: Path) -> None:
    """Raises InputError for a tokenizer with a pattern that takes too long on a short text."""
    suspected = [pattern for pattern in patterns_of(tokenizer) if may_backtrack(pattern)]
    if not suspected:
        return
    request = {"tokenizer": tokenizer.backend_tokenizer.to_str(), "characters": "".join(suspected)[:4000]}
    try:
        run_sandboxed(PROGRAM, request, seconds=PROBE_SECONDS, memory=PROBE_BYTES, packages=True)
    except SandboxError as error:
        given = f"the pattern {short(suspected[0])}, which {error}"
        expected = "repetitions of characters and classes"
        raise InputError(
            str(directory / "tokenizer.json"), given, expected, "take the tokenizer of the release"
        ) from error
