"""A small client for servers that speak the OpenAI API, for `kt chat`, `kt prove`, `kt eval` and `kt loop`. It
uses only the standard library, so that it starts at once.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any

from ktransformers.ground.errors import InputError, KTError

FIRST_RETRY_SECONDS = 1.0  # doubled after each attempt
RETRIED_STATUS = {408, 429, 500, 502, 503, 504}


class Client:
    """`attempts`: for requests that a busy server refuses or that do not reach it."""

    def __init__(self, url: str, key: str | None = None, *, attempts: int = 1, timeout: float = 3600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key, self._attempts, self._timeout = key, attempts, timeout

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(1, self._attempts + 1):
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                return urllib.request.urlopen(request, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED_STATUS or attempt == self._attempts:
                    raise KTError(f"{self.url}: the server answered {error.code}: {_message(error)}") from error
            except (OSError, ValueError) as error:
                if attempt == self._attempts:
                    given = f"{self.url} ({error})"
                    raise InputError("url", given, "a server that is running", "start `kt serve`") from error
            time.sleep(FIRST_RETRY_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("every path above returns or raises")

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the answer."""
        with self.open(path, body) as reply:
            try:
                return json.loads(reply.read())
            except ValueError as error:
                raise InputError("url", f"{self.url}, which answers no JSON", "a server of the OpenAI API") from error

    def models(self) -> list[str]:
        return list(self.template_origins())

    def template_origins(self) -> dict[str, str | None]:
        """Served names with the origin of the chat template: `adapter` if it is another than the base's."""
        return {name: entry.get("chat_template") for name, entry in self.model_entries().items()}

    def model_entries(self) -> dict[str, dict[str, Any]]:
        """What the server lists, by served name."""
        try:
            models = self.request("/v1/models")["data"]
            if not models:
                raise LookupError("no models")
            return {str(model["id"]): dict(model) for model in models}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("url", f"{self.url}, which lists no models", "a server of the OpenAI API") from error

    def load_adapter(self, name: str, directory: str) -> None:
        """Has a `kt serve` load an adapter from a directory that it can read."""
        with self.open("/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory}) as reply:
            reply.read()

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        finished = False
        with self.open("/v1/chat/completions", request) as reply:
            for line in self._lines(reply):
                finished = finished or line == "data: [DONE]"
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                try:
                    part = json.loads(line.removeprefix("data:"))
                except ValueError as error:
                    raise KTError(f"{self.url}: an answer that is not JSON: {line[:100]}") from error
                if "error" in part:
                    raise KTError(f"the server reported: {part['error'].get('message')}")
                finished = finished or any(choice.get("finish_reason") for choice in part.get("choices") or ())
                yield part
        if not finished:
            raise KTError(f"{self.url}: the connection ended during the answer")

    def _lines(self, reply: Any) -> Generator[str]:
        try:
            for raw in reply:
                yield raw.decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise KTError(f"{self.url}: the connection ended during the answer ({error})") from error


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]  # a page of HTML, as a server of another kind sends it
