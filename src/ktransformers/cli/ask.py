"""Questions on a terminal, asked only there.

Without a terminal (a pipe, a job, --json) what is missing is an error that names it, so no script waits for input.
Questions go to stderr, so that stdout has only what the command prints.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import typer

from ktransformers.ground.errors import InputError, MissingArgumentError

MIN_NOTE_WIDTH = 12  # characters; a shorter rest of a note says nothing


@dataclass(frozen=True)
class MenuChoice:
    value: str
    note: str = ""


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def tell(line: str) -> None:
    typer.echo(line, err=True)


def text(question: str, default: str | None = None) -> str:
    """An answer that is not empty."""
    while True:
        word = str(typer.prompt(question, default=default, err=True)).strip()
        if word:
            return word


def choice_lines(choices: Sequence[MenuChoice], columns: int) -> list[str]:
    """Numbered choices; a note is cut at the edge of the terminal, a value never is."""
    width = max((len(choice.value) for choice in choices), default=0)
    lines = []
    for number, choice in enumerate(choices, 1):
        line = f"{number:>3}  {choice.value:<{width}}"
        free = columns - len(line) - 2
        note = choice.note if len(choice.note) <= free else f"{choice.note[: free - 3].rstrip()}..."
        lines.append(f"{line}  {note}".rstrip() if free >= MIN_NOTE_WIDTH else line.rstrip())
    return lines


def choose(
    question: str,
    choices: Sequence[MenuChoice],
    default: str | None = None,
    *,
    other: Callable[[str], str | None] | None = None,
) -> str:
    """One of `choices`, by number or by name. `other`: what is wrong with another answer, None if it is good; without
    it only choices are."""
    for line in choice_lines(choices, shutil.get_terminal_size().columns):
        tell(line)
    values = [choice.value for choice in choices]
    while True:
        word = text(question, default)
        if word.isdecimal() and 1 <= int(word) <= len(values):
            return values[int(word) - 1]
        if word in values:
            return word
        wrong = f"a number from 1 to {len(values)}, or a name" if other is None else other(word)
        if wrong is None:
            return word
        tell(wrong)


def for_text(name: str, given: str | None, question: str, expected: str, quiet: bool = False) -> str:
    """`given`, or the answer to `question`."""
    if given:
        return given
    if quiet or not can_ask():
        raise MissingArgumentError(name, expected)
    return text(question)


def for_choice(name: str, given: str | None, choices: Sequence[str], expected: str, quiet: bool = False) -> str:
    """`given`, or one of `choices`, by number or by name."""
    if given:
        return given
    if quiet or not can_ask() or not choices:
        raise MissingArgumentError(name, expected)
    return choose(name, [MenuChoice(choice) for choice in choices], default="1" if len(choices) == 1 else None)


def for_consent(question: str, yes: bool, quiet: bool = False) -> None:
    """Return only if the user agreed, by --yes or on the terminal."""
    if yes:
        return
    if quiet or not can_ask():
        raise InputError("yes", "nothing", "--yes", "the command deletes files, and there is no terminal to confirm it")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def for_model(given: str | None, quiet: bool = False) -> str:
    """`given`, or one of the registered models."""
    if given:
        return given
    from ktransformers.ground.model_registry import all_models

    names = [entry.name for entry in all_models()]
    return for_choice("MODEL", None, names, "a model: a folder, a name of `kt model list`, or a hub id", quiet)
