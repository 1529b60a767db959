"""ApiError: what the server refuses or cannot do, as OpenAI's envelope. The message is bounded, whatever the client
sent and whatever a library says about it.
"""

from __future__ import annotations

from typing import Any

from ktransformers.ground.errors import KTError

MAX_MESSAGE_CHARACTERS = 1000
MAX_PARAM_CHARACTERS = 100
UNAVAILABLE = "node_unavailable"  # code of 503 while a host with experts is gone
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(KTError):
    """An error response in OpenAI's envelope."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(bounded(message))
        self.status, self.code = status, code
        self.param = None if param is None else bounded(param, MAX_PARAM_CHARACTERS)

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bounded(text: str, characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Text that is valid UTF-8 and has at most about so many characters."""
    total = len(text)
    text = text[:characters].encode("utf-8", "replace").decode()
    return text if total <= characters else f"{text}... ({total} characters)"
