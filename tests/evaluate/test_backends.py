"""The same numbers in this process and over HTTP, in batches and one by one, with an adapter and without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ktransformers.adapters.manifest import MANIFEST_FILE, MANIFEST_FORMAT, MANIFEST_VERSION
from ktransformers.checkpoint.dense import open_dense
from ktransformers.checkpoint.upcycle import Recipe, upcycle
from ktransformers.evaluate.backend import EvalPrompt, Question
from ktransformers.evaluate.local import LocalModel, trained_experts
from ktransformers.evaluate.remote import RemoteBackend, connect
from ktransformers.ground import client, system
from ktransformers.ground.errors import InputError, KTError

PROMPTS = [
    EvalPrompt("the"),
    EvalPrompt("a longer question, with 12 numbers and 喵", system="be brief"),
    EvalPrompt("plain text goes", chat=False),
    EvalPrompt("x" * 60),
    EvalPrompt("why?", chat=False),
    EvalPrompt("and then?", system="be brief", history=(("who is it?", "a cat"), ("where?", "here"))),
    EvalPrompt("and then?", chat=False, history=(("who is it?", "a cat"),)),
]
QUESTIONS = [Question(prompt, ("A", "B", "C")) for prompt in PROMPTS] + [
    Question(PROMPTS[0], ("a whole sentence", " the end", "喵")),
    Question(EvalPrompt("", chat=False), ("running text that has no prompt",)),
    Question(PROMPTS[2], (" there", " A")),
]


@pytest.fixture(scope="module")
def local(model_directory: Path, adapter_directory: Path) -> LocalModel:
    model = LocalModel.open(model_directory, dtype="float32", batch_size=4)
    model.add_adapters({"tuned": adapter_directory})
    return model


def close(first: list[list[Any]], second: list[list[Any]]) -> None:
    assert [[found.tokens for found in row] for row in first] == [[found.tokens for found in row] for row in second]
    for ours, theirs in zip(first, second, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-4)


def test_batched_results_equal_unbatched(local: LocalModel) -> None:
    backend = local.backend()
    single = [backend.generate([prompt], 12)[0] for prompt in PROMPTS]
    assert backend.generate(PROMPTS, 12) == single
    assert len(set(single)) > 2
    close(backend.likelihoods(QUESTIONS), [backend.likelihoods([question])[0] for question in QUESTIONS])


@pytest.mark.parametrize("adapter", [None, "tuned"])
def test_local_results_equal_remote(adapter: str | None, local: LocalModel, serving: tuple[str, Any]) -> None:
    there = RemoteBackend(connect(serving[0]), adapter or "base", local.tokens)
    here = local.backend(adapter)
    assert here.generate(PROMPTS, 12) == there.generate(PROMPTS, 12)
    close(here.likelihoods(QUESTIONS), there.likelihoods(QUESTIONS))


def test_adapter_changes_results_and_can_be_disabled(local: LocalModel) -> None:
    before = local.backend().likelihoods(QUESTIONS)
    tuned = local.backend("tuned").likelihoods(QUESTIONS)
    assert max(abs(a[0].logprob - b[0].logprob) for a, b in zip(before, tuned, strict=True)) > 0.1
    assert local.backend().likelihoods(QUESTIONS) == before


def test_packed_experts_give_the_same_likelihoods(
    local: LocalModel, model_directory: Path, adapter_directory: Path, tmp_path: Path
) -> None:
    """The same model as a Mixture of Experts in packed form, with an adapter of the dense one on its attention."""
    upcycle(open_dense(model_directory), tmp_path / "moe", Recipe(dtype="float32"))
    packed = LocalModel.open(tmp_path / "moe", dtype="float32")
    assert "(kt, float32" in packed.backend().name
    packed.add_adapters({"tuned": adapter_directory})
    for adapter in (None, "tuned"):
        for ours, dense in zip(
            packed.backend(adapter).likelihoods(QUESTIONS), local.backend(adapter).likelihoods(QUESTIONS), strict=True
        ):
            for one, other in zip(ours, dense, strict=True):  # experts are bf16 there
                assert one.logprob / one.tokens == pytest.approx(other.logprob / other.tokens, abs=0.25)


def test_experts_path_is_read_from_the_adapter(
    local: LocalModel, model_directory: Path, adapter_directory: Path, tmp_path: Path
) -> None:
    """Those that its manifest names, in place of the model's own."""
    for name in ("model", "others"):
        upcycle(open_dense(model_directory), tmp_path / name, Recipe(dtype="float32"))
    for shard in (tmp_path / "others").glob("*.safetensors"):  # other experts behind the same attention
        halved = {key: tensor * 0.5 if "experts" in key else tensor for key, tensor in load_file(shard).items()}
        save_file(halved, shard, metadata={"format": "pt"})
    places = {"one": tmp_path / "one", "two": tmp_path / "two"}
    for name, place in places.items():
        shutil.copytree(adapter_directory, place)
        if name == "one":
            words = {
                "format": MANIFEST_FORMAT,
                "version": MANIFEST_VERSION,
                "tensors": {},
                "experts": {"path": str(tmp_path / "others")},
            }
            (place / MANIFEST_FILE).write_text(json.dumps(words))
    found = trained_experts({"one": places["one"]})
    assert found == tmp_path / "others"
    assert trained_experts({"two": places["two"]}) is None
    own, other, directly = (
        LocalModel.open(tmp_path / model, dtype="float32", experts=experts).backend().likelihoods(QUESTIONS)
        for model, experts in (("model", None), ("model", found), ("others", None))
    )
    assert other == directly
    assert own != other
    with pytest.raises(InputError, match="the same experts"):
        trained_experts(places)
    with pytest.raises(InputError, match="engine"):
        LocalModel.open(tmp_path / "model", experts=found, engine="transformers")
    shutil.rmtree(tmp_path / "others")
    with pytest.raises(InputError, match="which is not there"):
        trained_experts({"one": places["one"]})


