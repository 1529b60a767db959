"""What `kt train` shows, on a terminal and piped: three lines of the plan, one redrawn line, nothing of other packages,
and none of the details without -v. The details are in the run's log."""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ktransformers.cli import progress as bars
from ktransformers.cli.library_output import LIBRARIES, library_output
from ktransformers.cli.train_view import LOG_FILE, PlainLines, TrainOutput, detail_line, sparkline, step_line
from ktransformers.ground import log
from ktransformers.ground.progress import report
from ktransformers.ground.system import scheduled_seconds
from ktransformers.train.callbacks import Progress, StepPosition, TrainLog
from tests.support.forked import Completed, python
from tests.support.terminal import run_on_terminal
from tests.support.training import recipe

pytest.importorskip("trl")

DETAILS = ("way ", "roof", "peak", "mapped", "key  ", "modes", "experts 3", "of the time", "learning_rate", "grad_norm")
FOREIGN = ("Loading weights:", "it/s", "Token indices", "[RANK", "Warning", "[transformers]")


@pytest.fixture
def written(tiny: Path, tmp_path: Path) -> Path:
    """A recipe with a key that has no effect, a row longer than the tokenizer's limit, and a step a line."""
    file = tmp_path / "recipe.yaml"
    keys = recipe(tiny, tmp_path / "out", max_steps=10, logging_steps=2, chunk_size=512)
    file.write_text(yaml.safe_dump(keys))
    return file


def kt(*words: str) -> Completed:
    return python("from ktransformers.cli.main import main; main()", *words)


def test_terminal_shows_the_plan_and_one_redrawn_line(written: Path, tmp_path: Path) -> None:
    ended = run_on_terminal("train", str(written), columns=160)
    assert ended.code == 0, "\n".join(ended.lines)
    names = [line.partition(" ")[0] for line in ended.lines]
    assert names == ["fits", "time", "memory", "trained", "adapter", "next"], "the bar is gone at the end"
    assert re.fullmatch(r"fits     yes, everything on the CPU", ended.lines[0])
    assert re.fullmatch(r"time     about \d+ (s|min) for 10 steps, about \d+ tokens/s", ended.lines[1])
    assert re.fullmatch(r"memory   [\d.]+ GB of [\d.]+ GB free memory", ended.lines[2])
    titles = list(dict.fromkeys(frame.split(" ━")[0] for frame in ended.frames if "━" in frame))
    assert titles[0] == "Reading the data" and "Training" in titles[1:]
    training = [frame for frame in ended.frames if frame.startswith("Training") and "loss" in frame]
    drawn = r"Training [━╸╺]+ \d+/10 loss [\d.]+ [▁▂▃▄▅▆▇█]+(  \d+ tokens/s)?(  [\d.]+ GB)? +(\d+:\d\d|a moment) left"
    assert training and all(re.fullmatch(drawn, frame) for frame in training), training
    assert any("tokens/s" in frame and "GB" in frame for frame in training)
    shown = "\n".join(ended.lines + ended.frames)
    assert not [word for word in (*DETAILS, *FOREIGN) if word in shown]
    assert (tmp_path / "out" / LOG_FILE).is_file()


def test_narrow_terminal_has_one_line(written: Path) -> None:
    ended = run_on_terminal("train", str(written), columns=80)
    assert ended.code == 0
    drawn = [frame for frame in ended.frames if "/10" in frame]
    assert drawn and all(frame.startswith("Training") for frame in drawn), "a line that wraps is not redrawn"
    assert any("loss" in frame and "tokens/s" in frame and "left" in frame for frame in drawn)


def test_piped_run_prints_plain_lines(written: Path, tmp_path: Path) -> None:
    ended = kt("train", str(written))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        "fits",
        "time",
        "memory",
        *["step"] * 5,
        "trained",
        "adapter",
        "next",
    ]
    assert re.fullmatch(r"step 4/10  loss [\d.]+  \d+ tokens/s  [\d.]+ GB  \d+:\d\d left", lines[4])
    assert ended.stderr == "" and "\x1b" not in ended.stdout and "━" not in ended.stdout
    assert not [word for word in DETAILS if word in ended.stdout]
    details = (tmp_path / "out" / LOG_FILE).read_text()
    for expected in ("chunk_size: has no effect", "learning_rate", "identity: 16 rows", "note: reloaded: 24 tensors"):
        assert expected in details
    assert "predicted" in details and "of this machine's peak" in details


def test_verbose_run_shows_the_details(written: Path) -> None:
    ended = kt("train", str(written), "-v")
    assert ended.returncode == 0, ended.stderr
    for expected in (
        "kt: key        max_steps: 10",
        "chunk_size: has no effect",
        "of this machine's peak",
        "grad_norm",
    ):
        assert expected in ended.stderr
    assert ended.stdout.startswith("fits ")


def test_quiet_and_json_runs_print_the_result_alone(written: Path) -> None:
    for flag, begins in (("--quiet", "trained  24 tensors"), ("--json", "{")):
        ended = kt("train", str(written), "overwrite_output_dir=true", flag)
        assert ended.returncode == 0 and ended.stderr == "" and ended.stdout.startswith(begins), ended


