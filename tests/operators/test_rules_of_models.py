"""Rules resolved on models without weights: what is refused, what becomes of every module, and the files that come with
the package on configurations of the released models."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import read_options
from ktransformers.operators import BaseInjectedModule, KLinearBase
from ktransformers.operators.builtin import rule_files
from ktransformers.operators.plan import OperatorPlan, find_operator, keywords_of, operators, plan_operators
from ktransformers.operators.rules import (
    SAMPLES,
    builtin_rules,
    find_rules,
    operators_of,
    own_sources,
    read_rules,
    require_rules,
)
from ktransformers.place.backends import rest_by_rules
from ktransformers.place.rule_devices import devices_by_rules
from ktransformers.place.rule_report import report_rules
from ktransformers.serve.flags import Launch
from ktransformers.serve.forecast import serving_workload
from ktransformers.serve.kv_tiers import open_tiers
from ktransformers.serve.placement import options_of
from ktransformers.serve.target import Target
from ktransformers.train.forecast import training_workload
from ktransformers.train.resolve import read_settings
from tests.support.tiny_models import COMMON, FAMILIES

ROOT = Path(__file__).resolve().parents[2]
# Sizes of the released models; a config of transformers without any is that of DeepSeek-V3.
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite-Chat": (
        "deepseek_v2",
        {"num_hidden_layers": 27, "hidden_size": 2048, "n_routed_experts": 64, "q_lora_rank": None},
    ),
    "DeepSeek-V2-Chat": ("deepseek_v2", {"num_hidden_layers": 60, "hidden_size": 5120, "n_routed_experts": 160}),
    "DeepSeek-V3-Chat": ("deepseek_v3", {}),
    "DeepSeek-R1": ("deepseek_v3", {}),
    "Kimi-K2": ("deepseek_v3", {"n_routed_experts": 384, "num_attention_heads": 64, "first_k_dense_replace": 1}),
    "Qwen3Moe": ("qwen3_moe", {"num_hidden_layers": 48, "num_experts": 128}),
    "Qwen3-30B-A3B": ("qwen3_moe", {"num_hidden_layers": 48, "num_experts": 128}),
    "Qwen3-235B-A22B": ("qwen3_moe", {"num_hidden_layers": 94, "num_experts": 128, "hidden_size": 4096}),
}


@functools.cache
def released(name: str) -> Any:
    family, sizes = RELEASED[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


def tiny(family: str = "qwen3_moe", **sizes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | sizes)))


def plan(tmp_path: Path, text: str, model: Any = None) -> OperatorPlan:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return plan_operators(model or tiny(), read_rules(file))


def rule(kind: str, match: str = "name: 'mlp\\.experts$'", **kwargs: Any) -> str:
    return f"- {{match: {{{match}}}, replace: {{class: {kind}, kwargs: {json.dumps(kwargs)}}}}}\n"


EXPERTS = "ktransformers.operators.experts.KTransformersExperts"
LINEAR = "ktransformers.operators.linear.KTransformersLinear"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (rule("ktransformers.operators.experts.KTransformersExpert"), "imported.*experts.KTransformersExperts`"),
        (rule("ktransformers.operator.experts.KTransformersExperts"), "cannot be imported.*`ktransformers.operators"),
        (rule("my_missing_module.Linear"), "PYTHONPATH"),
        (rule("torch.nn.Linear"), "derives from ktransformers.operators.BaseInjectedModule"),
        (rule(EXPERTS, generate_devise="cpu"), "keyword generate_devise of.*`generate_device`, perhaps"),
        (rule("default", generate_op="KLinearTorch"), "keyword generate_op of default"),
        (rule(EXPERTS, generate_op="KExpertCPU"), "`KExpertsCPU`, perhaps"),
        (rule(EXPERTS, generate_op="MLPCUDAExperts", generate_device="cpu"), "on cpu, expected generate_device: cuda"),
        (rule(EXPERTS, backend="AMXInt9"), "`AMXInt8`, perhaps|`AMXInt4`, perhaps"),
        (rule(EXPERTS, generate_device="cuad"), "`cuda`, perhaps"),
        (rule(EXPERTS, "name: 'self_attn$'"), "a Qwen3MoeAttention, expected routed experts"),
        (rule(LINEAR, "name: 'self_attn$'"), "expected a linear layer"),
        (rule(LINEAR, "class: torch.nn.Linear", generate_op="KLinearMarlim"), "`KLinearMarlin`, perhaps"),
        (rule("default", "name: '\\.mlp\\.expert$'"), "matches nothing.*`model.layers.0.mlp.experts`"),
        (rule("default", "class: a.Qwen3MoeAtention"), "matches nothing.*`Qwen3MoeAttention`, perhaps"),
        (rule("ktransformers.operators.attention.KDeepseekV2Attention", "name: 'self_attn$'"), "latent attention"),
        (rule("ktransformers.operators.RoPE.RotaryEmbedding", "name: 'self_attn$'"), "a rotary embedding"),
        (rule("ktransformers.operators.RoPE.YarnRotaryEmbedding", "name: 'rotary_emb$'"), "rope_type default"),
        (rule("ktransformers.operators.models.KQwen3MoeModel", "name: '^model$'", transfer_map={"7": "cpu"}), "0 to 1"),
        (rule("ktransformers.operators.experts.KQwen2MoeSparseMoeBlock", "name: 'self_attn$'"), "with routed experts"),
    ],
)  # fmt: skip
def test_wrong_rules_are_refused_before_loading(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(tmp_path, text)


def test_a_rule_that_is_never_first_is_noted(tmp_path: Path) -> None:
    notes = plan(tmp_path, rule("default", "name: self_attn") + rule("default", "name: 'self_attn\\.q_proj$'")).notes
    assert len(notes) == 1 and "entry 2: earlier rules" in notes[0]


def test_formats_follow_from_backends_and_operators(tmp_path: Path) -> None:
    text = "".join(
        rule(EXPERTS, f"name: 'layers\\.{layer}\\.mlp\\.experts$'", **words)
        for layer, words in enumerate(({"backend": "AMXInt8"}, {"backend": "amxint4"}, {"backend": "llamafile"}))
    )
    text += rule(EXPERTS, "name: 'layers\\.3\\.mlp\\.experts$'", generate_op="KExpertsMarlin", generate_device="cuda")
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(4)]
    found = plan(tmp_path, text, tiny(num_hidden_layers=4)).expert_formats
    assert found == {names[0]: "int8", names[1]: "int4:32", names[3]: "int4:32"}


def test_linear_operators_say_what_they_leave(tmp_path: Path) -> None:
    """The last words of a class match whatever their case; small layers and routers stay."""
    model = tiny("deepseek_v3", hidden_size=256, kv_lora_rank=256, v_head_dim=64)
    found = plan(tmp_path, rule(LINEAR, "class: torch.nn.linear", generate_op="KLinearQ8"), model)
    formats = {item.name: item.outcome.format for item in found.assignments}
    assert formats["model.layers.1.self_attn.o_proj"] == "int8"
    assert formats["model.layers.1.self_attn.kv_b_proj"] == "int8"
    assert formats["model.layers.1.mlp.shared_experts.up_proj"] is None
    assert any("fewer than" in note for note in found.notes)
    on_gpu = plan_operators(model, read_rules(tmp_path / "rules.yaml"), dict.fromkeys(formats, "cuda:0"))
    assert {item.name: item.outcome.format for item in on_gpu.assignments} == formats, "the same on a GPU"


def test_classes_of_the_original_models_are_those_of_stock(tmp_path: Path) -> None:
    """The guide's own lines, for a DeepSeek-V2."""
    text = """
- match: {class: ktransformers.models.modeling_deepseek.DeepseekV2MoE}
  replace: {class: ktransformers.operators.experts.KDeepseekV2MoE}
- match: {class: ktransformers.models.modeling_deepseek.DeepseekV2YarnRotaryEmbedding}
  replace: {class: ktransformers.operators.RoPE.RotaryEmbedding}
- match: {name: "^model\\\\.layers\\\\..*\\\\.self_attn$"}
  replace: {class: ktransformers.operators.attention.KDeepseekV2Attention, kwargs: {absorb_for_prefill: False}}
"""
    found = plan(tmp_path, text, tiny("deepseek_v2"))
    assert {(item.stock, item.operator.__name__) for item in found.assignments} == {
        ("DeepseekV2Moe", "KDeepseekV2MoE"),
        ("DeepseekV2RotaryEmbedding", "RotaryEmbedding"),
        ("DeepseekV2Attention", "KDeepseekV2Attention"),
    }
    assert any("absorb_for_prefill" in note for note in found.notes)


