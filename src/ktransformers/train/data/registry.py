"""Resolves a name in `dataset:` to an entry of dataset_info.json, a file, or a note where to download it.

The user's `dataset_dir` (or `data/` in the working directory) takes precedence over the packaged datasets. Entries have
LLaMA-Factory's fields (file_name, formatting, columns, tags, ranking, num_samples). An entry that would download data
is refused with its address, because training should not start with an unexpected download.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import is_file, path_exists, read_json_object, short, shorten, validate
from ktransformers.train.data.files import SUFFIXES

DEMO_DATA_DIR = Path(__file__).resolve().parent.parent / "demo_data"
INFO_FILE = "dataset_info.json"

# Demo datasets of LLaMA-Factory whose licence forbids redistribution, and where to get them.
_LLAMA_FACTORY = "https://github.com/hiyouga/LLaMA-Factory/tree/main/data"
NOT_REDISTRIBUTED = {
    "alpaca_en_demo": f"{_LLAMA_FACTORY} (alpaca_en_demo.json, CC BY-NC 4.0)",
    "alpaca_zh_demo": f"{_LLAMA_FACTORY} (alpaca_zh_demo.json, CC BY-NC 4.0)",
    "glaive_toolcall_zh_demo": f"{_LLAMA_FACTORY} (glaive_toolcall_zh_demo.json)",
    "dpo_zh_demo": f"{_LLAMA_FACTORY} (dpo_zh_demo.json)",
    "afrimed_qa": "https://huggingface.co/datasets/afrimedqa/afrimedqa_v2 (CC BY-NC-SA 4.0)",
}


class DatasetColumns(BaseModel):
    """Field names of each part of a row in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str = "instruction"
    query: str = "input"
    response: str = "output"
    history: str = "history"
    messages: str = "conversations"
    system: str = "system"
    tools: str = "tools"
    chosen: str = "chosen"
    rejected: str = "rejected"


class Tags(BaseModel):
    """Field and role names of a turn in a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


class DatasetSource(BaseModel):
    """One dataset: its file and format."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    path: Path
    formatting: Literal["auto", "alpaca", "sharegpt", "openai"] = "auto"
    ranking: bool = False
    columns: DatasetColumns = DatasetColumns()
    tags: Tags = Tags()
    num_samples: int | None = Field(default=None, ge=1, le=1 << 62)
    fill: dict[str, str] = Field(default_factory=dict)  # {{placeholder}} in the rows -> text


def _source(name: str, entry: Any, folder: Path) -> DatasetSource:
    entry_name = f"{folder / INFO_FILE}, entry {name}"
    if not isinstance(entry, dict):
        raise InputError(entry_name, short(entry), "an object with file_name")
    for key in ("columns", "tags"):
        if not isinstance(entry.get(key) or {}, dict):
            raise InputError(f"{entry_name}: {key}", short(entry[key]), "an object")
    for key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"):
        if entry.get(key) and not entry.get("file_name"):
            raise InputError(entry_name, f"{key}: {entry[key]}", "file_name", "download the data and name its file")
    ignored = {"hf_hub_url", "ms_hub_url", "om_hub_url", "licence", "origin", "subset", "split", "folder"}
    columns = {key: value for key, value in (entry.get("columns") or {}).items() if value is not None}
    for media in ("images", "videos", "audios"):
        if columns.pop(media, None):
            raise InputError(entry_name, f"columns.{media}", "text", "only text is trained")
    if columns.pop("kto_tag", None):
        raise InputError(entry_name, "columns.kto_tag", "chosen and rejected", "stage is sft or dpo")
    values = {key: value for key, value in entry.items() if key not in ignored}
    file = values.pop("file_name", None)
    if not isinstance(file, str) or not file or "\0" in file:
        raise InputError(f"{entry_name}: file_name", short(file), "the name of a file in its directory")
    tags = values.pop("tags", None) or {}
    formatting = values.pop("formatting", "alpaca" if entry.get("columns") else "auto")
    openai = formatting == "openai"
    defaults = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    fields = {
        **{key: value for key, value in values.items() if key != "columns"},
        "name": name,
        "path": folder / file,
        "formatting": formatting,
        "columns": {"messages": "messages"} | columns if openai else columns,
        "tags": (defaults | {"observation_tag": "tool"}) | tags if openai else tags,
    }
    return validate(DatasetSource, fields, entry_name)


def dataset_folders(dataset_dir: str | None) -> list[Path]:
    user_folder = Path(dataset_dir) if dataset_dir else Path("data")
    if dataset_dir and not (path_exists(user_folder) and user_folder.is_dir()):
        raise InputError("dataset_dir", shorten(dataset_dir), "a folder")
    return [folder for folder in (user_folder, DEMO_DATA_DIR) if (folder / INFO_FILE).is_file()]


def find_source(name: str, dataset_dir: str | None) -> DatasetSource:
    folder_of: dict[str, Path] = {}
    for folder in dataset_folders(dataset_dir):
        info = read_json_object(folder / INFO_FILE, "an object: name -> entry")
        if name in info:
            return _source(name, info[name], folder)
        folder_of |= {other_name: folder for other_name in info if other_name not in folder_of}
    if name.endswith(SUFFIXES):
        candidates = [Path(dataset_dir) / name, Path(name)] if dataset_dir else [Path(name)]
        for path in candidates:
            if is_file(path):
                return DatasetSource(name=path.stem, path=path)
        looked = ", ".join(map(shorten, candidates))
        raise InputError("dataset", shorten(name), "a file that exists", f"looked for {looked}")
    if name in NOT_REDISTRIBUTED:
        raise InputError(
            "dataset",
            f"{name}, whose licence does not let it ship with kt",
            "an entry for it in your dataset_info.json",
            f"get it from {NOT_REDISTRIBUTED[name]}",
        )
    matches = difflib.get_close_matches(name, folder_of, n=1)
    raise InputError(
        "dataset",
        f"{name}, which is in none of {', '.join(str(folder / INFO_FILE) for folder in dataset_folders(dataset_dir))}",
        f"`{matches[0]}`, perhaps" if matches else f"one of {', '.join(folder_of)}, or a file",
    )
