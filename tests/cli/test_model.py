"""`kt model`: registered names, and how verbs resolve them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from tests.support.cli import RunKt, write_model


def test_add_list_info_remove(kt: RunKt, tmp_path: Path) -> None:
    assert kt("model", "list", "--json").json == []
    directory = write_model(tmp_path / "disk" / "Tiny MoE")
    added = kt("model", "add", str(directory), "--json").json
    assert (added["name"], added["experts"], added["top_k"], added["format"]) == ("Tiny-MoE", 4, 2, "safetensors")
    listed = kt("model", "list").out.splitlines()
    assert listed[0].split() == ["NAME", "KIND", "SIZE", "PATH"]
    assert "qwen3_moe, 4 experts, top 2" in listed[1] and str(directory) in listed[1]
    actual = kt("model", "info", "tiny-moe", "--json").json  # names are found whatever their case
    assert (actual["tensors"], actual["numbers"], actual["dtypes"]) == (3, 134, {"BF16": 32, "F32": 2, "F8_E4M3": 100})
    assert actual["findings"] == []
    kt("model", "rm", "Tiny-MoE")
    named = kt("model", "add", str(directory), "--name", "t", "--repo", "me/t", "--json").json
    assert (named["name"], named["repo"], named["path"]) == ("t", "me/t", str(directory))
    assert model_registry.resolve("ME/T") == model_registry.resolve("t") == str(directory)
    assert kt("model", "rm", "t", "--json").json == {"removed": "t", "path": str(directory), "deleted": False}
    assert (directory / "config.json").is_file() and kt("model", "list", "--json").json == []


def test_taken_name_is_refused(kt: RunKt, tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "a" / "m"), write_model(tmp_path / "b" / "m")
    assert kt("model", "add", str(first)).code == 0
    refused = kt("model", "add", str(second))
    assert refused.code == 1 and "--name" in refused.error and str(first) in refused.error
    assert kt("model", "add", str(second), "--name", "no/slash").code == 1
    assert kt("model", "add", str(second), "--name", "m2").code == 0
    assert [entry.name for entry in model_registry.entries()] == ["m", "m2"]
    assert "config.json" in kt("model", "add", str(tmp_path)).error


def test_files_are_deleted_only_with_consent(kt: RunKt, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    kt("model", "add", str(directory))
    refused = kt("model", "rm", "m", "--files")
    assert refused.code == 1 and "--yes" in refused.error and directory.is_dir() and model_registry.entries()
    assert kt("model", "rm", "m", "--files", "--yes").code == 0
    assert not directory.exists() and model_registry.entries() == []


def test_missing_model_is_reported_and_removed(kt: RunKt, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    kt("model", "add", str(directory))
    directory.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"m, registered at .*does not exist.*kt model rm m"):
        model_registry.resolve("m")
    assert "gone" in kt("model", "list").out
    assert kt("model", "refresh", "--json").json == {"removed": ["m"]}
    assert kt("model", "refresh", "--json").json == {"removed": []}


def test_search_folders_provide_models(kt: RunKt, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "models" / "owner" / "deep-moe")
    write_model(tmp_path / "models" / "flat-moe")
    write_model(tmp_path / "models" / ".trash" / "old")
    assert model_registry.resolve("deep-moe") == "deep-moe"
    assert kt("model", "path-add", str(tmp_path / "models"), "--json").json == [str(tmp_path / "models")]
    assert kt("model", "path-add", str(tmp_path / "models"), "--json").json == [str(tmp_path / "models")]  # once
    assert model_registry.resolve("Deep-MoE") == str(directory)
    assert [one["name"] for one in kt("model", "list", "--json").json] == ["deep-moe", "flat-moe"]
    assert model_registry.complete("de") == ["deep-moe"]
    assert kt("model", "path-remove", str(tmp_path / "models"), "--json").json == []
    assert kt("model", "path-remove", str(tmp_path / "models")).code == 1
    assert "exists" in kt("model", "path-add", str(tmp_path / "nowhere")).error


def test_existing_path_overrides_a_name(kt: RunKt, tmp_path: Path) -> None:
    kt("model", "add", str(write_model(tmp_path / "disk" / "m")))
    (tmp_path / "m").mkdir()
    assert model_registry.resolve("m") == "m"
    assert model_registry.resolve("owner/unknown") == "owner/unknown" and model_registry.resolve("") == ""


def test_concurrent_commands_lose_no_entry(kt: RunKt, tmp_path: Path) -> None:
    places = [write_model(tmp_path / "disk" / f"m{number}") for number in range(8)]
    threads = [threading.Thread(target=model_registry.add, args=(directory,)) for directory in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.path for entry in model_registry.entries()] == places


def test_unreadable_registry_is_reported(kt: RunKt, tmp_path: Path) -> None:
    file = model_registry.registry_file()
    file.parent.mkdir(parents=True)
    file.write_text("{")
    assert "models.json, line 1: given no JSON" in kt("model", "list").error and model_registry.complete("m") == []
    file.write_text(json.dumps({"version": 99, "models": []}))
    assert "version 99" in kt("model", "list").error


def test_verbs_resolve_models_by_name(kt: RunKt, tmp_path: Path) -> None:
    from ktransformers.serve.target import resolve_target
    from ktransformers.train.model import base_directory
    from ktransformers.train.resolve import read_settings

    directory = write_model(tmp_path / "disk" / "some folder")
    kt("model", "add", str(directory), "--name", "neko")
    target = resolve_target("neko")
    assert target.model == directory and target.name == "neko"
    assert "num_hidden_layers" in kt("plan", "neko").error  # it was found, and is no whole model
    assert "MODEL" in kt("plan").error
    words = {"output_dir": str(tmp_path / "out"), "dataset": "identity"}
    settings = read_settings({"model_name_or_path": "neko", **words})
    assert settings.model.model_name_or_path == str(directory)  # so that the adapter names a base that PEFT finds
    assert base_directory(settings.model, download=False) == directory
    kt("model", "add", str(directory), "--name", "neko", "--repo", "someone/neko")
    settings = read_settings({"model_name_or_path": "neko", **words})
    assert settings.model.model_name_or_path == "someone/neko"  # and, where there is one, that others find too
    assert base_directory(settings.model, download=False) == directory
    assert model_registry.portable_name("a/b") == "a/b" and model_registry.portable_name("unknown") == "unknown"
    refused = kt("eval", "neko", "--task", "persona", "--engine", "nonsense")
    assert "nonsense" in refused.error
    assert kt("model", "prepare", "neko", "-o", str(tmp_path / "ready"), "--json").json["source"] == str(directory)
