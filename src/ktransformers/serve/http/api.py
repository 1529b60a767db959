"""HTTP routes: those of all doors, completions, adapters over HTTP, health, metrics and one page; every error in the
envelope of the door that was asked, OpenAI's elsewhere.

A request passes through `RequestBoundary` (its id, access, errors), `BodyReader` (bytes, within limits) and a worker
process of `PreparePool` (everything that may be slow), then becomes sequences of the engine. The event loop only moves
bytes. A client that disconnects is noticed between tokens of a stream, and within a quarter of a second otherwise.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request  # type: ignore[import-not-found,unused-ignore]
from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found,unused-ignore]
from fastapi.middleware.cors import CORSMiddleware  # type: ignore[import-not-found,unused-ignore]
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse  # type: ignore[import-not-found,unused-ignore]
from pydantic import BaseModel
from starlette.requests import ClientDisconnect  # type: ignore[import-not-found,unused-ignore]

import ktransformers
from ktransformers.ground.errors import KTError
from ktransformers.ground.log import logger
from ktransformers.serve.doors import ollama
from ktransformers.serve.doors.door import Door
from ktransformers.serve.doors.registry import DOORS, error_answer
from ktransformers.serve.http import metrics, openapi
from ktransformers.serve.http.answers import Completion, DoorAnswer, ResponseStream
from ktransformers.serve.http.body import BodyReader
from ktransformers.serve.http.boundary import AccessRules, RequestBoundary
from ktransformers.serve.http.choice_parser import ChoiceParser
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.model_list import list_models
from ktransformers.serve.http.page import page_document, page_headers
from ktransformers.serve.http.prepare import COUNT, PreparedRequest
from ktransformers.serve.http.protocol import (
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapter,
    TokenizeRequest,
    UnloadAdapter,
    parse_body,
)
from ktransformers.serve.http.registry import UnknownModel
from ktransformers.serve.http.service import Service
from ktransformers.serve.http.training import TrainingRuns
from ktransformers.serve.scheduler.engine import Unavailable

LOG = logger(__name__)
DISCONNECT_POLL_SECONDS = 0.25  # between checks whether the client is still connected
MAX_WAITING_LOADS = 32  # requests to load an adapter
MAX_ADAPTER_BODY_BYTES = 2**16  # of a request that loads or unloads an adapter; parsed on the event loop
SSE = "text/event-stream"
IGNORED_HEADER = "x-ktransformers-ignored-fields"
MAX_IGNORED_NAMES = 256  # of unknown fields that are logged
MAX_NAMES_CHARACTERS = 1000  # of unknown fields in a header or a line of the log
EXPOSED_HEADERS = ["x-request-id", IGNORED_HEADER]
# Paths of other kinds of models -> what a user may run beside this server.
OTHER_MODELS = {
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score"), "reranking"),
}
Result = TypeVar("Result")
MakeAnswer = Callable[[Service, PreparedRequest, list[ChoiceParser], ResponseStream, str], DoorAnswer | Completion]


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

    def __init__(self, answer: DoorAnswer | Completion, media_type: str, headers: dict[str, str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(answer.stream(), media_type=media_type, headers=headers)
        self._responses = answer.responses

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
        self._ignored_names: set[str] = set()

    async def completion(self, request: Request) -> Response:
        prepared = await self._prepare(request, "completion")
        return await self._answer(request, prepared, Completion, SSE)

    async def converse(self, door: Door, request: Request) -> Response:
        prepared = await self._prepare(request, door.name)
        return await self._answer(request, prepared, functools.partial(DoorAnswer, door), door.media_type)

    async def count(self, door: Door, request: Request) -> Response:
        prepared = await self._prepare(request, COUNT + door.name)
        assert door.count_document is not None
        self.service.find(prepared.model)
        return JSONResponse(door.count_document(len(prepared.prompts[0].tokens)))

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: of text, or of the messages of a chat completion."""
        prepared = await self._prepare(request, "tokenize")
        self.service.find(prepared.model)
        tokens = list(prepared.prompts[0].tokens)
        document = {"count": len(tokens), "max_model_len": self.service.max_sequence_tokens, "tokens": tokens}
        strings = self.service.tokenizer.convert_ids_to_tokens(tokens) if prepared.echo else None
        return JSONResponse({**document, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        prepared = await self._prepare(request, "detokenize")
        self.service.find(prepared.model)
        return JSONResponse({"prompt": prepared.prompts[0].text})

    async def _prepare(self, request: Request, kind: str) -> PreparedRequest:
        async with self._bodies.read(request) as body:
            prepared = await self._while_connected(request, self.pool.prepare(kind, body, self.service.templates()))
        self._log_ignored(request.url.path, prepared.ignored)
        return prepared

    def _log_ignored(self, path: str, names: tuple[str, ...]) -> None:
        """Each name once, and not more of them than a log should hold."""
        new = sorted(set(names) - self._ignored_names)
        if new and len(self._ignored_names) < MAX_IGNORED_NAMES:
            self._ignored_names.update(new)
            LOG.warning("%s: unknown fields are ignored: %s", path, _in_ascii(new))

    async def _answer(
        self, request: Request, prepared: PreparedRequest, make_answer: MakeAnswer, media_type: str
    ) -> Response:
        request_id = request.scope["request_id"]
        loop = asyncio.get_running_loop()
        answer = await asyncio.to_thread(self._submit, prepared, make_answer, request_id, loop)
        headers = {IGNORED_HEADER: _in_ascii(prepared.ignored)} if prepared.ignored else {}
        if prepared.stream:
            return CancellingStream(answer, media_type, headers)
        try:
            document = await self._while_connected(request, answer.complete())
        finally:
            answer.responses.cancel()
        return Response(document, media_type="application/json", headers=headers)

    def _submit(
        self, prepared: PreparedRequest, make_answer: MakeAnswer, request_id: str, loop: asyncio.AbstractEventLoop
    ) -> DoorAnswer | Completion:
        """The parsers are made first: the adapter may be unloaded or replaced once its sequences are queued."""
        service, parsers = self.service, list[ChoiceParser]()
        requests = service.generation_requests(prepared, request_id)
        if prepared.chat is not None:
            parsers = [service.choice_parser(prepared, requests[0].adapter) for _ in range(prepared.n)]
        responses = ResponseStream(service.engine, service.tokenizer, requests, prepared.n, loop)
        try:
            return make_answer(service, prepared, parsers, responses, request_id)
        except BaseException:
            responses.cancel()
            raise

    async def _while_connected(self, request: Request, result: Coroutine[Any, Any, Result]) -> Result:
        """Raises ClientDisconnect if the client disconnects first, which cancels the result."""
        task = asyncio.ensure_future(result)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=DISCONNECT_POLL_SECONDS)
                if done:
                    return task.result()
                if await request.is_disconnected():
                    raise ClientDisconnect
        finally:
            task.cancel()

    async def models(self) -> dict[str, Any]:
        models = list_models(self.service)
        return {"object": "list", "data": models, "models": []}

    async def model(self, name: str) -> dict[str, Any]:
        for entry in list_models(self.service):
            if entry["id"] == name:
                return entry
        raise ApiError(404, f"model {name!r} is not served", param="model", code="model_not_found")

    async def ollama_tags(self) -> dict[str, Any]:
        return {"models": [ollama.tag(entry) for entry in list_models(self.service)]}

    async def ollama_show(self, request: Request) -> dict[str, Any]:
        async with self._adapter_bodies.read(request) as body:
            asked, _ = parse_body(body, ollama.ShowBody)
        name = asked.model or asked.name or self.service.registry.served
        adapter = self.service.find(name)
        models = list_models(self.service)
        names = (name, name.removesuffix(ollama.DEFAULT_TAG))
        found = (one for known in names for one in models if one["id"] == known or one["id"].endswith(f":{known}"))
        return ollama.show(next(found, models[0]), self.service.template_of(adapter) or "")

    async def ollama_version(self) -> dict[str, Any]:
        return {"version": ollama.VERSION}

    async def load(self, request: Request) -> dict[str, Any]:
        async with self._adapter_bodies.read(request) as body:
            asked, ignored = parse_body(body, LoadAdapter)
        self._log_ignored(request.url.path, ignored)
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
            asked, ignored = parse_body(body, UnloadAdapter)
        self._log_ignored(request.url.path, ignored)
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


def _in_ascii(names: Iterable[str]) -> str:
    """Names of a request's fields for a header, which has no white space at its ends, or the log."""
    return ascii(", ".join(names))[1:-1][:MAX_NAMES_CHARACTERS].strip(", ")


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
    path = request.url.path
    where = f"{request.method} {path[:200]}"
    message, code = f"{where}: {error.detail}", None
    if error.status_code == 404:
        served = ", ".join([*(door.path for door in DOORS), "/v1/completions", "/v1/models"])
        message, code = f"{where} does not exist on this server, which has {served}", "unknown_url"
        if path in OTHER_MODELS:
            message += f"; for {OTHER_MODELS[path]} run another server with such a model, for example"
            message += " `llama-server --embedding` or text-embeddings-inference, and give the client its address"
    elif request.method == "OPTIONS" and (origin := request.headers.get("origin", "")):
        message = f"Origin: given {origin!r}, expected the server's own page; start it with --cors-origins {origin}"
        code = "origin_not_allowed"
        LOG.warning("a page of %.200r was refused; --cors-origins %.200s allows it", origin, origin)
    status, document = error_answer(path, ApiError(error.status_code, message, code=code))
    return JSONResponse(document, status_code=status, headers=error.headers)


async def _disconnected(_: Request, __: Any) -> Response:
    return Response(status_code=499)


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
    posts: list[tuple[str, Callable[[Any], Any], type[BaseModel] | None, tuple[str, ...]]] = []
    for door in DOORS:
        posts.append((door.path, functools.partial(api.converse, door), door.body, (*json_media, door.media_type)))
        if door.count_path:
            posts.append((door.count_path, functools.partial(api.count, door), door.body, json_media))
    posts += [
        ("/v1/completions", api.completion, CompletionRequest, (*json_media, SSE)),
        ("/tokenize", api.tokenize, TokenizeRequest, json_media),
        ("/detokenize", api.detokenize, DetokenizeRequest, json_media),
        ("/api/show", api.ollama_show, ollama.ShowBody, json_media),
        ("/v1/load_lora_adapter", api.load, LoadAdapter, json_media),
        ("/load_lora_adapter", api.load, LoadAdapter, json_media),
        ("/v1/unload_lora_adapter", api.unload, UnloadAdapter, json_media),
        ("/unload_lora_adapter", api.unload, UnloadAdapter, json_media),
    ]
    for path, handler, request_model, media in posts:
        described = {} if request_model is None else openapi.request_body(request_model)
        route = {"openapi_extra": described, "responses": openapi.responses(*media), "operation_id": path.strip("/")}
        app.add_api_route(path, _post_handler(handler), methods=["POST"], response_model=None, **route)
    for path, get_handler, media_type, response in (
        ("/v1/models", api.models, "application/json", JSONResponse),
        ("/api/tags", api.ollama_tags, "application/json", JSONResponse),
        ("/api/version", api.ollama_version, "application/json", JSONResponse),
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
    kinds = sorted({model for _, _, model, _ in posts if model is not None}, key=lambda model: model.__name__)
    app.openapi = functools.cache(lambda: openapi.add_schemas(fastapi_openapi(), kinds, service.registry.served))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(404, _http_error)
    app.add_exception_handler(405, _http_error)
    paths = {route.path for route in app.routes if "{" not in route.path}
    app.add_middleware(RequestBoundary, rules=rules)
    if rules.origins:
        # Any header: clients in browsers send those of their SDK.
        origins, methods = sorted(rules.origins), ["GET", "POST"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestCounter, counts=api.requests, paths=paths)
    return app


def _post_handler(handler: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Request) -> Any:
        return await handler(request)

    return answer


def _get_handler(handler: Callable[[], Any]) -> Callable[..., Any]:
    async def answer() -> Any:
        return await handler()

    answer.__name__ = handler.__name__
    return answer
