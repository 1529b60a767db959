"""Worker processes that prepare requests (`serve/http/prepare.py`), so that no body occupies the event loop: parsing,
templates and tokenising hold the GIL, which threads would share with the loop.

A worker has one request at a time and a deadline; one that passes it, dies or grows too large is replaced, and only
its request is refused. Bodies over `LARGE_BODY_BYTES` never occupy the last worker, so that short requests do not wait
behind them. Neither do grammars, which are compiled once for all requests that have them: in a worker, to see that
they keep their limits, and then here, on a thread of their own. The number of requests that wait is bounded as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import KTError
from ktransformers.ground.log import logger
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.grammar_source import GrammarCompiler, GrammarSource
from ktransformers.serve.http.prepare import ModelTemplate, PreparedRequest, PrepareSettings
from ktransformers.serve.http.prepare_worker import (
    GRAMMAR,
    LENGTHS,
    RECALL,
    answers_frame,
    error_of,
    frame_head,
    prepared_of,
    settings_document,
    templates_document,
)
from ktransformers.serve.http.sampled_answers import Recall, recall_nothing

LOG = logger(__name__)
LARGE_BODY_BYTES = 2**16
MAX_PENDING = 256  # requests that wait for a worker
FOLDER_PREFIX = "kt-tokenizer-"
NEW_SECONDS = 60.0
START_SECONDS = 120.0
RESTART_SECONDS = 1.0  # before a worker that could not be started is tried again
REMOTE_MODULES = "transformers_modules"  # where transformers puts code that a release brings
PROBE = "Hello, world! 你好 1234 <tool_call>\n"


class WorkerFailed(KTError):
    """A worker ended without an answer."""


class PrepareWorker:
    """One process and its two pipes."""

    def __init__(
        self,
        directory: str,
        settings: PrepareSettings,
        probe_tokens: list[int],
        recall: Recall,
        *,
        runs_code: bool = False,
    ) -> None:
        self._directory, self._settings, self._probe_tokens = directory, settings, probe_tokens
        self._recall, self._runs_code = recall, runs_code
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-P", "-m", "ktransformers.serve.http.prepare_worker", self._directory]
        command += ["--trust-remote-code"] if self._runs_code else []
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
        first = {"settings": settings_document(self._settings), "probe": PROBE}
        async with asyncio.timeout(START_SECONDS):
            answer, _ = await self._exchange(first, b"")
        if answer["tokens"] != self._probe_tokens:
            raise KTError("a worker process tokenises another way than the server: the tokenizer cannot be saved whole")

    async def ask(
        self, kind: str, body: bytes | bytearray, templates: Mapping[str, ModelTemplate]
    ) -> tuple[dict[str, Any], bytes]:
        answer, block = await self._exchange({"kind": kind, "templates": templates_document(templates)}, body)
        if RECALL in answer:
            return await self._exchange(*answers_frame(self._recall(answer[RECALL])))
        return answer, block

    async def _exchange(self, document: dict[str, Any], body: bytes | bytearray) -> tuple[dict[str, Any], bytes]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(frame_head(document, len(body)))
            self._process.stdin.write(body)
            await self._process.stdin.drain()
            lengths = await self._process.stdout.readexactly(LENGTHS.size)
            document_bytes, block_bytes = LENGTHS.unpack(lengths)
            answer = json.loads(await self._process.stdout.readexactly(document_bytes))
            return answer, await self._process.stdout.readexactly(block_bytes)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerFailed("the worker ended without an answer") from error

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def stop(self) -> None:
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Raises OSError if another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _tokenizer_folder() -> Iterator[str]:
    """A temporary folder that is locked while it is used. Those of killed servers have no lock and are removed, new
    ones apart, which may not be locked yet."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):
            if time.time() - left.stat().st_mtime > NEW_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as directory, _locked(directory):
        yield directory


