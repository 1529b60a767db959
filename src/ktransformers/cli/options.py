"""Options that several verbs have, and `print_result`, which prints a result with or without `--json`, and
`with_options`, which makes the options of a verb of a dataclass.

`--quiet` is added to every registered command in one place, so that no verb can lack it. `--no-verify` sets KT_VERIFY,
so that every model of the command is loaded so, also in processes that it starts.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

from ktransformers.cli.progress import set_quiet

UsageError: Any = typer.BadParameter.__base__  # of click, which typer carries inside of itself since 0.26


T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result and errors, no progress and no notes.")]


def print_result(document: Any, lines: Iterable[str], as_json: bool) -> None:
    """Prints the result of a verb: with `--json` the document, else the lines."""
    print(json.dumps(document, indent=2) if as_json else "\n".join(lines))


def show_log(verbose: bool) -> bool:
    if verbose:
        import logging

        from ktransformers.ground.log import show

        show(logging.INFO)
    return verbose


# What the package logs, and so one line for each tensor of an adapter.
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also one line for each tensor of the adapter.", callback=show_log)
]


def skip_checksums(no_verify: bool) -> bool:
    if no_verify:
        os.environ["KT_VERIFY"] = "0"
    return no_verify


NoVerify = Annotated[
    bool,
    typer.Option(
        "--no-verify", help="Do not compare packed experts with their checksums on first use.", callback=skip_checksums
    ),
]


def _with_parameters(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """The function with parameters that typer reads in place of its own."""
    described: Any = function
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def with_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """A command with one option for each field of the dataclass that typer can read; the function gets an object."""
    hints = typing.get_type_hints(options, include_extras=True)
    described = [item for item in dataclasses.fields(options) if hasattr(hints[item.name], "__metadata__")]  # type: ignore[arg-type]
    parameters = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name])
        for item in described
    ]

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(options(**values))

        return _with_parameters(command, parameters)

    return decorate


def with_quiet(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one more option."""

    @functools.wraps(command)
    def quietable(*args: Any, quiet: bool, **values: Any) -> Any:
        set_quiet(quiet)
        return command(*args, **values)

    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    return _with_parameters(quietable, [*inspect.signature(command, eval_str=True).parameters.values(), option])


def add_quiet(app: typer.Typer) -> None:
    """Adds the option to all commands of the app and of its groups."""
    for info in app.registered_commands:
        if info.callback is not None:
            info.callback = with_quiet(info.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_quiet(group.typer_instance)
