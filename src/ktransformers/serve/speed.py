"""Prompt and decode speed of a server over HTTP, as a client on kept-alive connections sees it.

Prompts are random tokens and never repeat, so that no cached prefix is found; no stop token ends an answer, and each
token is an event of its own. A cell asks for one token behind each prompt, which gives the rate of prompts and the time
to the first token, and then for the whole answers: the server has the prompts in its cache, so streams that began with
long prompts decode together. Rates are those of all streams together.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ktransformers.ground.errors import KTError

FEW_TOKENS = 4  # that a warm-up decodes
LONG_SECONDS = 20.0  # of a round: its cell is not warmed up, nor repeated


@dataclass(frozen=True)
class SpeedCell:
    prompt: int  # tokens
    new: int
    streams: int

    @property
    def tokens(self) -> int:
        """That the KV cache holds, with a block of slack for each stream."""
        return self.streams * (self.prompt + self.new + 64)


@dataclass(frozen=True)
class SpeedSample:
    prompt_rate: float  # tokens/s, until the last stream has its first token
    first_token: float  # seconds, the median of the streams
    decode_rate: float  # tokens/s, while all streams decode


class StreamingClient:
    """Streams of a server on this machine, each on a connection that is kept for the next request."""

    def __init__(self, port: int, model: str, vocabulary: int, seed: int | None = None) -> None:
        self._port, self._model, self._vocabulary, self._random = port, model, vocabulary, random.Random(seed)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def draw(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(tokens)]

    async def ask(self, prompt: Sequence[int], new: int, times: list[float], model: str | None = None) -> None:
        """Append the moment at which each token came."""
        while self._idle and self._idle[-1][0].at_eof():  # idle for too long
            self._idle.pop()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        body = {"model": model or self._model, "prompt": list(prompt), "max_tokens": new, "temperature": 0}
        text = json.dumps(body | {"stream": True, "ignore_eos": True, "logprobs": 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        try:
            writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
            status = await reader.readline()
            if b" 200 " not in status:
                raise KTError(f"the server answered {status.decode().strip()}: {(await reader.read(2000)).decode()}")
            while (line := await reader.readline()) != b"0\r\n":
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                elif not line:
                    raise KTError("the server closed a connection; its log has the reason")
            await reader.readline()
        except (asyncio.CancelledError, KTError):
            writer.close()
            raise
        self._idle.append((reader, writer))

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], new: int, models: Sequence[str | None] | None = None
    ) -> list[list[float]]:
        """All at once; when each token of each answer came."""
        times: list[list[float]] = [[] for _ in prompts]
        streams = zip(prompts, times, models or [None] * len(prompts), strict=True)
        await asyncio.gather(*(self.ask(prompt, new, arrivals, model) for prompt, arrivals, model in streams))
        if any(len(one) < new for one in times):
            raise KTError(f"the server ended an answer after {min(map(len, times))} of {new} tokens; its log has why")
        return times

    async def sample(self, cell: SpeedCell, new: int) -> SpeedSample:
        prompts = [self.draw(cell.prompt) for _ in range(cell.streams)]
        begun = time.perf_counter()
        firsts = [one[0] - begun for one in await self.ask_all(prompts, 1)]
        rate = cell.streams * cell.prompt / max(firsts)
        return SpeedSample(rate, statistics.median(firsts), decode_rate(await self.ask_all(prompts, new + 1)))

    async def measure(self, cell: SpeedCell, repetitions: int) -> list[SpeedSample]:
        """Rounds behind a warm-up round, which captures graphs and fills pools. Of a cell that takes long the first
        round is the only one."""
        begun = time.perf_counter()
        first = await self.sample(cell, min(FEW_TOKENS, cell.new))
        if time.perf_counter() - begun < LONG_SECONDS:
            return [await self.sample(cell, cell.new) for _ in range(repetitions)]
        return [SpeedSample(first.prompt_rate, first.first_token, (await self.sample(cell, cell.new)).decode_rate)]


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens/s of all answers, from the moment when each of them had begun until the first of them ended."""
    begun, ended = max(one[0] for one in times), min(one[-1] for one in times)
    if ended <= begun:  # prompts took longer than answers: what came after the last of them
        ended = max(one[-1] for one in times)
    return sum(begun < at <= ended for one in times for at in one) / (ended - begun)