def test_keywords_are_the_constructor_s(tmp_path: Path) -> None:
    class Own(BaseInjectedModule, KLinearBase):
        def __init__(
            self, key: Any, gguf_loader: Any, config: Any, orig_module: Any = None, bits: int = 3, **kwargs: Any
        ) -> None:
            super().__init__(key, gguf_loader, config, orig_module, **kwargs)

    class Closed(BaseInjectedModule):
        def __init__(self, key: Any, gguf_loader: Any, config: Any, orig_module: Any, generate_device: str) -> None:
            super().__init__(key, gguf_loader, config, orig_module, generate_device)

    assert set(keywords_of(Own)) == {"bits", "generate_device", "prefill_device"}
    assert keywords_of(Closed) == ("generate_device",)
    assert "transfer_map" in keywords_of(None)
    for path, operator in operators().items():
        text = tmp_path / "one.yaml"
        text.write_text(rule(path))
        assert find_operator(read_rules(text)[0]) is operator


def test_gpus_that_are_not_here(tmp_path: Path) -> None:
    """A number in a user's file must exist; without a GPU `cuda` is the CPU; files of the package are spread."""
    own = tmp_path / "own.yaml"
    own.write_text(rule("default", "name: self_attn", generate_device="cuda:3"))
    file = find_rules(own)
    assert file is not None and not file.shipped and file.gpus == 4
    for available in (0, 1, 3):
        with pytest.raises(InputError, match=r"cuda:3 in .*own.yaml, expected what torch sees here"):
            file.on_machine(available)
    assert file.on_machine(4) == (file.rules, "")
    rules, line = file.on_machine(0, cpu_only=True)
    assert rules[0].device == "cuda" and "as asked: everything is computed on the CPU" in line
    shipped = require_rules("examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml")
    assert shipped.shipped and shipped.gpus == 4
    rules, line = shipped.on_machine(2)
    assert rules[0].transfers == {15: "cuda:0", 30: "cuda:1", 45: "cuda:1"} and "spread over the 2" in line
    rules, line = shipped.on_machine(0)
    assert "there is no GPU" in line and set(rules[0].transfers.values()) == {"cuda"}
    plain = tmp_path / "plain.yaml"
    plain.write_text(rule("default", "name: self_attn", generate_device="cpu"))
    assert require_rules(plain).on_machine(0)[1] == ""


