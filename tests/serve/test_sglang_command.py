"""`kt serve --engine sglang` and `kt run --engine sglang`: the command of stock SGLang's server, made from the plan and
the line, and its start; `sglang` is a stub on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground.errors import InputError
from ktransformers.plan.machine import profile
from ktransformers.serve import forecast
from ktransformers.serve.flags import parse
from ktransformers.serve.launch import with_environment
from ktransformers.serve.sglang import command
from ktransformers.serve.target import resolve_target
from ktransformers.serve.yaml_keys import with_yaml_keys
from tests.support.sglang_adapters import write_expert_adapter

STUB = """#!{python}
import json, os, sys
json.dump({{"words": sys.argv[1:], "threads": os.environ["OMP_NUM_THREADS"], "pid": os.getpid()}}, open({out!r}, "w"))
"""
Words = dict[str, str]


@pytest.fixture
def workstation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU, for plans."""
    monkeypatch.setattr(forecast, "this_machine", lambda: profile("desktop-4090"))
    monkeypatch.setattr(forecast, "choose_device", lambda launch, plan=None: "cuda:0")


def words(model: Path, *line: str) -> tuple[Words, Any]:
    """Flag -> value of the command, and the plan."""
    launch = with_environment(parse([str(model), "--engine", "sglang", *line]))
    target = resolve_target(str(model))
    launch = with_yaml_keys(launch, target.keys)
    plan = command.plan_sglang(launch, target, lambda _: None, lambda _: None)
    listed = command.sglang_words(launch, target, plan)
    flags = [place for place, word in enumerate(listed) if word.startswith("--")]
    ends = [*flags[1:], len(listed)]
    return {listed[at]: " ".join(listed[at + 1 : end]) for at, end in zip(flags, ends, strict=True)}, plan


@pytest.mark.usefixtures("workstation")
def test_the_plan_decides_what_the_line_leaves_open(model_directory: Path) -> None:
    made, plan = words(model_directory, "--port", "30123")
    machine = profile("desktop-4090")
    assert made["--model-path"] == made["--kt-weight-path"] == str(model_directory)
    assert made["--served-model-name"] == model_directory.name
    assert (made["--port"], made["--kt-method"]) == ("30123", "BF16")
    assert made["--kt-num-gpu-experts"] == str(plan.nearest.choice.residents) != "0"
    assert made["--kt-cpuinfer"] == str(machine.cpu.threads)
    assert made["--kt-threadpool-count"] == str(machine.cpu.nodes)
    assert 0.8 < float(made["--mem-fraction-static"]) <= 0.95
    assert "--trust-remote-code" not in made and "--lora-paths" not in made and "--chunked-prefill-size" not in made


@pytest.mark.usefixtures("workstation")
def test_the_line_comes_first(model_directory: Path) -> None:
    line = "--kt-num-gpu-experts 2 --kt-cpuinfer 7 --kt-threadpool-count 2 --mem-fraction-static 0.7 --api-key secret "
    line += "--chunked-prefill-size -1 --trust-remote-code --kt-method AMXINT8 --tool-call-parser qwen25 --tp 1 "
    line += "--kt-gpu-prefill-token-threshold 2048 --kt-enable-dynamic-expert-update --kv-cache-dtype fp8_e4m3"
    made, _ = words(model_directory, *line.split())
    expected = {"--kt-num-gpu-experts": "2", "--kt-cpuinfer": "7", "--kt-threadpool-count": "2", "--tp-size": "1"}
    expected |= {"--mem-fraction-static": "0.7", "--chunked-prefill-size": "-1", "--kt-method": "AMXINT8"}
    expected |= {"--tool-call-parser": "qwen25", "--kt-gpu-prefill-token-threshold": "2048", "--trust-remote-code": ""}
    expected |= {"--kt-enable-dynamic-expert-update": "", "--kv-cache-dtype": "fp8_e4m3", "--api-key": "secret"}
    assert made.items() >= expected.items()
    assert words(model_directory, "--kt-method", "int8")[0]["--kt-method"] == "AMXINT8"
    assert words(model_directory, "--kt-method", "auto")[0]["--kt-method"] == "BF16"
    elsewhere = words(model_directory, "--kt-weight-path", str(model_directory.parent))[0]
    assert elsewhere["--kt-method"] == "LLAMAFILE"
    assert command.hide_key(["sglang", "--api-key", "secret"]) == ["sglang", "--api-key", "***"]


@pytest.mark.usefixtures("workstation")
def test_adapters_are_registered_by_name(model_directory: Path, tmp_path: Path) -> None:
    write_expert_adapter(tmp_path / "rest", 2, seed=1, attention=True, experts=False)
    write_expert_adapter(tmp_path / "one", 2, seed=2)
    made, _ = words(model_directory, "--lora-paths", f"rest={tmp_path / 'rest'}")
    assert made["--lora-paths"] == f"rest={tmp_path / 'rest'}" and made["--kt-num-gpu-experts"] != "0"
    made, plan = words(model_directory, "--lora-paths", f"one={tmp_path / 'one'}")
    assert made["--lora-paths"] == f"one={tmp_path / 'one'}" and {"--enable-lora", "--lora-backend"} <= made.keys()
    assert made["--kt-num-gpu-experts"] == "0" and plan.nearest.choice.residents == 0
    made, _ = words(model_directory, "--kt-expert-lora-path", str(tmp_path / "one"), "--kt-gpu-experts-ratio", "0.5")
    assert made["--kt-expert-lora-path"] == str(tmp_path / "one") and "--kt-gpu-experts-ratio" not in made


