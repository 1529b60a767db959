"""Names of adapters under concurrent requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from tests.support.serving import EngineHarness


def test_concurrent_loads_of_one_name_load_once(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    """The second load is refused, although the name was free when it started."""
    from ktransformers.serve.http.registry import Registry

    registry = Registry("tiny", harness.lora_modules, str(harness.directory), lambda owner: None)
    barrier = threading.Barrier(2, timeout=60)
    opened, refused = registry._open, []

    def together(name: str, source: str | Path) -> Any:
        created = opened(name, source)
        barrier.wait()
        return created

    def load() -> None:
        try:
            registry.load("one", adapters["one"])
        except InputError as error:
            refused.append(str(error))

    registry._open = together  # type: ignore[method-assign]
    both = [threading.Thread(target=load) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert list(registry.loaded) == ["one"] and len(refused) == 1 and "not loaded yet" in refused[0]
