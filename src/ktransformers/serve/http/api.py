"""HTTP routes: OpenAI's paths, adapters over HTTP, health, metrics and one page; every error in OpenAI's envelope.

Bodies are read completely and validated by pydantic from the bytes, so that malformed JSON, deep nesting and invalid
numbers are answered with 400 like any other invalid field. A client that disconnects is noticed between tokens of a
stream, and within a quarter of a second otherwise.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request  # type: ignore[import-not-found,unused-ignore]
from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found,unused-ignore]
from fastapi.responses import (  # type: ignore[import-not-found,unused-ignore]
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from pydantic import BaseModel, ValidationError

import ktransformers
from ktransformers.errors import KTError
from ktransformers.log import logger
from ktransformers.serve.http import metrics, openapi
from ktransformers.serve.http.chats import ChatCompletion
from ktransformers.serve.http.completions import Completion
from ktransformers.serve.http.protocol import ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter
from ktransformers.serve.http.registry import UnknownModel
from ktransformers.serve.http.service import ApiError, Service
from ktransformers.serve.http.training import TrainingLog

LOG = logger(__name__)
MAX_BODY_BYTES = 64 * 2**20  # of a request
DISCONNECT_POLL_SECONDS = 0.25  # between checks whether the client is still connected
PATHS_WITHOUT_KEY = {"/", "/health"}

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Any, kind: type[Body]) -> Body:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{field}: given an unknown field", param=field) from error
        raise ApiError(400, f"{field or 'body'}: {first['msg']}", param=field or None) from error


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


class Api:
    def __init__(self, service: Service, api_key: str | None, training: TrainingLog | None) -> None:
        self.service, self._key, self._training = service, api_key, training
        self.requests: Counter[tuple[str, int]] = Counter()

    def check_key(self, request: Request) -> None:
        if self._key is None or request.url.path in PATHS_WITHOUT_KEY:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(errors="replace"), self._key.encode())
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(401, "no valid API key was given; send `Authorization: Bearer KEY`", code="invalid_api_key")

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        return await self._answer(request, ChatCompletion(self.service, body), bool(body.stream))

    async def completion(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        return await self._answer(request, Completion(self.service, body), bool(body.stream))

    async def _answer(self, request: Request, completion: ChatCompletion | Completion, stream: bool) -> Response:
        if stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(completion.stream(), media_type="text/event-stream", headers=headers)
        task = asyncio.ensure_future(completion.complete())
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=DISCONNECT_POLL_SECONDS)
                if done:
                    return JSONResponse(task.result())
                if await request.is_disconnected():
                    return Response(status_code=499)
        finally:
            task.cancel()

    async def models(self) -> dict[str, Any]:
        registry, max_tokens = self.service.registry, self.service.max_sequence_tokens
        shared: dict[str, Any] = {"object": "model", "owned_by": "ktransformers", "max_model_len": max_tokens}
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
        body = await read_body(request, LoadAdapter)
        registry = self.service.registry
        await asyncio.to_thread(_load_adapter, registry.load, body.lora_name, body.lora_path, body.load_inplace)
        return self._adapters(f"adapter {body.lora_name!r} is served as {registry.served}:{body.lora_name}")

    async def unload(self, request: Request) -> dict[str, Any]:
        body = await read_body(request, UnloadAdapter)
        try:
            self.service.registry.unload(body.lora_name)
        except UnknownModel as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from error
        return self._adapters(f"adapter {body.lora_name!r} is no longer served")

    def _adapters(self, message: str) -> dict[str, Any]:
        loaded = {name: entry.adapter.source for name, entry in self.service.registry.loaded.items()}
        return {"success": True, "message": message, "loaded_adapters": loaded}

    async def health(self) -> Response:
        alive = self.service.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, status_code=200 if alive else 503)

    async def metrics(self) -> Response:
        text = metrics.render(self.service, self.requests)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

    async def page(self) -> Response:
        return HTMLResponse((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))

    async def training(self, after: int = 0) -> dict[str, Any]:
        if self._training is None:
            return {"directory": None, "lines": [], "next": 0}
        return await asyncio.to_thread(self._training.lines_after, after)


def _load_adapter(load: Callable[..., Any], name: str, path: str, replacing: bool) -> None:
    if not Path(path).exists():
        raise ApiError(404, f"lora_path: {path} does not exist on the server", param="lora_path", code="not_found")
    try:
        load(name, path, replacing=replacing)
    except (KTError, OSError) as error:
        raise ApiError(400, str(error), param="lora_path") from error


def _envelope(status: int, message: str) -> JSONResponse:
    return JSONResponse(ApiError(status, message).to_json(), status_code=status)


async def _api_error(_: Request, error: Any) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.to_json(), status_code=error.status, headers=headers)


async def _http_error(_: Request, error: Any) -> Response:
    document = ApiError(error.status_code, str(error.detail)).to_json()
    return JSONResponse(document, status_code=error.status_code, headers=error.headers)


async def _query_error(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    return _envelope(400, f"{first['loc'][-1]}: {first['msg']}")


async def _internal_error(_: Request, error: Any) -> Response:
    LOG.error("a request failed", exc_info=error)
    return _envelope(500, f"{type(error).__name__}: {error}")


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    training: TrainingLog | None = None,
    ended: Callable[[], None] = lambda: None,
) -> Any:
    """The ASGI application. Its engine starts and stops with it; `ended` is called after that."""
    api = Api(service, api_key, training)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await asyncio.to_thread(service.engine.stop)
        ended()

    app: Any = FastAPI(title="ktransformers", version=ktransformers.__version__, lifespan=lifespan, docs_url=None)
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
        app.add_api_route(path, _post_handler(api, handler), methods=["POST"], response_model=None, **route)
    for path, get_handler, media_type, response in (
        ("/v1/models", api.models, "application/json", JSONResponse),
        ("/health", api.health, "application/json", JSONResponse),
        ("/metrics", api.metrics, "text/plain", PlainTextResponse),
        ("/", api.page, "text/html", HTMLResponse),
    ):
        route = {"responses": openapi.responses(media_type), "response_class": response}
        app.add_api_route(path, _get_handler(api, get_handler), methods=["GET"], response_model=None, **route)

    async def model(request: Request, name: str) -> Any:
        api.check_key(request)
        return await api.model(name)

    async def log(request: Request, after: int = 0) -> Any:
        api.check_key(request)
        return await api.training(after)

    route_options = {"methods": ["GET"], "response_model": None, "responses": openapi.responses(*json_media)}
    app.add_api_route("/v1/models/{name:path}", model, **route_options)
    app.add_api_route("/training", log, **route_options)
    fastapi_openapi = app.openapi
    kinds: list[type[BaseModel]] = [ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter]
    app.openapi = lambda: openapi.add_schemas(fastapi_openapi(), kinds, service.registry.served)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    app.add_exception_handler(404, _http_error)
    app.add_exception_handler(405, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    paths = {route.path for route in app.routes if "{" not in route.path}
    app.add_middleware(RequestCounter, counts=api.requests, paths=paths)
    return app


def _post_handler(api: Api, handler: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Request) -> Any:
        api.check_key(request)
        return await handler(request)

    answer.__name__ = handler.__name__
    return answer


def _get_handler(api: Api, handler: Callable[[], Any]) -> Callable[..., Any]:
    async def answer(request: Request) -> Any:
        api.check_key(request)
        return await handler()

    answer.__name__ = handler.__name__
    return answer
