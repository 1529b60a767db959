"""The option `--quiet` of every verb: results and errors alone, no progress and no notes.

It is added to the registered commands in one place, so that no verb can lack it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ktransformers.cli.progress import set_quiet

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result and errors, no progress and no notes.")]


def with_quiet(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with one more option."""

    @functools.wraps(command)
    def quietable(*args: Any, quiet: bool, **options: Any) -> Any:
        set_quiet(quiet)
        return command(*args, **options)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    parameters = [*signature.parameters.values(), option]
    described: Any = quietable
    described.__signature__ = signature.replace(parameters=parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return quietable


def add_quiet(app: typer.Typer) -> None:
    """Adds the option to all commands of the app and of its groups."""
    for info in app.registered_commands:
        if info.callback is not None:
            info.callback = with_quiet(info.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_quiet(group.typer_instance)
