"""What `kt loop` shows to somebody who has not read a page, on a terminal and piped: a sentence for each stage, a bar
with the time left, before and after, the table, two commands, the report; nothing else without -v.

The verbs are stand-ins (`stand_in.py`)."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ktransformers.cli.loop_view import StageLines, StageScreen
from ktransformers.cli.train_view import DETAIL_WIDTH
from ktransformers.evaluate.loop import child
from ktransformers.evaluate.loop.settings import read_loop
from ktransformers.evaluate.loop.stages import Stage, build_stages, questions_of, run_paths
from ktransformers.ground import packages
from ktransformers.ground.errors import InputError
from ktransformers.ground.progress import ProgressEvent
from tests.support.forked import Completed, python
from tests.support.terminal import run_on_terminal

STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in.py"))]
MAIN = f"from ktransformers.evaluate.loop import child; child.PROGRAM = {STAND_IN!r}\n"
MAIN += "from ktransformers.cli.main import main; main()"
# Words that mean something to a reader of the documentation alone.
ABBREVIATIONS = (r"way \d", "roof", r"experts \d+%", "mapped", r"^key ", "pinned", "KT_PLACE", r"\$ kt", "asked for")
EXPECTED = """\
Everything goes to RUN. Ctrl-C stops; the same command goes on from there.
Making the model smollm2-moe
  time     N s
Checking the recipe, the data and the memory
  fits     yes, everything on the CPU
  memory   2 GB of 9 GB free memory
  time     N s
Training neko
  12 steps in 60 s at 200 tokens/s, loss from 3 to 1
  time     N s
Starting the server
  time     N s
  asked  Why?
  base   So.
  neko   Nya.
Checking that the server computes what was trained
  proven by 1 checks on 7 tokens: what is served is what was trained, and the base is the base
  time     N s
Judging the base model
  time     N s
Judging neko
  time     N s

task     metric        base  neko   change
persona  style hits %   0.0  80.0  +80.0**
         BLEU-1         0.0  80.0  +80.0**
unrelated: what it cost
stories  perplexity     5.0   6.0   +1.0**
* p < 0.05, ** p < 0.01, paired bootstrap; without a star it may be chance

Talk to it:
  kt serve RUN/neko
  kt chat --model model:neko      (in another terminal)

