"""What a user has set once for all commands: `config.yaml` under XDG_CONFIG_HOME, read and written whole.

A key is `section.name`. The file holds only what was set, so a default that changes in a later version reaches
everybody who left it alone. A flag wins over the environment, the environment over this file. The same folder rules
(`config_folder`, `data_folder`) serve the library of models.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ktransformers.errors import InputError
from ktransformers.files import write_text


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Paths(Section):
    models: tuple[str, ...] = Field((), description="folders whose models go by the names of their folders")
    downloads: str | None = Field(None, description="folder of `kt model download`; by itself under XDG_DATA_HOME")

    @field_validator("models", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Download(Section):
    source: Literal["huggingface", "modelscope"] = Field("huggingface", description="the hub that is asked")
    endpoint: str | None = Field(None, pattern=r"^https?://", description="a mirror of the hub; HF_ENDPOINT wins")
    workers: int = Field(8, ge=1, le=64, description="files fetched at a time")


class Server(Section):
    host: str = Field("127.0.0.1", min_length=1, description="address of `kt serve`, `run` and `chat`")
    port: int = Field(30000, ge=1, le=65535, description="port of `kt serve`, `run` and `chat`")


class Settings(Section):
    paths: Paths = Paths()  # type: ignore[call-arg,unused-ignore]
    download: Download = Download()  # type: ignore[call-arg,unused-ignore]
    server: Server = Server()  # type: ignore[call-arg,unused-ignore]


def _folder(variable: str, otherwise: str) -> Path:
    root = os.environ.get(variable, "").strip()
    return (Path(root) if root else Path.home() / otherwise) / "ktransformers"


def config_folder() -> Path:
    return _folder("XDG_CONFIG_HOME", ".config")


def data_folder() -> Path:
    return _folder("XDG_DATA_HOME", ".local/share")


def config_file() -> Path:
    return config_folder() / "config.yaml"


def keys() -> dict[str, str]:
    """Key -> what it is, in order."""
    sections: dict[str, type[BaseModel]] = {"paths": Paths, "download": Download, "server": Server}
    return {
        f"{section}.{name}": field.description or ""
        for section, kind in sections.items()
        for name, field in kind.model_fields.items()
    }


def read_config_file() -> dict[str, dict[str, Any]]:
    """What the file says, section by section; nothing where there is none."""
    file = config_file()
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(file), f"no YAML ({' '.join(str(error).split())})", "sections of `key: value`") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise InputError(str(file), "something else", "sections of `key: value`", "`kt config reset` begins anew")
    return found


def read() -> Settings:
    return _validate(read_config_file(), str(config_file()))


def _validate(values: dict[str, dict[str, Any]], where: str) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        if key not in keys():
            raise _unknown_key_error(key) from error
        raise InputError(
            f"{where}: {key}", repr(first.get("input")), first["msg"].removeprefix("Input should be ")
        ) from error


def _unknown_key_error(key: str) -> InputError:
    near = difflib.get_close_matches(key, keys(), 1)
    hint = f"did you mean {near[0]}?" if near else "`kt config show` lists them"
    return InputError("key", repr(key), "a key of config.yaml", hint)


def value(key: str) -> Any:
    """Of one key, the default where it was not set."""
    if key not in keys():
        raise _unknown_key_error(key)
    return effective_values()[key]


def effective_values() -> dict[str, Any]:
    """Key -> value in force, of every key."""
    document = read().model_dump(mode="json")
    return {key: document[key.partition(".")[0]][key.partition(".")[2]] for key in keys()}


def set_value(key: str, new: Any) -> Any:
    """Set one key, or with None forget it; nothing is written where the value does not fit."""
    if key not in keys():
        raise _unknown_key_error(key)
    section, _, name = key.partition(".")
    values = read_config_file()
    inside = dict(values.get(section, {}))
    if new is None:
        inside.pop(name, None)
    else:
        inside[name] = new
    values[section] = inside
    values = {word: kept for word, kept in values.items() if kept}
    checked = _validate(values, "value")
    stored = checked.model_dump(mode="json", exclude_unset=True)
    file = config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, yaml.safe_dump(stored, sort_keys=False, allow_unicode=True) if values else "")
    return checked.model_dump(mode="json")[section][name]


def reset() -> bool:
    """Forget everything that was set; False where nothing was."""
    there = config_file().exists()
    config_file().unlink(missing_ok=True)
    return there
