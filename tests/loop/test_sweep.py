"""`kt loop --sweep`: one run for each combination of values under one folder, the base judged once, one report.

Over the stand-ins of test_loop.py; the slow test at the end runs the real verbs on a tiny model.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from ktransformers.evaluate.loop import child
from ktransformers.evaluate.loop.run import Listener, Runner
from ktransformers.evaluate.loop.settings import Loop, read_loop
from ktransformers.evaluate.loop.sweep import read_axes, run_settings, sweep_runs
from ktransformers.evaluate.loop.sweep_report import make_sweep_report, terminal_lines
from ktransformers.ground.errors import InputError
from tests.loop.test_loop import place, start, wait_for  # noqa: F401  a fixture among them
from tests.support.tiny_models import build, save

DATA = Path(__file__).resolve().parents[1] / "data"
AXES = ["rank=8,16", "lr=1e-3,5e-4"]
RUNS = ["rank8-lr1e-3", "rank8-lr5e-4", "rank16-lr1e-3", "rank16-lr5e-4"]
SHORT = ("train.keys.max_steps=3",)


def read(folder: Path, axes: list[str], *words: str) -> Loop:
    return read_loop(folder / "loop.yaml", [*SHORT, *words], read_axes(axes))


def go(folder: Path, axes: list[str], *words: str) -> dict[str, str]:
    return {step.name: step.status for step in Runner(read(folder, axes, *words), Listener()).run_stages()}


def each(stage: str, runs: list[str] = RUNS) -> list[str]:
    return [f"{stage}-{run}" for run in runs]


def test_every_combination_is_one_run_and_the_base_is_judged_once(place: Path) -> None:  # noqa: F811
    steps = go(place, AXES)
    expected = ["model", "tasks", *each("plan"), *each("train"), "serve", *each("prove"), "baseline", *each("eval")]
    assert list(steps) == [*expected, "compare"]
    calls = (place / "calls").read_text().splitlines()
    (serve,) = [call for call in calls if call.startswith("serve ")]
    assert all(f"{run}={place}/run/{run}/{run}" in serve for run in RUNS), "one server has every adapter"
    assert sum("--served-model base" in call for call in calls) == 1
    (compare,) = [call for call in calls if "--compare" in call]
    assert f"--compare base {' '.join(RUNS)} --out {place}/run/eval" in compare
    recipe = yaml.safe_load((place / "run" / "rank16-lr5e-4" / "train.yaml").read_text())
    assert recipe["lora_rank"] == 16 and float(recipe["learning_rate"]) == 5e-4 and recipe["max_steps"] == 3
    assert set(go(place, AXES).values()) == {"skipped"}
    again = Runner(read_loop(place / "run" / "loop.yaml"), Listener()).preview()
    assert {step.status for step in again} == {"skipped"}, "loop.yaml keeps the sweep"
    added = go(place, ["rank=8,16,32", "lr=1e-3,5e-4"])
    trained = [name for name, status in added.items() if name.startswith("train-") and status == "run"]
    assert trained == ["train-rank32-lr1e-3", "train-rank32-lr5e-4"] and added["baseline"] == "skipped"


def test_report_has_a_row_for_each_run_and_curves_of_all(place: Path) -> None:  # noqa: F811
    loop = read(place, AXES)
    report = make_sweep_report(loop, Runner(loop, Listener()).run_stages())
    assert [run.name for run in report.runs] == RUNS and report.failures == []
    shown = terminal_lines(report)
    heads, base, first = shown[1].split("  "), shown[2], shown[3].split()
    assert [head.strip() for head in heads if head][:5] == ["run", "rank", "lr", "steps", "loss"]
    assert base.startswith("base") and "0.0" in base
    assert (
        first[:5] == ["rank8-lr1e-3", "8", "1e-3", "3", "1"] and "80.0**" in first and first[-3:] == ["200", "60", "s"]
    )
    assert "81.0**" in shown[4] and "82.0**" in shown[5], "every run has its own column of the comparison"
    kept = json.loads((place / "run" / "report.json").read_text())
    assert kept["runs"][3]["settings"] == {"rank": 16, "lr": "5e-4"} and kept["runs"][3]["proven"] is True
    assert "| rank8-lr1e-3 | 8 | 1e-3 | 3 | 1 |" in (place / "run" / "report.md").read_text()
    html = (place / "run" / "report.html").read_text()
    svgs = [
        ElementTree.fromstring(part.partition("</svg>")[0] + "</svg>")
        for part in html.split("<figure class='chart'>")[1:]
    ]
    curves = [len(svg.findall("{*}polyline")) + len(svg.findall("{*}circle")) for svg in svgs]
    assert curves[0] == len(RUNS), "the losses of all runs in one chart"
    assert all(run in "".join(svgs[0].itertext()) for run in RUNS)


def test_diverged_run_is_never_the_best(place: Path) -> None:  # noqa: F811
    loop = read(place, ["target=a|b,c"], "eval.tasks=[]", "prove=false")
    steps = Runner(loop, Listener()).run_stages()
    log = place / "run" / "targeta_b" / "targeta_b" / "trainer_log.jsonl"
    log.write_text('{"current_steps": 3, "loss": NaN}\n')
    report = make_sweep_report(loop, steps)
    assert report.next[0].endswith("/targetc/targetc")
    assert "| targeta_b | a\\|b | " in (place / "run" / "report.md").read_text()


def test_failed_training_is_a_row(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The other runs are proven, judged and compared; the command fails, and the next one tries the run again."""
    monkeypatch.setenv("BROKEN", "lr0.5")
    axes = ["lr=1e-3,0.5"]
    loop = read(place, axes)
    steps = Runner(loop, Listener()).run_stages()
    assert {step.name: step.status for step in steps}["train-lr0.5"] == "failed"
    assert [step.name for step in steps][-4:] == ["prove-lr1e-3", "baseline", "eval-lr1e-3", "compare"]
    report = make_sweep_report(loop, steps)
    assert len(report.failures) == 1 and "lr0.5: training failed; logs/train-lr0.5.log" in report.failures[0]
    assert any(line.split()[:3] == ["lr0.5", "0.5", "failed"] for line in terminal_lines(report))
    monkeypatch.delenv("BROKEN")
    again = go(place, axes)
    assert again["train-lr0.5"] != "skipped" and again["train-lr1e-3"] == "skipped" and again["compare"] == "run"
    monkeypatch.setenv("BROKEN", "lr0.7")
    with pytest.raises(child.StageFailed, match=r"train-lr0\.7"):
        go(place, ["lr=0.7"])


