"""`kt serve --rest`: linear layers outside of the experts in few bits. The server says so, computes what a model with
the decoded weights computes, and refuses before it loads what cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import pack_module, select_implementation
from ktransformers.ground.errors import InputError
from ktransformers.modeling.spec import ModelSpec
from ktransformers.nn import load_model
from ktransformers.plan import open_shape, profile
from ktransformers.plan.formats import bytes_in_format
from ktransformers.plan.memory import predict_memory
from ktransformers.plan.workload import Choice
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.weight import QuantizedWeight
from ktransformers.serve import kv_tiers
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.flags import parse
from ktransformers.serve.forecast import plan_server, serving_workload
from ktransformers.serve.loading import load_served, open_service
from ktransformers.serve.scheduler.forward import Chunk, Forward
from ktransformers.serve.scheduler.lora import LoadedAdapter, LoraModules
from ktransformers.serve.target import resolve_target
from ktransformers.train.settings import ExpertSettings
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")
PROMPT = [(7 * at + 3) % 90 for at in range(30)]


@pytest.fixture(scope="module")
def wide_directory(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A model whose linear layers are large enough to be encoded, with the tokenizer of another."""
    directory = tmp_path_factory.mktemp("wide")
    build("qwen3_moe", hidden_size=256, num_attention_heads=8, head_dim=32, vocab_size=512).save_pretrained(directory)
    for file in model_directory.iterdir():
        if "token" in file.name or "chat" in file.name:
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def served(directory: Path, lines: list[str], *words: str) -> Any:
    line = [str(directory), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "256", *words]
    return open_service(parse(line), resolve_target(str(directory)), lines.append)


def logits(service: Any) -> torch.Tensor:
    slot = KVSlot.alone(64)
    (whole,) = service.engine.forward.run([Chunk(slot, PROMPT, 0, None)])
    first = whole.logits.clone()
    (one,) = service.engine.forward.run([Chunk(slot, [5], len(PROMPT), None)])
    return torch.stack([first, one.logits])


@pytest.mark.parametrize("spec", ["int8", "int4:32"])
def test_logits_are_those_of_decoded_weights(spec: str, wide_directory: Path) -> None:
    lines: list[str] = []
    service = served(wide_directory, lines, "--rest", spec)
    assert service.approximations == {"rest": spec}
    assert any(f"quantized dense linear layers ({spec}" in line for line in lines)
    named = service.engine.forward.model.named_parameters()
    weights = {name: one for name, one in named if isinstance(one, QuantizedWeight)}
    assert len(weights) == 5  # q and o of two layers, and the head
    plain = served(wide_directory, [])
    released = logits(plain)
    with torch.no_grad():
        for name, weight in weights.items():
            plain.engine.forward.model.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(
                weight + 0, requires_grad=False
            )
    actual, expected = logits(service), logits(plain)
    assert float((actual - expected).norm() / expected.norm()) < 1e-2
    assert float((actual - released).norm() / released.norm()) > 1e-3, "the weights were not rounded"


def test_words_without_blocks_or_groups(wide_directory: Path) -> None:
    """`fp8` and `int4`, on every border where `rest` is given."""
    assert parse(["M", "--rest", "fp8"]).rest == "fp8:128x128" and parse(["M", "--rest", "int4"]).rest == "int4:32"
    assert parse(["M"]).rest == "keep" and parse(["M", "--rest", "mxfp4"]).rest == "mxfp4"
    assert ExpertSettings(rest="fp8").rest == "fp8:128x128"
    model = load_model(wide_directory, dtype=torch.float32, rest="fp8")
    coded = {one.spec for one in model.parameters() if isinstance(one, QuantizedWeight)}
    assert coded == {"fp8:128x128"}


