"""Clients of our server for `serve.py`: one steps the engine in this process, one talks HTTP to a server on loopback.

Both answer `begin` with the moments at which each token of each answer came. Seconds in the experts' modules are taken
on the thread that computes; where the rest of the model is on a GPU, launching its work is in them as well.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ktransformers.serve.speed import StreamingClient

DEPTH = 16  # tokens before an answer


class Client(Protocol):
    def begin(self, prompts: list[list[int]], new: int, names: list[str | None]) -> list[list[float]]:
        """Answers of `new` tokens each to all prompts at once; when each token of each came, from the start on."""

    def expert_seconds(self) -> float:
        """Spent in experts since the last question."""


class ExpertClock:
    """Seconds in the experts' modules, on the thread that computes."""

    def __init__(self, model: Any) -> None:
        from ktransformers.experts.contract import expert_modules

        self._seconds, self._begun = 0.0, 0.0
        for module in expert_modules(model).values():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self._seconds += time.perf_counter() - self._begun

    def take(self) -> float:
        taken, self._seconds = self._seconds, 0.0
        return taken


class InProcess:
    """The engine, stepped by hand."""

    def __init__(self, service: Any, clock: bool) -> None:
        self._service = service
        self.model = service.engine.forward.model
        self._clock = ExpertClock(self.model) if clock else None

    def begin(self, prompts: list[list[int]], new: int, names: list[str | None]) -> list[list[float]]:
        from ktransformers.serve.sampling.sampling import Sampling
        from ktransformers.serve.scheduler.sequence import Event, GenerationRequest, Sequence

        engine, registry = self._service.engine, self._service.registry
        times: list[list[float]] = [[] for _ in prompts]
        ended: list[Event] = []

        def ear(place: int) -> Callable[[Event], None]:
            def hear(event: Event) -> None:
                times[place].append(time.perf_counter() - begun)
                if event.finish is not None:
                    ended.append(event)

            return hear

        adapters = [registry.find(name or registry.served) for name in names]
        asks = [
            GenerationRequest(tuple(prompt), new, Sampling(temperature=0), adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        begun = time.perf_counter()
        engine.submit([Sequence(ask, self._service.tokenizer, ear(place)) for place, ask in enumerate(asks)])
        while len(ended) < len(prompts):
            engine.step()
        if any(event.error for event in ended):
            raise SystemExit(next(event.error for event in ended if event.error))
        return times

    def expert_seconds(self) -> float:
        return self._clock.take() if self._clock else 0.0


class OverHttp:
    """Streams from a server on this machine."""

    def __init__(self, port: int, model: Any) -> None:
        self._port, self._clock = port, ExpertClock(model)

    def begin(self, prompts: list[list[int]], new: int, names: list[str | None]) -> list[list[float]]:
        begun = time.perf_counter()
        return asyncio.run(self._ask(prompts, new, names, begun))

    async def _ask(
        self, prompts: list[list[int]], new: int, names: list[str | None], begun: float
    ) -> list[list[float]]:
        times = await StreamingClient(self._port, "base", 0).ask_all(prompts, new, names)
        return [[at - begun for at in one] for one in times]

    def expert_seconds(self) -> float:
        return self._clock.take()


@contextmanager
def open_ours(
    args: argparse.Namespace, model: Path, adapters: dict[str, Path], experts: Path | None = None, *, clock: bool = True
) -> Iterator[Client]:
    """`experts`: where they come from if not from the model's own directory. `clock`: seconds in experts are taken in
    this process, by hooks, which decoder layers then call."""
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.loading import open_service
    from ktransformers.serve.target import Target

    room = max(args.prompt, DEPTH) + args.new + 2
    launch = Launch(
        str(model),
        lora_paths=tuple((name, str(folder)) for name, folder in adapters.items()),
        max_running_requests=max(args.streams),
        max_queued_requests=max(128, *args.streams),
        max_total_tokens=2 * max(args.streams) * (room + 64),
        context_length=room,
        chunked_prefill_size=args.chunk,
        threads=args.threads or None,
        device=args.device,
        dtype=args.dtype,
        experts=experts,
    )
    target = Target(model, name="base")
    if args.engine:
        yield InProcess(open_service(launch, target, lambda line: print(f"    {line}", flush=True)), clock)
        return
    from ktransformers.evaluate.prove.server import start_server

    with start_server(launch, target, lambda line: print(f"    {line}", flush=True)) as (url, service):
        yield OverHttp(int(url.rpartition(":")[2]), service.engine.forward.model)