def test_stopped_sweep_resumes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The first run has ended, the second is in its training."""
    words = yaml.safe_load((place / "loop.yaml").read_text())
    words["train"] = {"keys": words["train"]["keys"] | {"max_steps": 3}}
    (place / "loop.yaml").write_text(yaml.safe_dump(words | {"sweep": {"rank": [8]}}))
    Runner(read_loop(place / "loop.yaml"), Listener()).run_stages()
    (place / "loop.yaml").write_text(yaml.safe_dump(words | {"sweep": {"rank": [8, 16, 32]}}))
    halt = place / "halt"
    halt.touch()
    monkeypatch.setenv("HALT", str(halt))
    stopped = start(place)
    wait_for(place / "run" / "rank16" / "rank16" / "checkpoint-1")
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 130 and b"resumes" in said
    halt.unlink()
    steps = {step.name: step.status for step in Runner(read_loop(place / "loop.yaml"), Listener()).run_stages()}
    trained = [steps[f"train-rank{rank}"] for rank in (8, 16, 32)]
    assert trained == ["skipped", "resumed", "run"] and steps["plan-rank32"] == "skipped"
    assert steps["prove-rank8"] == "skipped" and steps["compare"] == "run"


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (["rank"], "NAME=VALUE"),
        (["rank="], "at least one value"),
        (["rank=8,8"], "every value once"),
        (["lr=1e-4,0.0001"], "every value once"),
        (["rank=8", "rank=16"], "rank twice"),
        (["rank=8", "lora_rank=16"], "one of them"),
        (["output_dir=a,b"], "they are shared"),
        (["target=[q_proj],q_proj"], "two runs named"),
        (["rank=[8"], "no YAML"),
        ([f"target=[{','.join(['up_proj'] * 40)}]"], "they name a folder"),
    ],
)
def test_invalid_axes_are_refused(place: Path, axes: list[str], said: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match=said):
        run_settings(read(place, axes))
    assert run_settings(read(place, [])) == {} and sweep_runs(read(place, [])) == ()


def test_command_takes_the_words_of_the_guide(place: Path) -> None:  # noqa: F811
    """`--sweep rank=8,16 lr=...`: the shell's words after the option are axes too; keys of the file are not."""
    pytest.importorskip("trl")
    from typer.testing import CliRunner

    from ktransformers.cli.main import app

    def call(*words: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, ["loop", *words])
        return ended.exit_code, ended.stdout + ended.stderr + str(ended.exception or "")

    file = str(place / "loop.yaml")
    for order in ([file, *SHORT, "--sweep", *AXES], ["--sweep", *AXES, file, *SHORT]):
        code, said = call(*order, "--dry-run", "--json")
        names = [stage["name"] for stage in json.loads(said)["stages"]]
        assert code == 0 and [name for name in names if name.startswith("train-")] == each("train")
    for wrong, message in (
        ("rnak=8,16", "a key that is not known"),
        ("rank=0", "expected 1 or more"),
        ("lr=much", "expected float"),
        ("lr=-1", "learning_rate"),
    ):
        code, said = call(file, "--sweep", wrong)
        assert code != 0 and message in said, said
    assert not (place / "run").exists(), "refused before any work"
    code, said = call(file, *SHORT, "--sweep", "rank=8,16", "--quiet")
    assert code == 0 and said.rstrip().endswith(f"Report: {place}/run/report.html")


@pytest.mark.slow
def test_real_sweep_of_a_tiny_model(tmp_path: Path) -> None:
    for package in ("trl", "datasets", "fastapi", "sacrebleu"):
        pytest.importorskip(package)
    model = tmp_path / "my-moe"
    model.mkdir()
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, eos_token_id=2), model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, model / file)
    shutil.copy(DATA / "chat_templates" / "qwen3.jinja", model / "chat_template.jinja")
    keys = {"dataset": "identity", "cutoff_len": 128, "max_steps": 4, "logging_steps": 1, "kt_num_threads": 1}
    words = {"run": str(tmp_path / "run"), "model": {"path": str(model)}, "train": {"keys": keys}, "plan": False}
    words |= {"eval": {"tasks": ["world"], "limit": 4}}
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump(words))
    command = [sys.executable, "-c", "from ktransformers.cli.main import main; main()", "loop"]
    command += [str(tmp_path / "loop.yaml"), "--sweep", "rank=4,8", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert [run["training"]["steps"] for run in report["runs"]] == [4, 4]
    assert all(run["proven"] and run["scores"] and run["last_loss"] > 0 for run in report["runs"])
    ranks = [json.loads((Path(run["adapter"]) / "adapter_config.json").read_text())["r"] for run in report["runs"]]
    assert ranks == [4, 8]
    assert (tmp_path / "run" / "eval" / "report.html").is_file() and (tmp_path / "run" / "report.html").is_file()
