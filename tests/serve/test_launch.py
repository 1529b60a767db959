"""Launch lines, targets, and `kt serve`, `kt run` and `kt chat` as processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.field import options_of
from ktransformers.ground.options.placement import PlacementOptions, read_options
from ktransformers.serve.flags import GROUPS, IGNORED_OPTIONS, IGNORED_SWITCHES, KT_METHODS, Launch, parse, parse_run
from ktransformers.serve.forecast import plan_server
from ktransformers.serve.http.training import CheckpointWatch, TrainingLog
from ktransformers.serve.launch import bind_socket, with_environment
from ktransformers.serve.loading import open_service
from ktransformers.serve.target import check_adapters, resolve_target
from tests.support.forked import python
from tests.support.serving import EngineHarness, RunningServer

# The launch lines of the guides for SGLang with kt-kernel, whole.
LINES = [
    "--host 0.0.0.0 --port 10103 --model M --mem-fraction-static 0.7 --chunked-prefill-size 2048 --served-model-name N "
    "--tensor-parallel-size 1 --kt-method AMXINT8 --kt-weight-path W --kt-cpuinfer 64 --kt-threadpool-count 2 "
    "--kt-num-gpu-experts 1 --enable-lora --lora-paths lora0=D --max-loras-per-batch 1 --lora-backend triton",
    "--host 0.0.0.0 --port 30000 --model M --kt-weight-path W --kt-cpuinfer 64 --kt-threadpool-count 2 "
    "--kt-num-gpu-experts 32 --kt-method BF16 --attention-backend flashinfer --trust-remote-code "
    "--mem-fraction-static 0.80 --chunked-prefill-size 16384 --max-running-requests 4 --served-model-name Qwen3 "
    "--enable-mixed-chunk --tensor-parallel-size 1 --enable-p2p-check --disable-shared-experts-fusion "
    "--kt-gpu-prefill-token-threshold 4096 --kt-enable-dynamic-expert-update",
    "--host 0.0.0.0 --port 8000 --model M --trust-remote-code --mem-fraction-static 0.92 --chunked-prefill-size 4096 "
    "--served-model-name N --enable-mixed-chunk --kt-method LLAMAFILE --kt-weight-path W --kt-cpuinfer 64 "
    "--kt-threadpool-count 2 --kt-num-gpu-experts 32 --kt-max-deferred-experts-per-token 2",
    "--model M --kt-expert-lora-path E --enable-lora --lora-backend triton --lora-paths nonexpert=D "
    "--served-model-name N --kt-expert-placement-strategy uniform",
]


@pytest.mark.parametrize("line", LINES)
def test_launch_lines_of_guides_parse(line: str) -> None:
    actual = parse(line.split())
    assert actual.target == "M"
    words = line.split()
    for name in (*IGNORED_SWITCHES, *IGNORED_OPTIONS):
        assert any(note.startswith(name) for note in actual.notes) == (name in words), name
    if "--max-running-requests" in words:
        assert (
            actual.max_running_requests,
            actual.chunked_prefill_size,
            actual.memory,
            actual.threads,
            actual.groups,
        ) == (4, 16384, 0.8, 64, 2)
    if "AMXINT8" in words:
        assert (actual.host, actual.port, actual.lora_paths) == ("0.0.0.0", 10103, (("lora0", "D"),))
        assert any("keep the format" in note for note in actual.notes)
        assert actual.experts == Path("W")
    if "--kt-expert-lora-path" in words:
        assert actual.always_on == Path("E")
    options = read_options(actual.place)
    if "--kt-enable-dynamic-expert-update" in words:
        assert (options.kt_num_gpu_experts, options.kt_gpu_prefill_token_threshold) == (32, 4096)
        assert options.policy == "resident" and [note.partition(":")[0] for note in options.notes] == [
            "kt_enable_dynamic_expert_update"
        ]
    if "--kt-max-deferred-experts-per-token" in words:
        assert [note.partition(":")[0] for note in options.notes] == ["kt_max_deferred_experts_per_token"]


def test_attention_backend_takes_words_of_sglang() -> None:
    assert parse(["M"]).attention_backend == "triton" and not parse(["M"]).notes
    assert parse(["M", "--attention-backend", "torch"]).attention_backend == "torch"
    other = parse(["M", "--decode-attention-backend", "fa3"])
    assert other.attention_backend == "triton" and other.notes == ("--attention-backend fa3: triton is used instead",)
    assert parse(["M", "--attention-backend", "torch_native"]).attention_backend == "torch"
    with pytest.raises(InputError, match="attention-backend: given fast, expected one of triton, torch"):
        parse(["M", "--attention-backend", "fast"])


@pytest.mark.parametrize("line", LINES)
def test_run_takes_the_launch_lines_too(line: str) -> None:
    """With a prompt anywhere that argparse can tell from the values of a flag."""
    assert parse_run(line.split()).launch == parse(line.split())
    asked = parse_run(["Why?", *line.split(), "--max-tokens", "7", "--temperature", "0", "--system", "Be brief."])
    assert asked.launch == parse(line.split())
    assert (asked.prompt, asked.max_tokens, asked.temperature, asked.system) == ("Why?", 7, 0.0, "Be brief.")


def test_run_tells_model_and_prompt() -> None:
    asked = parse_run(["--chunked-prefill-size", "64", "M", "-p", "8000", "Why?", "--gpu-experts", "3"])
    assert (asked.launch.target, asked.prompt, asked.launch.port) == ("M", "Why?", 8000)
    assert asked.launch.place == {"kt_num_gpu_experts": 3}
    assert parse_run(["M"]).prompt is None and parse_run(["M"]).max_tokens == 512
    for words, message in (([], "MODEL: given nothing"), (["M", "--max-tokens", "0"], "1 or more")):
        with pytest.raises(InputError, match=message):
            parse_run(words)
    with pytest.raises(InputError, match="kt run: given unrecognized arguments: --wishes"):
        parse_run(["M", "--wishes", "3"])


def test_placement_flags_match_placement_options(tmp_path: Path) -> None:
    """The same names on the launch line and in a YAML file; the line overrides the file, and invalid values are
    refused before anything is loaded."""
    names = {name for name, option in options_of(PlacementOptions).items() if option.flags}
    assert names == set(options_of(PlacementOptions)) - {"kt_expert_update_steps"}
    keys = {"kt_num_gpu_experts": 5, "kt_config": {"kt_place": "auto"}, "lora_rank": 8}
    options = read_options(parse(["M", "--kt-num-gpu-experts", "7"]).place, keys)
    assert (options.kt_num_gpu_experts, options.policy) == (7, "auto")
    for line, words in (
        ("--kt-place gpu", "kt_place"),
        ("--kt-gpu-experts-ratio 1.5", "0 to 1"),
        ("--kt-expert-placement-strategy hottest", "front-loading"),
        ("--kt-gpu-prefill-token-threshold 0", "1 or more"),
        ("--init-expert-location no.pt", "file of statistics"),
    ):
        with pytest.raises(InputError, match=words):
            read_options(parse(["M", *line.split()]).place)
    with pytest.raises(InputError, match="tensor-parallel-size: given 0, expected 1 or more"):
        parse(["M", "--tp", "0"])


def test_own_flags_parse() -> None:
    actual = parse(
        ["M", "--lora-paths", "a=x", "b=y", "c/d", "--api-key", "k", "--watch", "out", "--chunked-prefill-size", "-1"]
    )
    assert actual.lora_paths == (("a", "x"), ("b", "y"), ("d", "c/d"))
    assert (actual.api_key, actual.watch, actual.notes) == ("k", Path("out"), ())
    assert actual.chunked_prefill_size > 10**9
    assert set(KT_METHODS) >= {"AMXINT4", "AMXINT8", "RAWINT4", "FP8", "FP8_PERCHANNEL", "BF16", "LLAMAFILE"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "given nothing, expected one model"),
        ("M --model N", "2 models"),
        ("M --wishes 3", "wishes"),
        ("M --kt-method AMXINT3", "AMXINT4"),
        ("M --tool-call-parser hermess", "tool-call-parser: given hermess, expected .hermes., perhaps"),
        ("M --tool-call-parser zzz", "expected one of cohere_command4, deepseekv3, "),
        ("M --reasoning-parser zzz", "expected one of cohere_command4, deepseek-r1, "),
        ("M --lora-paths a=x a=y", "every name once"),
        ("M --lora-paths a/b=x", "NAME=DIR"),
        ("M --mem-fraction-static 2", "mem-fraction-static"),
        ("M --port many", "port"),
        ("M --max-running-requests 0", "1 or more"),
        ("M --kv-host-gb -1", "kv-host-gb: given -1.0, expected 0 or more"),
        ("M --kv-host-gb nan", "kv-host-gb"),
        ("M --kv-disk x --kv-disk-gb 0", "kv-disk-gb: given 0.0, expected more than 0"),
        ("M --kv-disk x --kv-disk-gb inf", "kv-disk-gb"),
        ("M --kv-disk-gb 3", "--kv-disk PATH with it"),
        ("M --kv-cache-dtype fp8_e5m2", "kv-cache-dtype: given fp8_e5m2, expected auto, bf16 or fp8"),
    ],
)
def test_invalid_launch_lines_are_refused(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(line.split())


def test_environment_fills_missing_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_HOST", "API_PORT", "API_KEY"):
        monkeypatch.delenv(name, raising=False)
    plain = with_environment(Launch("M"))
    assert (plain.host, plain.port, plain.api_key) == ("127.0.0.1", 30000, None)
    monkeypatch.setenv("API_PORT", "8000")
    monkeypatch.setenv("API_KEY", "secret")
    filled = with_environment(Launch("M"))
    assert (filled.port, filled.api_key) == (8000, "secret")
    assert with_environment(Launch("M", port=1)).port == 1
    assert env.current()["API_KEY"] == "(set)"
    monkeypatch.setenv("API_PORT", "eight")
    with pytest.raises(InputError, match="API_PORT"):
        with_environment(Launch("M"))
    monkeypatch.delenv("API_PORT")
    for empty in ("", " "):
        monkeypatch.setenv("API_KEY", empty)
        with pytest.raises(InputError, match="API_KEY: given an empty value, expected a secret; `unset API_KEY`"):
            with_environment(Launch("M"))


def test_targets_resolve(model_directory: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    assert resolve_target(str(model_directory)).adapters == ()
    output = resolve_target(str(adapters["one"]))
    assert output.model == model_directory and output.adapters == (("one", str(adapters["one"])),)
    assert output.name == model_directory.name
    training = tmp_path / "train.yaml"
    training.write_text(f"model_name_or_path: {model_directory}\ndo_train: true\noutput_dir: {adapters['two']}\n")
    assert resolve_target(str(training)).adapters == (("two", str(adapters["two"])),)
    inference = tmp_path / "infer.yaml"
    inference.write_text(
        f"model_name_or_path: {model_directory}\nadapter_name_or_path: {adapters['one']}, {adapters['two']}\n"
        "template: qwen3\ninfer_backend: ktransformers\nuse_kt: true\n"
    )
    assert [name for name, _ in resolve_target(str(inference)).adapters] == ["one", "two"]
    assert resolve_target(str(training)).experts is None
    training.write_text(training.read_text() + f"kt_config:\n  kt_weight_path: {tmp_path}/packed\n")
    trained = resolve_target(str(training))
    with pytest.raises(InputError, match=r"experts of the training.*--kt-weight-path"):
        trained.choose_experts(None)
    assert trained.choose_experts(Path("W")) == Path("W") and trained.choose_experts(model_directory) is None
    unfinished = tmp_path / "unfinished.yaml"
    unfinished.write_text(f"model_name_or_path: {model_directory}\ndo_train: true\noutput_dir: {tmp_path}/none\n")
    for given, words in (
        (str(unfinished), "kt train"),
        (str(tmp_path / "no.yaml"), "does not exist"),
        (str(tmp_path), r"without config\.json"),
        ("/no/where", "does not exist"),
        ("word", "`kt model known`"),
    ):
        with pytest.raises(InputError, match=words):
            resolve_target(given)


def test_what_is_not_there_is_said_before_loading(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"given saves/run, which is no folder here, and saves/run cannot be fetched"):
        resolve_target("saves/run")
    target = resolve_target(str(model_directory))
    with pytest.raises(InputError, match="lora-paths: given x=/nope, which does not exist"):
        check_adapters(Launch("M", lora_paths=(("x", "/nope"),)), target)
    check_adapters(Launch("M"), target)


def test_port_in_use_is_refused_before_loading() -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(InputError, match="free port"):
            bind_socket("127.0.0.1", taken.getsockname()[1])


def test_checkpoints_are_loaded_and_unloaded(served: RunningServer, adapters: dict[str, Path], tmp_path: Path) -> None:
    registry = served.service.registry
    watch = CheckpointWatch(tmp_path, registry)
    watch.poll()
    step = tmp_path / "checkpoint-10"
    shutil.copytree(adapters["two"], step)
    watch.poll()
    assert "checkpoint-10" not in registry.loaded  # not complete
    (step / "trainer_state.json").write_text("{}")
    watch.poll()
    first = registry.loaded["checkpoint-10"].adapter
    watch.poll()
    assert registry.loaded["checkpoint-10"].adapter is first
    os.utime(step / "trainer_state.json", (1, 1))
    watch.poll()
    assert registry.loaded["checkpoint-10"].adapter.version > first.version
    broken = tmp_path / "checkpoint-20"
    shutil.copytree(step, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    watch.poll()
    assert "checkpoint-20" not in registry.loaded
    shutil.rmtree(step)
    watch.poll()
    assert set(registry.loaded) == {"one", "attention"}
    log = tmp_path / "trainer_log.jsonl"
    log.write_text('{"loss": 2.5, "current_steps": 1}\n{"loss": 2.')
    read = TrainingLog(tmp_path).lines_after(0)
    assert [line["loss"] for line in read["lines"]] == [2.5]
    with log.open("a") as stream:
        stream.write('25, "current_steps": 2}\n')
    again = TrainingLog(tmp_path).lines_after(read["next"])
    assert [line["loss"] for line in again["lines"]] == [2.25]
    assert TrainingLog(tmp_path).lines_after(again["next"])["lines"] == []
    log.write_text("{}\n")
    assert TrainingLog(tmp_path).lines_after(again["next"])["lines"] == [{}]


def test_always_on_expert_adapter_applies_to_every_request(
    harness: EngineHarness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The split of earlier guides: experts apply to the base's name as well, attention by request."""
    from ktransformers.adapters import convert
    from ktransformers.serve.http.registry import Registry

    expert, rest = tmp_path / "expert", tmp_path / "rest"
    convert(
        adapters["two"],
        tmp_path / "merged",
        "sglang",
        expert_output_dir=expert,
        nonexpert_output_dir=rest,
        base_model_name_or_path=str(harness.directory),
    )
    registry = Registry("tiny", harness.lora_modules, str(harness.directory), lambda _: None, always_on=expert)
    registry.load("rest", rest)
    both, alone = registry.find("tiny:rest"), registry.find("tiny")
    assert both is not None and alone is not None
    assert both.experts == alone.experts and both.linears and not alone.linears
    harness.loaded["both"] = both
    try:
        prompt = list(range(50, 80))
        assert harness.alone(prompt, "both").tokens == harness.alone(prompt, "two").tokens
    finally:
        del harness.loaded["both"]
    with pytest.raises(InputError, match="apply to every request"):
        registry.load("one", adapters["one"])
    with pytest.raises(InputError, match="LoRA on experts only"):
        Registry("tiny", harness.lora_modules, str(harness.directory), lambda _: None, always_on=adapters["one"])


