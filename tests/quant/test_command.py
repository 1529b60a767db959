"""The command `kt quant`: tables, JSON, older option names, the quantization report with a calibration text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.cli.quant import format_duration, normalise_format, parse_layers
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.quant.report import WINDOW_TOKENS, read_report, read_text, split_windows
from tests.support.packing import tiny
from tests.support.tiny_models import logits


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tiny(tmp_path_factory.mktemp("command") / "model")
    letters = ["<pad>", "<s>", "</s>", *map(chr, range(32, 125))]
    backend = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(directory)
    return directory


def kt(*words: object) -> str:
    done = CliRunner().invoke(app, ["quant", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_quant_prints_a_table_or_json(source: Path, tmp_path: Path) -> None:
    given = (source, "--format", "int4", "--group", 64, "--down-format", "int8", "-o", tmp_path / "out")
    shown = kt(*given)
    lines = shown.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'} (") and "GB/s" in lines[0]
    assert lines[1].split() == ["matrix", "from", "to", "mean", "error", "largest", "layer"]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["gate", "bf16", "int4:64"],
        ["up", "bf16", "int4:64"],
        ["down", "bf16", "int8"],
    ]
    words = json.loads(
        kt(source, "--format", "int4", "--group", 64, "--down-format", "int8", "-o", tmp_path / "out", "--json")
    )
    assert words["whole"] and words["kept_layers"] == 2 and words["source_bytes"] == 0  # it was there already
    assert words["summary"]["down"]["format"] == ["int8"]
    assert 0.01 < words["layers"][0]["matrices"]["gate"]["error"] < 0.17
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    shown = kt(source, "--format", "int8", "--dry-run")
    assert "bf16 -> int8" in shown and "2 layers of experts" in shown and "time" in shown
    words = json.loads(kt(source, "--format", "keep", "--dry-run", "--json", "-o", tmp_path / "out"))
    assert words["out_bytes"] == words["rest_bytes"] + sum(layer["packed_bytes"] for layer in words["layers"])
    assert list(tmp_path.iterdir()) == []


def test_older_option_names_are_accepted(source: Path, tmp_path: Path) -> None:
    old = kt("--input-path", source, "--input-type", "bf16", "--output", tmp_path / "a", "--quant-method", "moe_int8",
             "--cpuinfer-threads", 2, "--threadpool-count", 2)  # fmt: skip
    assert "int8" in old
    kt(source, "-m", "int8", "-o", tmp_path / "b", "--layers", "1", "--json")
    assert not (tmp_path / "b").exists()
    kt(source, "-m", "int8", "-o", tmp_path / "b")
    one, other = (load_model(tmp_path / name, dtype=torch.float32) for name in "ab")
    assert torch.equal(logits(one), logits(other))


def test_report_of_a_calibration_text(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "\n".join(json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 3}) for _ in range(3))
    )
    words = json.loads(
        kt(source, "--format", "int4", "-o", tmp_path / "out", "--calib", text, "--calib-tokens", 300, "--json")
    )
    actual = words["calibration"]
    assert actual["tokens"] == 299 and actual["text"] == "text.jsonl" and words["skipped"] is None
    assert 0 < actual["kl"] < 1 and 0.3 < actual["same_top"] <= 1
    want = perplexity(source, text, 300)
    assert abs(actual["source_perplexity"] / want - 1) < 0.02
    assert abs(actual["perplexity"] / want - 1) < 0.3
    assert read_report(tmp_path / "out").calibration is not None
    kept = json.loads(kt(source, "--format", "keep", "-o", tmp_path / "kept", "--calib", text, "--json"))["calibration"]
    assert kept["kl"] == 0 and kept["same_top"] == 1 and kept["perplexity"] == kept["source_perplexity"]
    assert not list((tmp_path / "kept").glob(".kt-calib*"))


def perplexity(directory: Path, text: Path, count: int) -> float:
    """By stock transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids: Any = AutoTokenizer.from_pretrained(directory)(read_text(text), return_tensors="pt").input_ids[:, :count]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        loss: float = model(ids, labels=ids).loss.exp().item()
    return loss


def test_impossible_calibration_is_skipped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.ground.system import Memory

    text = tmp_path / "text.txt"
    text.write_text("words")
    monkeypatch.setattr("ktransformers.quant.report.memory", lambda: Memory(1 << 30, 1 << 20, "never"))
    shown = kt(source, "--format", "int8", "-o", tmp_path / "out", "--calib", text)
    assert "no calibration: calib: given 0.0 GB of free memory" in shown
    assert read_report(tmp_path / "out").skipped is not None


def test_calibration_text_formats(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n{"prompt": "two"}\n')
    assert read_text(file) == "one\n\ntwo"
    for given, message in (("", "which is empty"), ("{", "line 1: given"), ('{"words": 1}', "an object with text")):
        file.write_text(given)
        with pytest.raises(InputError, match=message):
            read_text(file)
    pieces = split_windows(torch.arange(WINDOW_TOKENS + 2), WINDOW_TOKENS + 1)
    assert [tuple(piece.shape) for piece in pieces] == [(1, WINDOW_TOKENS)]  # one token alone predicts nothing


@pytest.mark.parametrize(("text", "layers"), [("0-3", {0, 1, 2, 3}), ("7", {7}), ("1, 3-4", {1, 3, 4})])
def test_layers_option_converts_some_layers(text: str, layers: set[int]) -> None:
    assert parse_layers(text) == layers


def test_wrong_options_are_refused(source: Path, tmp_path: Path) -> None:
    for text in ("", "3-1", "a", "1-"):
        with pytest.raises(InputError, match="layers: given"):
            parse_layers(text)
    for words, message in (
        ((source,), "out: given nothing"),
        (("-o", tmp_path / "out"), "MODEL: given nothing"),
        ((source, "-o", tmp_path / "out", "--threads", 0), "threads: given 0"),
        ((source, "-o", tmp_path / "out", "--calib", tmp_path / "nothing"), "calib: given .*does not exist"),
        ((source, "-o", tmp_path / "out", "--format", "int3"), "format: given"),
    ):
        with pytest.raises(InputError, match=message):
            kt(*words)
    assert list(tmp_path.iterdir()) == []


def test_format_words() -> None:
    assert [normalise_format(word) for word in ("MOE_INT8", "moe_int4", "int4:64", "Q8_0")] == [
        "int8",
        "int4",
        "int4:64",
        "q8_0",
    ]
    assert [format_duration(seconds) for seconds in (0.51, 59.4, 61, 3723)] == ["0.5 s", "59.4 s", "1:01", "1:02:03"]
