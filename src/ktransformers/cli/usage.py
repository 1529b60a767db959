"""The error of a command line that typer cannot parse."""

from __future__ import annotations

from typing import Any

import typer

UsageError: Any = typer.BadParameter.__base__  # of click, which typer carries inside of itself since 0.26