def test_builtin_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for guide, builtin in (("DeepSeek-V3-Chat-serve", "DeepSeek-V3-Chat"), ("Qwen3Moe-serve-amx", "Qwen3Moe-amx")):
        assert require_rules(f"{guide}.yaml").path.stem == builtin
    assert require_rules("DeepSeek-V3-Chat-multi-gpu-4.yaml").gpus == 4, "for any CPU"
    for name in ("DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml", "DeepSeek-V2-Lite-Chat-sft-amx.yaml"):
        assert require_rules(f"examples/kt_optimize_rules/{name}").path == Path(name)
    assert (
        require_rules("x/DeepSeek-V3-Chat-infer-amx-multi-gpu.yaml").path.name == "DeepSeek-V3-Chat-amx-multi-gpu.yaml"
    )
    with pytest.raises(InputError, match=r"`Kimi-K2-sft-amx.yaml`, perhaps"):
        require_rules("Kimi-K2-sft-amxx.yaml")


def test_builtin_rules_are_those_of_the_files_that_were_shipped() -> None:
    """The 104 files that came with the package before they were generated; their comments may change."""
    recorded = json.loads((Path(__file__).parent / "rule_hashes.json").read_text())
    assert len(recorded) == 104
    rules = {name: json.dumps(yaml.safe_load(text)) for name, text in rule_files().items()}
    assert {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in rules.items()} == recorded


def test_samples_are_builtin_texts() -> None:
    samples = {file.name: file.read_text() for file in SAMPLES.glob("*.yaml")}
    assert len(samples) == 4 and samples.items() <= rule_files().items()
    for name in samples:
        in_a_checkout = require_rules(ROOT / "examples" / "kt_optimize_rules" / name)
        assert in_a_checkout.shipped and in_a_checkout.gpus == require_rules(name).gpus


def test_a_builtin_file_is_written_to_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Kimi-K2-sft-amx-multi-gpu.yaml"
    for words, path in (([name], name), (["examples/kt_optimize_rules/" + name, "own.yaml"], "own.yaml")):
        assert CliRunner().invoke(app, ["rules", "--write", *words]).output == f"{path}\n"
        assert (tmp_path / path).read_text() == builtin_rules(name)[1]
        assert not require_rules(path).shipped
    for words, given in (([name], f"{name}, which exists"), (["Kimi-K3.yaml"], "Kimi-K3.yaml, which does not exist")):
        result = CliRunner().invoke(app, ["rules", "--write", *words])
        assert isinstance(result.exception, InputError) and given in str(result.exception)
    assert isinstance(CliRunner().invoke(app, ["rules", name]).exception, InputError), "no model"


