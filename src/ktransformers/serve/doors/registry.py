"""All doors. The server has a route for each (`serve/http/api.py`), and workers parse requests by a door's name."""

from __future__ import annotations

from ktransformers.serve.doors.chat import CHAT
from ktransformers.serve.doors.door import Door

DOORS: tuple[Door, ...] = (
    CHAT,
    # MESSAGES,
    # RESPONSES,
    # OLLAMA,
)
DOOR_OF_NAME = {door.name: door for door in DOORS}


def door_of_path(path: str) -> Door | None:
    """The door whose envelope an error at this path has."""
    matches = [door for door in DOORS if path == door.path or path.startswith(f"{door.path}/")]
    return max(matches, key=lambda door: len(door.path), default=None)
