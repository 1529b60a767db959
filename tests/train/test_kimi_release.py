"""`kt train` on a folder as Kimi-K2 is released: none of its code is run, and the saved tokenizer needs none."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from tests.support.kimi import ranks, write_release
from tests.support.training import recipe
from tests.support.training_runs import adapter, run


def test_release_is_trained(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    write_release(folder, max_position_embeddings=512)
    run(recipe(folder, tmp_path / "out", max_steps=1, max_samples=4, cutoff_len=128))
    assert any("experts" in name for name in adapter(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello")["input_ids"] == [ranks()[b"hello"]]
