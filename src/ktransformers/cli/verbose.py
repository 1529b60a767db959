"""The option `-v` of commands that read an adapter: what the package logs, and so one line for each tensor of it."""

from __future__ import annotations

from typing import Annotated

import typer


def show_log(verbose: bool) -> bool:
    if verbose:
        import logging

        from ktransformers.ground.log import show

        show(logging.INFO)
    return verbose


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also one line for each tensor of the adapter.", callback=show_log)
]
