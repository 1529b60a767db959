"""Shapes: formulas against transformers' own skeletons, headers against formulas, sizes against the core's."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.ground.model_registry import known_model
from ktransformers.nn import ExpertStore
from ktransformers.plan import Choice, Serving
from ktransformers.plan.formats import counted_as, format_of, packed_expert_bytes, packed_lora_bytes
from ktransformers.plan.layer_kinds import KEYS, layer_types, state_numbers
from ktransformers.plan.machine import profile
from ktransformers.plan.memory import attention_lora_numbers, expert_lora_numbers, kept_rows_bytes, predict_memory
from ktransformers.plan.model_shape import open_shape, shape_from_config, shipped_shapes
from ktransformers.serve.scheduler.forward import make_forward
from ktransformers.train.settings import LoraSettings
from ktransformers.train.targets import count_trained_parameters, find_targets
from tests.support.releases import KINDS
from tests.support.tiny_models import RECURRENT_LAYERS, build, save


def skeleton(config: dict[str, Any]) -> Any:
    words = dict(config)
    if words["model_type"] == "kimi_k2":  # stock transformers knows it as DeepSeek's
        words["model_type"] = "deepseek_v3"
    auto: Any = AutoModelForImageTextToText if "text_config" in words else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(**words))
    if "text_config" in words:
        del model.model.visual  # the text alone is planned
    return model


@pytest.mark.parametrize("name", sorted(shipped_shapes()))
def test_shipped_shapes_count_what_the_models_have(name: str) -> None:
    document = shipped_shapes()[name]
    shape = open_shape(name)
    model = skeleton(document["config"])
    experts = expert_modules(model)
    numbers = sum(tensor.numel() for module in experts.values() for tensor in module.parameters(recurse=False))
    assert (len(experts), numbers) == (shape.expert_layers, shape.expert_numbers_total)
    buffers = sum(tensor.numel() for key, tensor in model.state_dict().items() if "correction_bias" in key)
    rest = sum(tensor.numel() for tensor in model.parameters()) - numbers
    if not any("correction_bias" in key for key, _ in model.named_parameters()):
        rest += buffers
    assert shape.rest == pytest.approx(rest, abs=shape.layers)  # an average layer is a whole number
    if "counted" in document:  # linear layers of attention are those of a formula that does not know its kind
        return
    for target, expected in (("all", None), ("experts", expert_lora_numbers(shape, 8))):
        settings = LoraSettings(lora_rank=8, lora_target=(target,))
        targets = find_targets(model, settings)
        adapted = tuple(name for name in targets.modules if ".indexer." not in name)  # it is called without gradients
        found = count_trained_parameters(model, replace(targets, modules=adapted), 8)
        assert found == (expected or expert_lora_numbers(shape, 8) + attention_lora_numbers(shape, 8))


def test_shipped_shapes_say_where_their_numbers_come_from() -> None:
    """Counts that the makers published, and transformers' defaults, are compared; where there is neither, the file says
    so and nothing is compared."""
    compared = set()
    for name, document in shipped_shapes().items():
        published, source = document["parameters"], document["source"]
        assert document["parameters_source"].startswith("none ") == (published is None), name
        if published is not None:
            assert open_shape(name).numbers == pytest.approx(published, rel=0.005), name
            compared.add(name)
        if source.startswith("defaults of"):
            config = document["config"].get("text_config", document["config"])
            stock = AutoConfig.for_model(config["model_type"])
            assert source.startswith(f"defaults of transformers' {type(stock).__name__}"), name
            other = {key for key, value in config.items() if getattr(stock, key, None) != value}
            assert other == set(re.findall(r"but for (\w+)", source)), name
            compared.add(name)
        assert "not compared" in source or "was not read" in source, name
    assert set(shipped_shapes()) - compared == {"glm-4.7", "kimi-k2", "nemotron-3-nano"}


def released_bytes(model: Any, extra_layers: int) -> int:
    """A release in fp8: linear layers with a float32 scale per block of 128 x 128; embedding, head, norms and router in
    bf16, the router's correction in float32; multi-token prediction layers with embedding, head, three norms and a
    projection of their own."""

    def tensor_bytes(name: str, shape: tuple[int, ...]) -> int:
        if "correction_bias" in name:
            return 4 * math.prod(shape)
        if len(shape) == 3:  # transformers' fused experts; gate and up are two matrices in the release
            halves = 2 if "gate_up" in name else 1
            return shape[0] * halves * tensor_bytes("expert", (shape[1] // halves, shape[2]))
        if len(shape) == 2 and not any(word in name for word in ("embed_tokens", "lm_head", "gate.weight")):
            return math.prod(shape) + 4 * -(-shape[0] // 128) * -(-shape[1] // 128)
        return 2 * math.prod(shape)

    sizes = {name: tensor_bytes(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    config = model.config
    last = sum(size for name, size in sizes.items() if f".layers.{config.num_hidden_layers - 1}." in name)
    own = 2 * (2 * config.vocab_size * config.hidden_size + 3 * config.hidden_size + 2 * config.hidden_size**2)
    return sum(sizes.values()) + extra_layers * (last + own)


@pytest.mark.parametrize(("name", "gigabytes"), [("deepseek-v3", 688.6), ("kimi-k2", 1029.2)])
def test_checkpoint_bytes_of_fp8_releases_follow_from_their_tensors(name: str, gigabytes: float) -> None:
    document, shape = shipped_shapes()[name], open_shape(name)
    assert shape.stored == "fp8" and shape.checkpoint_bytes == document["checkpoint_bytes"]
    assert shape.checkpoint_bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)
    extra = document["config"]["num_nextn_predict_layers"]
    assert released_bytes(skeleton(document["config"]), extra) == shape.checkpoint_bytes
    memory = predict_memory(shape, Serving(), Choice("fp8"), profile("dual-xeon-4090"))
    assert memory.disk["checkpoint"] == shape.checkpoint_bytes


def test_bf16_releases_have_two_bytes_per_number() -> None:
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v2-lite", "opensourcerelease/DeepSeek-V3-bf16"):
        shape = open_shape(name)
        memory = predict_memory(shape, Serving(), Choice("bf16"), profile("dual-xeon-4090"))
        assert shape.stored == "bf16" and memory.disk["checkpoint"] == 2 * shape.numbers


@pytest.mark.parametrize(("name", "bytes_per_token"), [("deepseek-v2-lite", 276_480), ("deepseek-v3", 4_997_120)])
def test_kv_cache_of_latent_attention_is_counted_expanded(name: str, bytes_per_token: int) -> None:
    """As serve/cache/kv_cache.py keeps it: keys and values of every head."""
    assert 2 * open_shape(name).cache_width == bytes_per_token


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v32", {}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}),
        ("axk2", {}),
        ("hy_v4", {}),
        ("mistral_large4", {}),
    ],
)
def test_kv_cache_counts_keys_of_indexers(family: str, changes: dict[str, Any]) -> None:
    """What the slots of a server hold of a token; new tokens read the selected keys alone."""
    model = build(family, **changes)
    shape = shape_from_config(model.config.to_dict(), family)
    assert make_forward(model).check_against_stock() == 4 * shape.cached_numbers
    assert shape.index_width == 16 * (1 if changes else 2) and shape.index_topk == 8
    assert shape.read_numbers(100) == 8 * shape.latent_width + 100 * shape.index_width


@pytest.mark.parametrize(("name", "numbers"), [("deepseek-v3.2", 61 * (576 + 128)), ("glm-5", 78 * (576 + 128))])
def test_kv_cache_of_shipped_models_with_indexers(name: str, numbers: int) -> None:
    assert open_shape(name).cached_numbers == numbers


def test_every_name_and_every_file_is_known() -> None:
    for short, document in shipped_shapes().items():
        names = (short, *document["names"], *document.get("bf16_names", ()))
        assert {open_shape(name).name for name in names} == {short}
        assert document["source"]
        assert known_model(short) is not None, f"`kt model known` lacks {short}"
        assert all(figure["source"] and figure["work"] in ("train", "serve") for figure in document["published"])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "deepseek_v2", "mixtral", "olmoe"])
def test_headers_say_what_the_formulas_say(family: str, tmp_path: Path) -> None:
    model = build(family)
    save(model, tmp_path)
    found = open_shape(str(tmp_path))
    experts = sum(t.numel() for module in expert_modules(model).values() for t in module.parameters(recurse=False))
    assert found.expert_numbers_total == experts
    assert found.rest == pytest.approx(sum(t.numel() for t in model.parameters()) - experts, abs=20)
    assert found.checkpoint_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    settings = LoraSettings(lora_rank=4, lora_target=("all",))
    numbers = expert_lora_numbers(found, 4) + attention_lora_numbers(found, 4)
    assert numbers == count_trained_parameters(model, find_targets(model, settings), 4)
    formulas = shape_from_config(json.loads((tmp_path / "config.json").read_text()), "formulas")
    assert formulas.linears == found.linears or sorted(map(repr, formulas.linears)) == sorted(map(repr, found.linears))
    if family in ("qwen3_moe", "deepseek_v3", "deepseek_v2", "mixtral"):
        assert formulas.rest == pytest.approx(found.rest, abs=20)


def test_gemma_has_a_forecast(tmp_path: Path) -> None:
    """Its config names the chosen experts by another word, and every layer has a dense MLP beside them."""
    model = build("gemma4_text")
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("num_experts_per_tok", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, formulas = open_shape(str(tmp_path)), shape_from_config(config, "formulas")
    experts = sum(t.numel() for module in expert_modules(model).values() for t in module.parameters(recurse=False))
    assert found.top_k == 2 and found.expert_numbers_total == formulas.expert_numbers_total == experts
    assert found.rest == pytest.approx(sum(t.numel() for t in model.parameters()) - experts, abs=20)
    assert formulas.rest == pytest.approx(found.rest, rel=0.02) and formulas.mlp_width == 3 * 48


def test_layers_beyond_the_model_count_on_disk_only(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(build("deepseek_v3"), tmp_path)
    before = open_shape(str(tmp_path))
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    extra = {name.replace("layers.1.", "layers.2."): t.clone() for name, t in tensors.items() if ".layers.1." in name}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    after = open_shape(str(tmp_path))
    assert extra and after.checkpoint_bytes > before.checkpoint_bytes
    assert (after.rest, after.linears) == (before.rest, before.linears)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_quantised_releases_have_the_sizes_of_their_model(kind: str, tmp_path: Path) -> None:
    """Codes of fewer bits than a byte, in words or bytes, with scales beside them: the same numbers as before."""
    from safetensors.torch import load_file, save_file

    make, spec, words = KINDS[kind]
    save(build("qwen3_moe", hidden_size=256, moe_intermediate_size=160, head_dim=64), tmp_path)
    plain = open_shape(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    released = dict(tensors)
    for seed, (name, tensor) in enumerate(tensors.items()):
        attention = "self_attn" in name and tensor.dim() == 2 and kind != "mxfp4"  # only experts are released in that
        if ".experts." in name or attention:
            parts, _ = make(*tensor.shape, seed)
            del released[name]
            released |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in parts.items()}
    save_file(released, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": words}))
    found = open_shape(str(tmp_path))
    for name in ("experts", "intermediate", "gated", "expert_layers", "rest_per_layer", "embedding", "tied"):
        assert getattr(found, name) == getattr(plain, name), name
    assert sorted(map(repr, found.linears)) == sorted(map(repr, plain.linears))
    assert counted_as(found.stored) == {"fp8": "fp8", "int8": "int8", "uint8": "int8", "mxfp8": "int8"}.get(
        spec.partition(":")[0], "int4"
    )


def test_gpt_oss_has_its_sizes(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(build("gpt_oss", hidden_size=64, intermediate_size=96, moe_intermediate_size=96), tmp_path)
    plain = open_shape(str(tmp_path))
    released = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            released[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        released[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
        released[f"{name}_scales"] = torch.zeros(experts, rows, columns // 32, dtype=torch.uint8)
    save_file(released, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    found = open_shape(str(tmp_path))
    assert (found.experts, found.intermediate, found.gated) == (plain.experts, 96, True)
    assert (found.stored, found.rest) == ("mxfp4", plain.rest)


@pytest.mark.parametrize("sizes", [(512, 256), (2048, 768), (100, 70), (1408, 2048)])
@pytest.mark.parametrize("gated", [True, False])
def test_packed_sizes_are_the_cores(sizes: tuple[int, int], gated: bool) -> None:
    hidden, inner = sizes
    store = ExpertStore(3, hidden, inner, gated=gated)
    assert store.packed_bytes == 3 * packed_expert_bytes(hidden, inner, gated, format_of("bf16"))
    lossless = ExpertStore(3, hidden, inner, gated=gated, formats="bf16:12").packed_bytes
    if min(sizes) >= 768:  # smaller ones have more patches, and more padding in bf16
        assert lossless == pytest.approx(3 * packed_expert_bytes(hidden, inner, gated, format_of("bf16:12")), rel=0.03)
    for rank in (4, 32, 40):
        adapter = store.new_adapter(rank if gated else 0, rank, rank, shared=gated)
        assert adapter.packed_bytes == 3 * packed_lora_bytes(hidden, inner, gated, rank)


def test_kept_rows_are_the_cores() -> None:
    shape = open_shape("qwen3-30b-a3b")
    for isa, machine in (("neon", "arm2"), ("avx512_bf16", "desktop-4090")):
        from ktransformers import _core

        if not any(v["name"] == isa and (v["native"] or v["emulated"]) for v in _core.variants()):
            continue
        store = ExpertStore(1, shape.hidden, shape.intermediate, isa=isa)
        assert kept_rows_bytes(shape, 7, profile(machine)) == store.keep_bytes(7, shape.top_k)


def test_refusals_name_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="qwen3-30b-a3b"):
        open_shape("qwen9")
    with pytest.raises(InputError, match="a folder without"):
        open_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}')
    with pytest.raises(InputError, match="num_experts"):
        open_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="JSON"):
        open_shape(str(tmp_path))


RECURRENT_FAMILIES = ["bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax"]
RECURRENT_FAMILIES += ["nemotron_h", "qwen3_5_moe_text", "qwen3_next", "zaya"]


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_states_of_a_sequence_are_those_of_the_server(family: str) -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        model: Any = build(family, **RECURRENT_LAYERS.get(family, {})).to(dtype)
        forward = make_forward(model)
        bytes_per_token = forward.check_against_stock()
        config, layers = model.config.to_dict(), model.config.num_hidden_layers
        assert state_numbers(config, layers).bytes(size) == forward.bytes_per_sequence > 0
        shape = shape_from_config(config, family)
        assert shape.states == state_numbers(config, layers) and shape.cached_numbers * size == bytes_per_token


def test_layers_are_named_as_releases_name_them() -> None:
    """As their config.json has it, before transformers has read it."""

    def cached_layers(config: dict[str, Any], layers: int) -> int:
        return sum(kind in KEYS for kind in layer_types(config, layers))

    delta = {"hidden_size": 64, "num_attention_heads": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    delta |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    assert cached_layers(delta, 48) == cached_layers(delta | {"full_attention_interval": 4}, 48) == 12
    assert layer_types({"hybrid_override_pattern": "ME*-"}, 4) == ["mamba", "moe", "attention", "mlp"]
    assert cached_layers({"attn_type_list": [0, 0, 1, 0]}, 4) == 1
    assert cached_layers({"attn_layer_period": 8, "attn_layer_offset": 4}, 32) == 4
    assert layer_types({"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1]}}, 2)[1] == "full_attention"
    assert cached_layers({}, 5) == 5
    assert state_numbers(delta, 8).float32 == 6 * 4 * 16 * 16