def test_a_model_without_suitable_layers(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.quantized.weight.MIN_WEIGHTS", 1 << 30)
    lines: list[str] = []
    service = served(model_directory, lines, "--rest", "int8")
    assert not service.approximations
    assert any(line.startswith("--rest int8: without effect") for line in lines)


def test_what_cannot_be_done_is_refused_before_loading(wide_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for spec, words in (("int9", "format"), ("iq2_xs", "keep, bf16, or a format")):
        with pytest.raises(InputError, match=words):
            served(wide_directory, lines, "--rest", spec)
    with pytest.raises(InputError, match="int8 with dtype float16 on cpu, expected dtype bfloat16 or float32"):
        served(wide_directory, lines, "--rest", "int8", "--dtype", "float16")
    with pytest.raises(InputError, match="'int9'"):  # the plan of `kt serve` comes first
        plan_server(parse([str(wide_directory), "--rest", "int9"]), resolve_target(str(wide_directory)), print, print)
    assert not any("loading" in line for line in lines)
    monkeypatch.setattr("ktransformers.serve.loading.require_compiler", lambda *given: None)
    line = parse([str(wide_directory), "--device", "cuda", "--rest", "int8", "--dtype", "float32"])
    with pytest.raises(InputError, match="int8 with dtype float32 on cuda, expected dtype bfloat16"):
        open_service(line, resolve_target(str(wide_directory)), lines.append)


def test_cached_blocks_of_other_bits_are_not_used(wide_directory: Path, tmp_path: Path) -> None:
    def identity(*words: str) -> bytes:
        line = parse([str(wide_directory), "--kv-disk", str(tmp_path), *words])
        request = kv_tiers.open_tiers(line, resolve_target(str(wide_directory)), torch.float32, "cpu", print)
        assert request is not None
        request.close()
        return request.identity

    assert identity() == identity("--rest", "keep") != identity("--rest", "int8") != identity("--rest", "int4:32")


def test_plan_counts_the_codes() -> None:
    """Embeddings and routers stay as they are."""
    shape, machine = open_shape("qwen3-30b-a3b"), profile("amx16-h200")
    work = serving_workload(parse(["M", "--rest", "int4:32"]), 2, 4096)
    assert work.linear_format == "int4:32"
    plain = serving_workload(parse(["M"]), 2, 4096)
    as_released = predict_memory(shape, plain, Choice("bf16"), machine)
    coded = predict_memory(shape, work, Choice("bf16", linear_format="int4:32"), machine)
    linears = shape.rest - shape.embedding - shape.router_numbers
    assert coded.host["linear layers"] == pytest.approx(linears * (0.5 + 2 / 32))
    assert as_released.mapped - coded.mapped == 2 * linears and "linear layers" not in as_released.host
    tied = predict_memory(replace(shape, tied=True), work, Choice("bf16", linear_format="int4:32"), machine)
    assert tied.host["linear layers"] == coded.host["linear layers"], "the head's codes lie beside the embedding"
    on_gpu = predict_memory(shape, work, Choice("bf16", gpus=1, linear_format="int4:32"), machine)
    plain_gpu = predict_memory(shape, plain, Choice("bf16", gpus=1), machine)
    saved = plain_gpu.gpus[0]["weights"] - on_gpu.gpus[0]["weights"]
    assert saved == pytest.approx(linears * (2 - 0.5 - 2 / 32) + 2 * shape.embedding, rel=1e-6)
    assert on_gpu.host["embedding"] == 2 * shape.embedding, "rows of it are read over the bus"
    shared = predict_memory(replace(shape, tied=True), work, Choice("bf16", gpus=1, linear_format="int4:32"), machine)
    assert "embedding" not in shared.host and "embedding" not in plain_gpu.host
    assert bytes_in_format("q8_0") == 34 / 32 and bytes_in_format("int8") == pytest.approx(1, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["int8", "int4:32"])
def test_a_gpu_decodes_with_codes_in_graphs(spec: str, wide_directory: Path) -> None:
    """Codes in the memory of the GPU, read by the captured step; the same tokens as without graphs."""
    answers = []
    for words in ([], ["--disable-cuda-graph"]):
        lines: list[str] = []
        line = [str(wide_directory), "--device", "cuda", "--dtype", "bfloat16", "--max-total-tokens", "256"]
        service = open_service(
            parse([*line, "--rest", spec, *words]), resolve_target(str(wide_directory)), lines.append
        )
        coded = [one for one in service.engine.forward.model.parameters() if isinstance(one, QuantizedWeight)]
        assert coded and all(one.device.type == "cuda" for one in coded)
        assert any(spec in line and "linear layers" in line for line in lines)
        answers.append(logits(service))
    assert float((answers[0] - answers[1]).norm() / answers[1].norm()) < 2e-2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_adapters_of_a_batch_over_codes(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters and the base in one batch, over linear layers in codes, the absorbed matrix of latent attention
    among them: what each gives alone. The embedding stays in host memory."""
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 10)
    torch.manual_seed(0)
    model: Any = build(family).to(torch.bfloat16 if device != "cpu" else torch.float32)
    for module in expert_modules(model).values():
        pack_module(module, free=True)
    select_implementation(model)
    on_gpu = device != "cpu"
    assert quantized_weight.quantize_linears(model, "int8")
    assert quantized_weight.keep_embedding_on_host(model, pin=on_gpu)
    forward, modules = Forward(model.to(device)), LoraModules(model)
    names = [name for name, one in model.named_modules() if name.endswith("o_proj")]
    names += [name for name, one in model.named_modules() if name.endswith("kv_b_proj")]
    assert all(isinstance(model.get_submodule(name).weight, QuantizedWeight) for name in names)

    def adapter(name: str, rank: int) -> LoadedAdapter:
        pairs = {}
        for target in names:
            linear = model.get_submodule(target)
            a = torch.randn(rank, linear.in_features) * 0.3
            pairs[target] = LoraPair(a, torch.randn(linear.out_features, rank) * 0.3, 0.5)
        return modules.bind(adapter_from_tensors({}, pairs), name, name, 1)

    adapters = [adapter("one", 4), None, adapter("two", 2)]

    def steps(chosen: Sequence[LoadedAdapter | None]) -> torch.Tensor:
        slots = KVSlot.together(len(chosen), 64)
        logits = []
        for tokens in (PROMPT, [5], [7]):
            chunks = [
                Chunk(slot, tokens, slot.length, one, greedy=True) for slot, one in zip(slots, chosen, strict=True)
            ]
            logits.append(torch.stack([one.logits for one in forward.run(chunks) if one is not None]).float().cpu())
        return torch.stack(logits, dim=1)

    with torch.inference_mode():
        together = steps(adapters)
        for row, one in enumerate(adapters):
            alone = steps([one])[0]
            assert float((together[row] - alone).norm() / alone.norm()) < (3e-2 if on_gpu else 1e-4)
    assert all(float((together[row] - together[1]).norm() / together[1].norm()) > 0.1 for row in (0, 2))


def test_products_of_a_dense_model_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server starts, as those of other models."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 512}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(tmp_path)
    compared: list[Any] = []
    monkeypatch.setattr("ktransformers.modeling.load.check_on_device", compared.append)
    launch, target = parse([str(tmp_path), "--rest", "int8"]), resolve_target(str(tmp_path))
    spec = ModelSpec(target.model, dtype=torch.float32, rest=launch.rest)
    model: Any = load_served(spec, launch, target, print, None, spare=False)
    assert compared == [model] and isinstance(model.lm_head.weight, QuantizedWeight)
