"""User settings for all commands: `config.yaml` under XDG_CONFIG_HOME, read and written as a whole.

A key is `section.name`. The file contains only keys that were set, so a changed default reaches users who did not set
the key. A flag overrides the environment, which overrides this file. The model registry uses the same folder rules
(`config_folder`, `data_folder`).
"""

from __future__ import annotations

import difflib
import errno
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_yaml, write_text


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Paths(Section):
    models: tuple[str, ...] = Field((), description="folders whose models can be used by folder name")
    downloads: str | None = Field(None, description="folder of `kt model download`; default under XDG_DATA_HOME")

    @field_validator("models", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Download(Section):
    source: Literal["huggingface", "modelscope"] = Field("huggingface", description="the hub to download from")
    endpoint: str | None = Field(
        None, pattern=r"^https?://", description="a mirror of the hub; HF_ENDPOINT overrides it"
    )
    workers: int = Field(8, ge=1, le=64, description="files downloaded in parallel")


class Server(Section):
    host: str = Field("127.0.0.1", min_length=1, description="address of `kt serve`, `run` and `chat`")
    port: int = Field(30000, ge=1, le=65535, description="port of `kt serve`, `run` and `chat`")


class Answers(Section):
    """Answers to the questions that commands ask on a terminal; the next question proposes them."""

    model: str | None = Field(None, description="last answer: a model")
    adapter: str | None = Field(None, description="last answer: an adapter")
    recipe: str | None = Field(None, description="last answer: a YAML file of a training")
    loop: str | None = Field(None, description="last answer: a YAML file of a loop")
    task: str | None = Field(None, description="last answer: a task of `kt eval`")
    port: int | None = Field(None, ge=1, le=65535, description="last answer: a port")


class Settings(Section):
    paths: Paths = Paths()  # type: ignore[call-arg,unused-ignore]
    download: Download = Download()  # type: ignore[call-arg,unused-ignore]
    server: Server = Server()  # type: ignore[call-arg,unused-ignore]
    answers: Answers = Answers()  # type: ignore[call-arg,unused-ignore]


def _folder(variable: str, default: str) -> Path:
    root = os.environ.get(variable, "").strip()
    return (Path(root) if root else Path.home() / default) / "ktransformers"


def config_folder() -> Path:
    return _folder("XDG_CONFIG_HOME", ".config")


def data_folder() -> Path:
    return _folder("XDG_DATA_HOME", ".local/share")


def config_file() -> Path:
    return config_folder() / "config.yaml"


def keys() -> dict[str, str]:
    """Key -> description, in order."""
    sections: dict[str, Any] = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        f"{section}.{name}": field.description or ""
        for section, model in sections.items()
        for name, field in model.model_fields.items()
    }


def read_config_file() -> dict[str, dict[str, Any]]:
    """The contents of the file, section by section; empty without a file."""
    file = config_file()
    if not file.exists():
        return {}
    document = read_yaml(file, "sections of `key: value`")
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(section, dict) for section in document.values()):
        raise InputError(str(file), "something else", "sections of `key: value`", "`kt config reset` removes it")
    return document


def read() -> Settings:
    return _validate(read_config_file(), str(config_file()))


def _validate(values: dict[str, dict[str, Any]], source: str) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        if key not in keys():
            raise _unknown_key_error(key) from error
        raise InputError(
            f"{source}: {key}", repr(first.get("input")), first["msg"].removeprefix("Input should be ")
        ) from error


def _unknown_key_error(key: str) -> InputError:
    matches = difflib.get_close_matches(key, keys(), 1)
    hint = f"did you mean {matches[0]}?" if matches else "`kt config show` lists them"
    return InputError("key", repr(key), "a key of config.yaml", hint)


def value(key: str) -> Any:
    """The value of one key, or its default."""
    if key not in keys():
        raise _unknown_key_error(key)
    return effective_values()[key]


def effective_values() -> dict[str, Any]:
    """Key -> effective value, for every key."""
    document = read().model_dump(mode="json")
    return {key: document[key.partition(".")[0]][key.partition(".")[2]] for key in keys()}


def set_value(key: str, new_value: Any) -> Any:
    """Sets one key, or removes it with None; an invalid value is refused before anything is written."""
    if key not in keys():
        raise _unknown_key_error(key)
    section, _, name = key.partition(".")
    values = read_config_file()
    inside = dict(values.get(section, {}))
    if new_value is None:
        inside.pop(name, None)
    else:
        inside[name] = new_value
    values[section] = inside
    values = {section_name: section_values for section_name, section_values in values.items() if section_values}
    checked = _validate(values, "value")
    stored = checked.model_dump(mode="json", exclude_unset=True)
    file = config_file()
    if file.exists() and not os.access(file, os.W_OK):  # replacing it would need no right to write it
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, yaml.safe_dump(stored, sort_keys=False, allow_unicode=True) if values else "")
    return checked.model_dump(mode="json")[section][name]


def reset() -> bool:
    """Removes all settings; False if there were none."""
    existed = config_file().exists()
    config_file().unlink(missing_ok=True)
    return existed
