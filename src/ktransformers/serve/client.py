"""A small client for servers that speak the OpenAI API, for `kt chat` and `kt prove`. It uses only the standard
library, so that it starts at once.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any

from ktransformers.errors import InputError, KTError


class Client:
    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=3600)
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")
            try:
                message = json.loads(message)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = message[:300]
            raise KTError(f"the server answered {error.code}: {message}") from error
        except (OSError, ValueError) as error:
            raise InputError("url", f"{self.url} ({error})", "a server that is running", "start `kt serve`") from error

    def models(self) -> list[str]:
        return list(self.template_origins())

    def template_origins(self) -> dict[str, str | None]:
        """Served names with the origin of the chat template: `adapter` if it is another than the base's."""
        with self.open("/v1/models") as reply:
            return {str(model["id"]): model.get("chat_template") for model in json.loads(reply.read())["data"]}

    def load_adapter(self, name: str, directory: str) -> None:
        """Has a `kt serve` load an adapter from a directory that it can read."""
        with self.open("/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory}) as reply:
            reply.read()

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self.open("/v1/chat/completions", request) as reply:
            for raw in reply:
                line = raw.decode("utf-8", "replace").strip()
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                part = json.loads(line.removeprefix("data:"))
                if "error" in part:
                    raise KTError(f"the server reported: {part['error'].get('message')}")
                yield part
