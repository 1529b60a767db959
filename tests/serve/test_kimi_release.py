"""`kt serve` of a folder as Kimi-K2 is released: its own code is run only with --trust-remote-code, and named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ktransformers.modeling.pretrained import read_tokenizer
from ktransformers.serve.flags import Launch, parse
from ktransformers.serve.forecast import plan_server
from ktransformers.serve.http.grammar_source import GrammarCompiler
from ktransformers.serve.http.prepare import PrepareSettings
from ktransformers.serve.http.prepare_pool import PreparePool
from ktransformers.serve.launch import serve
from ktransformers.serve.loading import open_service
from ktransformers.serve.target import resolve_target
from tests.support.kimi import TRUSTED_CODE, write_release, write_tokenizer


def test_release_is_planned_loaded_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    folder = write_release(tmp_path, max_position_embeddings=512)
    launch = parse([str(folder), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "256"])
    target = resolve_target(launch.target)
    lines: list[str] = []
    plan = plan_server(launch, target, lines.append, lambda plan: None)
    service = open_service(launch, target, lines.append, plan)
    assert service.engine.forward.model.config.model_type == "deepseek_v3"
    assert service.tokenizer.eos_token == "[EOS]"


def test_flag_names_whose_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    folder = write_release(tmp_path)
    lines: list[str] = []
    monkeypatch.setattr("ktransformers.serve.launch.plan_server", lambda *_: pytest.fail("stop here"))
    with pytest.raises(pytest.fail.Exception, match="stop here"):
        serve(parse([str(folder), "--trust-remote-code", "--port", "0"]), lines.append, lambda plan: None)
    named = f"running code of the release, tokenization_kimi.TikTokenTokenizer in {folder}"
    assert [line for line in lines if named in line] == lines[-1:]


def test_workers_run_the_code_of_a_trusted_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TRUSTED_CODE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    tokenizer = read_tokenizer(tmp_path, trust_remote_code=True)
    assert Launch("M").trust_remote_code is False

    async def start() -> None:
        compiler = GrammarCompiler(tokenizer, 256)
        async with PreparePool(tokenizer, PrepareSettings(256, 64), compiler, workers=1).running():
            pass

    asyncio.run(start())