class PreparePool:
    def __init__(
        self,
        tokenizer: Any,
        settings: PrepareSettings,
        compiler: GrammarCompiler,
        *,
        workers: int = 2,
        seconds: float = 10.0,
        recall: Recall = recall_nothing,
    ) -> None:
        self._tokenizer, self._settings, self._count, self._seconds = tokenizer, settings, workers, seconds
        self._compiler, self._recall = compiler, recall
        self._compiling: dict[GrammarSource, asyncio.Task[None]] = {}
        self._compile_thread = ThreadPoolExecutor(1, "kt-grammar")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: asyncio.Queue[PrepareWorker] = asyncio.Queue()
        self._large = asyncio.Semaphore(max(1, workers - 1))
        self._workers: list[PrepareWorker] = []
        self._pending = 0
        self._stopped = False
        self.restarts = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start all workers, and end them with the block. The tokenizer as it is in memory is theirs, saved to a
        temporary directory."""
        with _tokenizer_folder() as directory:
            await asyncio.to_thread(self._tokenizer.save_pretrained, directory)
            probe_tokens = list(self._tokenizer(PROBE)["input_ids"])
            runs_code = type(self._tokenizer).__module__.startswith(REMOTE_MODULES)  # it was trusted when it was read
            self._workers = [
                PrepareWorker(directory, self._settings, probe_tokens, self._recall, runs_code=runs_code)
                for _ in range(self._count)
            ]
            try:
                await asyncio.gather(*(worker.start() for worker in self._workers))
                for worker in self._workers:
                    self._idle.put_nowait(worker)
                yield
            finally:
                self._stopped = True
                self._compile_thread.shutdown(wait=False, cancel_futures=True)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def prepare(
        self, kind: str, body: bytes | bytearray, templates: Mapping[str, ModelTemplate]
    ) -> PreparedRequest:
        """Raises ApiError: of the request, or 429 if too many wait."""
        if self._pending >= MAX_PENDING:
            raise ApiError(429, f"the server is full: {MAX_PENDING} requests are being prepared", code="queue_full")
        self._pending += 1
        try:
            if len(body) <= LARGE_BODY_BYTES:
                prepared = await self._prepare(kind, body, templates)
            else:
                async with self._large:
                    prepared = await self._prepare(kind, body, templates)
            if prepared.grammar is not None and prepared.grammar not in self._compiler:
                await self._compile(prepared.grammar)
            return prepared
        finally:
            self._pending -= 1

    async def _compile(self, source: GrammarSource) -> None:
        task = self._compiling.get(source)
        if task is None:
            task = self._compiling[source] = self._start(self._compile_within_limits(source))
            task.add_done_callback(lambda _: self._compiling.pop(source))
        await asyncio.shield(task)

    async def _compile_within_limits(self, source: GrammarSource) -> None:
        async with self._large:
            answer, _ = await self._answer(GRAMMAR, json.dumps(source).encode(), {})
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._compile_thread, self._compiler.compile, source, answer["bytes"])

    async def _prepare(
        self, kind: str, body: bytes | bytearray, templates: Mapping[str, ModelTemplate]
    ) -> PreparedRequest:
        answer, block = await self._answer(kind, body, templates)
        if len(block) <= LARGE_BODY_BYTES:
            return prepared_of(answer["prepared"], block)
        return await asyncio.to_thread(prepared_of, answer["prepared"], block)

    async def _answer(
        self, kind: str, body: bytes | bytearray, templates: Mapping[str, ModelTemplate]
    ) -> tuple[dict[str, Any], bytes]:
        """A worker's answer; raises ApiError if it is an error."""
        worker = await self._idle.get()
        while not worker.alive:  # it was killed while idle
            self._start(self._restart(worker))
            worker = await self._idle.get()
        # A task of its own: when the client disconnects, the worker still has to be read from before its next request.
        task = self._start(self._ask(worker, kind, body, templates))
        answer, block = await asyncio.shield(task)
        if "error" in answer:
            if answer["unexpected"]:
                LOG.warning("a request could not be prepared:\n%s", answer["unexpected"])
            raise error_of(answer["error"])
        return answer, block

    async def _ask(
        self, worker: PrepareWorker, kind: str, body: bytes | bytearray, templates: Mapping[str, ModelTemplate]
    ) -> tuple[dict[str, Any], bytes]:
        usable = False
        try:
            async with asyncio.timeout(self._seconds):
                answer = await worker.ask(kind, body, templates)
            usable = not answer[0]["last"]
            return answer
        except TimeoutError as error:
            message = f"the request took longer than {self._seconds:g} seconds to prepare (--prepare-timeout)"
            raise ApiError(400, message, code="prepare_timeout") from error
        except WorkerFailed as error:
            raise ApiError(400, "the request takes more memory than a worker has, or ended it") from error
        finally:
            if usable:
                self._idle.put_nowait(worker)
            elif not self._stopped:
                self._start(self._restart(worker))

    async def _restart(self, worker: PrepareWorker) -> None:
        self.restarts += 1
        while not self._stopped:
            try:
                await worker.stop()
                await worker.start()
                self._idle.put_nowait(worker)
                return
            except (KTError, OSError, TimeoutError) as error:
                LOG.error("a worker process cannot be started: %s", error)
                await asyncio.sleep(RESTART_SECONDS)

    def _start(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where the client has disconnected and the request awaits nothing any more
