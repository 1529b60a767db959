"""Tiers of the KV cache from the launch line: what is opened before the model is loaded, what is reported, restarts."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.serve import kv_tiers
from ktransformers.serve.cache.disk_tier import DiskFile
from ktransformers.serve.flags import Launch, parse
from ktransformers.serve.identity import model_identity
from ktransformers.serve.loading import open_service
from ktransformers.serve.target import Target
from tests.support.serving import RecordedEvents, random_prompt, write_sample_adapter

pytest.importorskip("fastapi")
PROMPT = tuple(random_prompt(5, 200))


@contextmanager
def opened(model: Path, *flags: str) -> Iterator[tuple[Any, list[str]]]:
    """A service on the CPU in float32, and what it logged."""
    lines: list[str] = []
    words = [str(model), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", *flags]
    service = open_service(parse(words), Target(model, name="tiny"), lines.append)
    try:
        yield service, lines
    finally:
        if service.engine.tiers is not None:
            assert service.engine.tiers.flush()
            service.engine.tiers.close()


def ask(service: Any, name: str = "tiny") -> Any:
    from ktransformers.serve.sampling.sampling import Sampling
    from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence

    recorded, adapter = RecordedEvents(), service.registry.find(name)
    request = GenerationRequest(PROMPT, 4, Sampling(temperature=0), adapter=adapter, logprobs=1)
    service.engine.submit([Sequence(request, service.tokenizer, recorded)])
    while service.engine.busy:
        service.engine.step()
    return recorded


def test_a_restarted_server_finds_its_prefixes(
    model_directory: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    lora = ["--lora-paths", f"one={adapters['one']}"]
    disk = ["--kv-disk", str(tmp_path), "--kv-disk-gb", "1"]
    with opened(model_directory, *lora) as (service, _):
        assert service.engine.tiers is None
        expected = {name: ask(service, name) for name in ("tiny", "one")}
    with opened(model_directory, *disk, *lora) as (service, lines):
        assert any("a buffer of the disk; on disk: 1.00 GiB in" in line for line in lines)
        assert [ask(service, name).events[-1].cached for name in ("tiny", "one")] == [0, 0]
    with opened(model_directory, *disk, *lora) as (service, _):
        for name, answer in expected.items():
            again = ask(service, name)
            assert again.events[-1].cached == 192 and again.tokens == answer.tokens
        cache = service.describe_cache()
    assert [path.suffix for path in tmp_path.iterdir()] == [".ktkv"]
    assert cache["bytes_per_token"] == service.kv_bytes_per_token == sum(cache["kinds"].values())
    assert list(cache["kinds"]) == ["keys_and_values"] and cache["tiers"]["disk"]["blocks"] == 6


def test_a_server_with_codes_has_a_file_of_its_own(model_directory: Path, tmp_path: Path) -> None:
    disk = ["--kv-disk", str(tmp_path), "--kv-disk-gb", "1"]
    with opened(model_directory, *disk) as (service, _):
        ask(service)
        numbers = service.kv_bytes_per_token
    with opened(model_directory, *disk, "--kv-cache-dtype", "fp8") as (service, lines):
        assert any(line.startswith("keys and values in fp8 (e4m3): logits of a short text differ by") for line in lines)
        answer = ask(service)
        assert answer.events[-1].cached == 0
    with opened(model_directory, *disk, "--kv-cache-dtype", "fp8_e4m3") as (service, _):
        again, cache = ask(service), service.describe_cache()
        assert again.events[-1].cached == 192 and again.tokens == answer.tokens
        assert cache["dtype"] == "fp8_e4m3" and service.approximations["kv_cache_dtype"] == "fp8_e4m3"
        assert cache["bytes_per_token"] == sum(cache["kinds"].values()) < 0.3 * numbers
    assert len(list(tmp_path.iterdir())) == 2


def test_an_adapter_that_was_trained_again_is_no_hit(
    model_directory: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(adapters["one"], adapter)
    flags = ["--kv-disk", str(tmp_path / "kv"), "--lora-paths", f"one={adapter}"]
    with opened(model_directory, *flags) as (service, _):
        ask(service, "one")
    shutil.rmtree(adapter)
    write_sample_adapter(adapter, model_directory, rank=4, seed=77)
    with opened(model_directory, *flags) as (service, _):
        assert ask(service, "one").events[-1].cached == 0
    shutil.rmtree(adapter)
    shutil.copytree(adapters["one"], adapter)
    with opened(model_directory, *flags) as (service, _):
        assert ask(service, "one").events[-1].cached == 192


def test_metrics_name_the_tiers(model_directory: Path, tmp_path: Path) -> None:
    from ktransformers.serve.http.metrics import render

    with opened(model_directory, "--kv-host-gb", "0.01", "--kv-disk", str(tmp_path / "kv")) as (service, _):
        ask(service)
        assert service.engine.tiers.flush()
        service.engine.kv_cache.evict_idle()
        ask(service)
        text = render(service, Counter(), 0)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kt_cache_tier"))
    assert values['kt_cache_tier_hit_tokens_total{tier="host"}'] == "192"
    assert values['kt_cache_tier_blocks{tier="disk"}'] == values['kt_cache_tier_blocks{tier="host"}'] == "3"
    size = service.engine.tiers.layout.bytes
    assert float(values['kt_cache_tier_write_bytes_total{tier="disk"}']) == 3 * size
    assert len(values) == 24


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.write_text("a letter"), "another kind of file"),
        (lambda path: path.symlink_to("missing/kv"), "No such file"),
        (lambda path: os.mkfifo(path), "no regular file"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    model_directory: Path, tmp_path: Path, prepare: Any, words: str
) -> None:
    prepare(tmp_path / "kv")
    lines: list[str] = []
    launch = Launch(str(model_directory), device="cpu", kv_disk=tmp_path / "kv")
    with pytest.raises(InputError, match=words):
        open_service(launch, Target(model_directory, name="tiny"), lines.append)
    assert not any("loading" in line for line in lines)


def test_a_second_server_is_refused_before_the_model_is_loaded(model_directory: Path, tmp_path: Path) -> None:
    first = DiskFile(tmp_path / "kv", b"model")
    launch, lines = Launch(str(model_directory), device="cpu", kv_disk=tmp_path / "kv"), list[str]()
    with pytest.raises(InputError, match="another server uses"):
        open_service(launch, Target(model_directory, name="tiny"), lines.append)
    assert not any("loading" in line for line in lines)
    first.close()


def test_modes_without_tiers_say_so(model_directory: Path, tmp_path: Path) -> None:
    with opened(model_directory, "--deterministic", "--kv-disk", str(tmp_path / "kv")) as (service, lines):
        assert service.engine.tiers is None
        assert "no lower tiers of the KV cache: with --deterministic no prefix is used again" in lines
    assert not (tmp_path / "kv").exists()
    with opened(model_directory, "--kv-host-gb", "0.000001") as (service, lines):
        assert service.engine.tiers is None and any("a block takes" in line for line in lines)
    request = kv_tiers.TierRequest(Launch("", kv_host_gb=1.0), 1.0, b"", None)
    lines = []
    assert kv_tiers.make_tiers(request, SimpleNamespace(block_layout=None), 512, lines.append) is None
    assert lines == ["no lower tiers of the KV cache: this family is computed one sequence at a time"]


def test_a_cache_dtype_other_than_the_models_is_refused() -> None:
    kv_tiers.check_cache_dtype(Launch("M", kv_cache_dtype="bf16"), torch.bfloat16)
    kv_tiers.check_cache_dtype(Launch("M"), torch.float32)
    with pytest.raises(InputError, match="kv-cache-dtype: given bf16, expected auto, or --dtype bfloat16"):
        kv_tiers.check_cache_dtype(Launch("M", kv_cache_dtype="bf16"), torch.float32)


def test_identities_change_with_weights_and_not_with_texts(model_directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    weights = next(model.glob("*.safetensors"))
    before = model_identity([model], {"dtype": "bf16"})
    (model / "tokenizer_config.json").write_text("{}")
    (model / "README.md").write_text("about")
    assert model_identity([model], {"dtype": "bf16"}) == before
    assert model_identity([model], {"dtype": "f32"}) != before
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)  # of the same size, with the same header
    changed = model_identity([model], {"dtype": "bf16"})
    assert changed != before
    (model / "config.json").write_text((model / "config.json").read_text().replace("rope_theta", "rope_thetas"))
    assert model_identity([model], {"dtype": "bf16"}) not in (before, changed)
    assert model_identity([model_directory, model], {}) != model_identity([model_directory], {})
