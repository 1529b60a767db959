"""The command `kt plan`, and how `kt train` plans a training file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.cli.train_view import plan_lines
from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.train.forecast import Lengths, simulate_epoch, training_workload
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from ktransformers.train.run import train
from tests.support.measured_training import TOKENIZER
from tests.support.tiny_models import build, save
from tests.support.training import RunRecorder, recipe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BASE = {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "output_dir": "out", "dataset": "identity"}
SHAPES = {
    "qwen3_30b": "qwen3-30b-a3b",
    "qwen3_235b": "qwen3-235b-a22b",
    "deepseek_v2_lite": "deepseek-v2-lite",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
}


def kt(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_training_and_serving_are_printed() -> None:
    code, text = kt("qwen3-30b-a3b", "--machine", "desktop-4090")
    assert code == 0
    for word in (
        "train: fits",
        "serve: fits",
        "gpu 0",
        "host",
        "pinned",
        "disk",
        "tokens/s",
        "first token",
        "published",
    ):
        assert word in text


def test_linear_layers_in_few_bits() -> None:
    """They take fewer bytes, on a CPU and on a GPU; released codes are counted as they are."""

    def served(*words: str) -> dict[str, Any]:
        code, text = kt("qwen3-30b-a3b", "--serve", "--machine", "desktop-4090", "--json", *words)
        assert code == 0, text
        document: dict[str, Any] = json.loads(text)["serve"]
        return document

    numbers, codes = served("--gpu", "none"), served("--gpu", "none", "--rest", "int4:32")
    assert "linear layers" in json.dumps(codes) and "linear layers" not in json.dumps(numbers)
    weights = [served("--rest", rest)["plan"]["gpus"][0]["weights"] for rest in ("bf16", "int4:32")]
    assert weights[1] < 0.5 * weights[0]
    assert "int4" in json.dumps(served("--format", "int4:32"))
    for words in (("--rest", "iq2_xs"), ("--rest", "int9"), ("--format", "x")):
        assert kt("qwen3-30b-a3b", "--serve", "--machine", "desktop-4090", *words)[0] != 0


IN_INT4 = "--rest int4:32 --format int4"


@pytest.mark.parametrize(
    ("line", "weights"),
    [
        ("deepseek-v3 --ram 1024GB --gpu 24GB", 17.5e9),
        (f"deepseek-v3 --ram 382GB --gpu 24GB --context 139000 {IN_INT4}", 10e9),
        (f"deepseek-v2 --ram 256GB --gpu 11GB --context 8192 {IN_INT4}", 8.2e9),
    ],
)
def test_large_models_on_small_gpus(line: str, weights: float) -> None:
    code, text = kt(*line.split(), "--serve", "--machine", "dual-xeon-4090", "--json")
    plan = json.loads(text)["serve"]
    assert code == 0 and plan["fits"], plan["plan"]["lacking"]
    assert plan["plan"]["gpus"][0]["weights"] <= weights


def test_page_draws_memory_against_what_is_there(tmp_path: Path) -> None:
    """A bar for each GPU and the host, to scale with the JSON document; what does not fit says what is missing."""
    file = tmp_path / "plan.html"
    words = ("deepseek-v3", "--serve", "--machine", "desktop-4090", "--json", "--html", str(file))
    code, text = kt(*words)
    plan = json.loads(text)["serve"]
    assert code == 2 and not plan["fits"]
    page = file.read_text()
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    places = [(plan["machine"]["gpus"][0]["memory"], plan["plan"]["gpus"][0]["total"])]
    places.append((plan["machine"]["memory"], plan["plan"]["host"]["total"]))
    for chart, (available, used) in zip(charts, places, strict=True):
        *segments, frame = [rect for rect in chart.findall("{*}rect") if rect.attrib["height"] == "20"]
        drawn = sum(float(rect.attrib["width"]) for rect in segments)
        assert frame.attrib["fill"] == "none" and len(segments) > 1
        assert drawn / float(frame.attrib["width"]) == pytest.approx(used / available, rel=0.02)
    assert page.count(" missing</text>") == len(plan["plan"]["lacking"]) > 0
    assert "serve: does not fit" in page and "remedy 1" in page


def test_json_is_one_document_with_exact_sums() -> None:
    code, text = kt(
        *("deepseek-v3", "--serve", "--machine", "dual-xeon-4090", "--gpu", "24GB,24GB", "--ram", "512GB"),
        *("--place", "cpu", "--json"),
    )
    assert code == 2  # it does not fit
    found = json.loads(text)["serve"]
    plan = found["plan"]
    assert not found["fits"] and plan["lacking"]["host"] > 0 and plan["executable"]
    assert sum(size for name, size in plan["host"].items() if name != "total") == plan["host"]["total"]
    assert len(plan["nodes"]) == 2 and len(found["ways"]) == 2  # int4, or more memory
    assert all(way["plan"]["fits"] for way in found["ways"])


def test_modes_of_every_pass_are_shown_with_their_reasons() -> None:
    words = ("qwen3-30b-a3b", "--machine", "amx16-h200")
    code, text = kt(*words, "--place", "stream")
    assert code == 0 and "training at 2048 tokens stream (by the policy)" in text
    code, text = kt(*words, "--place", "auto", "--json")
    modes = {name: {row["pass"]: row for row in plan["modes"]} for name, plan in json.loads(text).items()}
    assert code == 0 and set(modes["train"]) == {"training"} and set(modes["serve"]) == {"prefill", "decode"}
    training, prefill, decode = modes["train"]["training"], modes["serve"]["prefill"], modes["serve"]["decode"]
    assert (training["tokens"], prefill["tokens"], decode["tokens"]) == (2048, 1024, 1)
    assert training["mode"] == "stream" and training["reason"].startswith("stream (predicted ")
    assert decode["mode"] == "host_callback"  # every expert is resident
    code, text = kt("qwen3-30b-a3b", "--machine", "arm2", "--serve", "--json")
    assert {row["mode"] for row in json.loads(text)["serve"]["modes"]} == {"cpu"}


def test_all_shows_every_policy() -> None:
    code, text = kt("qwen3-30b-a3b", "--serve", "--machine", "desktop-4090", "--gpu", "24GB,24GB", "--all")
    assert code == 0 and "2 GPUs" in text and "resident there" in text
    for word in ("stream", "auto", "resident"):
        assert f"KT_PLACE={word}" in text
    code, text = kt("qwen3-30b-a3b", "--machine", "amx16-h200", "--place", "cpu")
    assert code == 0 and "experts in bf16 on the CPU; attention" in text and "KT_PLACE" not in text
    done = CliRunner().invoke(app, ["plan", "qwen3-30b-a3b", "--machine", "amx16-h200", "--place", "moon"])
    assert "one of auto, cpu" in str(done.exception)


def test_training_is_not_planned_with_split() -> None:
    words = ["plan", "qwen3-30b-a3b", "--machine", "amx16-h200", "--place", "split"]
    for more in ([], ["--serve", "--train", "any.yaml"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert isinstance(done.exception, InputError), more
        for part in ("--place: given split, expected in training one of auto, cpu", "with --serve and without --train"):
            assert part in str(done.exception), more
    done = CliRunner().invoke(app, [*words, "--serve"])
    assert done.exit_code == 0 and "KT_PLACE=split" in done.output


def test_machines_are_listed_and_bad_words_refused() -> None:
    code, text = kt("qwen3-30b-a3b", "--machine", "list")
    assert code == 0 and "epyc-zen5" in text and "gpus" not in text.split()
    for words in (("qwen9",), ("qwen3-30b-a3b", "--ram", "much", "--machine", "arm2")):
        done = CliRunner().invoke(app, ["plan", *words])
        assert done.exception is not None and "expected" in str(done.exception)


@pytest.mark.parametrize("file", [EXAMPLES / f"{name}_sft.yaml" for name in SHAPES], ids=lambda file: file.stem)
def test_recipes_can_be_planned(file: Path) -> None:
    code, text = kt(
        SHAPES[file.stem.removesuffix("_sft")],
        "--train",
        str(file),
        "--machine",
        "dual-xeon-4090",
        "--ram",
        "3TB",
        "--gpu",
        "80GB",
    )
    assert code == 0 and "train: fits" in text


def test_keys_mean_what_the_trainer_makes_of_them() -> None:
    found = training_workload(
        read_settings(BASE | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}), 2
    )
    assert (found.tokens, found.tokens_per_step, found.sequence) == (4096, 16384, 2048)
    assert found.checkpointing and not found.retain and found.adapts_experts and found.adapts_attention
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "kt_tokens_per_batch": 4096}
    cut = training_workload(read_settings(BASE | keys), 2)
    assert (cut.tokens, cut.tokens_per_step) == (4096, 16384)
    assert training_workload(read_settings(BASE | {"kt_cpu_activation": "retain"}), 2).retain
    off = training_workload(read_settings(BASE | {"disable_gradient_checkpointing": True, "pure_bf16": True}), 2)
    assert not off.checkpointing and off.trained_bytes == 2
    attention = training_workload(read_settings(BASE | {"lora_target": "q_proj,v_proj"}), 2)
    assert attention.adapts_attention and not attention.adapts_experts
    experts = training_workload(read_settings(BASE | {"lora_target": "experts"}), 2)
    assert experts.adapts_experts and not experts.adapts_attention
    assert training_workload(read_settings(BASE), 2, Lengths(100, 50)).sequence == 100
    assert training_workload(read_settings(BASE | {"packing": True}), 2, Lengths(100, 50)).sequence == 2048


def test_the_head_is_planned_for_labelled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, known = {"per_device_train_batch_size": 2}, Lengths(longest=100, labelled=50)
    assert training_workload(read_settings(BASE | rows), 2).labelled == 1  # nobody has seen the data
    assert training_workload(read_settings(BASE | rows), 2, known).labelled == 50 / 200
    assert training_workload(read_settings(BASE | rows | {"packing": True}), 2, known).labelled_tokens == 50
    assert training_workload(read_settings(BASE | rows | {"label_smoothing_factor": 0.1}), 2, known).labelled == 1
    assert training_workload(read_settings(BASE | rows), 2, known).mean_labelled_tokens == 50  # the mean is not known
    mean = training_workload(read_settings(BASE | rows), 2, Lengths(longest=100, labelled=50, mean_labelled=20.0))
    assert (mean.labelled_tokens, mean.mean_labelled_tokens) == (50, 20)
    pairs = read_settings(BASE | rows | {"stage": "dpo"})
    assert training_workload(pairs, 2, known).labelled == 1  # on a CPU pairs are scored whole
    monkeypatch.setattr("ktransformers.train.forecast.device_of", lambda settings: torch.device("cuda"))
    assert training_workload(pairs, 2, known).labelled == 50 / 400


def test_batch_with_most_labels_is_planned_for() -> None:
    sequences = [(10, 4), (30, 20), (20, 1), (40, 8)]
    assert simulate_epoch(sequences, 1, None, seed=0).max_labelled == 20
    assert simulate_epoch(sequences, 4, None, seed=0).max_labelled == 33
    assert simulate_epoch(sequences, 4, 40, seed=0).max_labelled == 20  # 10 with 20, 30 alone, 40 alone: padding counts
    assert simulate_epoch(sequences, 4, 90, seed=0).max_labelled == 25


def test_labels_of_the_data_reach_the_forecast(tmp_path: Path) -> None:
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512), tmp_path / "model")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, tmp_path / "model" / file.name)
    found = {}
    for packing in (False, True):
        for whole in (False, True):
            keys = recipe(tmp_path / "model", tmp_path / "out", packing=packing, train_on_prompt=whole)
            plan = make_plan(read_settings(keys)).plan
            assert plan.data is not None and plan.forecast is not None
            assert 0 < plan.data.learned_at_once <= 2 * 96
            found[packing, whole] = plan.data.learned_at_once, plan.forecast.nearest.memory.host["activations"]
    for packing in (False, True):
        assert found[packing, False] < found[packing, True]
    assert found[False, True] < found[True, True]


def test_training_prints_its_plan_and_is_refused_where_memory_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512), tmp_path / "model")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, tmp_path / "model" / file.name)
    settings = read_settings(recipe(tmp_path / "model", tmp_path / "out", max_steps=1))
    plan = make_plan(settings).plan
    assert plan.forecast is not None and plan.forecast.best is not None
    shown = "\n".join(plan_lines(plan))
    assert "experts in bf16 on the CPU" in shown and "tokens/s" in shown
    monkeypatch.setattr(system, "memory", lambda: system.Memory(10**8, 10**8, "never"))
    watcher = RunRecorder()
    with pytest.raises(InputError, match=r"host lacks 0\.\d GB.*--force"):
        train(settings, watcher)
    assert watcher.plans and not (tmp_path / "out").exists()  # shown first, and nothing was begun
    result = train(settings, watcher, force=True)
    assert [line.what for line in result.comparison] == ["host memory", "speed"]


@pytest.mark.parametrize(
    ("model", "gpu", "ram", "fits", "memory"),
    [
        ("qwen3-30b-a3b", "none", "128GB", "yes, everything on the CPU", r"[\d.]+ GB of 128.0 GB free memory"),
        (
            "qwen3-30b-a3b",
            "24GB",
            "128GB",
            "yes, attention on the GPU, experts in host memory",
            r".* on the GPU and .*",
        ),
        ("deepseek-v3", "none", "128GB", r"no, [\d.]+ GB of host memory is missing", r".* where there are 128.0 GB .*"),
        (
            "deepseek-v3",
            "8GB,8GB",
            "128GB",
            "no, .* of memory of GPU 1 are missing",
            r".* on GPU 0, .* on GPU 1 and .*",
        ),
    ],
)
def test_summary_is_three_lines(model: str, gpu: str, ram: str, fits: str, memory: str) -> None:
    """What a run shows before it starts: no name of a mode, no table of parts."""
    from ktransformers.cli.plan_text import summary_rows
    from ktransformers.plan import Serving, Training, make_plan, open_shape, profile, with_gpus, with_memory
    from ktransformers.plan.workload import PLANNED_POLICIES

    machine = with_memory(with_gpus(profile("desktop-4090"), gpu), ram)
    for work, time in (
        (Training(), r"about \d.* for 100 steps, about [\d.]+ tokens/s"),
        (Serving(), r"first token .*"),
    ):
        rows = dict(summary_rows(make_plan(open_shape(model), work, machine, policies=PLANNED_POLICIES), 100))
        assert list(rows) == ["fits", "time", "memory"]
        assert re.match(fits, rows["fits"]) and re.fullmatch(time, rows["time"]), rows
        assert re.fullmatch(memory, rows["memory"]), rows
        assert not re.search(r"KT_PLACE|mapped|pinned|stream|e\+", " ".join(rows.values()))
