"""All doors. The server has a route for each (`serve/http/api.py`), and workers parse requests by a door's name."""

from __future__ import annotations

from typing import Any

from ktransformers.serve.doors.chat import CHAT
from ktransformers.serve.doors.door import Door
from ktransformers.serve.doors.messages import MESSAGES
from ktransformers.serve.doors.ollama import OLLAMA
from ktransformers.serve.doors.responses import RESPONSES
from ktransformers.serve.http.error import ApiError

DOORS: tuple[Door, ...] = (CHAT, MESSAGES, RESPONSES, OLLAMA)
DOOR_OF_NAME = {door.name: door for door in DOORS}


def error_answer(path: str, error: ApiError) -> tuple[int, dict[str, Any]]:
    """Status and document of an error, in the envelope of the door that has this path, or of OpenAI."""
    for door in DOORS:
        if path == door.path or path.startswith((f"{door.path}/", *door.more_paths)):
            return door.statuses.get(error.status, error.status), door.error_document(error)
    return error.status, error.to_json()
