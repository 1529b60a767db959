"""A door: one API that holds conversations. `parse` runs in a worker process, the emitter in the server's event loop.

Errors are `ApiError`s everywhere; a door gives them its own envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from ktransformers.serve.doors.answer_events import AnswerEvent, Finish, Usage
from ktransformers.serve.doors.conversation import ChatRequest
from ktransformers.serve.http.error import ApiError


@dataclass(frozen=True)
class AnswerHead:
    """What an emitter knows before the first token."""

    model: str  # the name that the request asked for, or that of the served model
    request_id: str
    choices: int  # more than one only for doors that allow it
    prompt_tokens: int
    cached_tokens: int | None  # None: not known before the first event of the engine
    echo: dict[str, Any]
    prompt_token_ids: tuple[int, ...] = ()  # only of a request with `return_token_ids`


class Emitter(Protocol):
    """Turns the events of one request into the events of its API. Every method returns complete server-sent events, as
    text; `document` returns what a request without a stream is answered with, from the same events."""

    def begin(self) -> Iterable[str]:
        """Before the first token."""

    def ping(self) -> str:
        """Keeps the connection alive while a prompt is computed; empty: nothing is sent."""

    def event(self, choice: int, event: AnswerEvent) -> Iterable[str]: ...

    def finish(self, choice: int, finish: Finish) -> Iterable[str]: ...

    def end(self, usage: Usage) -> Iterable[str]:
        """All choices have ended."""

    def fail(self, error: ApiError) -> Iterable[str]:
        """The stream ends with an error: status 200 has been sent already."""

    def document(self, usage: Usage) -> dict[str, Any]:
        """The whole answer; every event has been passed to `event` and `finish` before."""


@dataclass(frozen=True)
class Door:
    name: str  # of the kind of request, as worker processes are told
    path: str
    parse: Callable[[bytes | bytearray], ChatRequest]
    emitter: Callable[[AnswerHead], Emitter]
    error_document: Callable[[ApiError], dict[str, Any]]  # the envelope of an error
    body: type[BaseModel] | None = None  # of a request, for the OpenAPI document
    media_type: str = "text/event-stream"  # of a stream
    more_paths: tuple[str, ...] = ()  # beginnings of other paths whose errors have this envelope
    # Statuses that clients of this API take for the end of their session -> what they are answered with instead.
    statuses: Mapping[int, int] = field(default_factory=dict)
    count_path: str = ""  # of requests that are answered with the number of their prompt's tokens; empty: none
    count_document: Callable[[int], dict[str, Any]] | None = None  # that answer