KT = "from ktransformers.cli.main import main; main()"


def kt(*words: str) -> list[str]:
    return [sys.executable, "-c", KT, *words]


@contextmanager
def serving(*words: str) -> Iterator[tuple[str, Any]]:
    process = subprocess.Popen(kt("serve", *words, "--port", "0"), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "is served at" in line:
            break
    else:
        raise AssertionError("".join(lines))
    try:
        process.said = lines  # type: ignore[attr-defined]
        yield line.rsplit(" ", 1)[1].strip().removesuffix("/v1"), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_serve_chat_and_shutdown(adapters: dict[str, Path], tmp_path: Path) -> None:
    """A training output as MODEL, a real process, the terminal client, and SIGTERM during a response."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with serving(str(adapters["one"]), "--trust-remote-code", "--watch", str(tmp_path)) as (url, process):
        shown = [line for line in process.said if line.startswith(("kt: fits ", "kt: time ", "kt: memory "))]
        loading = next(index for index, line in enumerate(process.said) if line.startswith("kt: loading "))
        assert process.said[loading - 3 : loading] == shown, "the plan comes before loading, in three lines"
        assert not any("host memory at start" in line or "KV cache of" in line for line in process.said), "that is -v"
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        step = tmp_path / "checkpoint-5"
        shutil.copytree(adapters["two"], step)
        (step / "trainer_state.json").write_text("{}")
        lines = "/model\nHello\n/model tiny:one\nHello\n/clear\n/system Be brief.\nHello\n/model none\n/what\n/exit\n"
        talk = subprocess.run(
            kt("chat", url, "--max-tokens", "5", "--temperature", "0"), input=lines, capture_output=True, text=True
        )
        assert talk.returncode == 0, talk.stderr
        assert talk.stdout.count("[5 tokens, ") == 3 and "tokens/s" in talk.stdout
        assert "* tiny:one" in talk.stdout and "(none is not served)" in talk.stdout and "/clear" in talk.stdout
        while time.monotonic() < end:
            with urllib.request.urlopen(f"{url}/v1/models") as reply:
                names = [model["id"] for model in json.loads(reply.read())["data"]]
            if "tiny:checkpoint-5" in names:
                break
            time.sleep(0.2)
        assert names == ["tiny", "tiny:one", "tiny:checkpoint-5"]
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            reply.readline()
            process.send_signal(signal.SIGTERM)
            rest = reply.read().decode()
        assert '"finish_reason": "length"' in rest and rest.rstrip().endswith("data: [DONE]")
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert "host memory at the end: " in process.stderr.read()


def test_run_answers_and_exits(adapters: dict[str, Path]) -> None:
    done = python(KT, "run", adapters["one"], "Hello", "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "tiny:one" in done.stderr
    planned = python(KT, "run", adapters["one"], "--dry-run", "--port", "8000")
    assert planned.returncode == 0 and [line.split()[0] for line in planned.stdout.splitlines()] == [
        *("fits", "time", "memory", "command")
    ]
    assert planned.stdout.splitlines()[-1].endswith(f"kt run {adapters['one']} --port 8000")
    wrong = python(KT, "run", adapters["one"], "Hi", "--adapter", "x")
    assert wrong.returncode == 1 and "kt: adapter: given x, expected one of one" in wrong.stderr


def test_packed_directory_is_prefaulted_or_locked(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--prefault and --lock reach the mapped files; without a mapping a line says that they have no effect."""
    from ktransformers.experts import packed
    from ktransformers.quant.convert import convert
    from ktransformers.quant.plan import make_plan as plan_conversion
    from ktransformers.quant.plan import parse_formats

    out = tmp_path / "packed"
    convert(plan_conversion(model_directory, parse_formats("bf16"), 2), out)
    requested: list[str] = []
    load_pages = packed.load_pages

    def loaded(path: Path, file: Any, pages: str) -> None:
        requested.append(pages)
        load_pages(path, file, "prefault" if pages == "lock" else pages)  # a test may not be allowed to lock

    monkeypatch.setattr(packed, "load_pages", loaded)
    lines: list[str] = []
    for words, pages in (([], "lazy"), (["--prefault"], "prefault"), (["--prefault", "--lock"], "lock")):
        launch = parse([str(out), *words, "--device", "cpu", "--max-total-tokens", "256"])
        assert launch.pages == pages
        open_service(launch, resolve_target(str(out)), lines.append)
        assert requested == ([] if pages == "lazy" else [pages] * 2)
        requested.clear()
    assert not any("without effect" in line for line in lines)
    launch = parse([str(model_directory), "--lock", "--device", "cpu", "--max-total-tokens", "256"])
    open_service(launch, resolve_target(str(model_directory)), lines.append)
    assert any(line.startswith("--lock: without effect") for line in lines) and not requested


def test_plan_that_does_not_fit_is_refused(model_directory: Path) -> None:
    """Refused before anything is loaded, with remedies; `--force` continues."""
    plans: list[Any] = []
    target = resolve_target(str(model_directory))
    with pytest.raises(InputError, match=r"host lacks .* GB, expected a plan that fits.*--force"):
        plan_server(parse([str(model_directory), "--max-total-tokens", str(10**12)]), target, print, plans.append)
    assert plans and plans[0].best is None and plans[0].nearest.lacking["host"] > 10**12
    forced = parse([str(model_directory), "--max-total-tokens", str(10**12), "--force"])
    assert plan_server(forced, target, print, plans.append) is plans[1]
    fits = plan_server(parse([str(model_directory)]), target, print, plans.append)
    assert fits is not None and fits.best is not None and fits.best.work.context == 512  # type: ignore[union-attr]


def test_docs_list_every_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    for option in (option for model in GROUPS.values() for option in options_of(model).values() if option.flags):
        assert f"| {', '.join(f'`{name}`' for name in option.flags)} | {option.described} |" in page
    for name, why in (IGNORED_SWITCHES | IGNORED_OPTIONS).items():
        assert f"| `{name}` | {why} |" in page
    for name in KT_METHODS:
        assert f"`{name}`" in page
