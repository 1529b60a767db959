"""Prompts for required arguments that are missing, on a terminal only.

Without a terminal (a pipe, a job, --json) the same argument is an error that names it, so no script waits for input.
Prompts go to stderr, so that stdout has only what the command prints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from ktransformers.errors import InputError


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def for_text(name: str, given: str | None, question: str, expected: str, quiet: bool = False) -> str:
    """`given`, or the answer to `question`."""
    if given:
        return given
    if quiet or not can_ask():
        raise InputError(name, "nothing", expected)
    return str(typer.prompt(question, err=True)).strip()


def for_choice(name: str, given: str | None, choices: Sequence[str], expected: str, quiet: bool = False) -> str:
    """`given`, or one of `choices`, by number or by name."""
    if given:
        return given
    if quiet or not can_ask() or not choices:
        raise InputError(name, "nothing", expected)
    for number, choice in enumerate(choices, 1):
        typer.echo(f"{number:>3}  {choice}", err=True)
    while True:
        word = str(typer.prompt(name, default="1" if len(choices) == 1 else None, err=True)).strip()
        if word.isdigit() and 1 <= int(word) <= len(choices):
            return choices[int(word) - 1]
        if word in choices:
            return word
        typer.echo(f"a number from 1 to {len(choices)}, or a name", err=True)


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
    from ktransformers.model_registry import all_models

    names = [entry.name for entry in all_models()]
    return for_choice("MODEL", None, names, "a model: a folder, a name of `kt model list`, or a hub id", quiet)