@pytest.mark.parametrize(
    ("template", "kind", "expected"),
    [
        ("<|im_start|> <tool_call> </tool_call>", "qwen3_moe", ("hermes", None)),
        ("<|im_start|> <tool_call> <function= </think>", "qwen3_moe", ("qwen3_coder", "qwen3")),
        ("<tool_call> <arg_key> </think>", "glm4_moe", ("glm47", "glm45")),
        ("<|tool_calls_section_begin|> </think>", "kimi_k2", ("kimi_k2", "kimi_k2")),
        ("<minimax:tool_call> </think>", "minimax_m2", ("minimax-m2", "minimax")),
        ("[TOOL_CALLS]", "mixtral", ("mistral", None)),
        ("", "deepseek_v32", ("deepseekv32", "deepseek-v3")),
        ("plain", "mixtral", (None, None)),
    ],
)
def test_parsers_follow_the_template(
    template: str, kind: str, expected: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_pretrained_config", lambda path: type("Config", (), {"model_type": kind}))
    tokenizer = type("Tokenizer", (), {"chat_template": template})
    monkeypatch.setattr(command, "read_tokenizer", lambda path, **options: tokenizer)
    target: Any = type("Target", (), {"model": Path()})
    assert command.parsers(parse(["M"]), target) == expected
    assert command.parsers(replace(parse(["M"]), reasoning_parser="qwen3"), target) == (expected[0], "qwen3")


@pytest.mark.usefixtures("workstation")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--kv-disk x", "kv-disk"),
        ("--rest int8", "--dense-dtype"),
        ("--watch out", "--watch"),
        ("--kt-optimize-rule rules.yaml", "kt_optimize_rule"),
        ("--kt-place stream", "--kt-place"),
        ("--port 0", "--port"),
        ("--kt-method int4:32", "int8, AMXINT8 or AMXINT4"),
    ],
)
def test_what_sglang_cannot_do_is_refused(line: str, message: str, model_directory: Path) -> None:
    with pytest.raises(InputError, match=message):
        words(model_directory, *line.split())


def test_a_machine_without_a_gpu_keeps_our_engine(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "this_machine", lambda: replace(profile("desktop-4090"), gpus=()))
    with pytest.raises(InputError, match="leave --engine out"):
        words(model_directory, "--device", "cpu")


def test_the_file_of_llamafactory_names_the_engine(model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"model_name_or_path: {model_directory}\ninfer_backend: sglang\nuse_kt: true\n")
    target = resolve_target(str(tmp_path / "x.yaml"))
    assert with_yaml_keys(parse([str(tmp_path / "x.yaml")]), target.keys).engine == "sglang"
    assert parse(["M"]).engine == "ktransformers"


KT = "import sys; from ktransformers.cli.main import main; sys.exit(main())"


def run_kt(tmp_path: Path, *line: str, stub: bool = True) -> subprocess.CompletedProcess[str]:
    out = tmp_path / "started.json"
    (tmp_path / "bin").mkdir(exist_ok=True)
    if stub:
        (tmp_path / "bin" / "sglang").write_text(STUB.format(python=sys.executable, out=str(out)))
        (tmp_path / "bin" / "sglang").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "XDG_DATA_HOME": str(tmp_path / "data")}
    command_line = [sys.executable, "-c", KT, *line]
    return subprocess.run(command_line, capture_output=True, text=True, env=environment, timeout=300)


def test_the_process_becomes_sglangs(model_directory: Path, tmp_path: Path) -> None:
    line = ("serve", str(model_directory), "--engine", "sglang", "--force", "--port", "30124", "--api-key", "secret")
    done = run_kt(tmp_path, *line, "--json")
    assert done.returncode == 0, done.stderr
    started = json.loads((tmp_path / "started.json").read_text())
    assert started["words"][0] == "serve" and started["threads"] == "1"
    assert started["words"][started["words"].index("--port") + 1] == "30124"
    assert json.loads(done.stdout) == {
        "url": "http://127.0.0.1:30124",
        "model": model_directory.name,
        "pid": started["pid"],
    }
    assert "starting " in done.stderr and "secret" not in done.stderr
    asked = run_kt(tmp_path, "run", str(model_directory), "Why?", "--engine", "sglang")
    assert asked.returncode and "ask with `kt chat`" in asked.stderr
    shown = run_kt(tmp_path, "run", str(model_directory), "--engine", "sglang", "--dry-run", "--force", "--json")
    assert json.loads(shown.stdout)["command"].startswith("sglang serve --model-path ")
    missing = run_kt(tmp_path / "data", *line, stub=False)
    assert missing.returncode and "which is not installed" in missing.stderr