def test_retrained_adapter_changes_the_fingerprint(local: LocalModel, adapter_directory: Path, tmp_path: Path) -> None:
    before = local.backend("tuned").name
    shutil.copytree(adapter_directory, tmp_path / "again")
    weights = load_file(tmp_path / "again" / "adapter_model.safetensors")
    first = next(iter(weights))
    save_file({**weights, first: weights[first] + 1}, tmp_path / "again" / "adapter_model.safetensors")
    local.add_adapters({"again": tmp_path / "again"})
    assert local.backend("tuned").name == before
    assert local.backend("again").name.split("(")[-1] != before.split("(")[-1]


def test_scoring_chat_prompts_needs_a_tokenizer(local: LocalModel, serving: tuple[str, Any]) -> None:
    there = RemoteBackend(connect(serving[0]), "base")
    plain = [Question(PROMPTS[2], (" there", " A")), Question(EvalPrompt("", chat=False), ("running text",))]
    close(local.backend().likelihoods(plain), there.likelihoods(plain))
    with pytest.raises(InputError, match="--tokenizer"):
        there.likelihoods(QUESTIONS[:1])


def test_busy_server_is_retried(serving: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_RETRY_SECONDS", 0.01)
    serving[1].busy = 2
    assert RemoteBackend(connect(serving[0]), "base").generate(PROMPTS[:1], 3)
    assert serving[1].busy == 0


def test_server_errors_are_reported(monkeypatch: pytest.MonkeyPatch, serving: tuple[str, Any]) -> None:
    monkeypatch.setattr(client, "FIRST_RETRY_SECONDS", 0.01)
    with pytest.raises(KTError, match="no model other"):
        RemoteBackend(connect(serving[0]), "other").generate(PROMPTS[:1], 3)
    with pytest.raises(InputError, match="that is running"):
        connect("http://127.0.0.1:9").models()


def test_auto_dtype_depends_on_the_cpu(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for native, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(system, "bf16_is_fast", lambda device, native=native: native)
        assert f"(transformers, {dtype}" in LocalModel.open(model_directory).name


def test_invalid_options_are_refused(model_directory: Path, local: LocalModel, tmp_path: Path) -> None:
    for words in ({"engine": "onnx"}, {"dtype": "int4"}, {"batch_size": 0}):
        with pytest.raises(InputError, match=next(iter(words)).replace("_", ".")):
            LocalModel.open(model_directory, **words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Hugging Face directory"):
        LocalModel.open(tmp_path)
    with pytest.raises(InputError, match="tuned"):
        local.backend("other")
    with pytest.raises(InputError, match="adapter_config"):
        local.add_adapters({"x": tmp_path})


def test_head_computes_scored_positions_only(local: LocalModel) -> None:
    questions = [Question(EvalPrompt("the cat "), ("sat", "stood")), Question(EvalPrompt("a"), ("b", "c"))]
    rows: list[int] = []
    head = local.transformer.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[-2]))
    try:
        scores = local.backend().likelihoods(questions)
    finally:
        handle.remove()
    letters = 1  # one position for both continuations of a token
    assert sum(rows) == letters + sum(score.tokens for score in scores[0])