@pytest.mark.parametrize("name", ["my_rulez.yaml", "rules/Kimi-K2-sft-amxx.yaml", "x-multi-gpu-0.yaml", "-sft.yml"])
def test_a_name_without_a_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By everything that reads rules; a recipe for training may have a name that says what it asks for."""
    monkeypatch.chdir(tmp_path)
    for read in (find_rules, require_rules, operators_of, own_sources):
        with pytest.raises(InputError, match=f"kt_optimize_rule: given {name}, which does not exist"):
            read(name)
    with pytest.raises(InputError, match="which does not exist"):
        options_of(Launch("M", place={"kt_optimize_rule": name}), Target(tmp_path))


@pytest.mark.parametrize("name", ["x-sft.yaml", "x-sft-amx-multi-gpu-16.yaml", "<model>-sft-amx-<gpu-count>.yaml"])
def test_a_recipe_may_name_what_it_asks_for_and_a_server_may_not(name: str, tmp_path: Path) -> None:
    assert find_rules(name) is None and operators_of(name) == []
    with pytest.raises(InputError, match=f"kt_optimize_rule: given {name}, which does not exist"):
        options_of(Launch("M", place={"kt_optimize_rule": name}), Target(tmp_path))


def rules_alone(name: str) -> str:
    """The text of a file without its header and the word that tells AMX from any CPU."""
    return rule_files()[name].partition("- match")[2].replace("AMXBF16", "llamafile")


@pytest.mark.parametrize("family", RELEASED)
def test_files_of_the_package_fit_the_released_models(family: str) -> None:
    """Every module that has weights has a rule, and every rule a module; nothing but experts and embedding is on the
    CPU; layers are spread evenly."""
    ends = (".", "-sft", "-amx", "-multi")
    names = [name for name in rule_files() if name.startswith(tuple(f"{family}{end}" for end in ends))]
    model = released(family)
    assert len(names) == (4 if family == "Qwen3Moe" else 12 if model.config.num_hidden_layers < 61 else 16)
    distinct = {rules_alone(name): name for name in names}
    assert len(distinct) == len(names) // 2
    for name in distinct.values():
        file = require_rules(name)
        found = plan_operators(model, file.rules)
        assert not [note for note in found.notes if "earlier rules" in note], name
        weighted = {key.rpartition(".")[0] for key, _ in model.named_parameters()}
        assert weighted <= found.rule_of.keys(), name
        assert {type(item.operator) for item in found.assignments} and not found.expert_formats
        device_map = devices_by_rules(model, file.rules, ["cuda:0"])
        gpus = next((count for count in (8, 4) if f"gpu-{count}" in name), 2 if "multi-gpu" in name else 1)
        counts = [device_map.layers.count(f"cuda:{place}") for place in range(gpus)]
        assert sum(counts) == len(device_map.layers) and max(counts) - min(counts) <= 1, name
        assert (device_map.embedding, device_map.head) == ("cpu", "cuda:0")


def test_what_rules_compute_is_compared_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a run that is resumed, and for keys and values on disk, which depend on the code of own operators too."""
    one, four = (f"DeepSeek-V3-Chat-sft-amx{end}.yaml" for end in ("", "-multi-gpu-4"))
    assert [entry for entry in operators_of(four) if "Model" not in entry[1]] == operators_of(one)
    assert not any("torch.nn.Linear" in entry[0] for entry in operators_of(one)), "as `rest` says"
    assert operators_of(one) != operators_of("DeepSeek-V3-Chat.yaml") and operators_of(None) == []
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_linear.py").write_text("")
    rules = tmp_path / "own.yaml"
    rules.write_text(rule("own_linear.Linear") + rule(LINEAR))
    before = own_sources(str(rules))
    (tmp_path / "own_linear.py").write_text("changed = True\n")
    assert list(before) == ["own_linear"] and own_sources(str(rules)) != before and own_sources(one) == {}
    dtype, launch = torch.float32, Launch("M", device="cpu", kv_host_gb=1.0)
    target = Target(tmp_path)
    identities = {
        request.identity
        for line, place in (
            (launch, target),
            (replace(launch, expert_format="int8"), target),
            (launch, replace(target, expert_format="int4:32")),
            (replace(launch, place={"kt_optimize_rule": str(rules)}), target),
        )
        if (request := open_tiers(line, place, dtype, False, print)) is not None
    }
    assert len(identities) == 4


