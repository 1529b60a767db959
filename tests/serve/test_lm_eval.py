"""lm-eval against the server by the command of docs/eval.md, where the program is installed.

`kt eval` over the same questions is the reference: both score every option by the sum of its log-probabilities. The
requests themselves are tested without the program in `http/test_api.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.evaluate.backend import EvalPrompt, PromptTokenizer, Question
from ktransformers.evaluate.remote import RemoteBackend, connect
from ktransformers.modeling.pretrained import read_tokenizer
from tests.support.serving import RunningServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "eval.md"
QUESTIONS = [
    {"question": f"Which village lies {side} of the river, number {number}?", "choices": choices, "answer": number % 3}
    for number, (side, choices) in enumerate(
        [("north", ["Aro", "Bel town", "Cim"]), ("south", ["Dun", "Eka", "Fol hill"]), ("east", ["Gor", "Hul", "Ivo"])]
        * 2
    )
]
TASK = """task: villages
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def questions() -> list[Question]:
    return [
        Question(
            EvalPrompt(f"{row['question']}\nAnswer:", chat=False), tuple(f" {choice}" for choice in row["choices"])
        )
        for row in QUESTIONS
    ]


def reference(served: RunningServer, directory: Path, model: str) -> list[list[float]]:
    """The log-probabilities of every option, by `kt eval`."""
    tokens = PromptTokenizer(read_tokenizer(directory), str(directory))
    scores = RemoteBackend(connect(served.url), model, tokens).likelihoods(questions())
    return [[score.logprob for score in row] for row in scores]


def command() -> list[str]:
    """The arguments of the command in the documentation."""
    text = re.search(r"^(lm_eval run (?:.*\\\n)*.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert text, "docs/eval.md has no lm_eval command"
    return text[1].replace("\\\n", " ").split()[1:]


@pytest.mark.parametrize("model", ["tiny", "tiny:one"])
def test_lm_eval_scores_as_kt_eval_does(
    served: RunningServer, model_directory: Path, model: str, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "villages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "villages.yaml").write_text(TASK.format(file=tmp_path / "villages.jsonl"))
    given = {
        "http://127.0.0.1:30000": served.url,
        "model=smollm2-moe": f"model={model}",
        "tokenizer=smollm2-moe": f"tokenizer={model_directory}",
        "hellaswag,arc_easy": "villages",
    }
    words = command()
    for old, new in given.items():
        assert any(old in word for word in words), old
        words = [word.replace(old, new) for word in words]
    extra = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, *extra], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("samples_villages_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))
    theirs = [[float(pair[0]) for pair in sample["filtered_resps"]] for sample in samples]
    for row, expected in zip(theirs, reference(served, model_directory, model), strict=True):
        assert row == pytest.approx(expected, abs=1e-3)
