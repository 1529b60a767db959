"""HTTP routes: OpenAI's paths, adapters over HTTP, health, metrics and one page; every error in OpenAI's envelope.

A request passes through `RequestBoundary` (its id, access, errors), `BodyReader` (bytes, within limits) and a worker
process of `PreparePool` (everything that may be slow), then becomes sequences of the engine. The event loop only moves
bytes. A client that disconnects is noticed between tokens of a stream, and within a quarter of a second otherwise.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request  # type: ignore[import-not-found,unused-ignore]
from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found,unused-ignore]
from fastapi.middleware.cors import CORSMiddleware  # type: ignore[import-not-found,unused-ignore]
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse  # type: ignore[import-not-found,unused-ignore]
from pydantic import BaseModel

import ktransformers
from ktransformers.ground.errors import KTError
from ktransformers.ground.log import logger
from ktransformers.serve.http import metrics, openapi
from ktransformers.serve.http.answers import (
    SSE_DONE,
    ChatCompletion,
    Completion,
    ResponseStream,
    encode_json,
    sse_event,
)
from ktransformers.serve.http.body import BodyReader
from ktransformers.serve.http.boundary import AccessRules, RequestBoundary, api_error
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.page import page_document, page_headers
from ktransformers.serve.http.prepare import PreparedRequest, parse_body
from ktransformers.serve.http.protocol import ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter
from ktransformers.serve.http.registry import UnknownModel
from ktransformers.serve.http.service import Service
from ktransformers.serve.http.training import TrainingRuns
from ktransformers.serve.scheduler.engine import Unavailable

LOG = logger(__name__)
DISCONNECT_POLL_SECONDS = 0.25  # between checks whether the client is still connected
MAX_WAITING_LOADS = 32  # requests to load an adapter
MAX_ADAPTER_BODY_BYTES = 2**16  # of a request that loads or unloads an adapter; parsed on the event loop
COMPLETIONS: dict[str, type[ChatCompletion] | type[Completion]] = {"chat": ChatCompletion, "completion": Completion}


class RequestCounter:
    """ASGI middleware that counts responses by path and status. It wraps only `send`, so streams are not buffered."""

    def __init__(self, app: Any, counts: Counter[tuple[str, int]], paths: set[str]) -> None:
        self._app, self._counts, self._paths = app, counts, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._counts[(path, message["status"])] += 1
            await send(message)

        await self._app(scope, receive, counted)


class CancellingStream(StreamingResponse):  # type: ignore[misc,unused-ignore]
    """A stream whose sequences end with it, also if the client disconnects before the first event."""

    def __init__(self, events: AsyncIterator[str], responses: ResponseStream) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._responses = responses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._responses.cancel()


class Api:
    def __init__(self, service: Service, training: TrainingRuns) -> None:
        self.service, self._training = service, training
        self.requests: Counter[tuple[str, int]] = Counter()
        self.pool = service.make_pool()
        self._bodies = BodyReader(service.request_limits.max_body_bytes)
        self._adapter_bodies = BodyReader(MAX_ADAPTER_BODY_BYTES)
        self._loading, self._waiting_loads = asyncio.Lock(), 0

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, "completion")

    async def _generate(self, request: Request, kind: str) -> Response:
        request_id = request.scope["request_id"]
        async with self._bodies.read(request) as body:
            prepared = await self._while_connected(request, self.pool.prepare(kind, body, self.service.templates()))
        if prepared is None:
            return Response(status_code=499)
        responses = await asyncio.to_thread(self._submit, prepared, request_id, asyncio.get_running_loop())
        completion = COMPLETIONS[kind](self.service, prepared, responses)
        if prepared.stream:
            return CancellingStream(_stream(completion, request_id), responses)
        document = await self._while_connected(request, _complete(completion))
        if document is None:
            return Response(status_code=499)
        return Response(document, media_type="application/json")

    def _submit(self, prepared: PreparedRequest, request_id: str, loop: asyncio.AbstractEventLoop) -> ResponseStream:
        requests = self.service.generation_requests(prepared, request_id)
        return ResponseStream(self.service.engine, self.service.tokenizer, requests, prepared.n, loop)

    async def _while_connected(self, request: Request, result: Any) -> Any:
        """The result; None if the client disconnects first, which cancels it."""
        task = asyncio.ensure_future(result)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=DISCONNECT_POLL_SECONDS)
                if done:
                    return task.result()
                if await request.is_disconnected():
                    return None
        finally:
            task.cancel()

    async def models(self) -> dict[str, Any]:
        registry, max_tokens = self.service.registry, self.service.max_sequence_tokens
        shared: dict[str, Any] = {"object": "model", "owned_by": "ktransformers", "max_model_len": max_tokens}
        if self.service.attention_backend:
            shared["attention_backend"] = self.service.attention_backend
        shared["cache"] = self.service.describe_cache()
        if self.service.approximations:
            shared["approximations"] = self.service.approximations
        base = {"id": registry.served, "created": registry.created, "root": registry.model, "parent": None, **shared}
        loaded = [
            {
                "id": f"{registry.served}:{name}",
                "created": entry.created,
                "root": entry.adapter.source,
                "parent": registry.served,
                "matrices": entry.adapter.matrices,
                "chat_template": self.service.template_origin(entry.adapter),
                **shared,
            }
            for name, entry in registry.loaded.items()
        ]
        return {"object": "list", "data": [base, *loaded]}

    async def model(self, name: str) -> dict[str, Any]:
        for entry in (await self.models())["data"]:
            if entry["id"] == name:
                model: dict[str, Any] = entry
                return model
        raise ApiError(404, f"model {name!r} is not served", param="model", code="model_not_found")

    async def load(self, request: Request) -> dict[str, Any]:
        async with self._adapter_bodies.read(request) as body:
            asked = parse_body(body, LoadAdapter)
        registry = self.service.registry
        if self._waiting_loads >= MAX_WAITING_LOADS:
            raise ApiError(429, f"{MAX_WAITING_LOADS} adapters are being loaded already", code="queue_full")
        self._waiting_loads += 1
        try:
            async with self._loading:  # one at a time: the threads of the pool are there for other requests too
                await asyncio.to_thread(_load_adapter, registry.load, asked, request.scope["request_id"])
        finally:
            self._waiting_loads -= 1
        return self._adapters(f"adapter {asked.lora_name!r} is served as {registry.served}:{asked.lora_name}")

    async def unload(self, request: Request) -> dict[str, Any]:
        async with self._adapter_bodies.read(request) as body:
            asked = parse_body(body, UnloadAdapter)
        try:
            self.service.registry.unload(asked.lora_name)
        except UnknownModel as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from error
        return self._adapters(f"adapter {asked.lora_name!r} is no longer served")

    def _adapters(self, message: str) -> dict[str, Any]:
        loaded = {name: entry.adapter.source for name, entry in self.service.registry.loaded.items()}
        return {"success": True, "message": message, "loaded_adapters": loaded}

    async def health(self) -> Response:
        alive, reason = self.service.engine.alive, self.service.engine.unavailable()
        if alive and reason:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok" if alive else "stopped"}, status_code=200 if alive else 503)

    async def metrics(self) -> Response:
        text = metrics.render(self.service, self.requests, self.pool.restarts)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

    async def page(self) -> Response:
        return HTMLResponse(page_document(), headers=page_headers())

    async def training(self, after: int = 0, run: str | None = None) -> dict[str, Any]:
        """Logged steps of a training by a name of `training_runs`; without a name, of the one of `--watch`."""
        log = await asyncio.to_thread(self._training.log_of, run)
        if log is None and run is not None:
            raise ApiError(404, f"run: given {run[:200]!r}, expected a name of /training/runs", param="run")
        if log is None:
            return {"directory": None, "lines": [], "next": 0}
        return await asyncio.to_thread(log.lines_after, after)

    async def training_runs(self) -> dict[str, Any]:
        return {"runs": await asyncio.to_thread(self._training.list)}


async def _complete(completion: ChatCompletion | Completion) -> str:
    await completion.responses.complete()
    return await asyncio.to_thread(lambda: encode_json(completion.document()))


async def _stream(completion: ChatCompletion | Completion, request_id: str) -> AsyncIterator[str]:
    """Status 200 is sent before the first event, so an error is an event as well."""
    try:
        async for event in completion.stream():
            yield event
    except Exception as error:
        yield sse_event(api_error(error, request_id).to_json())
    yield SSE_DONE


def _load_adapter(load: Callable[..., Any], asked: LoadAdapter, request_id: str) -> None:
    """A path without an adapter is refused in the same words whether it exists or not; the log has the reason. What is
    wrong with an adapter is told."""
    given = f"lora_path: given {asked.lora_path!r}"
    try:
        if not (Path(asked.lora_path) / "adapter_config.json").is_file():
            raise OSError("there is no adapter_config.json")
    except (OSError, ValueError) as error:  # a component is too long, a null byte
        LOG.warning("request %s: lora_path %.200r: %.300s", request_id, asked.lora_path, error)
        expected = "expected a directory with an adapter that the server can read"
        raise ApiError(400, f"{given}, {expected}", param="lora_path", code="adapter_not_found") from error
    try:
        load(asked.lora_name, asked.lora_path, replacing=asked.load_inplace)
    except Unavailable:
        raise
    except (KTError, OSError) as error:
        raise ApiError(400, str(error), param="lora_path") from error
    except MemoryError:
        raise
    except Exception as error:  # of a file that was made by others: whatever fails, the file is the reason
        LOG.warning("request %s: an adapter could not be read", request_id, exc_info=error)
        reason = f"the adapter cannot be read ({type(error).__name__}: {error})"
        raise ApiError(400, f"{given}: {reason}", param="lora_path") from error


async def _http_error(request: Request, error: Any) -> Response:
    """What the router refuses: paths and methods that do not exist."""
    where = f"{request.method} {request.url.path[:200]}"
    message, code = f"{where}: {error.detail}", None
    if error.status_code == 404:
        served = "/v1/chat/completions, /v1/completions and /v1/models"
        message, code = f"{where} does not exist on this server, which has {served}", "unknown_url"
    document = ApiError(error.status_code, message, code=code).to_json()
    return JSONResponse(document, status_code=error.status_code, headers=error.headers)


async def _query_error(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    document = ApiError(400, f"{first['loc'][-1]}: {first['msg']}").to_json()
    return JSONResponse(document, status_code=400)


def create_app(
    service: Service,
    *,
    rules: AccessRules | None = None,
    training: TrainingRuns | None = None,
    ready: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> Any:
    """The ASGI application. Its engine and worker processes start and stop with it; `ready` is called when they have
    started, `ended` after they have stopped. Without `rules` it answers loopback addresses only, without a key."""
    rules = rules or AccessRules()
    api = Api(service, training or TrainingRuns())

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with api.pool.running():
            service.engine.start()
            ready()
            yield
            await asyncio.to_thread(service.engine.stop)
        ended()

    # No pages of documentation: FastAPI's load their scripts from another host.
    app: Any = FastAPI(
        title="ktransformers", version=ktransformers.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    json_media = ("application/json",)
    for path, handler, request_model, media in (
        ("/v1/chat/completions", api.chat, ChatRequest, (*json_media, "text/event-stream")),
        ("/v1/completions", api.completion, CompletionRequest, (*json_media, "text/event-stream")),
        ("/v1/load_lora_adapter", api.load, LoadAdapter, json_media),
        ("/load_lora_adapter", api.load, LoadAdapter, json_media),
        ("/v1/unload_lora_adapter", api.unload, UnloadAdapter, json_media),
        ("/unload_lora_adapter", api.unload, UnloadAdapter, json_media),
    ):
        route = {"openapi_extra": openapi.request_body(request_model), "responses": openapi.responses(*media)}
        app.add_api_route(path, _post_handler(handler), methods=["POST"], response_model=None, **route)
    for path, get_handler, media_type, response in (
        ("/v1/models", api.models, "application/json", JSONResponse),
        ("/health", api.health, "application/json", JSONResponse),
        ("/metrics", api.metrics, "text/plain", PlainTextResponse),
        ("/", api.page, "text/html", HTMLResponse),
    ):
        route = {"responses": openapi.responses(media_type), "response_class": response}
        app.add_api_route(path, _get_handler(get_handler), methods=["GET"], response_model=None, **route)

    route_options = {"methods": ["GET"], "response_model": None, "responses": openapi.responses(*json_media)}
    app.add_api_route("/v1/models/{name:path}", api.model, **route_options)
    app.add_api_route("/training", api.training, **route_options)
    app.add_api_route("/training/runs", api.training_runs, **route_options)
    fastapi_openapi = app.openapi
    kinds: list[type[BaseModel]] = [ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter]
    app.openapi = functools.cache(lambda: openapi.add_schemas(fastapi_openapi(), kinds, service.registry.served))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    app.add_exception_handler(404, _http_error)
    app.add_exception_handler(405, _http_error)
    paths = {route.path for route in app.routes if "{" not in route.path}
    app.add_middleware(RequestBoundary, rules=rules)
    if rules.origins:
        methods, headers = ["GET", "POST"], ["Authorization", "Content-Type"]
        origins = sorted(rules.origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
    app.add_middleware(RequestCounter, counts=api.requests, paths=paths)
    return app


def _post_handler(handler: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Request) -> Any:
        return await handler(request)

    answer.__name__ = handler.__name__
    return answer


def _get_handler(handler: Callable[[], Any]) -> Callable[..., Any]:
    async def answer() -> Any:
        return await handler()

    answer.__name__ = handler.__name__
    return answer
