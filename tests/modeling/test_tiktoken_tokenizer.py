"""Releases with `tiktoken.model` and code of their own (Kimi-K2): opened without running any of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.ground.errors import InputError
from ktransformers.modeling.pretrained import read_tokenizer, run_code_note
from ktransformers.nn import load_model
from ktransformers.plan.model_shape import open_shape
from tests.support.kimi import PARTS, RESERVED, SPECIAL, TRUSTED_CODE, ranks, write_release, write_tokenizer
from tests.support.tiny_models import build


def reference(text: str) -> list[int]:
    """As tiktoken encodes: the pair of the lowest rank is merged first."""
    table, ids = ranks(), []
    for match in regex.finditer("(?V1)" + "|".join(PARTS), text):
        pieces = [bytes([value]) for value in match[0].encode()]
        while len(pieces) > 1:
            merged = [table.get(a + b, len(table)) for a, b in itertools.pairwise(pieces)]
            best = min(range(len(merged)), key=merged.__getitem__)
            if merged[best] == len(table):
                break
            pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
        ids += [table[piece] for piece in pieces]
    return ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_release(tmp_path_factory.mktemp("kimi"))


@pytest.mark.parametrize(
    "text", ["hello world", "中国hello 2024年", "HELLO'll they're\r\n\r\n  x", "a  b\t\tc   ", "日本 Ωλ é🙂", ""]
)
def test_tokens_are_those_of_tiktoken(folder: Path, text: str) -> None:
    tokenizer = read_tokenizer(folder)
    assert tokenizer(text)["input_ids"] == reference(text)
    assert tokenizer.decode(reference(text)) == text


def test_any_text(folder: Path) -> None:
    tokenizer = read_tokenizer(folder)

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(codec="utf-8"), max_size=30))
    def check(text: str) -> None:
        assert tokenizer(text)["input_ids"] == reference(text)

    check()


def test_special_tokens_and_template(folder: Path) -> None:
    tokenizer, first = read_tokenizer(folder), len(ranks())
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL] == list(range(first, first + len(SPECIAL)))
    assert tokenizer.convert_tokens_to_ids(f"<|reserved_token_{first + 6}|>") == first + 6
    assert len(tokenizer) == first + RESERVED + 2 and tokenizer.eos_token == "[EOS]"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert ids == [first + 3, *reference("hello"), first + 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|im_user|>hello"


def test_saved_and_opened_again(folder: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(folder)
    tokenizer.save_pretrained(tmp_path)
    again = read_tokenizer(tmp_path)
    assert again("中国hello<|im_end|> world")["input_ids"] == tokenizer("中国hello<|im_end|> world")["input_ids"]


def test_model_of_the_folder(folder: Path) -> None:
    """As deepseek_v3, without code of the release; `kt plan` reads the same folder."""
    model = load_model(folder, dtype=torch.float32)
    stock = build("deepseek_v3", vocab_size=len(ranks()) + RESERVED + 2)
    tokens = torch.tensor([reference("hello world 2024")])
    with torch.no_grad():
        error = (model(input_ids=tokens).logits - stock(input_ids=tokens).logits).norm()
    assert model.config.model_type == "deepseek_v3" and error < 1e-3
    assert open_shape(str(folder)).latent_width == 2 * (16 + 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [("pat_str = make_pattern()", "without a constant pat_str"), ('pat_str = "a"', "without a constant num_reserved")],
)
def test_code_that_would_have_to_run_is_refused(change: str, message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, f"class TikTokenTokenizer:\n    {change}\n")
    with pytest.raises(InputError, match=message) as caught:
        read_tokenizer(tmp_path)
    assert "--trust-remote-code" in str(caught.value)


def test_other_code_is_refused_and_runs_when_trusted(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TRUSTED_CODE)
    (tmp_path / "tiktoken.model").rename(tmp_path / "other.model")
    with pytest.raises(InputError, match=r"tokenization_kimi.TikTokenTokenizer .*--trust-remote-code"):
        read_tokenizer(tmp_path)
    (tmp_path / "other.model").rename(tmp_path / "tiktoken.model")
    assert read_tokenizer(tmp_path, trust_remote_code=True)("ab")["input_ids"] == [97, 98]
    assert run_code_note(tmp_path) == (
        f"WARNING: running code of the release, tokenization_kimi.TikTokenTokenizer in {tmp_path}, as its tokenizer"
    )


@pytest.mark.parametrize("line", ["aGVsbG8=", "??? 3", "aGVsbG8= x", "aGVsbG8= 100000"])
def test_broken_ranks_are_named(line: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"tiktoken\.model"):
        read_tokenizer(tmp_path)
