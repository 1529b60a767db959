"""The folder with the tokenizer of worker processes: gone with the server, also with one that was killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ktransformers.serve.http import prepare_pool


def test_folders_of_killed_servers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, new = tmp_path / "kt-tokenizer-old", tmp_path / "kt-tokenizer-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    os.utime(old, (1, 1))
    with prepare_pool._tokenizer_folder() as used:
        os.utime(used, (1, 1))
        assert sorted(tmp_path.iterdir()) == sorted([new, Path(used)])
        with prepare_pool._tokenizer_folder() as second:
            assert Path(used).is_dir() and second != used, "a folder in use stays"
    assert list(tmp_path.iterdir()) == [new]
