"""The HTTP side: OpenAI's paths, adapters over HTTP, health and metrics, one page; every error in OpenAI's envelope.

Bodies are read whole and checked by pydantic from the bytes, so that malformed JSON, endless nesting and numbers that
are none end in a 400 like any other mistake. A reader who leaves is noticed between tokens of a stream, and within a
quarter of a second otherwise.
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
BODY = 64 * 2**20  # bytes of the largest request
LOOK = 0.25  # seconds between looks whether the reader is still there
OPEN_PATHS = {"/", "/health"}  # need no key

Body = TypeVar("Body", bound=BaseModel)


async def read(request: Any, kind: type[Body]) -> Body:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY:
            raise ApiError(413, f"the body is larger than {BODY} bytes")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{place}: given a field that is not known here", param=place) from error
        raise ApiError(400, f"{place or 'body'}: {first['msg']}", param=place or None) from error


class Counting:
    """Counts answers by path and status, around the application so that nothing stands between it and its streams."""

    def __init__(self, app: Any, seen: Counter[tuple[str, int]], paths: set[str]) -> None:
        self._app, self._seen, self._paths = app, seen, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._seen[(path, message["status"])] += 1
            await send(message)

        await self._app(scope, receive, counted)


class Api:
    def __init__(self, service: Service, api_key: str | None, training: TrainingLog | None) -> None:
        self.service, self._key, self._training = service, api_key, training
        self.requests: Counter[tuple[str, int]] = Counter()

    def check_key(self, request: Request) -> None:
        if self._key is None or request.url.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(errors="replace"), self._key.encode())
        if scheme.lower() != "bearer" or not known:
            raise ApiError(401, "no valid API key was given; send `Authorization: Bearer KEY`", code="invalid_api_key")

    async def chat(self, request: Request) -> Response:
        asked = await read(request, ChatRequest)
        return await self._answer(request, ChatCompletion(self.service, asked), bool(asked.stream))

    async def completion(self, request: Request) -> Response:
        asked = await read(request, CompletionRequest)
        return await self._answer(request, Completion(self.service, asked), bool(asked.stream))

    async def _answer(self, request: Request, under_way: ChatCompletion | Completion, stream: bool) -> Response:
        if stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(under_way.stream(), media_type="text/event-stream", headers=headers)
        task = asyncio.ensure_future(under_way.whole())
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=LOOK)
                if done:
                    return JSONResponse(task.result())
                if await request.is_disconnected():
                    return Response(status_code=499)
        finally:
            task.cancel()

    async def models(self) -> dict[str, Any]:
        registry, room = self.service.registry, self.service.room
        same: dict[str, Any] = {"object": "model", "owned_by": "ktransformers", "max_model_len": room}
        if self.service.approximations:
            same["approximations"] = self.service.approximations
        base = {"id": registry.served, "created": registry.since, "root": registry.model, "parent": None, **same}
        loaded = [
            {
                "id": f"{registry.served}:{name}",
                "created": one.since,
                "root": one.resident.source,
                "parent": registry.served,
                "matrices": one.resident.matrices,
                **same,
            }
            for name, one in registry.loaded.items()
        ]
        return {"object": "list", "data": [base, *loaded]}

    async def model(self, name: str) -> dict[str, Any]:
        for one in (await self.models())["data"]:
            if one["id"] == name:
                found: dict[str, Any] = one
                return found
        raise ApiError(404, f"model {name!r} is not served", param="model", code="model_not_found")

    async def load(self, request: Request) -> dict[str, Any]:
        asked = await read(request, LoadAdapter)
        registry = self.service.registry
        await asyncio.to_thread(_refuse, registry.load, asked.lora_name, asked.lora_path, asked.load_inplace)
        return self._adapters(f"adapter {asked.lora_name!r} is served as {registry.served}:{asked.lora_name}")

    async def unload(self, request: Request) -> dict[str, Any]:
        asked = await read(request, UnloadAdapter)
        try:
            self.service.registry.unload(asked.lora_name)
        except UnknownModel as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from error
        return self._adapters(f"adapter {asked.lora_name!r} is no longer served")

    def _adapters(self, message: str) -> dict[str, Any]:
        loaded = {name: one.resident.source for name, one in self.service.registry.loaded.items()}
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
        return await asyncio.to_thread(self._training.after, after)


def _refuse(load: Callable[..., Any], name: str, path: str, replacing: bool) -> None:
    if not Path(path).exists():
        raise ApiError(404, f"lora_path: {path} does not exist on the server", param="lora_path", code="not_found")
    try:
        load(name, path, replacing=replacing)
    except (KTError, OSError) as error:
        raise ApiError(400, str(error), param="lora_path") from error


def _envelope(status: int, message: str) -> JSONResponse:
    return JSONResponse(ApiError(status, message).to_json(), status_code=status)


async def _told(_: Request, error: Any) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.to_json(), status_code=error.status, headers=headers)


async def _http(_: Request, error: Any) -> Response:
    told = ApiError(error.status_code, str(error.detail)).to_json()
    return JSONResponse(told, status_code=error.status_code, headers=error.headers)


async def _query(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    return _envelope(400, f"{first['loc'][-1]}: {first['msg']}")


async def _bug(_: Request, error: Any) -> Response:
    LOG.error("a request failed", exc_info=error)
    return _envelope(500, f"{type(error).__name__}: {error}")


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    training: TrainingLog | None = None,
    ended: Callable[[], None] = lambda: None,
) -> Any:
    """The application, to be run by any ASGI server; its engine starts and ends with it, and `ended` is called last."""
    api = Api(service, api_key, training)

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await asyncio.to_thread(service.engine.stop)
        ended()

    app: Any = FastAPI(title="ktransformers", version=ktransformers.__version__, lifespan=life, docs_url=None)
    json = ("application/json",)
    for path, handler, kind, media in (
        ("/v1/chat/completions", api.chat, ChatRequest, (*json, "text/event-stream")),
        ("/v1/completions", api.completion, CompletionRequest, (*json, "text/event-stream")),
        ("/v1/load_lora_adapter", api.load, LoadAdapter, json),
        ("/load_lora_adapter", api.load, LoadAdapter, json),
        ("/v1/unload_lora_adapter", api.unload, UnloadAdapter, json),
        ("/unload_lora_adapter", api.unload, UnloadAdapter, json),
    ):
        described = {"openapi_extra": openapi.body(kind), "responses": openapi.answers(*media)}
        app.add_api_route(path, _guarded(api, handler), methods=["POST"], response_model=None, **described)
    for path, look, kind_of_answer, response in (
        ("/v1/models", api.models, "application/json", JSONResponse),
        ("/health", api.health, "application/json", JSONResponse),
        ("/metrics", api.metrics, "text/plain", PlainTextResponse),
        ("/", api.page, "text/html", HTMLResponse),
    ):
        described = {"responses": openapi.answers(kind_of_answer), "response_class": response}
        app.add_api_route(path, _guarded_look(api, look), methods=["GET"], response_model=None, **described)

    async def model(request: Request, name: str) -> Any:
        api.check_key(request)
        return await api.model(name)

    async def log(request: Request, after: int = 0) -> Any:
        api.check_key(request)
        return await api.training(after)

    looked = {"methods": ["GET"], "response_model": None, "responses": openapi.answers(*json)}
    app.add_api_route("/v1/models/{name:path}", model, **looked)
    app.add_api_route("/training", log, **looked)
    plain = app.openapi
    kinds: list[type[BaseModel]] = [ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter]
    app.openapi = lambda: openapi.complete(plain(), kinds, service.registry.served)
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _query)
    app.add_exception_handler(404, _http)
    app.add_exception_handler(405, _http)
    app.add_exception_handler(Exception, _bug)
    paths = {route.path for route in app.routes if "{" not in route.path}
    app.add_middleware(Counting, seen=api.requests, paths=paths)
    return app


def _guarded(api: Api, handler: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Request) -> Any:
        api.check_key(request)
        return await handler(request)

    answer.__name__ = handler.__name__
    return answer


def _guarded_look(api: Api, handler: Callable[[], Any]) -> Callable[..., Any]:
    async def answer(request: Request) -> Any:
        api.check_key(request)
        return await handler()

    answer.__name__ = handler.__name__
    return answer