Report: RUN/report.html"""


@pytest.fixture
def loop_file(tmp_path: Path) -> Path:
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "task.jsonl").write_text("1")
    keys = {"dataset": str(tmp_path / "rows.json"), "learning_rate": 1e-3, "max_steps": 12}
    words = {
        "run": str(tmp_path / "run"),
        "name": "neko",
        "model": {"make": "smollm2-moe"},
        "train": {"keys": keys},
        "eval": {"tasks": ["persona"], "limit": 3},
    }
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump(words))
    return tmp_path / "loop.yaml"


def variables(file: Path) -> dict[str, str]:
    return {"CALLS": str(file.parent / "calls"), "TASK_DATA": str(file.parent / "task.jsonl")}


def piped(file: Path, *words: str) -> Completed:
    return python(MAIN, "loop", str(file), *words, **variables(file))


def without_times(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"^  time     \d+ s$", "  time     N s", line) for line in lines]


def expected(file: Path) -> list[str]:
    return EXPECTED.replace("RUN", str(file.parent / "run")).splitlines()


def test_terminal_shows_this_and_nothing_else(loop_file: Path) -> None:
    ended = run_on_terminal("loop", str(loop_file), columns=140, code=MAIN, SLOW="0.4", **variables(loop_file))
    assert ended.code == 0 and without_times(ended.lines) == expected(loop_file)
    bars = [frame for frame in ended.frames if "━" in frame]
    assert bars and all(frame.startswith("  ") for frame in bars), "below its sentence"
    training = [frame for frame in bars if frame.startswith("  Training ")]
    drawn = r"  Training [━╸╺]+ 1/12 loss 3\.00 ▁  200 tokens/s  2\.0 GB +\d+:\d\d"
    assert training and all(re.fullmatch(drawn, frame) for frame in training), training
    shown = "\n".join(ended.lines + ended.frames)
    assert not [word for word in ABBREVIATIONS if re.search(word, shown, re.MULTILINE)]


def test_pipe_gets_the_same_lines_without_a_bar(loop_file: Path) -> None:
    ended = piped(loop_file)
    assert ended.returncode == 0 and ended.stderr == ""
    assert without_times(ended.stdout.splitlines()) == expected(loop_file)
    assert "\x1b" not in ended.stdout


def test_verbose_adds_commands_and_their_output(loop_file: Path) -> None:
    shown = piped(loop_file, "-v").stdout
    run = loop_file.parent / "run"
    for line in (f"  $ kt train {run}/train.yaml", "  | step 1/12  loss 3", "proof: proven by 1 checks"):
        assert line in shown
    assert shown.startswith("Everything goes to") and shown.count("\n  time ") == 9
    logs = {file.name for file in (run / "logs").iterdir()}
    assert {"train.log", "serve.log", "prove.log", "baseline.log"} <= logs


def test_quiet_prints_the_result_alone(loop_file: Path) -> None:
    ended = piped(loop_file, "--quiet")
    table = expected(loop_file).index("task     metric        base  neko   change")
    assert ended.stdout.splitlines() == ["asked  Why?", "base   So.", "neko   Nya.", "", *expected(loop_file)[table:]]
    assert ended.stderr == ""


def test_plain_progress_is_rare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    view, stage = StageLines("neko", verbose=False), Stage("train", ("train", "x.yaml"), "Training neko")
    view.on_start(stage, True)
    for step in range(100):
        now += 2.0
        values = {"loss": 1.0, "memory": 2e9}
        view.on_event(stage, ProgressEvent("Training", step + 1, 100, remaining=200.0 - now, values=values))
    assert capsys.readouterr().out.splitlines() == [
        "Training neko, from where it stopped",
        "  Training 15/100, loss 1, 2:50 left",
        "  Training 30/100, loss 1, 2:20 left",
        "  Training 45/100, loss 1, 1:50 left",
        "  Training 60/100, loss 1, 1:20 left",
        "  Training 75/100, loss 1, 0:50 left",
        "  Training 90/100, loss 1, 0:20 left",
    ]
    assert DETAIL_WIDTH < 80


def test_full_bar_does_not_stand_beside_the_time_left() -> None:
    """Between the packed experts and the first step."""
    from rich.console import Console

    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    view, stage = StageScreen("neko", False, console), Stage("train", ("train", "x.yaml"), "Training neko")
    try:
        view.on_start(stage, False)
        view.on_event(stage, ProgressEvent("Packing experts", 29, 30))
        assert "29/30" in drawn(view)
        view.on_event(stage, ProgressEvent("Packing experts", 30, 30))
        assert "Starting" in drawn(view) and "30/30" not in drawn(view) and "left" not in drawn(view)
        view.on_event(stage, ProgressEvent("Training", 12, 12, remaining=0.0))
        assert "12/12" in drawn(view)
    finally:
        view.close()


def drawn(view: StageScreen) -> str:
    with view._console.capture() as capture:
        view._console.print(view._bar.get_renderable())
    return capture.get()


def test_ignored_keys_are_named_in_one_line(loop_file: Path) -> None:
    shown = piped(loop_file, "train.minutes=2", "train.pace_steps=null").stdout.splitlines()
    assert shown[0].startswith("note: train.minutes: accepted, and ignored") and not shown[1].startswith("note: ")
    assert without_times(shown[1:]) == expected(loop_file)


def test_first_question_of_the_data_is_asked(loop_file: Path) -> None:
    assert piped(loop_file, "eval.tasks=[]").returncode == 0
    loop = read_loop(loop_file)
    assert questions_of(loop, run_paths(loop)) == ("Why?",)
    own = read_loop(loop_file, ['questions=["a?", "b?"]'])
    assert questions_of(own, run_paths(own)) == ("a?", "b?")


@pytest.mark.parametrize(
    ("extra", "words"), [("train", []), ("serve", ["eval.tasks=[]"]), ("eval", []), ("serve", ["prove=false"])]
)
def test_missing_packages_end_the_loop_before_it_begins(
    extra: str, words: list[str], loop_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.EXTRAS, extra, ("no_such_package",))
    with pytest.raises(InputError, match=rf"no_such_package.*pip install 'ktransformers\[{extra}\]'"):
        build_stages(read_loop(loop_file, words))


def names(found: Any) -> list[str]:
    return [stage.name for stage in found]


def test_nothing_is_judged_before_it_is_trained(loop_file: Path) -> None:
    order = names(build_stages(read_loop(loop_file)))
    assert order.index("tasks") < order.index("train") < order.index("baseline") < order.index("eval")


def test_progress_never_blocks_a_stage() -> None:
    """A listener that is stuck costs events and not the child's time."""
    free = threading.Event()

    def stuck(event: ProgressEvent) -> None:
        free.wait(30)

    with child._progress_pipe(stuck) as writing:
        assert writing is not None
        with pytest.raises(BlockingIOError):
            for _ in range(100):
                os.write(writing, b'{"title": "x"}\n' * 4096)
        free.set()
