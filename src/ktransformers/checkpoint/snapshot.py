"""A model of the hub in huggingface_hub's cache, downloaded with progress in our style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktransformers.ground import progress


def bar_class(name: str) -> Any:
    """A tqdm that draws nothing and reports the bytes of a download. huggingface_hub counts them in two bars, received
    and written, of which it uses one or both: the larger counts. Bars of files are not shown."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    most = {"done": 0.0, "total": 0.0}

    class Reported(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            self.counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, count: float | None = 1) -> None:
            self.n += count or 0
            if self.counts_bytes and self.total:
                most["done"], most["total"] = max(most["done"], self.n), max(most["total"], self.total)
                progress.report(f"Downloading {name}", min(most["done"], most["total"]), most["total"], "bytes")

    return Reported


def fetch_snapshot(name: str, **options: Any) -> Path:
    """The directory of a hub id; `options` of `snapshot_download`."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, tqdm_class=bar_class(name.rpartition("/")[2]), **options))