def test_run_that_does_not_fit_leaves_no_log(written: Path, tmp_path: Path) -> None:
    ended = kt("train", str(written), "model_name_or_path=/no/model")
    assert ended.returncode == 1 and ended.stderr.startswith("kt: model_name_or_path: given /no/model")
    assert ended.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def example_step(**values: float) -> Progress:
    return Progress(3, 10, 0.5, {"loss": 1.5, **values}, 1234.0, 0.25, 2 * 10**9, 0, 30.0, 70.0, 0.5, 0.125)


def test_lines_of_a_step() -> None:
    assert step_line(example_step(grad_norm=0.3)) == "step 3/10  loss 1.5  1234 tokens/s  2.0 GB  1:10 left"
    full = detail_line(example_step(grad_norm=0.3))
    for expected in ("grad_norm 0.3", "25% of the time in experts", "experts at 50% of this machine's peak"):
        assert expected in full
    assert "waited for a core 12% of the time" in full
    assert sparkline([]) == "" and sparkline([2.0]) == "▁" and sparkline([1.0, 2.0]) == "▁█"
    assert sparkline([8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0], 4) == "█▄▂▁"
    assert len(sparkline([float(step % 7) for step in range(1000)])) == 8


def test_every_step_has_a_position(tmp_path: Path) -> None:
    """Also where only every tenth step is logged; the first step, which warms up, does not count."""
    positions: list[StepPosition] = []
    clock = SimpleNamespace(seconds=0.0, peak_seconds=0.0, peak_rates=object())
    journal = TrainLog(tmp_path, clock, lambda step: None, positions.append, lambda: 2.5)  # type: ignore[arg-type]
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=10, epoch=0.0)
    journal.on_train_begin(None, state, None)
    journal.started_at -= 100.0  # a slow first step
    for step in (1, 2, 3):
        state.global_step = step
        journal.on_step_end(None, state, None)
    assert [(found.step, found.steps, found.loss) for found in positions] == [(1, 10, 2.5), (2, 10, 2.5), (3, 10, 2.5)]
    assert positions[0].remaining > 800 and positions[2].remaining < 10


def test_waiting_for_a_core_is_counted() -> None:
    ran, waited = scheduled_seconds()
    sum(range(2_000_000))
    later, waited_later = scheduled_seconds()
    assert later > ran > 0 and waited_later >= waited


def test_other_packages_speak_in_one_style(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bars.set_quiet(False)
    found = logging.getLogger("transformers")
    before = found.handlers[:], found.propagate
    drawn: list[tuple[str, float, float | None, str]] = []
    with library_output(lambda *event: drawn.append(event)):
        kept = log.FileLog(LIBRARIES)
        logger = logging.getLogger("transformers.tokenization")
        logger.warning("Token indices sequence length is longer than the specified maximum sequence length")
        for _ in range(2):
            logger.warning("Some weights were not initialized.\nYou should probably train.")
        warnings.warn("a thing of torch", UserWarning, stacklevel=1)
        warnings.warn("going away", FutureWarning, stacklevel=1)
        from transformers import logging as stock

        assert list(stock.tqdm([1, 2], desc="Loading weights")) == [1, 2]
        with stock.tqdm(total=3, desc="Other") as other:
            other.set_postfix(a=1)
            other.update(2)
        report("Packing experts", 1, 4)
        kept.open(tmp_path / "log.txt")
        logger.warning("later")
        kept.close()
    said = capsys.readouterr()
    assert said.out == "" and drawn == [
        ("Loading weights", 1, 2, ""),
        ("Loading weights", 2, 2, ""),
        ("Other", 2, 3, ""),
        ("Packing experts", 1, 4, ""),
    ]
    first, second, third = said.err.splitlines()
    assert first == "kt: transformers: Some weights were not initialized." and third == "kt: transformers: later"
    assert second.startswith("kt: ") and "a thing of torch" in second
    written = (tmp_path / "log.txt").read_text()
    for expected in ("transformers: Token indices", "You should probably train.", "going away", "later"):
        assert expected in written
    assert (found.handlers, found.propagate) == before


def test_bar_of_another_package_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bars.set_quiet(False)
    with library_output():
        from transformers import logging as stock

        assert len(list(stock.tqdm(range(5), desc="Loading weights"))) == 5
    assert capsys.readouterr() == ("", ""), "short work needs no line"


def test_events_reach_the_screen_and_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv("KT_PROGRESS", str(writing))
    output = TrainOutput(PlainLines(), None)
    output.on_load(1, 2)
    output.on_step(example_step())
    output.on_position(StepPosition(10, 10, 1.25, 0.0))
    os.close(writing)
    from ktransformers.ground.progress import receive

    with os.fdopen(reading, "rb") as stream:
        events = list(receive(stream))
    assert [event.title for event in events] == ["Packing experts", "Training", "Saving and checking the adapter"]
    assert events[1].values == {"tokens_per_second": 1234.0, "memory": 2e9, "loss": 1.25} and events[1].done == 10
    assert capsys.readouterr().out == step_line(example_step()) + "\n"
