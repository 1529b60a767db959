"""`kt version`: the version, on one line."""

from __future__ import annotations

import ktransformers


def version() -> None:
    """Print the version."""
    print(f"ktransformers {ktransformers.__version__}")