def test_report_counts_bytes_per_device(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    text = rule(EXPERTS, backend="AMXInt8", generate_device="cpu", out_device="cuda")
    file.write_text(text + rule("default", "name: 'embed_tokens$'", generate_device="cpu"))
    model = tiny()
    report = report_rules(model, require_rules(file))
    experts = [module for module in report.modules if module.operator == "KTransformersExperts"]
    numbers = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    embedding = model.get_input_embeddings().weight.numel()
    rest = sum(p.numel() for p in model.parameters()) - numbers - embedding
    assert len(experts) == 2 and {(item.computed, item.device, item.format) for item in experts} == {
        ("cpu", "cuda:0", "int8")
    }
    assert sum(item.weights for item in experts) == numbers
    assert report.bytes["cuda:0"] == 2 * rest
    assert numbers + 2 * embedding <= report.bytes["cpu"] < 1.01 * numbers + 2 * embedding


@pytest.mark.parametrize("op", ["KLinearCPUInfer", "KLinearTorch", None])
@pytest.mark.parametrize("coded", [None, 1.0001])
def test_report_counts_codes_that_are_kept(coded: float | None, op: str | None, tmp_path: Path) -> None:
    """By an operator, or without one as `rest: keep` has them; a release without codes is shown in bf16."""
    file = tmp_path / "rules.yaml"
    linear = rule(LINEAR, "class: torch.nn.Linear", generate_op=op) if op else ""
    file.write_text(linear + rule("default", "name: 'embed_tokens$'", generate_device="cpu"))
    model = tiny(hidden_size=256, num_attention_heads=8, head_dim=32)
    report = report_rules(model, require_rules(file), "fp8", coded)
    shown = {module.name: module for module in report.modules}
    layer = shown["model.layers.0.self_attn.q_proj"]
    kept = coded is not None and op != "KLinearTorch"
    assert layer.weights == 256 * 256 and layer.format == ("keep" if kept else "bf16")
    assert layer.bytes == round(layer.weights * (coded if kept and coded else 2))
    assert shown["model.layers.0.mlp.gate"].format == shown["model.embed_tokens"].format == "bf16"


@pytest.mark.parametrize(
    ("ops", "rest", "planned"),
    [
        (["KLinearQ8"], "keep", "int8"),
        (["KLinearQ8", "KLinearQ8"], "bf16", "int8"),
        (["KLinearQ8", "KLinearFP8"], "int4:32", "int4:32"),
        (["KLinearTorch"], "keep", None),
        (["KLinearCPUInfer"], "bf16", "keep"),
        ([None], "keep", "int4:32"),
        ([], "bf16", None),
    ],
)
def test_plans_count_linear_layers_as_rules_store_them(
    ops: list[str | None], rest: str, planned: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "rules.yaml"
    text = [
        rule(LINEAR, f"name: 'layers\\.{at}\\.'", **({} if op is None else {"generate_op": op}))
        for at, op in enumerate(ops)
    ]
    file.write_text("".join(text) + rule("default", "name: 'embed_tokens$'"))
    options = read_options({"kt_optimize_rule": str(file)})
    launch = Launch("M", rest=rest)
    assert serving_workload(launch, 2, 512, rest_by_rules(options, rest)).linear_format == planned
    keys = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rest": rest, "use_cpu": True}
    settings = read_settings(keys | {"kt_optimize_rule": str(file)})
    assert training_workload(settings, 2).linear_format == planned


def test_kt_rules(tmp_path: Path) -> None:
    """On a folder with config.json alone."""
    AutoConfig.for_model(
        "qwen3_moe", **(COMMON | FAMILIES["qwen3_moe"]), architectures=["Qwen3MoeForCausalLM"]
    ).save_pretrained(tmp_path)
    document = json.loads(kt("rules", "Qwen3Moe-sft-amx.yaml", str(tmp_path), "--json"))
    assert document["rules"].endswith("Qwen3Moe-sft-amx.yaml") and set(document["bytes"]) == {"cpu", "cuda:0"}
    experts = [module for module in document["modules"] if module["operator"] == "KTransformersExperts"]
    assert len(experts) == 2 and experts[0]["computed"] == "cpu" and experts[0]["rule"] == "entry 1"
    table = kt("rules", "Qwen3Moe-sft-amx.yaml", str(tmp_path / "config.json"))
    assert "model.layers.*.mlp.experts" in table and "cuda:0" in table
    with pytest.raises(InputError, match=r"latent attention|matches nothing"):
        kt("rules", "DeepSeek-V3-Chat.yaml", str(tmp_path))
    with pytest.raises(InputError, match=r"no config.json"):
        kt("rules", "Qwen3Moe.yaml", str(tmp_path / "absent"))


def kt(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.stdout
